"""Canaries: what we rely on inside of Hugging Face `datasets`: a table, the stages of a stream."""

import pytest
from canary import relies_on

from odb_nodes._compat.datasets import (
    RESTORABLE,
    SPLIT_BY_SHARDS,
    consists_of,
    fingerprint_of_table,
    has_integer_lists,
    is_split,
    is_table,
    shown_columns,
    shuffle_states,
    split_over_ranks,
    stages_of,
    stored_column,
)

pytestmark = pytest.mark.slow  # importing it takes seconds


def canary(behaviour, used_in="core/sources/iterable_source.py"):
    return relies_on("datasets", behaviour, f"_compat/datasets.py (`{used_in}`)")


@pytest.fixture(scope="module")
def datasets():
    return pytest.importorskip("datasets")


@pytest.fixture
def stream(datasets):
    rows = [{"n": n} for n in range(12)]
    return datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=4)


def kinds(stream):
    return [type(stage).__name__ for stage in stages_of(stream)]


@canary("a stage of datasets.iterable_dataset")
def test_every_stage_that_we_name_exists(datasets):
    missing = {
        name
        for name in SPLIT_BY_SHARDS | RESTORABLE
        if not hasattr(datasets.iterable_dataset, name)
        and not name.startswith("ShuffledDataSources")  # of older versions
    }
    assert missing <= {"InterleavedShardsExamplesIterable"}, missing  # of newer ones


@canary("IterableDataset._ex_iterable, and ex_iterable and ex_iterables of stages")
def test_a_stream_names_its_stages_and_sources(datasets, stream):
    mapped = stream.map(lambda row: row).filter(lambda row: True).take(3).skip(1)
    names = kinds(mapped)
    assert names[:2] == ["SkipExamplesIterable", "TakeExamplesIterable"], names
    assert {"FilteredExamplesIterable", "MappedExamplesIterable"} <= {*names}, names
    assert names[-1] == "ArrowExamplesIterable", names
    assert consists_of(stages_of(mapped), RESTORABLE)
    assert not consists_of(stages_of(mapped), SPLIT_BY_SHARDS)
    assert not consists_of(stages_of(object()), RESTORABLE)
    names = kinds(datasets.interleave_datasets([stream, stream.take(2)]))
    assert names[0] == "CyclingMultiSourcesExamplesIterable", names
    assert names.count("ArrowExamplesIterable") == 2, names
    assert "TakeExamplesIterable" in names, names


@canary("BufferShuffledExamplesIterable.generator")
def test_a_shuffle_has_a_generator_and_a_stage_that_cannot_be_restored(stream):
    seeded = [stages_of(stream.shuffle(seed=seed, buffer_size=4)) for seed in (1, 1, 2)]
    assert type(seeded[0][0]).__name__ == "BufferShuffledExamplesIterable"
    assert not consists_of(seeded[0], RESTORABLE)
    assert consists_of(seeded[0], SPLIT_BY_SHARDS) and consists_of(seeded[0][1:], RESTORABLE)
    first, same, different = map(shuffle_states, seeded)
    assert first and first == same != different
    assert shuffle_states(stages_of(stream)) == []


@canary("IterableDataset._distributed, or load_state_dict(None)")
def test_a_split_is_seen_and_a_state_can_be_taken_back(stream):
    assert not is_split(stream)
    assert is_split(split_over_ranks(stream, 0, 2))
    next(iter(stream))
    stream.load_state_dict(stream.state_dict())
    stream.load_state_dict(None)
    assert [row["n"] for row in stream] == list(range(12))


@canary("Dataset._indices, Dataset.data or Dataset._fingerprint", "core/sources/known_lengths.py")
def test_rows_of_a_table_are_places_in_a_column_of_arrow(datasets):
    table = datasets.Dataset.from_dict({"ids": [[1], [2, 2], [3]]})
    assert is_table(table) and not is_table(table.to_iterable_dataset())
    column, places = stored_column(table, "ids")
    assert column.to_pylist() == table["ids"][:] and places is None
    column, places = stored_column(table.select([2, 0]).select([1, 0]), "ids")
    assert [column[place].as_py() for place in places.tolist()] == [[1], [3]]
    prints = [
        fingerprint_of_table(table) for table in (table, table.select([2, 0]), table.shuffle())
    ]
    assert all(prints) and len({*prints}) == 3


@canary("Dataset.format, or require_decoding", "core/sources/known_lengths.py")
def test_the_columns_of_rows_are_known_unless_something_else_is_made_of_them(datasets):
    table = datasets.Dataset.from_dict({"ids": [[1]], "n": [1], "rows": [[[1]]]})
    formatted = {"columns": ["ids"], "output_all_columns": True}
    for name in (None, "python", "numpy", "np", "torch", "pt"):
        assert shown_columns(table.with_format(name)) == ["ids", "n", "rows"]
        assert shown_columns(table.with_format(name, columns=["n"])) == ["n"]
        assert shown_columns(table.with_format(name, **formatted)) == ["ids", "n", "rows"]
    assert shown_columns(table.with_format("torch", dtype=None)) is not None
    for name in ("arrow", "pandas"):
        assert shown_columns(table.with_format(name)) is None
    assert shown_columns(table.with_transform(dict)) is None
    assert shown_columns(table.with_format("numpy", ndmin=2)) is None
    assert [has_integer_lists(table, name) for name in table.column_names] == [True, False, False]
