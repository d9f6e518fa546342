"""Canaries: what we rely on inside of Hugging Face `datasets`, the stages of a stream."""

import pytest
from canary import relies_on

from odb_nodes._compat.datasets import (
    RESTORABLE,
    SPLIT_BY_SHARDS,
    consists_of,
    is_split,
    shuffle_states,
    split_over_ranks,
    stages_of,
)

pytestmark = pytest.mark.slow  # importing it takes seconds

USED_IN = "_compat/datasets.py (`sources/streams.py`)"


@pytest.fixture(scope="module")
def datasets():
    return pytest.importorskip("datasets")


@pytest.fixture
def stream(datasets):
    rows = [{"n": n} for n in range(12)]
    return datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=4)


def kinds(stream):
    return [type(stage).__name__ for stage in stages_of(stream)]


def test_every_stage_that_we_name_exists(datasets):
    with relies_on("datasets", "a stage of datasets.iterable_dataset", USED_IN):
        missing = [
            name
            for name in sorted(SPLIT_BY_SHARDS | RESTORABLE)
            if not hasattr(datasets.iterable_dataset, name)
            and not name.startswith("ShuffledDataSources")  # of older versions
            and name != "InterleavedShardsExamplesIterable"  # of newer ones
        ]
        assert not missing, missing


def test_a_stream_names_its_stages(datasets, stream):
    with relies_on("datasets", "IterableDataset._ex_iterable and ex_iterable of stages", USED_IN):
        mapped = stream.map(lambda row: row).filter(lambda row: True).take(3).skip(1)
        names = kinds(mapped)
        assert names[:2] == ["SkipExamplesIterable", "TakeExamplesIterable"], names
        assert {"FilteredExamplesIterable", "MappedExamplesIterable"} <= {*names}, names
        assert names[-1] == "ArrowExamplesIterable", names
        assert consists_of(stages_of(mapped), RESTORABLE)
        assert not consists_of(stages_of(mapped), SPLIT_BY_SHARDS)


def test_a_mixture_names_its_sources(datasets, stream):
    with relies_on("datasets", "ex_iterables of stages with several sources", USED_IN):
        mixed = datasets.interleave_datasets([stream, stream.take(2)])
        names = kinds(mixed)
        assert names[0] == "CyclingMultiSourcesExamplesIterable", names
        assert names.count("ArrowExamplesIterable") == 2, names
        assert "TakeExamplesIterable" in names, names


def test_a_shuffle_has_a_generator_and_a_stage_that_cannot_be_restored(stream):
    with relies_on("datasets", "BufferShuffledExamplesIterable.generator", USED_IN):
        seeded = [stream.shuffle(seed=seed, buffer_size=4) for seed in (1, 1, 2)]
        assert not consists_of(stages_of(seeded[0]), RESTORABLE), kinds(seeded[0])
        assert consists_of(stages_of(seeded[0]), SPLIT_BY_SHARDS), kinds(seeded[0])
        assert consists_of(stages_of(seeded[0])[1:], RESTORABLE), kinds(seeded[0])
        assert kinds(seeded[0])[0] == "BufferShuffledExamplesIterable", kinds(seeded[0])
        first, same, other = (shuffle_states(stages_of(one)) for one in seeded)
        assert first and first == same != other
        assert shuffle_states(stages_of(stream)) == []


def test_a_split_is_seen(stream):
    with relies_on("datasets", "IterableDataset._distributed", USED_IN):
        assert not is_split(stream)
        assert is_split(split_over_ranks(stream, 0, 2))


def test_a_state_can_be_taken_back(stream):
    with relies_on("datasets", "IterableDataset.load_state_dict(None)", "sources/streams.py"):
        rows = iter(stream)
        next(rows)
        stream.load_state_dict(stream.state_dict())
        stream.load_state_dict(None)
        assert [row["n"] for row in stream] == list(range(12))


def test_stages_that_are_not_known_are_neither_split_nor_restored():
    assert not consists_of(stages_of(object()), RESTORABLE)
