"""Datasets of Hugging Face: map-style, and streams that resume at every step."""

import json
import subprocess
import sys

import pytest
from rank_jobs import run_ranks

from odb_nodes import IterableSource, Loader, ODBDataLoader, StateError
from odb_nodes.testing import assert_resumes_exactly

datasets = pytest.importorskip("datasets")
split_dataset_by_node = pytest.importorskip("datasets.distributed").split_dataset_by_node

WARM = ("datasets", "odb_nodes")
ROWS = [{"id": n, "input_ids": [n] * (n % 5 + 1)} for n in range(24)]


def rows(first, last):
    return datasets.Dataset.from_list(ROWS[first:last])


def stream(shards=4):
    return datasets.Dataset.from_list(ROWS).to_iterable_dataset(num_shards=shards)


def generate(parts):
    for first in parts:
        yield from ROWS[first : first + 6]


def generated():
    return datasets.IterableDataset.from_generator(generate, gen_kwargs={"parts": [0, 6, 12, 18]})


def double(batch):
    return {"id": [n for n in batch["id"] for _ in range(2)]}


def interleaved(**options):
    parts = [rows(0, 9).to_iterable_dataset(), rows(9, 24).to_iterable_dataset(num_shards=3)]
    return datasets.interleave_datasets(parts, stopping_strategy="all_exhausted", **options)


def below_the_buffer():
    """The stages that a shuffle adds, without the buffer, which cannot be restored."""
    shuffled = stream().shuffle(seed=5, buffer_size=7)
    return datasets.IterableDataset(ex_iterable=shuffled._ex_iterable.ex_iterable)


STREAMS = {
    "arrow": stream,
    "one shard": lambda: stream(1),
    "generator": generated,
    "torch format": lambda: stream().with_format("torch"),
    "numpy format": lambda: generated().with_format("numpy"),
    "map": lambda: generated().map(lambda row: {"twice": 2 * row["id"]}),
    "map of batches": lambda: generated().map(
        double, batched=True, batch_size=5, remove_columns=["input_ids"]
    ),
    "map of arrow": lambda: stream().map(lambda row: {"twice": 2 * row["id"]}),
    "filter": lambda: stream().filter(lambda row: row["id"] % 3),
    "columns": lambda: stream().select_columns(["id"]),
    "take and skip": lambda: stream().skip(3).take(15),
    "repeat": lambda: generated().take(7).repeat(2),
    "interleave": interleaved,
    "interleave at random": lambda: interleaved(probabilities=[0.4, 0.6], seed=3),
    "concatenate": lambda: datasets.concatenate_datasets(
        [rows(0, 9).to_iterable_dataset(), rows(9, 24).to_iterable_dataset()]
    ),
    "shuffled shards": below_the_buffer,
    "shuffle": lambda: stream().shuffle(seed=5, buffer_size=7),
    "shuffle of a generator": lambda: generated().shuffle(seed=5, buffer_size=7),
    "shuffle, then map": lambda: generated().shuffle(seed=5, buffer_size=4).map(lambda row: row),
}


def ids(items):
    return [int(row["id"]) for row in items]


@pytest.mark.parametrize("name", STREAMS)
def test_every_step_resumes(name, sampled):
    less = sampled(every=3, chain=1, horizon=12)
    assert_resumes_exactly(lambda: IterableSource(STREAMS[name](), 0, 1), **less)


@pytest.mark.parametrize(
    ("version", "restores"),
    [("3.6.0", False), ("4.8.4", False), ("5.0.1", False), ("5.1.0", True), ("6.0.0.dev0", True)],
)
def test_versions_whose_states_stand_too_far_are_read_again(version, restores, monkeypatch):
    monkeypatch.setattr(datasets, "__version__", version)

    def make():
        return IterableSource(STREAMS["map of arrow"](), 0, 1)

    node = make()
    node.reset(None)
    rest = [*node][5:]
    node.set_epoch(0)
    node.reset(None)
    for _ in range(5):
        next(node)
    state = node.state_dict()
    assert (state["iterable"] is not None) == restores
    again = make()
    again.reset(state)
    assert [*again] == rest


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", STREAMS)
def test_ranks_share_the_samples_out(name, world_size):
    for epoch in (0, 2):
        whole = STREAMS[name]()
        whole.set_epoch(epoch)
        nodes = [IterableSource(STREAMS[name](), rank, world_size) for rank in range(world_size)]
        shares = []
        for node in nodes:
            node.set_epoch(epoch)
            shares.append(ids(Loader(node)))
        assert sorted(sum(shares, [])) == sorted(ids(whole))
        assert all(shares)


@pytest.mark.parametrize("name", ["arrow", "take and skip", "shuffle"])
def test_a_share_resumes(name, sampled):
    less = sampled(every=2, chain=1, horizon=12)
    assert_resumes_exactly(lambda: IterableSource(STREAMS[name](), 1, 2), **less)


@pytest.mark.parametrize("shuffled", [False, True])
def test_shards_are_not_read_by_other_ranks(shuffled):
    read = []

    def note(row):
        read.append(row["id"])
        return row

    whole = generated().map(note)
    node = IterableSource(whole.shuffle(seed=3, buffer_size=5) if shuffled else whole, 1, 2)
    got = ids(Loader(node))
    assert sorted(got) == sorted(read)
    assert shuffled or got == read
    assert len(read) == 12


@pytest.mark.parametrize(("buffered", "expected"), [(False, 4), (True, 24)])
def test_what_a_resume_reads(buffered, expected):
    read = []

    def note(row):
        read.append(row["id"])
        return row

    def make():
        found = generated().map(note)
        return IterableSource(found.shuffle(seed=1, buffer_size=3) if buffered else found, 0, 1)

    node = make()
    node.reset(None)
    for _ in range(20):
        next(node)
    read.clear()
    resumed = make()
    resumed.reset(node.state_dict())
    assert ids(resumed) == ids(node)
    assert len(read) >= expected
    assert buffered or len(read) < 24 + 4


def test_the_order_of_an_epoch_is_that_of_set_epoch():
    loader, whole = Loader(IterableSource(STREAMS["shuffle"](), 0, 1)), STREAMS["shuffle"]()
    epochs = [ids(loader) for _ in range(3)]
    for epoch, got in enumerate(epochs):
        whole.set_epoch(epoch)
        assert got == ids(whole)
    assert epochs[0] != epochs[1] != epochs[2]
    loader.set_epoch(1)
    assert ids(loader) == epochs[1]


def test_the_own_state_loses_what_is_in_a_shuffle_buffer():
    """Why such a stream is read again."""
    whole = STREAMS["shuffle of a generator"]()
    iterator = iter(whole)
    seen = ids(next(iterator) for _ in range(5))
    resumed = STREAMS["shuffle of a generator"]()
    resumed.load_state_dict(whole.state_dict())
    assert len({*seen, *ids(resumed)}) < 24


def test_an_epoch_begins_anew_after_a_state_within_it_was_loaded():
    node = IterableSource(generated(), 0, 1)
    node.reset(None)
    start = node.state_dict()
    for _ in range(9):
        next(node)
    again = IterableSource(generated(), 0, 1)
    again.reset(node.state_dict())
    assert len(list(again)) == 15
    again.reset(start)
    assert len(list(again)) == 24


def test_another_order_or_number_of_shards_is_refused():
    states = [IterableSource(stream().shuffle(seed=s), 0, 1).state_dict() for s in (1, None)]
    for state in states:
        with pytest.raises(StateError, match="`shuffle_seed` was"):
            IterableSource(stream().shuffle(seed=2), 0, 1).reset(state)
    with pytest.raises(StateError, match="`num_shards` was 4 when saved, but is 2 now"):
        IterableSource(stream(2), 0, 1).reset(IterableSource(stream(4), 0, 1).state_dict())


def test_what_is_split_already_is_not_split_again():
    split = split_dataset_by_node(stream(), rank=0, world_size=2)
    with pytest.raises(ValueError, match="was split over ranks already"):
        IterableSource(split, 0, 2)
    assert len(list(Loader(IterableSource(split, 0, 1)))) == 12


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", [stream, lambda: rows(0, 24)])
def test_a_loader_over_it(kind, num_workers):
    with ODBDataLoader(kind(), token_budget=12, window=6, num_workers=num_workers) as loader:
        for _ in range(2):
            assert sorted(int(n) for batch in loader for n in batch["id"]) == [*range(24)]


def test_a_loader_over_it_resumes(sampled):
    def make():
        return ODBDataLoader(
            {"map": rows(0, 12).with_format("torch"), "stream": generated()},
            token_budget=12,
            window=4,
            process_fn=lambda row: {"id": int(row["id"]), "input_ids": [1] * len(row["input_ids"])},
        )

    assert_resumes_exactly(make, **sampled(every=3, chain=1))


def test_the_splits_of_a_dataset_are_not_taken_for_a_mixture():
    splits = datasets.DatasetDict(train=rows(0, 9), test=rows(9, 24))
    with pytest.raises(TypeError, match=r"a `DatasetDict` of \['test', 'train'\]\. Pass one"):
        ODBDataLoader(splits, token_budget=12)


def test_importing_the_library_does_not_import_it():
    code = "import sys; from odb_nodes import *; assert 'datasets' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_two_ranks(tmp_path):
    body = """
    import datasets
    rows = [{"id": n, "input_ids": [n] * (n % 5 + 1)} for n in range(40)]
    shards, found = json.loads(sys.argv[1]), []
    for number in shards:
        def make():
            data = datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=number)
            data = data.shuffle(seed=1, buffer_size=5)
            return ODBDataLoader(data, token_budget=12, window=4, round_size=4, timeout_s=60.0)
        loader, states, expected = make(), [], []
        for batch in loader:
            expected.append(r.describe(batch))
            states.append(loader.state_dict())
        for step in range(0, len(states), 4):
            resumed = make()
            resumed.load_state_dict(states[step])
            assert [r.describe(batch) for batch in resumed] == expected[step + 1:]
        found.append(sorted(sum(r.gathered(r.real_ids(expected)), [])))
    r.finish(found)
    """
    for found in run_ranks(tmp_path, body, 2, json.dumps([4, 3]), warm=WARM):
        assert found == [[*range(40)]] * 2


def test_ranks_with_different_orders_say_so(tmp_path):
    body = """
    import datasets
    rows = [{"input_ids": [n] * (n % 5 + 1)} for n in range(40)]
    data = datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=3).shuffle()
    try:
        list(ODBDataLoader(data, token_budget=12, window=4, timeout_s=60.0))
    except StateError as error:
        r.finish(str(error))
    """
    for error in run_ranks(tmp_path, body, 2, warm=WARM):
        assert "shuffle_seed" in error


def test_files_that_are_streamed(tmp_path, sampled):
    for part in range(3):
        lines = [json.dumps(row) for row in ROWS[8 * part : 8 * part + 8]]
        (tmp_path / f"{part}.jsonl").write_text("\n".join(lines))

    def make():
        files = [str(tmp_path / f"{part}.jsonl") for part in range(3)]
        options = {"split": "train", "streaming": True, "cache_dir": str(tmp_path / "cache")}
        return IterableSource(datasets.load_dataset("json", data_files=files, **options), 0, 1)

    assert sorted(ids(Loader(make()))) == [*range(24)]
    assert_resumes_exactly(make, **sampled(every=3, chain=1))
