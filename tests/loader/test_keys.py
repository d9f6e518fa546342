"""Every sample has a key, which is in the step that it is in, or in what was left out."""

import random
from collections import Counter

import numpy as np
import pytest
import torch
from aligned_ranks import on_ranks
from torchdata.nodes import IterableWrapper, Unbatcher

from odb_nodes import (
    GroupCollator,
    ItemKey,
    IterableSource,
    JsonlSource,
    LengthObserver,
    Loader,
    Observation,
    ODBDataLoader,
    ParallelProcessor,
    PerSource,
    RankAligner,
    ShardedSampler,
    Skipped,
    SourceMixer,
    TokenBudget,
    WeightedSampler,
    WindowBucketer,
    pop_step_info,
)
from odb_nodes.contract import EpochNode, EpochState

BUDGET = TokenBudget(64, oversize="drop")
SKIPPED = [(n, "", "seventeenth") for n in range(5, 120, 17)]
DROPPED = [(n, "", "dropped") for n in (40, 41, 80)]

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(Further ones|were skipped)", "ignore:`weights` are not given", "ignore:.*not emitted"
)


def text(index):
    """A sample that knows its number; every 17th is skipped, and 3 of them exceed 64 tokens."""
    if index % 17 == 5:
        return Skipped("seventeenth")
    length = 90 if index in (40, 41, 80) else 5 + index * 7 % 23
    return {"input_ids": [index + 1] * length, "id": index}


def steps_of(loader):
    """Per step: what its `StepInfo` says of it, and the numbers that the model would see."""
    return [(pop_step_info(batch), batch["id"].tolist()) for batch in loader]


def check(steps, expected, left_out=()):
    """The keys of the steps are those of their rows; each comes once, in a step or left out."""
    for info, ids in steps:
        assert len(info.keys) == len(info.row_sources) == len(info.row_repeats)
        assert len(info.keys) == info.local_samples
        assert info.is_filler or list(info.keys) == ids
    out = [one for info, _ in steps for one in info.left_out]
    assert Counter(out) == Counter(left_out)
    keys = [key for info, _ in steps for key in info.keys] + [one.key for one in out]
    assert sorted(keys) == sorted(expected)


def collate_ids(group):
    return {"id": torch.tensor([one["id"] for one in group])}


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_of_a_map_style_dataset_they_are_the_indices(layout):
    budget = TokenBudget(64, oversize="drop", layout=layout)
    options = {"window": 8, "process_fn": text, "collate_fn": collate_ids}
    loader = ODBDataLoader(range(120), token_budget=budget, **options)
    epochs = [steps_of(loader) for _ in range(2)]
    for steps in epochs:
        check(steps, range(120), SKIPPED + DROPPED)
    assert [info.keys for info, _ in epochs[0]] != [info.keys for info, _ in epochs[1]]


def test_of_json_lines_they_are_file_and_offset(tmp_path):
    lines = {}
    for file in range(2):
        path, offset = tmp_path / f"{file}.jsonl", 0
        with path.open("w") as out:
            for n in range(30):
                lines[100 * file + n] = (file << 40) + offset
                record = f'{{"input_ids": {[1] * (n % 9 + 1)}, "id": {100 * file + n}}}'
                offset += out.write(record + ("\n\n" if n % 5 == 0 else "\n"))
    for info, ids in steps_of(ODBDataLoader(JsonlSource(tmp_path), token_budget=32, window=8)):
        assert list(info.keys) == [lines[one] for one in ids]


class Again:
    def __iter__(self):
        return iter(DATA)


DATA = [{"input_ids": [1] * (n % 9 + 1), "id": n} for n in range(50)]
ORDER = [49, 3, 3, 17]


@pytest.mark.parametrize(
    ("dataset", "options", "expected"),
    [
        (Again(), {}, range(50)),
        (DATA, {"sampler": ORDER}, ORDER),
        (DATA, {"sampler": WeightedSampler([1.0] * 50, 200)}, [*WeightedSampler([1.0] * 50, 200)]),
    ],
    ids=["iterable", "sampler", "weighted"],
)
def test_of_an_iterable_they_are_numbers_and_of_a_sampler_indices(dataset, options, expected):
    check(steps_of(ODBDataLoader(dataset, token_budget=32, window=8, **options)), expected)


def test_an_observation_may_give_a_key_of_its_own():
    def observe(sample):
        return Observation(len(sample["input_ids"]), key=7 * sample["id"])

    for info, ids in steps_of(ODBDataLoader(DATA, token_budget=32, window=8, observe=observe)):
        assert list(info.keys) == [7 * one for one in ids]


class Pages(EpochNode):
    """A source of a user's own, whose keys are page numbers."""

    def begin_epoch(self):
        self.page = 0

    def restore(self, state):
        self.page = 0

    def save(self):
        return EpochState()

    def next(self):
        if self.page == 9:
            raise StopIteration
        self.page += 1
        return {"input_ids": [1] * self.page, "id": 100 + self.page}

    def item_key(self):
        return ItemKey("", 100 + self.page, world_size=1)


@pytest.mark.parametrize("mixed", [False, True])
def test_a_node_of_ones_own_may_tell_them(mixed):
    node = SourceMixer({"book": Pages()}) if mixed else Pages()
    steps = steps_of(Loader(GroupCollator(WindowBucketer(LengthObserver(node), 64, 4))))
    check(steps, range(101, 110))
    assert {*steps[0][0].row_sources} == ({"book"} if mixed else {""})


def test_where_nobody_knows_there_is_none():
    plain = IterableWrapper([{"input_ids": [1, 2], "id": n} for n in range(9)])
    many = Unbatcher(
        ParallelProcessor(ShardedSampler(3), lambda n: [{"input_ids": [n], "id": n}] * 2)
    )
    for node in (plain, many):
        for info, _ in steps_of(Loader(GroupCollator(WindowBucketer(LengthObserver(node), 8, 4)))):
            assert set(info.keys) == {None}


# --- on ranks -------------------------------------------------------------------------------------


def graph_of(exchange, source, process_fn=text, **options):
    shard = {"rank": exchange.rank, "world_size": exchange.world_size}
    node = LengthObserver(ParallelProcessor(source, process_fn, **shard))
    aligner = RankAligner(WindowBucketer(node, BUDGET, 8), exchange, timeout_s=20.0, **options)
    return Loader(GroupCollator(aligner))


def sharded(exchange, size, seed=0):
    return ShardedSampler(size, seed=seed, rank=exchange.rank, world_size=exchange.world_size)


@pytest.mark.parametrize("is_own", [True, False])
def test_where_each_rank_has_data_of_its_own_the_step_says_so(is_own):
    def run(exchange):
        sampler = ShardedSampler(60) if is_own else sharded(exchange, 60)
        mixer = SourceMixer({"a": sampler, "b": sharded(exchange, 60)})
        return steps_of(graph_of(exchange, mixer, PerSource({"a": text, "b": text})))

    for steps in on_ranks(2, run):
        assert {source for info, _ in steps for source in info.row_sources} == {"a", "b"}
        for info, _ in steps:
            assert info.own_sources == ({*info.row_sources} & {"a"} if is_own else set())


@pytest.mark.parametrize("uneven", ["stop", "fill"])
def test_where_ranks_have_unequal_data_the_last_step_is_known_and_fillers_have_no_keys(uneven):
    def run(exchange):
        source = ShardedSampler((3, 60)[exchange.rank], rank=0, world_size=1)
        return steps_of(graph_of(exchange, source, uneven=uneven, round_size=4))

    few, many = on_ranks(2, run)
    for steps in (few, many):
        ends = [info.ends_epoch for info, _ in steps]
        assert ends == [False] * (len(steps) - 1) + [True]
    if uneven == "fill":
        fillers = [info for info, _ in few if info.is_filler]
        assert len(fillers) > 3
        assert all(info.keys == info.row_sources == () for info in fillers)
        check(few, range(3))
        check(many, range(60), [one for one in SKIPPED + DROPPED if one[0] < 60])


# --- random numbers -------------------------------------------------------------------------------


def augmented(index):
    drawn = [random.random(), np.random.random(), torch.rand(()).item()]
    return {"input_ids": [1] * (1 + int(drawn[0] * 9)), "id": index, "drawn": torch.tensor(drawn)}


def test_a_sample_that_comes_twice_in_an_epoch_is_drawn_anew():
    node = ParallelProcessor(IterableSource([3, 3, 3], yields_indices=True), augmented)
    assert len({tuple(one["drawn"].tolist()) for one in Loader(node)}) == 3
    mixer = SourceMixer({"a": ShardedSampler(2), "b": ShardedSampler(40)}, stop="cycle")
    everything = [*Loader(ParallelProcessor(mixer, lambda routed: (routed, random.random())))]
    of_a = [number for routed, number in everything if routed.source == "a"]
    assert len(of_a) == len({*of_a}) > 10
    assert len({number for _, number in everything}) == len(everything)  # nor are they shared
