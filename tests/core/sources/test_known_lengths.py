"""Lengths that are known ahead: what an observer would say of each sample, from elsewhere."""

import json
import tracemalloc
from collections import UserList
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refusals import refuses
from torch.utils.data import ConcatDataset, Subset
from toys import Stream

from odb_nodes import JsonlSource, ODBDataLoader, ParquetDataset, Skipped, StateError, pop_step_info
from odb_nodes.core.processing.observation import observe_sample
from odb_nodes.core.sources.known_lengths import known_lengths
from odb_nodes.tools.lengths import LengthTable, observe_lengths

LENGTHS = [3, 1, 5, 2, 4, 9, 7]
DICTS = [{"input_ids": [8] * n, "n_tokens": n, "text": "x" * n} for n in LENGTHS]


def observed(dataset):
    """The length that the observer of a loader says of each row."""
    return [observe_sample(dataset[index]).tokens for index in range(len(dataset))]


def known_tokens(dataset, lengths):
    """The known lengths of a dataset, from the argument `lengths`."""
    column = known_lengths(dataset, lengths, is_processed=True)
    assert column.tokens.dtype == np.int64
    return column.tokens.tolist()


# --- tables of `datasets`, which takes seconds to import ------------------------------------------


@pytest.fixture(scope="module")
def datasets():
    module = pytest.importorskip("datasets")
    module.disable_progress_bars()
    yield module
    module.enable_progress_bars()


ARROW_TYPES = {
    "list of int32": pa.list_(pa.int32()),
    "list of uint16": pa.list_(pa.uint16()),
    "large list of int64": pa.large_list(pa.int64()),
    "fixed-size list": pa.list_(pa.int64(), 3),
}
FORMATS = {
    "none": lambda table: table,
    "numpy": lambda table: table.with_format("numpy"),
    "numpy with a dtype": lambda table: table.with_format("numpy", dtype=np.int16),
    "torch": lambda table: table.with_format("torch"),
    "torch with columns": lambda table: table.with_format("torch", columns=["input_ids"]),
    "other columns": lambda table: table.with_format(
        "numpy", columns=["id"], output_all_columns=True
    ),
}


@st.composite
def tables(draw, datasets):
    """A table of a few rows: chunks that are slices of others, any mapping and format."""
    kind = ARROW_TYPES[draw(st.sampled_from([*ARROW_TYPES]))]
    size = st.just(3) if pa.types.is_fixed_size_list(kind) else st.integers(1, 6)
    chunks = []
    for rows in draw(st.lists(st.integers(1, 4), min_size=2, max_size=3)):
        before, after = draw(st.integers(0, 2)), draw(st.integers(0, 2))
        lists = [[7] * draw(size) for _ in range(before + rows + after)]
        chunks.append(pa.array(lists, kind).slice(before, rows))
    column = pa.chunked_array(chunks)
    columns = {"input_ids": column, "id": pa.array(range(1, len(column) + 1))}
    table = datasets.Dataset(pa.table(columns))
    if draw(st.booleans()):
        other = datasets.Dataset.from_dict({"other": [*range(len(table))]})
        table = datasets.concatenate_datasets([table, other], axis=1)
    for _ in range(draw(st.integers(0, 2))):
        table = draw(st.sampled_from(MAPPINGS))(table, draw, datasets)
    return FORMATS[draw(st.sampled_from([*FORMATS]))](table)


def select(table, draw, _):
    rows = st.lists(st.integers(0, len(table) - 1), min_size=1, max_size=12)
    return table.select(draw(rows))


def select_a_range(table, draw, _):
    first = draw(st.integers(0, len(table) - 1))
    return table.select(range(first, draw(st.integers(first + 1, len(table)))))


def shuffle(table, draw, _):
    return table.shuffle(seed=draw(st.integers(0, 9)))


def split(table, draw, _):
    if len(table) < 2:
        return table
    parts = table.train_test_split(test_size=1, seed=draw(st.integers(0, 9)))
    return parts[draw(st.sampled_from(["train", "test"]))]


def concatenate(table, _, datasets):
    return datasets.concatenate_datasets([table, table.select([0, len(table) - 1])])


MAPPINGS = [select, select_a_range, shuffle, split, concatenate]


def subset(dataset, draw):
    rows = draw(st.lists(st.integers(0, len(dataset) - 1), min_size=1, max_size=9))
    kinds = [list, tuple, np.array, lambda _: range(len(dataset) - 1, -1, -1)]
    return Subset(dataset, draw(st.sampled_from(kinds))(rows))


WRAPPERS = [
    lambda dataset, _: dataset,
    subset,
    lambda dataset, _: ConcatDataset([dataset, dataset]),
    lambda dataset, draw: subset(ConcatDataset([dataset, subset(dataset, draw)]), draw),
]


def ids_of(dataset):
    """The column `id` of rows that may be formatted without it."""
    if isinstance(dataset, Subset):
        ids = ids_of(dataset.dataset)
        return [ids[index] for index in dataset.indices]
    if isinstance(dataset, ConcatDataset):
        return [id_ for part in dataset.datasets for id_ in ids_of(part)]
    return [row["id"] for row in dataset.with_format(None)]


@pytest.mark.slow
@given(data=st.data())
def test_lengths_of_a_table_are_those_that_an_observer_says(datasets, data):
    table = data.draw(tables(datasets))
    dataset = data.draw(st.sampled_from(WRAPPERS))(table, data.draw)
    stored = known_lengths(dataset, is_processed=False)
    assert stored.tokens.tolist() == observed(dataset)
    assert stored.tokens.dtype == np.int64
    assert stored.origin == "list offsets of the column 'input_ids'"
    assert known_lengths(dataset, is_processed=True) is None
    assert known_tokens(dataset, "input_ids") == stored.tokens.tolist()
    assert known_tokens(dataset, "id") == [int(row) for row in ids_of(dataset)]
    together = table.__getitems__([*range(len(table))])
    alone = known_lengths(table, is_processed=False).tokens.tolist()
    assert [observe_sample(row).tokens for row in together] == alone


@pytest.mark.slow
def test_a_batch_has_the_lengths_that_were_known(datasets):
    table = datasets.Dataset.from_list(DICTS).select_columns("input_ids").shuffle(seed=1)
    stored = known_lengths(table, is_processed=False)
    for format_ in (None, "numpy", "torch"):
        seen = {}
        for batch in ODBDataLoader(table.with_format(format_), token_budget=20, seed=0):
            keys = pop_step_info(batch).keys
            seen |= dict(zip(keys, batch["attention_mask"].sum(1).tolist(), strict=True))
        assert [seen[row] for row in range(len(table))] == stored.tokens.tolist()


def rows_of(datasets, values, kind=None, **columns):
    return datasets.Dataset(pa.table({"input_ids": pa.array(values, kind), **columns}))


NOT_KNOWN = {
    "a transform": lambda ds: rows_of(ds, [[1]]).with_transform(lambda rows: rows),
    "a format of another kind": lambda ds: rows_of(ds, [[1]]).with_format("arrow"),
    "a format of more dimensions": lambda ds: rows_of(ds, [[1]]).with_format("numpy", ndmin=3),
    "a format without the column": lambda ds: rows_of(ds, [[1]], id=[1]).with_format(
        "torch", columns=["id"]
    ),
    "no column": lambda ds: ds.Dataset.from_dict({"text": ["a"]}),
    "a null": lambda ds: rows_of(ds, [[1], None]),
    "a null of a fixed size": lambda ds: rows_of(ds, [[1], None], pa.list_(pa.int64(), 1)),
    "a row without tokens": lambda ds: rows_of(ds, [[1], []]),
    "no row": lambda ds: rows_of(ds, [], pa.list_(pa.int64())),
    "floats": lambda ds: rows_of(ds, [[1.0]]),
    "strings": lambda ds: rows_of(ds, [["a"]]),
    "integers": lambda ds: rows_of(ds, [1]),
    "text": lambda ds: rows_of(ds, ["abc"]),
    "lists of lists": lambda ds: rows_of(ds, [[[1, 2]]]),
    "two dimensions": lambda ds: ds.Dataset.from_dict(
        {"input_ids": [[[1, 2]]]}, ds.Features({"input_ids": ds.Array2D((1, 2), "int64")})
    ),
    "pixels": lambda ds: rows_of(ds, [[1]], pixel_values=[[[0.5]]]),
    "a grid of images": lambda ds: rows_of(ds, [[1]], image_grid_thw=[[1, 2, 2]]),
    "a class of the user": lambda ds: type("Own", (ds.Dataset,), {})(
        pa.table({"input_ids": [[1]]})
    ),
    "a subset of that": lambda ds: Subset(NOT_KNOWN["a class of the user"](ds), [0]),
    "one of several": lambda ds: ConcatDataset([rows_of(ds, [[1]]), NOT_KNOWN["text"](ds)]),
    "rows of rows": lambda ds: Subset(rows_of(ds, [[1], [2]]), [[0, 1]]),
    "a stream": lambda ds: rows_of(ds, [[1]]).to_iterable_dataset(),
    "several datasets": lambda ds: {"a": rows_of(ds, [[1]])},
    "a dict of splits": lambda ds: ds.DatasetDict(train=rows_of(ds, [[1]])),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NOT_KNOWN)
def test_lengths_are_not_known_where_only_reading_a_row_tells(name, datasets):
    assert known_lengths(NOT_KNOWN[name](datasets), is_processed=False) is None


@pytest.mark.slow
def test_rows_that_are_not_in_the_dataset_do_not_count(datasets):
    table = rows_of(datasets, [[1, 2], None, [], [3]])
    for dataset in (table.select([3, 0]), Subset(table, [-1, 0]), table.filter(bool_of)):
        tokens = known_lengths(dataset, is_processed=False).tokens.tolist()
        assert tokens == observed(dataset) and sorted(tokens) == [1, 2]


def bool_of(row):
    return bool(row["input_ids"])


@pytest.mark.slow
def test_images_that_a_format_leaves_out_do_not_count(datasets):
    table = rows_of(datasets, [[1, 2]], pixel_values=[[0.5]])
    table = table.with_format("torch", columns=["input_ids"])
    assert known_lengths(table, is_processed=False).tokens.tolist() == observed(table) == [2]


@pytest.mark.slow
def test_a_row_takes_16_bytes_while_lengths_are_found_whatever_it_holds(datasets):
    rows, pool = 20_000, pa.proxy_memory_pool(pa.default_memory_pool())
    values = pa.array(np.zeros(rows * 100, np.int32))
    lists = pa.ListArray.from_arrays(np.arange(0, rows * 100 + 1, 100, dtype=np.int32), values)
    table = datasets.Dataset(pa.table({"input_ids": lists})).shuffle(seed=0)
    known_lengths(table, is_processed=False)  # imports
    before = pa.default_memory_pool()
    pa.set_memory_pool(pool)
    tracemalloc.start()
    try:
        stored = known_lengths(table, is_processed=False)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        pa.set_memory_pool(before)
    assert stored.tokens.nbytes == 8 * rows
    assert peak + pool.max_memory() < 16 * rows + 100_000  # the values take 400


@pytest.mark.slow
def test_a_column_of_a_table_may_be_hidden_from_its_rows_or_be_read_by_the_user(datasets):
    table = datasets.Dataset.from_list(DICTS).shuffle(seed=0)
    hidden = table.with_format("torch", columns=["input_ids"])
    expected = observed(table)
    assert (
        known_tokens(hidden, "n_tokens")
        == known_tokens(hidden.with_transform(dict), "n_tokens")
        == expected
    )
    assert (
        known_tokens(hidden, table["n_tokens"])
        == known_tokens(table, table["n_tokens"][:])
        == expected
    )
    with pytest.raises(ValueError, match=r"row 1 has no value in the column 'n'"):
        known_tokens(rows_of(datasets, [[1], [2], [3]], n=[2, None, 4]), "n")
    with pytest.raises(TypeError, match="column of integers, or of lists, but 'n' is of double"):
        known_tokens(rows_of(datasets, [[1]], n=[0.5]), "n")
    with pytest.raises(ValueError, match=r"the columns are \['input_ids', 'n_tokens', 'text'\]"):
        known_tokens(hidden, "n_token")


@pytest.mark.slow
def test_a_file_of_another_table_is_refused(datasets, tmp_path):
    table, path = datasets.Dataset.from_list(DICTS), tmp_path / "lengths.npz"
    observe_lengths(table).save(path)
    assert known_tokens(datasets.Dataset.from_list(DICTS), path) == LENGTHS
    for other in (table.shuffle(seed=1), table.map(lambda row: {"input_ids": [1]})):
        with pytest.raises(ValueError, match="they are of other data"):
            known_tokens(other, path)
    assert known_tokens(Subset(table, range(7)), path) == LENGTHS  # has nothing that tells it apart


# --- other datasets -------------------------------------------------------------------------------


def test_nothing_is_known_of_other_datasets_by_themselves():
    class Dataset:
        __len__ = LENGTHS.__len__
        __getitem__ = DICTS.__getitem__

    for dataset in (DICTS, Dataset(), Subset(DICTS, [0]), Stream(DICTS), {"a": DICTS}):
        assert known_lengths(dataset, is_processed=False) is None


def test_a_column_of_dicts_holds_integers_or_lists():
    for name in ("n_tokens", "input_ids"):
        assert known_tokens(DICTS, name) == known_tokens(tuple(DICTS), name) == LENGTHS
        assert known_tokens(Subset(DICTS, [2, -1]), name) == [5, 7]
        assert known_tokens(ConcatDataset([DICTS, DICTS[:2]]), name) == [*LENGTHS, 3, 1]
    kinds = [np.int32(4), torch.tensor(4), np.ones(4), torch.ones(4), (1, 2, 3, 4)]
    assert known_tokens([{"n": value} for value in kinds], "n") == [4] * 5
    assert known_tokens([{"n": torch.tensor([9])}], "n") == [1]
    column = known_lengths(DICTS, "n_tokens", is_processed=False)
    assert column.origin == "the column 'n_tokens'"


@pytest.mark.slow
@given(
    sizes=st.lists(st.integers(0, 7), min_size=1, max_size=3),
    group=st.integers(1, 5),
    nulls=st.booleans(),
)
def test_a_column_of_parquet_files_is_read_by_itself(tmp_path_factory, sizes, group, nulls):
    folder, lengths = tmp_path_factory.mktemp("files"), iter(range(1, 99))
    schema = pa.schema([("ids", pa.list_(pa.int32())), ("n", pa.int16()), ("text", pa.string())])
    expected = []
    for number, size in enumerate(sizes):
        part = [next(lengths) for _ in range(size)]
        expected += part
        rows = [{"ids": [5] * n, "n": n, "text": "a"} for n in part]
        table = pa.Table.from_pylist(rows, schema)
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=group)
    dataset = ParquetDataset(folder, ["text"])
    assert known_tokens(dataset, "n") == known_tokens(dataset, "ids") == expected
    assert dataset[0] == {"text": "a"} if expected else len(dataset) == 0
    if nulls and expected:
        pq.write_table(pa.Table.from_pylist([{"n": None}], schema), folder / "9.parquet")
        with pytest.raises(ValueError, match=f"row {len(expected)} has no value in the column 'n'"):
            known_tokens(ParquetDataset(folder), "n")


def test_a_column_that_only_some_parquet_files_have_is_none(tmp_path):
    for name, column in (("a", "n"), ("b", "m")):
        columns = {"x": [1], column: [2]}
        pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
    dataset = ParquetDataset(tmp_path, ["x"])
    with pytest.raises(ValueError, match=r"but is 'n' instead: .* the columns are \['x'\]"):
        known_tokens(dataset, "n")
    with pytest.raises(TypeError, match="'t' is of string"):
        pq.write_table(pa.table({"t": ["a"]}), tmp_path / "c.parquet")
        known_tokens(ParquetDataset(tmp_path / "c.parquet"), "t")


@pytest.mark.parametrize(
    "make",
    [list, tuple, np.array, lambda n: np.array(n, np.uint8), torch.tensor, lambda n: pa.array(n)],
)
def test_an_integer_for_each_row_is_taken_as_it_is(make):
    column = known_lengths(DICTS, make(LENGTHS), is_processed=False)
    assert column.tokens.tolist() == LENGTHS
    assert column.origin == "`lengths`"
    assert known_tokens(DICTS, range(2, 9)) == [*range(2, 9)]


def test_lengths_are_a_copy_and_are_read_at_once():
    """A column of `datasets` takes some 0.1 ms for each element that is read by itself."""
    array = np.array(LENGTHS)
    column = known_lengths(DICTS, array, is_processed=True)
    array[:] = 1
    assert column.tokens.tolist() == LENGTHS

    class Column(UserList):
        def __getitem__(self, key):
            assert key == slice(None)
            return self.data

    assert known_tokens(DICTS, Column(LENGTHS)) == LENGTHS


test_lengths_that_are_none_are_refused_by_name = refuses(
    [
        (DICTS, [1, 2], ValueError, r"`lengths` must have .* each of the 7 rows .* but has 2\."),
        (DICTS, [], ValueError, "but has 0"),
        (
            DICTS,
            [1, 2, 0, 4, 5, 6, 7],
            ValueError,
            "in 1..2147483647, but row 2 has 0 in `lengths`",
        ),
        (DICTS, [1, 2, 3, 2**31, 5, 6, 7], ValueError, "but row 3 has 2147483648"),
        (DICTS, [1.0] * 7, TypeError, r"but is \[1.0, .* \(7,\) of float64 instead"),
        (DICTS, [True] * 7, TypeError, "of bool"),
        (DICTS, [1, None], TypeError, "of object"),
        (DICTS, [[1, 2], [3]], TypeError, "one integer for each row"),
        (DICTS, np.ones((7, 1), int), TypeError, r"but is a `ndarray` \(7, 1\) of int64"),
        (DICTS, torch.ones(7, dtype=torch.bfloat16), TypeError, "but is a `Tensor` instead"),
        (DICTS, iter(LENGTHS), TypeError, "but is a `list_iterator` instead"),
        (DICTS, 4, TypeError, "but is 4 instead"),
        (DICTS, "n", ValueError, r"but is 'n' .* no such file, and the columns are \['input_ids'"),
        (DICTS, "text", TypeError, "'text' of row 0 is 'xxx' instead"),
        ([{"n": True}], "n", TypeError, "'n' of row 0 is True"),
        ([{"n": 1}, {"m": 1}], "n", ValueError, "row 1 has no value in the column 'n'"),
        (Subset([{"n": 1}, {"n": -1}], [0, 1]), "n", ValueError, "row 1 has -1 in the column 'n'"),
        (ConcatDataset([DICTS, [{"n": 1}]]), "n", ValueError, r"the columns are \[\]"),
        (range(3), "n", ValueError, "a `range` has no columns, as a"),
        (Stream(DICTS), LENGTHS, TypeError, "`lengths` must be None for a `Stream`"),
        ({"a": DICTS}, [1], TypeError, "`lengths` must be None for a `dict`"),
    ],
    lambda dataset, lengths: known_lengths(dataset, lengths, is_processed=False),
)


def test_lengths_of_json_lines_are_refused(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"input_ids": [1]}\n')
    with pytest.raises(TypeError, match="must be None for a `JsonlSource`"):
        known_tokens(JsonlSource(path), [1])


# --- files ----------------------------------------------------------------------------------------


def skip_short(item):
    return Skipped("short") if len(item["input_ids"]) < 3 else item


def test_a_file_tells_the_lengths_of_a_profile(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    observe_lengths(DICTS).save("lengths.npz")
    column = known_lengths(DICTS, "lengths.npz", is_processed=True)
    assert column.tokens.tolist() == known_tokens(DICTS, tmp_path / "lengths.npz") == LENGTHS
    assert column.origin == "the file 'lengths.npz'"
    named = [{"lengths.npz": 2 * n} for n in LENGTHS]  # a column comes first
    assert known_tokens(named, "lengths.npz") == [2 * n for n in LENGTHS]
    table = LengthTable.load("lengths.npz")
    table.rows(np.array([3, 0, 1, 2, 6, 5, 4])).save("lengths.npz")  # as a sampler reads them
    assert known_tokens(DICTS, "lengths.npz") == LENGTHS


def test_a_row_that_processing_skips_counts_as_a_token(tmp_path):
    observe_lengths(DICTS, process_fn=skip_short).save(tmp_path / "lengths")
    assert known_tokens(DICTS, tmp_path / "lengths") == [3, 1, 5, 1, 4, 9, 7]


TABLE = LengthTable.of(LENGTHS)
NOT_OF_THE_ROWS = {
    "they are of 8 samples, and the dataset has 7": LengthTable.of([*LENGTHS, 1]),
    "they are of 7 of 70 samples": replace(TABLE, sizes=(70,)),
    "their keys are not the numbers": replace(TABLE, keys=TABLE.keys << 40),
    "they are of the datasets": replace(TABLE, names=("a", "b"), sizes=(4, 3)),
}


@pytest.mark.parametrize("why", NOT_OF_THE_ROWS)
def test_a_file_that_is_not_of_the_rows_is_refused(why, tmp_path):
    NOT_OF_THE_ROWS[why].save(tmp_path / "lengths.npz")
    with pytest.raises(ValueError, match=f"rows of this dataset, but in the file .*{why}.*Profile"):
        known_tokens(DICTS, tmp_path / "lengths.npz")


def test_a_file_of_json_lines_is_refused_for_a_dataset_of_the_same_rows(tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in DICTS))
    observe_lengths(JsonlSource(tmp_path / "rows.jsonl")).save(tmp_path / "lengths.npz")
    with pytest.raises(ValueError, match="byte offsets of JSON Lines.*profile module:function"):
        known_tokens(DICTS, tmp_path / "lengths.npz")
    assert known_tokens(DICTS, LengthTable.load(tmp_path / "lengths.npz").tokens) == LENGTHS


def test_a_file_of_other_parquet_files_is_refused(tmp_path):
    for name, lengths in (("a", LENGTHS), ("b", LENGTHS[::-1])):
        pq.write_table(pa.table({"input_ids": [[1] * n for n in lengths]}), tmp_path / name)
    first, other = (ParquetDataset(tmp_path / name) for name in "ab")
    observe_lengths(first).save(tmp_path / "lengths.npz")
    assert known_tokens(first, tmp_path / "lengths.npz") == LENGTHS
    with pytest.raises(ValueError, match="they are of other data .'1 files, CRC-32"):
        known_tokens(other, tmp_path / "lengths.npz")


def test_a_file_of_something_else_is_refused(tmp_path):
    np.save(tmp_path / "lengths.npy", LENGTHS)
    with pytest.raises(StateError, match="no table of lengths of version 1"):
        known_tokens(DICTS, tmp_path / "lengths.npy")
    with pytest.raises(FileNotFoundError):
        known_tokens(DICTS, tmp_path / "none.npz")


def test_what_a_dataset_calls_its_data_is_asked_of_none_but_strings(tmp_path):
    path = tmp_path / "lengths.npz"
    replace(LengthTable.of([1]), data_id="x").save(path)
    make = type("Own", (SimpleNamespace,), {"__len__": lambda _: 1, "__getitem__": None})
    assert known_tokens(make(data_id=7), path) == known_tokens(make(data_id="x"), path) == [1]
    with pytest.raises(ValueError, match="other data"):
        known_tokens(make(data_id="y"), path)
