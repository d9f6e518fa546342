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


@pytest.mark.parametrize(
    "ids",
    [
        IDS,
        [IDS],
        tuple(IDS),
        np.array(IDS),
        np.array([IDS]),
        torch.tensor(IDS),
        torch.tensor([IDS]),
    ],
)
def test_the_length_is_that_of_input_ids_however_they_come(ids):
    assert observe({"input_ids": ids})[1:4] == (4, 3, 0)


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor, lambda x: torch.tensor([x])])
def test_targets_are_the_labels_that_count_after_the_causal_shift(kind):
    labels = kind([7, -100, 7, 8])
    assert observe({"input_ids": IDS, "labels": labels}).targets == 2


@pytest.mark.parametrize("label", ["news", b"news", ["news", "sports"], {"topic": 3}, None])
def test_a_label_that_is_text_is_no_label_of_a_model(label):
    for key in ("label", "label_ids"):
        sample = observe({"input_ids": IDS, key: label})
        assert (sample.targets, sample.counted) == (len(IDS) - 1, "tokens")


def test_a_class_label_is_not_a_row_of_labels():
    for label in (3, 0.5, torch.tensor(3), np.int64(3), [0.5, 1.0, 0.0]):
        for key in ("labels", "label", "label_ids"):
            sample = observe({"input_ids": IDS, key: label})
            assert (sample.targets, sample.counted) == (1, "samples")
    for key in ("label", "label_ids"):  # several classes, or one for each token
        assert observe({"input_ids": IDS, key: [0, 1, 1, 0, 1]}).counted == "samples"
        assert observe({"input_ids": IDS, key: [0] * len(IDS)}).targets == len(IDS) - 1


def test_a_row_of_one_label_is_one_target_of_a_class_or_of_a_decoder():
    for label in ([3], torch.tensor([3])):
        sample = observe({"input_ids": IDS, "labels": label})
        assert (sample.targets, sample.counted) == (1, "labels")


def test_a_span_of_the_sample_is_one_target():
    sample = observe({"input_ids": IDS, "start_positions": 0, "end_positions": 2})
    assert (sample.targets, sample.counted) == (1, "samples")


def test_a_sample_says_what_its_targets_are():
    assert observe({"input_ids": IDS}).counted == "tokens"
    assert observe({"input_ids": IDS, "labels": IDS}).counted == "labels"
    assert observe({"input_ids": IDS}, lambda _: Observation(4, 1)).counted == "observed"
    assert observe({"input_ids": IDS}, len).counted == "tokens"


def test_patches_come_from_the_image_fields():
    grid = {"input_ids": IDS, "image_grid_thw": torch.tensor([[1, 2, 3], [2, 2, 2]])}
    assert observe(grid).patches == 14
    assert observe({"input_ids": IDS, "pixel_values": np.zeros((9, 4))}).patches == 9


def test_observe_may_return_tokens_or_the_full_observation():
    item = {"text": "abc", "labels": [1, 2, -100]}
    assert observe(item, lambda x: len(x["text"]))[1:4] == (3, 1, 0)
    assert observe(item, lambda x: np.int64(7)).tokens == 7
    assert observe(item, lambda _: Observation(9, targets=0, patches=2))[1:4] == (9, 0, 2)
    assert observe(item, lambda _: (9, 4))[1:4] == (9, 4, 0)
    expected = Sample("any object", 5, 4, 0, counted="tokens")
    assert observe("any object", lambda _: 5) == expected


@pytest.mark.parametrize(
    ("item", "function", "message"),
    [
        ({"text": "abc"}, None, r"no length: it is a `dict` with keys \['text'\]"),
        ("abc", None, "no length"),
        (None, None, r"returned None. Return a sample, or `Skipped\(reason, text\)` to leave it"),
        (None, len, "returned None. Return a sample"),
        ({"input_ids": None}, None, "no length"),
        ({"input_ids": 5}, None, "must be a list, an array or a tensor, but is 5"),
        ({"input_ids": []}, None, "`tokens` must be in 1..2147483647, but is 0"),
        ({"input_ids": np.zeros((2, 3))}, None, r"\(L,\) or \(1, L\), but has \(2, 3\)"),
        ({"input_ids": [[1], [2]]}, None, "holds 2 rows"),
        ({"input_ids": IDS}, lambda _: -1, "`tokens` must be in 1..2147483647, but is -1"),
        ({"input_ids": IDS}, lambda _: 0, "`tokens` .* is 0"),
        ({"input_ids": IDS}, lambda _: 2.0, "`tokens` must be an integer, but is 2.0"),
        ({"input_ids": IDS}, lambda _: float("nan"), "`tokens` must be an integer, but is nan"),
        ({"input_ids": IDS}, lambda _: True, "`tokens` must be an integer, but is True"),
        ({"input_ids": IDS}, lambda _: None, "`tokens` must be an integer, but is None"),
        ({"input_ids": IDS}, lambda _: (4, -1), "`targets` .* is -1"),
        ({"input_ids": IDS}, lambda _: (4, 1, 0.5), "`patches` must be an integer, but is 0.5"),
        ({"input_ids": IDS}, lambda item: item["text"], "`observe` raised KeyError"),
        ({"input_ids": IDS}, lambda _: (4, 1, 0, 0, 0), "`task` must be a `str` or None, but is 0"),
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
