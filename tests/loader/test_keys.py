"""Every sample has a key, which is in the step that it is in, or in what was left out."""

import json
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from aligned_ranks import on_ranks
from rank_jobs import run_ranks
from torchdata.nodes import IterableWrapper, Unbatcher

from odb_nodes import (
    GroupCollator,
    ItemKey,
    IterableSource,
    JsonlSource,
    LengthObserver,
    Loader,
    Mixing,
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
    WorkerOptions,
    pop_step_info,
)
from odb_nodes.contract import EpochNode, EpochState
from odb_nodes.testing import assert_resumes_exactly

LENGTHS = [5 + n * 7 % 23 for n in range(120)]


def text(index):
    """A sample that knows its number; every 17th is skipped, and 3 of them exceed 64 tokens."""
    if index % 17 == 5:
        return Skipped("seventeenth")
    length = 90 if index in (40, 41, 80) else LENGTHS[index]
    return {"input_ids": [index + 1] * length, "id": index}


def steps_of(loader):
    """Per step: what its `StepInfo` says of it, and the numbers that the model would see."""
    found = []
    for batch in loader:
        info = pop_step_info(batch)
        found.append((info, batch["id"].tolist()))
    return found


def check(steps, expected, left_out=()):
    """The keys of the steps are those of their rows; each comes once, in a step or left out."""
    for info, ids in steps:
        assert len(info.keys) == len(info.row_sources) == info.local_samples
        assert len(info.row_repeats) == info.local_samples
        if not info.is_filler:
            assert list(info.keys) == ids
    out = [one for info, _ in steps for one in info.left_out]
    assert Counter(out) == Counter(left_out)
    keys = [key for info, _ in steps for key in info.keys] + [one.key for one in out]
    assert sorted(keys) == sorted(expected)


BUDGET = TokenBudget(64, oversize="drop")
SKIPPED = [(n, "", "seventeenth") for n in range(5, 120, 17)]
DROPPED = [(n, "", "dropped") for n in (40, 41, 80)]


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_of_a_map_style_dataset_they_are_the_indices(layout, num_workers):
    budget = TokenBudget(64, oversize="drop", layout=layout)
    options = {"window": 8, "num_workers": num_workers, "process_fn": text}
    if layout == "packed":
        options["collate_fn"] = lambda group: {"id": torch.tensor([one["id"] for one in group])}
    with ODBDataLoader(range(120), token_budget=budget, **options) as loader:
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
                record = json.dumps({"input_ids": [1] * (n % 9 + 1), "id": 100 * file + n})
                lines[100 * file + n] = (file << 40) + offset
                offset += out.write(record + ("\n\n" if n % 5 == 0 else "\n"))
    for _ in range(2):
        for info, ids in steps_of(ODBDataLoader(JsonlSource(tmp_path), token_budget=32, window=8)):
            assert list(info.keys) == [lines[one] for one in ids]


def test_of_an_iterable_they_are_the_numbers_in_the_epoch():
    data = [{"input_ids": [1] * (n % 9 + 1), "id": n} for n in range(50)]
    loader = ODBDataLoader(Again(data), token_budget=32, window=8)
    for _ in range(2):
        check(steps_of(loader), range(50))


class Again:
    def __init__(self, items):
        self._items = items

    def __iter__(self):
        return iter(self._items)


def test_of_a_sampler_they_are_the_indices_that_it_yields():
    data = [{"input_ids": [1] * (n % 9 + 1), "id": n} for n in range(50)]
    order = [49, 3, 3, 17]
    check(steps_of(ODBDataLoader(data, token_budget=32, window=8, sampler=order)), order)
    drawn = WeightedSampler([1.0] * 50, 200)
    steps = steps_of(ODBDataLoader(data, token_budget=32, window=8, sampler=drawn))
    check(steps, WeightedSampler([1.0] * 50, 200))


@pytest.mark.parametrize("by", ["samples", "tokens"])
def test_of_a_mixture_each_source_has_its_own(by):
    data = {"a": range(120), "b": range(60)}
    loader = ODBDataLoader(
        data,
        token_budget=BUDGET,
        window=8,
        process_fn=text,
        weights=Mixing(weights={"a": 2, "b": 1}, by=by),
    )
    with pytest.warns(UserWarning):
        steps = steps_of(loader)
    rows = [row for info, _ in steps for row in zip(info.row_sources, info.keys, strict=True)]
    out = [(one.source, one.key) for info, _ in steps for one in info.left_out]
    expected = [(name, key) for name in data for key in data[name]]
    assert sorted(rows + out) == expected
    assert {one.source for info, _ in steps for one in info.left_out} == {"a", "b"}
    for info, ids in steps:
        assert list(info.keys) == ids


def test_an_observation_may_give_a_key_of_its_own():
    def observe(sample):
        return Observation(len(sample["input_ids"]), key=7 * sample["id"])

    data = [{"input_ids": [1] * (n % 9 + 1), "id": n} for n in range(50)]
    for info, ids in steps_of(ODBDataLoader(data, token_budget=32, window=8, observe=observe)):
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


@pytest.mark.parametrize("state", ["replay", "payload"])
def test_keys_and_what_was_left_out_are_the_same_after_a_resume(state):
    def make():
        node = ParallelProcessor(ShardedSampler(40), text)
        return GroupCollator(WindowBucketer(LengthObserver(node), BUDGET, 8, state))

    assert_resumes_exactly(make)


# --- on ranks -------------------------------------------------------------------------------------


def graph_of(exchange, process_fn=text, size=120, seed=0, **options):
    shard = {"rank": exchange.rank, "world_size": exchange.world_size}
    node = ParallelProcessor(ShardedSampler(size, seed=seed, **shard), process_fn, **shard)
    bucketer = WindowBucketer(LengthObserver(node), BUDGET, 8)
    return GroupCollator(RankAligner(bucketer, exchange, timeout_s=20.0, **options))


@pytest.mark.parametrize("is_own", [True, False])
def test_where_each_rank_has_data_of_its_own_the_step_says_so(is_own):
    def run(exchange):
        shard = {"rank": exchange.rank, "world_size": exchange.world_size}
        sampler = (
            ShardedSampler(60, rank=0, world_size=1) if is_own else ShardedSampler(60, **shard)
        )
        mixer = SourceMixer({"a": sampler, "b": ShardedSampler(60, **shard)})
        make = PerSource({"a": text, "b": text})
        node = LengthObserver(ParallelProcessor(mixer, make, **shard))
        loader = Loader(GroupCollator(RankAligner(WindowBucketer(node, BUDGET, 8), exchange)))
        return [info for info, _ in steps_of(loader)]

    for steps in on_ranks(2, run):
        assert any("b" in info.row_sources for info in steps)
        assert any("a" in info.row_sources for info in steps)
        for info in steps:
            assert info.own_sources == ({*info.row_sources} & {"a"} if is_own else set())


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("size", [120, 7])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_over_ranks_each_comes_once(world_size, size, accumulate):
    def run(exchange):
        loader = Loader(graph_of(exchange, size=size, accumulate=accumulate, round_size=4))
        return [steps_of(loader) for _ in range(2)]

    ranks = on_ranks(world_size, run)
    left_out = [one for one in SKIPPED + DROPPED if one[0] < size]
    for epoch in range(2):
        check([step for rank in ranks for step in rank[epoch]], range(size), left_out)
        for rank in ranks:
            infos = [info for info, _ in rank[epoch]]
            assert {info.epoch for info in infos} == {epoch}
            assert [info.ends_epoch for info in infos] == [False] * (len(infos) - 1) + [True]


@pytest.mark.parametrize("uneven", ["join", "stop"])
def test_the_last_step_of_an_epoch_is_known_where_ranks_end_apart(uneven):
    def run(exchange):
        sampler = ShardedSampler((25, 60)[exchange.rank], rank=0, world_size=1)
        node = ParallelProcessor(sampler, text, rank=exchange.rank, world_size=2)
        options = {"uneven": uneven, "round_size": 4}
        node = RankAligner(WindowBucketer(LengthObserver(node), BUDGET, 8), exchange, **options)
        return [info for info, _ in steps_of(Loader(GroupCollator(node)))]

    for infos in on_ranks(2, run):
        assert [info.ends_epoch for info in infos] == [False] * (len(infos) - 1) + [True]


def test_what_comes_again_in_an_epoch_is_told_from_itself():
    mixing = Mixing(stop="cycle")
    data = {"a": range(100), "b": range(7)}
    loader = ODBDataLoader(data, token_budget=BUDGET, window=8, process_fn=text, weights=mixing)
    with pytest.warns(UserWarning):
        infos = [info for info, _ in steps_of(loader)]
    facts = [(info.row_sources, info.keys, info.row_repeats) for info in infos]
    rows = [row for fact in facts for row in zip(*fact, strict=True)]
    assert len(rows) == len({*rows}) > len({row[:2] for row in rows})
    assert {repeat for source, _, repeat in rows if source == "a"} == {0}


def test_on_ranks_too_they_are_the_same_after_a_resume():
    def run(exchange):
        loader, states, steps = Loader(graph_of(exchange, round_size=8)), [], []
        for batch in loader:
            steps.append(pop_step_info(batch))
            states.append(loader.state_dict())
        return states, steps

    def resume(exchange):
        loader = Loader(graph_of(exchange, round_size=8))
        loader.load_state_dict(ranks[exchange.rank][0][at])
        return [pop_step_info(batch) for batch in loader]

    ranks = on_ranks(2, run)
    for at in range(len(ranks[0][0]) - 1):
        for (_, steps), rest in zip(ranks, on_ranks(2, resume), strict=True):
            assert rest == steps[at + 1 :]


def test_on_ranks_a_resumed_run_may_be_resumed_again_to_its_very_end():
    def from_state(states):
        def run(exchange):
            loader, found = Loader(graph_of(exchange, size=97, round_size=4)), []
            loader.load_state_dict(states[exchange.rank])
            for batch in loader:
                found.append((loader.state_dict(), pop_step_info(batch)))
            return found

        return on_ranks(2, run)

    begin = on_ranks(2, lambda ex: Loader(graph_of(ex, size=97, round_size=4)).state_dict())
    whole = from_state(begin)
    for at in range(0, len(whole[0]) - 1, 4):
        resumed = from_state([steps[at][0] for steps in whole])
        for then in (2, len(resumed[0]) // 2, len(resumed[0])):
            again = from_state([steps[then - 1][0] for steps in resumed])
            for steps, rest in zip(whole, again, strict=True):
                infos = [info for _, info in steps[at + 1 + then :]]
                assert [info for _, info in rest] == infos


def test_a_step_that_fills_has_no_keys():
    def run(exchange):
        sampler = ShardedSampler((3, 60)[exchange.rank], rank=0, world_size=1)
        node = ParallelProcessor(sampler, text, rank=exchange.rank, world_size=2)
        node = RankAligner(WindowBucketer(LengthObserver(node), BUDGET, 8), exchange)
        return steps_of(Loader(GroupCollator(node)))

    few, many = on_ranks(2, run)
    fillers = [info for info, _ in few if info.is_filler]
    assert len(fillers) > 3
    assert all(info.keys == info.row_sources == () for info in fillers)
    check(few, range(3))
    check(many, range(60), [one for one in SKIPPED + DROPPED if one[0] < 60])


# --- random numbers -------------------------------------------------------------------------------


def augmented(index):
    drawn = [random.random(), np.random.random(), torch.rand(()).item()]
    return {"input_ids": [1] * (1 + int(drawn[0] * 9)), "id": index, "drawn": torch.tensor(drawn)}


def drawn_by_sample(exchange, epochs=2):
    loader = Loader(graph_of(exchange, augmented, size=50, seed=exchange.world_size))
    found = {}
    for epoch in range(epochs):
        for batch in loader:
            if not pop_step_info(batch).is_filler:
                drawn = [one.tolist() for one in batch["drawn"]]
                found.update(zip([(epoch, n) for n in batch["id"].tolist()], drawn, strict=True))
    return found


def test_an_augmented_sample_is_the_same_on_any_rank_of_any_number_and_in_any_order():
    (alone,) = on_ranks(1, drawn_by_sample)
    assert len({tuple(one) for one in alone.values()}) == 100  # other numbers in another epoch
    for world_size in (2, 3, 4):
        of_ranks = {}
        for found in on_ranks(world_size, drawn_by_sample):
            of_ranks |= found
        assert of_ranks == alone


def test_ranks_with_data_of_their_own_draw_numbers_of_their_own():
    def run(rank):
        sampler = ShardedSampler(20, rank=0, world_size=1)
        node = ParallelProcessor(sampler, augmented, rank=rank, world_size=2)
        return {one["id"]: one["drawn"].tolist() for one in Loader(node)}

    first, second = run(0), run(1)
    assert first.keys() == second.keys()
    assert all(first[n] != second[n] for n in first)


def test_a_sample_that_comes_twice_in_an_epoch_is_drawn_anew():
    node = ParallelProcessor(IterableSource([3, 3, 3], yields_indices=True), augmented)
    assert len({tuple(one["drawn"].tolist()) for one in Loader(node)}) == 3
    mixer = SourceMixer({"a": ShardedSampler(2), "b": ShardedSampler(40)}, stop="cycle")
    node = ParallelProcessor(mixer, lambda routed: (routed, random.random()))
    of_a = [drawn for routed, drawn in Loader(node) if routed.source == "a"]
    assert len(of_a) == len({*of_a}) > 10
    everything = [drawn for _, drawn in Loader(node)]
    assert len({*everything}) == len(everything) > 70  # nor do sources share them


@pytest.mark.parametrize("method", ["process", "thread"])
def test_who_processes_makes_no_difference(method):
    workers = WorkerOptions(num_workers=2, chunk_size=3, method=method)
    alone = {
        n["id"]: n["drawn"].tolist()
        for n in Loader(ParallelProcessor(ShardedSampler(30), augmented))
    }
    node = ParallelProcessor(ShardedSampler(30, shuffle=False), augmented, workers=workers)
    assert {n["id"]: n["drawn"].tolist() for n in Loader(node)} == alone
    node.close()


@pytest.mark.parametrize("world_size", [2, 4])
def test_over_real_ranks_with_workers_each_comes_once(tmp_path, world_size):
    body = """
        sys.path.append(sys.argv[1])
        from test_keys import BUDGET, text
        import warnings
        warnings.simplefilter("ignore")
        data = {"a": range(120), "b": range(40)}
        options = {"process_fn": text, "window": 8, "num_workers": 2, "accumulate": 2}
        with ODBDataLoader(data, token_budget=BUDGET, round_size=4, **options) as loader:
            for epoch in range(2):
                seen = []
                for batch in loader:
                    info = pop_step_info(batch)
                    if not info.is_filler:
                        assert list(info.keys) == batch["id"].tolist()
                    seen += zip(info.row_sources, info.keys)
                    seen += [(one.source, one.key) for one in info.left_out]
                everywhere = sorted(pair for rank in r.gathered(seen) for pair in rank)
                assert everywhere == [(name, key) for name in data for key in data[name]]
        r.finish(len(seen))
    """
    assert sum(run_ranks(tmp_path, body, world_size, Path(__file__).parent)) == 160
