"""Padded batches hold each value in its place, whatever type the samples' rows have."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rows import ROWS_OF_INTEGERS as KINDS

from odb_nodes import PaddingCollate, SampleError

ROWS = st.lists(
    st.lists(st.sampled_from([-100, 0, 5, 2**31 - 1, 2**31, -(2**63)]), max_size=9), min_size=1
)


def padded(rows, width, fill, side):
    pads = [[fill] * (width - len(row)) for row in rows]
    pairs = zip(rows, pads, strict=True)
    return [[*pad, *row] if side == "left" else [*row, *pad] for row, pad in pairs]


@given(ROWS, st.data(), st.sampled_from(["left", "right"]), st.sampled_from([1, 4]))
def test_rows_of_any_kinds_are_padded_alike(rows, data, side, multiple):
    collate = PaddingCollate(pad_token_id=9, side=side, pad_to_multiple_of=multiple)
    kinds = data.draw(
        st.lists(st.sampled_from(sorted(KINDS)), min_size=len(rows), max_size=len(rows))
    )
    samples = [
        {key: KINDS[kind](row) for key in ("input_ids", "labels")}
        for kind, row in zip(kinds, rows, strict=True)
    ]
    width = -(-max(map(len, rows)) // multiple) * multiple
    labels = [[-100, *row[1:]] if row and side == "left" else row for row in rows]
    for group in (samples, [*map(collate.prepare, samples)]):
        batch = collate(group)
        assert {value.dtype for value in batch.values()} == {torch.int64}
        assert all(value.is_contiguous() for value in batch.values())
        assert batch["input_ids"].tolist() == padded(rows, width, 9, side)
        assert batch["labels"].tolist() == padded(labels, width, -100, side)
        mask = padded([[1] * len(row) for row in rows], width, 0, side)
        assert batch["attention_mask"].tolist() == mask


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_mask_of_rows_longer_than_16_bits(side):
    lengths = [2**15 - 1, 2**15, 2**15 + 1, 70_000]
    batch = PaddingCollate(side=side)([{"input_ids": np.arange(n)} for n in lengths])
    assert batch["attention_mask"].sum(1).tolist() == lengths
    edge = batch["attention_mask"][:, 0 if side == "right" else -1]
    assert edge.tolist() == [1] * len(lengths)


@given(ROWS.map(lambda rows: rows[0]), st.sampled_from(sorted(KINDS)))
def test_a_prepared_sample_has_arrays_of_its_values(row, kind):
    sample = {"input_ids": KINDS[kind](row), "labels": KINDS[kind](row), "text": "a", "score": 2}
    prepared = PaddingCollate().prepare(sample)
    for key in ("input_ids", "labels"):
        assert type(prepared[key]) is np.ndarray
        assert prepared[key].dtype.kind == "i" and prepared[key].tolist() == row
    assert (prepared["text"], prepared["score"]) == ("a", 2)
    assert (prepared is sample) == (kind in ("array", "strided", "big-endian"))


def test_a_gradient_and_a_dtype_are_not_lost_on_the_way():
    row = torch.tensor([0.5, -1.0], requires_grad=True)
    prepared = PaddingCollate().prepare({"input_ids": [1, 2], "labels": row})
    assert prepared["labels"].dtype == np.float32 and prepared["labels"].tolist() == [0.5, -1.0]


@pytest.mark.parametrize("value", [np.str_("a"), np.datetime64("2026-11-26"), np.array("a")])
def test_what_numpy_has_without_dimensions_is_listed_unless_it_is_a_number(value):
    samples = [{"input_ids": [1], "of": value, "count": np.int32(n)} for n in range(2)]
    batch = PaddingCollate()(samples)
    assert batch["of"] == [value, value] and batch["count"].tolist() == [0, 1]


@pytest.mark.parametrize(
    "number",
    [torch.tensor(1.5, dtype=torch.bfloat16), torch.tensor(1.5, requires_grad=True)],
    ids=["bfloat16", "with a gradient"],
)
def test_numbers_in_tensors_are_stacked(number):
    batch = PaddingCollate()([{"input_ids": [1], "reward": number}] * 2)
    assert batch["reward"].dtype == number.dtype and not batch["reward"].requires_grad
    assert batch["reward"].tolist() == [1.5, 1.5]
    mixed = [{"input_ids": [1], "reward": reward} for reward in (number, 2.0)]
    assert PaddingCollate()(mixed)["reward"].tolist() == [1.5, 2.0]


@pytest.mark.parametrize("key", ["input_ids", "labels"])
@pytest.mark.parametrize("number", [2**63, 2**64 - 100])
def test_a_number_that_a_tensor_cannot_hold_is_refused(key, number):
    fits = {"input_ids": np.array([1, 2], np.uint64), "labels": [3, 4]}
    assert PaddingCollate()([fits])["input_ids"].tolist() == [[1, 2]]
    for row in ([number, number], np.array([1, number], np.uint64)):
        with pytest.raises(SampleError, match=f"`{key}` must hold integers .* {number}"):
            PaddingCollate()([fits, {**fits, key: row}])


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_rows_of_unlike_lengths_are_refused(kind):
    sample = {"input_ids": kind([1, 2]), "labels": kind([1, 2, 3])}
    with pytest.raises(SampleError, match=r"`labels` must have the length of `input_ids` \(2\)"):
        PaddingCollate().prepare(sample)
    with pytest.raises(SampleError, match="sample 1 of the group: `labels` must have the length"):
        PaddingCollate()([{"input_ids": kind([1]), "labels": kind([1])}, sample])
