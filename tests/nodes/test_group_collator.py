from collections import UserDict
from dataclasses import replace

import numpy as np
import pytest
import torch
from torchdata.nodes import IterableWrapper

from odb_nodes import (
    GroupCollator,
    LengthObserver,
    Loader,
    ODBDataLoader,
    PaddingCollate,
    RankAligner,
    Sample,
    SampleError,
    StateError,
    WindowBucketer,
    pop_step_info,
)

ROWS = [[1, 2, 3], [4], [5, 6]]


def groups(*groups):
    return IterableWrapper([[Sample(data, 1, 1) for data in group] for group in groups])


@pytest.mark.parametrize(
    "kind", [list, tuple, np.array, torch.tensor, lambda row: np.array([row]), lambda row: [row]]
)
def test_rows_of_any_kind_are_padded_alike(kind):
    batch = PaddingCollate()([{"input_ids": kind(row), "labels": kind(row)} for row in ROWS])
    assert batch["input_ids"].tolist() == [[1, 2, 3], [4, 0, 0], [5, 6, 0]]
    assert batch["labels"].tolist() == [[1, 2, 3], [4, -100, -100], [5, 6, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0], [1, 1, 0]]
    assert {value.dtype for value in batch.values()} == {torch.int64}


def test_padding_goes_where_it_is_asked_for():
    collate = PaddingCollate(pad_token_id=9, pad_to_multiple_of=4, side="left")
    batch = collate([{"input_ids": row, "labels": row} for row in ROWS])
    assert batch["input_ids"].tolist() == [[9, 1, 2, 3], [9, 9, 9, 4], [9, 9, 5, 6]]
    # No first token is predicted from padding: the loss sees as many targets as are counted.
    assert batch["labels"].tolist() == [[-100, -100, 2, 3], [-100] * 4, [-100, -100, -100, 6]]
    assert batch["attention_mask"].tolist() == [[0, 1, 1, 1], [0, 0, 0, 1], [0, 0, 1, 1]]


def test_a_group_is_padded_to_one_of_the_shapes():
    samples = [{"input_ids": row, "labels": row, "id": i} for i, row in enumerate(ROWS)]
    batch = PaddingCollate(pad_token_id=9, shapes=((6, 2), (4, 4)))(samples)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 9], [4, 9, 9, 9], [5, 6, 9, 9], [9] * 4]
    assert batch["labels"][3].tolist() == [-100] * 4
    assert batch["attention_mask"].sum(1).tolist() == [3, 1, 2, 0]
    assert batch["id"].tolist() == [0, 1, 2]
    wide = PaddingCollate(pad_to_multiple_of=4, shapes=((6, 2),))(samples[:1])
    assert wide["input_ids"].shape == (1, 4)  # wider than all of them: as it is
    left = PaddingCollate(side="left", shapes=((4, 4),))(samples)
    assert left["attention_mask"].tolist() == [[0, 1, 1, 1], [0, 0, 0, 1], [0, 0, 1, 1], [0] * 4]


def test_more_samples_than_a_shape_has_rows_are_an_error():
    with pytest.raises(ValueError, match="has 3 tokens must have at most 2 .* has 3 instead"):
        PaddingCollate(shapes=((2, 4),))([{"input_ids": row} for row in ROWS])


def test_shapes_go_from_the_narrowest_up():
    with pytest.raises(ValueError, match=r"`shapes` must go .* have the widths \[4, 2\]"):
        PaddingCollate(shapes=((4, 4), (6, 2)))


def test_other_keys_become_what_they_can():
    batch = PaddingCollate()(
        [
            {"input_ids": row, "token_type_ids": np.ones(len(row)), "n": i, "box": [1] * len(row)}
            | {"name": "x", "weight": np.float32(i), "zero_d": torch.tensor(i)}
            for i, row in enumerate(ROWS)
        ]
    )
    assert batch["token_type_ids"].tolist() == [[1, 1, 1], [1, 0, 0], [1, 1, 0]]
    assert batch["n"].tolist() == batch["weight"].tolist() == batch["zero_d"].tolist() == [0, 1, 2]
    assert batch["name"] == ["x", "x", "x"]
    assert batch["box"] == [[1, 1, 1], [1], [1, 1]]  # not told to have a value per token
    padded = PaddingCollate(token_keys=("input_ids", "box"))
    assert padded([{"input_ids": row, "box": row} for row in ROWS])["box"].shape == (3, 3)


def test_rows_of_different_dtypes_lose_nothing():
    rows = [np.array([1, 1]), np.array([0.5, 0.25])]
    batch = PaddingCollate()([{"input_ids": [1, 2], "position_ids": row} for row in rows])
    assert batch["position_ids"].tolist() == [[1, 1], [0.5, 0.25]]


@pytest.mark.parametrize(
    ("samples", "error", "message"),
    [
        ([{"input_ids": [1]}, {"input_ids": [1], "labels": [1]}], ValueError, "the same keys"),
        ([{"input_ids": [1], "labels": [1]}, {"input_ids": [1]}], ValueError, "the same keys"),
        (
            [{"input_ids": [1, 2], "labels": [1]}],
            ValueError,
            "sample 0 .* `labels` must have the length",
        ),
        (
            [{"input_ids": [1], "id": 5}, {"input_ids": [1], "id": 6, "labels": [1]}],
            SampleError,
            r"sample 0 lacks \['labels'\]: 1 of 2 have \['id', 'input_ids', 'labels'\]",
        ),
        (
            [{"input_ids": [1]}] * 5 + [{"input_ids": [1], "zz": 1}, {"input_ids": [1]}],
            SampleError,
            r"sample 5 also has \['zz'\]: 6 of 7 have \['input_ids'\]",
        ),
        (
            [{"input_ids": [1], "a": 1}] + [{"input_ids": [1], "b": 1}] * 2,
            SampleError,
            r"sample 0 also has \['a'\] and lacks \['b'\]: 2 of 3 have",
        ),
        (
            [{"input_ids": [1], "id": 5}, {"input_ids": ["x"], "id": 6}],
            SampleError,
            "sample 1 of the group: `input_ids` must hold integers",
        ),
        (["text"], TypeError, "sample 0 of the group is a `str`. Pass a `collate_fn`"),
        ([{"text": "x"}], TypeError, "mappings with `input_ids`"),
    ],
)
def test_samples_that_do_not_go_together_are_an_error(samples, error, message):
    with pytest.raises(error, match=message):
        PaddingCollate()(samples)


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"input_ids": ["a", "b"]}, r"`input_ids` must hold integers.* is \['a', 'b'\] instead"),
        ({"input_ids": "text"}, "`input_ids` must be a list, .* but is 'text' instead"),
        ({"input_ids": [1, None]}, r"`input_ids` must hold integers, one per token, but is \[1, N"),
        ({"input_ids": [1, [2]]}, "`input_ids` must hold integers"),
        ({"input_ids": [0.5, 1.0]}, r"`input_ids` must hold integers.*\[0.5, 1.0\].* processing"),
        ({"input_ids": np.ones(2)}, "`input_ids` must hold integers"),
        ({"input_ids": torch.ones(1, 2)}, "`input_ids` must hold integers"),
        ({"input_ids": [True]}, "`input_ids` must hold integers"),
        ({"input_ids": [1], "labels": ["x"]}, "`labels` must hold numbers.* is .'x'. instead"),
        ({"input_ids": [1], "labels": torch.ones(1, dtype=torch.bfloat16)}, "`labels` must hold n"),
    ],
)
def test_ids_that_are_no_integers_are_named_with_their_key(sample, message):
    for use in (PaddingCollate().prepare, lambda sample: PaddingCollate()([sample])):
        with pytest.raises(SampleError, match=message):
            use(sample)


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor, lambda row: [row]])
def test_prepared_samples_give_the_same_batch(kind):
    samples = [
        {"input_ids": kind(row), "labels": kind(row), "attention_mask": [True] * len(row), "n": 1}
        for row in ROWS
    ]
    collate = PaddingCollate(pad_to_multiple_of=4)
    prepared = [collate.prepare(sample) for sample in samples]
    assert all(type(sample["input_ids"]) is np.ndarray for sample in prepared)
    assert all(type(sample["labels"]) is np.ndarray for sample in prepared)
    assert {type(sample["input_ids"]) for sample in samples} == {type(kind([1]))}  # as they were
    expected, got = collate(samples), collate(prepared)
    assert list(got) == list(expected)
    for key, value in expected.items():
        assert got[key].dtype == value.dtype
        assert got[key].tolist() == value.tolist()


def test_what_needs_no_preparation_is_returned_as_it_is():
    ready = {"input_ids": np.arange(3), "labels": 1, "token_type_ids": None, "name": "x"}
    for sample in (ready, "text", 5, {"text": [1]}, {"input_ids": None}):
        assert PaddingCollate().prepare(sample) is sample
    assert PaddingCollate().prepare({"input_ids": []})["input_ids"].dtype == np.int64


def test_an_attention_mask_of_the_samples_own_is_kept():
    batch = PaddingCollate()([{"input_ids": [1, 2], "attention_mask": [0, 1]}])
    assert batch["attention_mask"].tolist() == [[0, 1]]


def test_a_side_that_is_none_is_refused():
    with pytest.raises(ValueError, match='`side` must be one of \\("right", "left"\\)'):
        PaddingCollate(side="top")


def test_each_batch_carries_its_step_info():
    group = [Sample({"input_ids": [1, 2, 3]}, 3, 2), Sample({"input_ids": [1]}, 1, 0)]
    node = GroupCollator(IterableWrapper([group, group]))
    node.reset(None)
    infos = [pop_step_info(batch) for batch in node]
    assert [info.step for info in infos] == [0, 1]
    assert {info.local_samples for info in infos} == {2}
    assert {info.all_samples_this_step for info in infos} == {2}
    assert {(info.local_targets, info.all_targets) for info in infos} == {(2, 2)}
    assert {(info.loss_scale, info.is_filler) for info in infos} == {(1.0, False)}


def test_a_step_info_can_be_taken_once():
    node = GroupCollator(groups([{"input_ids": [1]}]))
    node.reset(None)
    batch = next(node)
    pop_step_info(batch)
    assert set(batch) == {"input_ids", "attention_mask"}
    with pytest.raises(KeyError, match="popped before"):
        pop_step_info(batch)


def test_any_mutable_mapping_serves_as_a_batch():
    node = GroupCollator(groups([1, 2]), lambda data: UserDict(data=data))
    node.reset(None)
    batch = next(node)
    assert batch["data"] == [1, 2]
    assert pop_step_info(batch).local_samples == 2


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_failing_collate_function_loses_no_group(error):
    failures = [error("boom")]

    def collate(data):
        if data == [2] and failures:
            raise failures.pop()
        return {"data": data}

    node = GroupCollator(groups([1], [2], [3]), collate)
    node.reset(None)
    next(node)
    good = node.state_dict()
    with pytest.raises(error, match="boom"):
        next(node)
    with pytest.raises(StateError, match="failed at step 1"):
        node.state_dict()
    assert [batch["data"] for batch in node] == [[2], [3]]
    node.reset(good)
    assert [batch["data"] for batch in node] == [[2], [3]]


def test_a_failing_collate_function_leaves_the_loader_where_it_was():
    failures = [KeyboardInterrupt(), ValueError()]

    def collate(data):
        if data == [2] and failures:
            raise failures.pop()
        return {"data": data}

    loader, seen = Loader(GroupCollator(groups([1], [2], [3]), collate)), []
    for _ in range(3):
        try:
            seen += [batch["data"] for batch in loader]
        except (ValueError, KeyboardInterrupt):
            seen.append("error")
            assert loader.state_dict()["num_yielded"] == 1
    assert seen == ["error", "error", [2], [3]]


def test_what_is_no_group_is_refused():
    node = GroupCollator(IterableWrapper([{"input_ids": [1]}]))
    node.reset(None)
    with pytest.raises(TypeError, match="must yield groups, .* yielded `dict`"):
        next(node)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1],), "`source` must be a `BaseNode`, but is .1. instead"),
        ((groups(), 5), "`collate_fn`"),
    ],
)
def test_arguments_that_are_not_valid_are_named(arguments, message):
    with pytest.raises(TypeError, match=message):
        GroupCollator(*arguments)


def test_a_collate_function_must_return_a_mapping():
    node = GroupCollator(groups([1]), lambda data: (data,))
    node.reset(None)
    with pytest.raises(TypeError, match="`collate_fn` must return a dict .* `tuple`"):
        next(node)


class Stepwise(PaddingCollate):
    """A collate function that looks at the step."""

    def collate_step(self, samples, info):
        return {**self(samples), "seen": info}


def test_a_collate_function_may_look_at_the_step():
    data = [{"input_ids": [1] * (n % 5 + 1), "pixel_values": [0] * (n % 5 == 4)} for n in range(20)]
    bucketer = WindowBucketer(LengthObserver(IterableWrapper(data)), 16, 4)
    batches = list(Loader(GroupCollator(RankAligner(bucketer), Stepwise())))
    for batch in batches:
        info = pop_step_info(batch)  # which knows the tokens of the batch beside
        assert replace(info, local_tokens=0, local_padded_tokens=0) == batch["seen"]
        assert batch["seen"].modalities == (
            ("image",) if any(map(len, batch["pixel_values"])) else ()
        )
    assert {batch["seen"].modalities for batch in batches} == {("image",), ()}
    loader = ODBDataLoader(data, token_budget=16, collate_fn=Stepwise())
    assert all(batch["seen"].step == pop_step_info(batch).step for batch in loader)
    alone = GroupCollator(WindowBucketer(LengthObserver(IterableWrapper(data)), 16, 4), Stepwise())
    assert all(batch["seen"].modalities == () for batch in Loader(alone))


def test_a_collate_function_may_change_the_dicts_it_gets():
    row = {"input_ids": [1], "images": ["a"]}
    node = GroupCollator(groups([row], [row]), lambda rows: {"images": rows[0].pop("images")})
    assert [batch["images"] for batch in Loader(node)] == [["a"], ["a"]]
