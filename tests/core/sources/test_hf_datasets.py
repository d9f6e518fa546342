"""Datasets of Hugging Face: map-style, and streams that resume at every step."""

import json
import random

import pytest
from aligned_ranks import on_ranks
from refusals import refuses
from torch.utils.data import Subset

from odb_nodes import IterableSource, Loader, ODBDataLoader, StateError
from odb_nodes.core.sources.datasets import holds_no_generators
from odb_nodes.testing import assert_resumes_exactly

datasets = pytest.importorskip("datasets")
split_dataset_by_node = pytest.importorskip("datasets.distributed").split_dataset_by_node

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
    "filter by number": lambda: stream().filter(lambda row, n: n < 9, with_indices=True),
    "column by number": lambda: stream().remove_columns("id").add_column("id", [*range(24)]),
    "without a last batch": lambda: generated().map(
        lambda rows: rows, batched=True, batch_size=5, drop_last_batch=True
    ),
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
def test_every_stream_is_shared_out_and_resumes(name, sampled):
    for world_size, epoch in ((2, 0), (3, 2)):
        whole = STREAMS[name]()
        whole.set_epoch(epoch)
        nodes = [IterableSource(STREAMS[name](), rank, world_size) for rank in range(world_size)]
        for node in nodes:
            node.set_epoch(epoch)
        shares = [ids(Loader(node)) for node in nodes]
        assert all(shares)
        assert sorted(sum(shares, [])) == sorted(ids(whole))
    less = sampled(every=5, chain=1, horizon=8)
    shards = [(0, 1), (1, 2)] if name in ("arrow", "one shard", "generator") else [(1, 2)]
    for shard in shards:
        assert_resumes_exactly(lambda shard=shard: IterableSource(STREAMS[name](), *shard), **less)


@pytest.mark.parametrize(
    ("version", "restores"),
    [("3.6.0", False), ("4.8.4", False), ("5.0.1", False), ("5.1.0", True), ("6.0.0.dev0", True)],
)
def test_versions_whose_states_stand_too_far_are_read_again(version, restores, monkeypatch):
    monkeypatch.setattr(datasets, "__version__", version)
    node, restored = (IterableSource(STREAMS["map of arrow"](), 0, 1) for _ in range(2))
    node.reset(None)
    for _ in range(5):
        next(node)
    state = node.state_dict()
    assert (state["iterable"] is not None) == restores
    restored.reset(state)
    assert [*restored] == [*node]


@pytest.mark.parametrize("buffered", [False, True])
def test_shards_are_not_read_by_other_ranks_nor_again(buffered):
    """But where a buffer, whose content no state has, is filled again."""
    read = []

    def note(row):
        read.append(row["id"])
        return row

    def make(*shard):
        whole = generated().map(note)
        return IterableSource(whole.shuffle(seed=3, buffer_size=5) if buffered else whole, *shard)

    assert sorted(ids(Loader(make(1, 2)))) == sorted(read)
    assert len(read) == 12
    node, restored = make(0, 1), make(0, 1)
    node.reset(None)
    for _ in range(20):
        next(node)
    read.clear()
    restored.reset(node.state_dict())
    assert ids(restored) == ids(node)
    assert len(read) >= 24 if buffered else 4 <= len(read) < 28


def test_the_order_of_an_epoch_is_that_of_set_epoch():
    loader, whole = Loader(IterableSource(STREAMS["shuffle"](), 0, 1)), STREAMS["shuffle"]()
    epochs = [ids(loader) for _ in range(3)]
    for epoch, order in enumerate(epochs):
        whole.set_epoch(epoch)
        assert order == ids(whole)
    assert epochs[0] != epochs[1] != epochs[2]
    loader.set_epoch(1)
    assert ids(loader) == epochs[1]


def test_the_own_state_loses_what_is_in_a_shuffle_buffer():
    """Why such a stream is read again."""
    whole, resumed = (STREAMS["shuffle of a generator"]() for _ in range(2))
    iterator = iter(whole)
    seen = ids(next(iterator) for _ in range(5))
    resumed.load_state_dict(whole.state_dict())
    assert len({*seen, *ids(resumed)}) < 24


def test_an_epoch_begins_anew_after_a_state_within_it_was_loaded():
    node, restored = IterableSource(generated(), 0, 1), IterableSource(generated(), 0, 1)
    node.reset(None)
    start = node.state_dict()
    for _ in range(9):
        next(node)
    restored.reset(node.state_dict())
    assert len(list(restored)) == 15
    restored.reset(start)
    assert len(list(restored)) == 24


test_another_order_or_number_of_shards_is_refused = refuses(
    [
        (lambda: stream().shuffle(seed=1), lambda: stream().shuffle(seed=2), "`shuffle_seed` was"),
        (lambda: stream().shuffle(), lambda: stream().shuffle(seed=2), "`shuffle_seed` was"),
        (lambda: stream(4), lambda: stream(2), "`num_shards` was 4 .* is 2 now"),
    ],
    lambda saved, changed: IterableSource(changed(), 0, 1).reset(
        IterableSource(saved(), 0, 1).state_dict()
    ),
    error=StateError,
)


def test_what_is_split_already_is_not_split_again():
    split = split_dataset_by_node(stream(), rank=0, world_size=2)
    with pytest.raises(ValueError, match="was split over ranks already"):
        IterableSource(split, 0, 2)
    assert len(list(Loader(IterableSource(split, 0, 1)))) == 12
    splits = datasets.DatasetDict(train=rows(0, 9), test=rows(9, 24))
    with pytest.raises(TypeError, match=r"`DatasetDict` of \['test', 'train'\]"):
        ODBDataLoader(splits, token_budget=12)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_mixes_and_resumes_both_kinds(num_workers, sampled):
    def make(**options):
        return ODBDataLoader(
            {"map": rows(0, 12).with_format("torch"), "stream": generated()},
            token_budget=12,
            window=4,
            process_fn=lambda row: {"id": int(row["id"]), "input_ids": [1] * len(row["input_ids"])},
            **options,
        )

    with make(num_workers=num_workers) as loader:
        for _ in range(2):
            indices = sorted(int(n) for batch in loader for n in batch["id"])
            assert indices == sorted([*range(12), *range(24)])
    if not num_workers:
        assert_resumes_exactly(make, **sampled(every=5, chain=1))


def test_a_stream_that_is_read_twice_at_a_time_resumes_in_both(sampled):
    def make():
        shared = generated().select_columns(["input_ids"]).repeat(4)
        return ODBDataLoader(
            {"a": shared, "b": shared}, weights={"a": 3, "b": 1}, token_budget=12, window=2
        )

    assert_resumes_exactly(make, **sampled(every=5, chain=1))


def test_a_source_leaves_the_epoch_of_its_stream_alone():
    shared = STREAMS["shuffle"]()
    node = IterableSource(shared, 0, 1)
    node.set_epoch(3)
    assert ids(Loader(node)) != ids(shared)
    assert shared.epoch == 0


class Kept(list):
    """A map-style dataset with a state, which nobody iterates."""

    def state_dict(self):
        raise NotImplementedError

    load_state_dict = state_dict


def test_an_iterable_with_a_position_is_no_two_sources_of_a_mixture():
    kept = Loader(IterableSource(ROWS, 0, 1))
    with pytest.raises(ValueError, match="of \\['a', 'b'\\] two are the same"):
        ODBDataLoader({"a": kept, "b": kept}, token_budget=12)
    looked_up = Kept(ROWS)
    loader = ODBDataLoader({"a": looked_up, "b": looked_up}, token_budget=12)
    assert sum(len(batch["id"]) for batch in loader) == 2 * len(ROWS)


def test_ranks_with_different_orders_say_so():
    def run(exchange):
        loader = ODBDataLoader(stream(3).shuffle(), token_budget=12, process_group=exchange)
        with pytest.raises(StateError, match="shuffle_seed"):
            list(loader)

    on_ranks(2, run)


def test_files_that_are_streamed(tmp_path, sampled):
    for part in range(3):
        lines = [json.dumps(row) for row in ROWS[8 * part : 8 * part + 8]]
        (tmp_path / f"{part}.jsonl").write_text("\n".join(lines))

    def make():
        files = [str(tmp_path / f"{part}.jsonl") for part in range(3)]
        options = {"split": "train", "streaming": True, "cache_dir": str(tmp_path / "cache")}
        return IterableSource(datasets.load_dataset("json", data_files=files, **options), 0, 1)

    assert sorted(ids(Loader(make()))) == [*range(24)]
    assert_resumes_exactly(make, **sampled(every=5, chain=1))


def declared(table):
    table.draws_random_numbers = False
    return table


@pytest.mark.parametrize(
    ("change", "reads"),
    [
        (lambda table: table, True),
        (lambda table: table.select(range(3, 20)), True),
        (lambda table: table.with_format("numpy"), False),  # a null in one row makes others floats
        (lambda table: table.with_format("torch"), False),
        (lambda table: declared(table.with_format("numpy")), False),
        (lambda table: table.with_transform(lambda rows: rows), False),  # may draw
    ],
)
def test_a_table_of_plain_values_is_read_many_rows_at_once(change, reads, monkeypatch):
    calls, read = [], datasets.Dataset.__getitems__
    monkeypatch.setattr(
        datasets.Dataset,
        "__getitems__",
        lambda self, index: calls.append(index) or read(self, index),
    )
    table = change(datasets.Dataset.from_list(ROWS))
    loader = ODBDataLoader(table, token_budget=32, window=8)
    assert sum(len(batch["input_ids"]) for batch in loader) == len(table)
    assert bool(calls) is reads
    if reads:
        assert sorted(index for places in calls for index in places) == [*range(len(table))]


def test_a_table_is_looked_through_for_generators_only_if_a_transform_may_hold_one():
    table = datasets.Dataset.from_list(ROWS)
    assert holds_no_generators(table) and holds_no_generators(Subset(table, [1, 0]))
    assert not holds_no_generators(table.with_transform(lambda rows: rows))
    assert not holds_no_generators(ROWS)


def test_a_transform_that_is_set_later_draws_the_numbers_of_each_row():
    def batches(seed):
        table = datasets.Dataset.from_list(ROWS)
        loader = ODBDataLoader(table, token_budget=32, window=8)
        table.set_transform(
            lambda rows: {"input_ids": [[random.randrange(99)] for _ in rows["id"]]}
        )
        random.seed(seed)
        return [batch["input_ids"].tolist() for batch in loader]

    assert batches(0) == batches(1)
