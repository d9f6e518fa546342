import numpy as np
import pytest
import torch
from torchdata.nodes import IterableWrapper

from odb_nodes import LengthObserver, Observation, Sample, SampleError


def observe(item, function=None):
    node = LengthObserver(IterableWrapper([item]), function)
    node.reset(None)
    return next(node)


IDS = [5, 6, 7, 8]


CLASSES = [3, 0.5, torch.tensor(3), np.int64(3), [0.5, 1.0, 0.0]]
TEXTS = ["news", b"news", ["news", "sports"], {"topic": 3}, None]


@pytest.mark.parametrize(
    ("fields", "targets", "counted"),
    [
        ({}, 3, "tokens"),
        ({"labels": IDS}, 3, "labels"),
        *(
            ({key: value}, 1, "samples")
            for key in ("labels", "label", "label_ids")
            for value in CLASSES
        ),
        *(({key: value}, 3, "tokens") for key in ("label", "label_ids") for value in TEXTS),
        # Several classes, or one for each token.
        *(({key: [0, 1, 1, 0, 1]}, 1, "samples") for key in ("label", "label_ids")),
        *(({key: [0] * 4}, 3, "labels") for key in ("label", "label_ids")),
        # A row of one label is one target, of a class or of a decoder.
        *(({"labels": label}, 1, "labels") for label in ([3], torch.tensor([3]))),
        # A span of the sample is one target.
        ({"start_positions": 0, "end_positions": 2}, 1, "samples"),
    ],
)
def test_a_sample_says_how_many_targets_it_has_and_what_they_are(fields, targets, counted):
    sample = observe({"input_ids": IDS, **fields})
    assert (sample.targets, sample.counted) == (targets, counted)


def test_patches_come_from_the_image_fields():
    grid = {"input_ids": IDS, "image_grid_thw": torch.tensor([[1, 2, 3], [2, 2, 2]])}
    assert observe(grid).patches == 14
    assert observe({"input_ids": IDS, "pixel_values": np.zeros((9, 4))}).patches == 9


def test_observe_may_return_tokens_or_the_full_observation():
    item = {"text": "abc", "labels": [1, 2, -100]}
    assert observe(item, lambda x: len(x["text"]))[1:4] == (3, 1, 0)
    assert observe(item, lambda x: np.int64(7)).tokens == 7
    whole = observe(item, lambda _: Observation(9, targets=0, patches=2))
    assert (*whole[1:4], whole.counted) == (9, 0, 2, "observed")
    assert observe(item, lambda _: (9, 4))[1:4] == (9, 4, 0)
    sample = observe("any", lambda _: 5)
    assert sample._replace(digest=None) == Sample("any", 5, 4, 0, counted="tokens")


@pytest.mark.parametrize(
    ("item", "function", "message"),
    [
        ({"text": "abc"}, None, r"no length: .* keys \['text'\]"),
        ("abc", None, "no length"),
        (None, None, r"returned None.*`Skipped\(reason"),
        (None, len, "returned None"),
        ({"input_ids": None}, None, r"`input_ids` must be a list, .* is None .*`Skipped\(reason"),
        ({"input_ids": 5}, None, "must be a list, an array or a tensor"),
        ({"input_ids": []}, None, "`tokens` must be in 1..2147483647.* is 0"),
        ({"input_ids": np.zeros((2, 3))}, None, r"\(L,\) or \(1, L\), but has \(2, 3\)"),
        ({"input_ids": [[1], [2]]}, None, "holds 2 rows"),
        ({"input_ids": IDS}, lambda _: -1, "`tokens` must be in .* is -1"),
        ({"input_ids": IDS}, lambda _: float("nan"), "`tokens` must be an integer.* is nan"),
        ({"input_ids": IDS}, lambda _: True, "`tokens` must be an integer.* is True"),
        ({"input_ids": IDS}, lambda _: None, "`tokens` must be an integer.* is None"),
        ({"input_ids": IDS}, lambda _: (4, -1), "`targets` .* is -1"),
        ({"input_ids": IDS}, lambda _: (4, 1, 0.5), "`patches` must be an integer.* is 0.5"),
        ({"input_ids": IDS}, lambda item: item["text"], "`observe` raised KeyError"),
        ({"input_ids": IDS}, lambda _: (4, 1, 0, 0, 0), "`task` must be a `str` or None"),
        ({"input_ids": IDS}, lambda _: (4, 1, 0, 0, "a", 0), "positional arguments"),
        ({"input_ids": IDS}, lambda _: (4, 1, 0, -1), "`key` .* is -1"),
    ],
)
def test_a_sample_without_a_valid_length_is_an_error_that_names_it(item, function, message):
    with pytest.raises(SampleError, match=message) as caught:
        observe(item, function)
    assert "sample 0 of the epoch" in str(caught.value)


def test_a_bad_sample_cannot_pass_unseen():
    node = LengthObserver(IterableWrapper([[1], [], [2]]), len)
    node.reset(None)
    assert next(node).tokens == 1
    state = node.state_dict()
    for _ in range(3):
        with pytest.raises(SampleError, match="sample 1 of the epoch"):
            next(node)
    mended = LengthObserver(IterableWrapper([[1], [3, 3], [2]]), len)
    mended.reset(state)
    assert [sample.data for sample in mended] == [[3, 3], [2]]
