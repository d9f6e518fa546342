"""Groups that are cut to the same costs on all ranks, through resumes; and where they are not."""

import random

import pytest
from aligned_ranks import TIMEOUT_S, on_ranks
from torchdata.nodes import IterableWrapper

from odb_nodes import (
    LengthObserver,
    Loader,
    ParallelProcessor,
    RankAligner,
    ShardedSampler,
    WindowBucketer,
)
from odb_nodes.nodes.read_ahead import ReadAhead

SAMPLES = 500


def sample(index):
    return {"input_ids": [1] * random.Random(index).randint(1, 60), "id": index}


def loader_of(exchange, kind="keys", reads_ahead=False, **options):
    ids = range(SAMPLES * exchange.rank, SAMPLES * (exchange.rank + 1))
    if kind == "keys":
        source = ParallelProcessor(
            ShardedSampler(SAMPLES, rank=0, world_size=1), lambda at: sample(ids[at])
        )
    else:
        source = IterableWrapper([sample(index) for index in ids])
    groups = WindowBucketer(LengthObserver(source), 100, 64)
    if reads_ahead:
        groups = ReadAhead(groups, 4)
    options = {"round_size": 8, "timeout_s": TIMEOUT_S, **options}
    return Loader(RankAligner(groups, exchange, **options))


def described(item):
    return item.info.step, item.info.is_filler, [one.data["id"] for one in item.samples]


def has_caps(state):
    """Whether the state of a graph has caps: a node leaves them out where it has none."""
    return isinstance(state, dict) and ("caps" in state or any(map(has_caps, state.values())))


def epoch(ranks, **options):
    """Of each rank: its steps, and the states before and after them."""

    def run(exchange):
        loader = loader_of(exchange, **options)
        steps, states = [], [loader.state_dict()]
        for item in loader:
            steps.append(described(item))
            states.append(loader.state_dict())
        return steps, states

    return on_ranks(ranks, run)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("kind", ["keys", "iterable"])
@pytest.mark.parametrize(
    "options", [{}, {"accumulate": 3}, {"uneven": "join"}], ids=["", "accumulate", "join"]
)
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_step_resumes_with_the_same_groups(ranks, kind, options, sampled):
    whole = epoch(ranks, kind=kind, **options)
    assert all(any(map(has_caps, states)) for _, states in whole)
    least = min(len(steps) for steps, _ in whole)  # None has left its peers.
    for place in range(0, least, sampled(every=31).get("every", 1)):

        def run(exchange, place=place):
            steps, states = whole[exchange.rank]
            loader = loader_of(exchange, kind, **options)
            loader.load_state_dict(states[place])
            same = loader.state_dict() == states[place]
            return same, [*map(described, loader)] == steps[place:]

        assert on_ranks(ranks, run) == [(True, True)] * ranks


def test_there_are_none_of_one_rank_nor_of_other_costs_nor_where_a_node_reads_ahead():
    for ranks, options in ((1, {}), (2, {"cost_fn": len}), (2, {"reads_ahead": True})):
        assert not any(has_caps(state) for _, states in epoch(ranks, **options) for state in states)


@pytest.mark.parametrize("seed", [1, 7, 31])
def test_a_rank_that_has_drained_in_a_short_round_fills_with_the_same_sample_again(seed):
    sizes = [118, 260, 260]

    def length(rank, index):
        rng = random.Random(1000 * rank + index + 10**6 * (seed if rank == 0 else 0))
        return 3 * rng.randint(3, 9) if rank == 0 else 5 * rng.randint(1, 12)

    def make(exchange):
        rank = exchange.rank
        samples = [
            {"input_ids": [1] * length(rank, index), "id": (rank, index)}
            for index in range(sizes[rank])
        ]
        groups = WindowBucketer(LengthObserver(IterableWrapper(samples)), 100, 40)
        return Loader(RankAligner(groups, exchange, timeout_s=TIMEOUT_S))

    def run(exchange):
        loader = make(exchange)
        found = [(described(item), loader.state_dict()) for item in loader]
        return [step for step, _ in found], [state for _, state in found]

    whole = on_ranks(3, run)
    place = len(whole[0][0]) - 3
    assert whole[0][0][place][1]  # rank 0 fills there

    def resumed(exchange):
        loader = make(exchange)
        loader.load_state_dict(whole[exchange.rank][1][place - 1])
        return [*map(described, loader)]

    assert on_ranks(3, resumed) == [steps[place:] for steps, _ in whole]
