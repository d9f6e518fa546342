"""Samples, keys and data in columns are what they are one by one."""

import copy
import pickle

import numpy as np
import pytest
import torch

from odb_nodes import ItemKey, PaddingCollate, Sample, SampleError
from odb_nodes.core.collate.protocol import new_tensor
from odb_nodes.core.processing.columns import Column, DataColumns
from odb_nodes.core.processing.observation import with_item_key
from odb_nodes.core.processing.transport import pack, unpack
from odb_nodes.core.sample_block import DATA, NO_SAMPLES, ItemKeys, SampleBlock

PLAIN = Sample(None, 1, 0)
BARE = Sample([4], 3, 2, key=0, digest=0, ordinal=0)
FULL = Sample(
    {"input_ids": [1]}, 7, 6, 5, "web", "labels", 2**63 - 1, ItemKey("a/b", 9, 4, 3), 8, "ocr", 2
)
SAMPLES = [PLAIN, FULL, BARE, FULL._replace(source="", task=""), FULL._replace(item=None), PLAIN]


def two_sources():
    """A block of three samples whose data are in two lists, between data of others."""
    first = SampleBlock.of([PLAIN, FULL, PLAIN, PLAIN]).with_data(["other", "a", "b", "other"])[1:3]
    second = SampleBlock.of([BARE, FULL, BARE]).with_data(["c", "d", "other"])
    return SampleBlock.joined([first, second]).take([3, 0, 2])


def sent(value):
    return unpack([bytearray(part) for part in pack(value)])


COPIES = {
    "pickle": lambda block: pickle.loads(pickle.dumps(block)),
    "sent": sent,
    "copy": copy.copy,
}


# --- blocks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [None, [f"data {n}" for n in range(len(SAMPLES))]])
def test_a_sample_comes_out_as_it_went_in(data):
    block = SampleBlock.of(SAMPLES, data)
    held = [sample.data for sample in SAMPLES] if data is None else data
    expected = [sample._replace(data=own) for sample, own in zip(SAMPLES, held, strict=True)]
    for again in (block, block[:], block.take(range(len(block)))):
        assert [*again] == expected == again and again.data() == held
        assert [again[index] for index in range(-6, 6)] == expected * 2
        assert {type(sample) for sample in again} == {Sample}
        assert {type(sample.item) for sample in again} == {ItemKey, type(None)}
        assert {type(value) for sample in again for value in sample[1:4]} == {int}
    assert block.tokens.tolist() == [sample.tokens for sample in SAMPLES]
    assert block.targets.tolist() == [sample.targets for sample in SAMPLES]
    assert block.patches.tolist() == [sample.patches for sample in SAMPLES]
    assert [kind.task_name for kind in block.kinds] == [sample.task_name for sample in SAMPLES]


def test_samples_are_the_same_objects_each_time():
    block = SampleBlock.of(SAMPLES)
    assert all(sample is expected for sample, expected in zip(block, SAMPLES, strict=True))
    made = block[1:]
    assert all(sample is again for sample, again in zip(made, made, strict=True))
    assert SampleBlock.of(block) is block


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_of_several_sources_and_kinds_is_equal(how):
    for block in (two_sources(), SampleBlock.of(SAMPLES), NO_SAMPLES, two_sources()[:0]):
        again = COPIES[how](block)
        assert again == block and type(again) is SampleBlock
        assert again.kinds == block.kinds and again.data() == block.data()
        assert SampleBlock.joined([block, again]) == [*block, *again]


@pytest.mark.parametrize("how", COPIES)
def test_facts_alone_may_be_copied(how):
    block = SampleBlock(two_sources().facts, {})
    again = COPIES[how](block)
    assert again.kinds == block.kinds and again.tokens.tolist() == block.tokens.tolist()


def test_parts_of_a_block_are_those_of_its_samples():
    block, samples = two_sources(), [*two_sources()]
    assert block.data() == ["d", "a", "c"]
    assert block[1:] == samples[1:] and block[::-1] == samples[::-1]
    assert block.take(np.array([2, 2, 0])) == [samples[2], samples[2], samples[0]]
    assert SampleBlock.joined([block[2:], block[:2]]) == [samples[2], *samples[:2]]
    assert SampleBlock.joined([block]) is block
    assert block != samples[1:] and block != block[1:] and block != 3
    assert samples[1] in block and block.index(samples[2]) == 2
    for wrong in (3, -4):
        with pytest.raises(IndexError):
            block[wrong]


def test_a_part_has_no_holder_that_it_has_no_sample_of():
    block = two_sources()
    assert len(block.holders) == 2
    assert [len(part.holders) for part in (block[1:2], block.take([0, 2]), block[:0])] == [1, 1, 0]
    assert {*block[1:2].holders} == {*block[1:2].facts[DATA].tolist()}


def test_a_block_alone_holds_no_data_of_others():
    block = two_sources()
    alone = block.alone()
    assert alone == block and sorted(sum(alone.holders.values(), [])) == ["a", "c", "d"]
    rows = [{"n": np.arange(n)} for n in range(4)]
    columns = SampleBlock.of([PLAIN] * 4).with_data(DataColumns.of(rows)).take([3, 1])
    (held,) = columns.alone().holders.values()
    assert [row["n"].tolist() for row in held] == [[0, 1, 2], [0]]
    tuples = SampleBlock.of([PLAIN, PLAIN]).with_data(("a", "b"))[1:]  # which cannot be cut
    assert tuples.alone().data() == ["b"]


def test_facts_and_data_may_be_exchanged():
    block = two_sources()
    other = block.with_facts(digest=[1, 2, 3], ordinal=[4, 5, -1])
    assert [(sample.digest, sample.ordinal) for sample in other] == [(1, 4), (2, 5), (3, None)]
    assert other.data() == block.data() and [sample.digest for sample in block] == [8, 8, 0]
    other = block.with_data("abc")
    assert other.data() == [*"abc"]
    assert [sample[1:] for sample in other] == [sample[1:] for sample in block]
    assert [row for _, row in other.places()] == [0, 1, 2]


def test_an_empty_block_is_an_empty_sequence():
    for block in (NO_SAMPLES, SampleBlock.of([]), SampleBlock.joined([]), two_sources()[3:]):
        assert not block and block == [] and [*block] == block.data() == block.kinds == []
        assert block.take([]) == block[:] == block.alone() == SampleBlock.joined([block, block])


# --- keys -----------------------------------------------------------------------------------------

KEYS = [ItemKey("a", 5, 2, 1), None, ItemKey("", 2**63 - 1, 1), ItemKey("a", 0, 2), None]


@pytest.mark.parametrize("keys", [KEYS, KEYS[:1], [None], []])
def test_keys_come_out_as_they_went_in(keys):
    columns = ItemKeys.of(keys)
    for again in (columns, ItemKeys.of(columns), sent(columns), ItemKeys.joined([columns])):
        assert [*again] == keys and len(again) == len(keys)
        assert [again[index] for index in range(len(keys))] == keys
        assert {type(key) for key in again} <= {ItemKey, type(None)}
        assert again.are_known is (None not in keys)
        assert [*again[1:]] == keys[1:] and [*again[:1]] == keys[:1]


@pytest.mark.parametrize("as_columns", [True, False])
def test_keys_are_joined(as_columns):
    parts = [KEYS[:2], KEYS[2:4], [], KEYS[4:]]
    columns = [ItemKeys.of(part) if as_columns else part for part in parts]
    assert [*ItemKeys.joined(columns)] == KEYS
    whole = ItemKeys.of(KEYS)
    assert [*ItemKeys.joined([whole[3:], whole[:3]])] == KEYS[3:] + KEYS[:3]
    assert [*ItemKeys.joined([])] == []


# --- data -----------------------------------------------------------------------------------------

LENGTHS = [3, 0, 2, 5]


def arrays(dtype, *_):
    return [np.arange(n).astype(dtype) for n in LENGTHS]


VALUES = {
    "int64": arrays("i8"),
    "float32": arrays("f4"),
    "bool": arrays("?"),
    "tensors": [torch.arange(n) for n in LENGTHS],
    "half tensors": [torch.arange(n).half() for n in LENGTHS],
    "bfloat16": [torch.arange(n).bfloat16() for n in LENGTHS],
    "mixed dtypes": [*arrays("i8")[:2], *arrays("f4")[2:]],
    "mixed kinds": [*arrays("i8")[:2], *map(torch.arange, LENGTHS[2:])],
    "matrices": [np.ones((n, 2)) for n in LENGTHS],
    "objects": [np.array([None] * n) for n in LENGTHS],
    "long": [np.zeros(40_000, np.int64)] * 4,
    "lists": [[*range(n)] for n in LENGTHS],
    "texts": [*"abcd"],
}
JOINED = {"int64", "float32", "bool", "tensors", "half tensors"}


def check_equal(value, expected):
    assert type(value) is type(expected)
    if isinstance(expected, (np.ndarray, torch.Tensor)):
        assert value.dtype == expected.dtype and value.shape == expected.shape
        assert value.tolist() == expected.tolist()
    else:
        assert value == expected


def check_rows(columns, data):
    assert len(columns) == len(data)
    for row, expected in zip(columns, data, strict=True):
        assert type(row) is dict and [*row] == [*expected]
        for key, value in expected.items():
            check_equal(row[key], value)


@pytest.mark.parametrize("kind", VALUES)
def test_values_of_a_key_come_out_as_they_went_in(kind):
    data = [{"n": index, "value": value} for index, value in enumerate(VALUES[kind])]
    columns = DataColumns.of(data)
    assert isinstance(columns.column("value"), Column) is (kind in JOINED)
    assert columns.column("n") == [0, 1, 2, 3] and columns.column("other") is None
    for again in (columns, sent(columns)):
        check_rows(again, data)
        check_rows(again[1:3], data[1:3])
        kept = again.take_rows(np.array([3, 0]))
        check_rows(kept, [data[3], data[0]])
        if kind in JOINED:
            assert kept.column("value").values.base is None  # a buffer of its own
            assert len(kept.column("value").values) == 8


def test_columns_of_like_rows_share_their_offsets():
    data = [{"ids": np.arange(n), "labels": np.arange(n), "one": np.arange(1)} for n in LENGTHS]
    columns = DataColumns.of(data)
    for again in (columns, columns.take_rows(np.array([2, 1])), sent(columns)):
        ids, labels, one = map(again.column, ("ids", "labels", "one"))
        assert ids.offsets is labels.offsets is not one.offsets


def test_rows_are_views_of_the_joined_values():
    columns = DataColumns.of([{"a": np.arange(3)}, {"a": np.arange(2)}])
    columns[1]["a"][0] = 7
    assert columns[1]["a"].tolist() == [7, 1] and columns[0]["a"].tolist() == [0, 1, 2]
    assert np.shares_memory(columns[0]["a"], columns.column("a").values)


@pytest.mark.parametrize(
    "data",
    [
        [],
        [3, "a", None],
        [{"a": 1}, {"b": 1}],
        [{"a": 1, "b": 2}, {"b": 2, "a": 1}],  # whose order stays
        [{}, {}],
        [{"a": 1}, [1]],
    ],
)
def test_other_data_stay_as_they_are(data):
    columns = DataColumns.of(data)
    assert [*columns] == data and len(columns) == len(data)
    assert columns.keys is None and columns.column("a") is None
    assert [*map(repr, sent(columns))] == [*map(repr, data)]
    assert columns[1:] == data[1:]
    assert [*columns.take_rows(np.arange(len(data))[::-1])] == data[::-1]


TEXTS = [{"input_ids": np.array([5, 6]), "labels": np.array([7, 8])} for _ in range(2)]


def test_what_somebody_changes_in_a_sample_is_collated():
    block = SampleBlock.of(
        [Sample(text, 2, 1) for text in TEXTS], DataColumns.of([{**text} for text in TEXTS])
    )
    assert PaddingCollate().collate_block(block)["labels"].all()
    for sample in block:
        sample.data["labels"] = sample.data["labels"] * 0
    assert block[0] is block[0] and block.index(block[0]) == 0
    for changed in (block, block.take([0, 1]), block[:2], SampleBlock.joined([block, block])):
        labels = PaddingCollate().collate_block(changed)["labels"]
        assert not labels.any()


def test_no_samples_that_were_looked_at_make_none_of_others():
    assert [*NO_SAMPLES] == []
    block = SampleBlock.of([Sample(text, 2, 1) for text in TEXTS], DataColumns.of(TEXTS))
    assert not SampleBlock.joined([block, NO_SAMPLES, block]).has_objects


def test_a_batch_is_written_into_the_memory_that_is_asked_for():
    block = SampleBlock.of([Sample(text, 2, 1) for text in TEXTS], DataColumns.of(TEXTS))
    made = []

    def new(*of):
        made.append(new_tensor(*of))
        return made[-1]

    batch = PaddingCollate().collate_block(block, new)
    assert [*batch] == ["input_ids", "labels", "attention_mask"]
    assert all(value is there for value, there in zip(batch.values(), made, strict=True))
    assert str(batch) == str(PaddingCollate()(TEXTS))


@pytest.mark.parametrize(
    "wrong", [{"tokens": 3.5}, {"key": -1}, {"key": 2**63}, {"key": "doc"}, {"targets": -2}]
)
def test_a_number_that_does_not_fit_is_an_error_that_names_it(wrong):
    sample = Sample({}, 1, 1)._replace(**wrong)
    with pytest.raises(SampleError, match=f"`{next(iter(wrong))}`"):
        with_item_key(sample, None)
    if wrong != {"targets": -2}:
        with pytest.raises(SampleError, match=f"`{next(iter(wrong))}`"):
            SampleBlock.of([sample])
