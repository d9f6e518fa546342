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
from odb_nodes.contract.graph import walk

SAMPLES = 500


def sample(index):
    return {"input_ids": [1] * random.Random(index).randint(1, 60), "id": index}


def loader_of(exchange, kind="keys", **options):
    ids = range(SAMPLES * exchange.rank, SAMPLES * (exchange.rank + 1))
    if kind == "keys":
        source = ParallelProcessor(
            ShardedSampler(SAMPLES, rank=0, world_size=1), lambda at: sample(ids[at])
        )
    else:
        source = IterableWrapper([sample(index) for index in ids])
    bucketer = WindowBucketer(LengthObserver(source), 100, 64)
    options = {"round_size": 8, "timeout_s": TIMEOUT_S, **options}
    return Loader(RankAligner(bucketer, exchange, **options))


def described(item):
    return item.info.step, item.info.is_filler, [one.data["id"] for one in item.samples]


def caps_of(loader):
    (bucketer,) = (node for node in walk(loader.root) if isinstance(node, WindowBucketer))
    return bucketer.save().caps


def epoch(ranks, **options):
    """Of each rank: its steps, the states after them, and whether caps were in force."""

    def run(exchange):
        loader = loader_of(exchange, **options)
        steps, states, capped = [], [loader.state_dict()], []
        for item in loader:
            steps.append(described(item))
            states.append(loader.state_dict())
            capped.append(caps_of(loader) is not None)
        return steps, states, capped

    return on_ranks(ranks, run)


@pytest.mark.parametrize("kind", ["keys", "iterable"])
@pytest.mark.parametrize(
    "options", [{}, {"accumulate": 3}, {"uneven": "join"}], ids=["", "accumulate", "join"]
)
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_step_resumes_with_the_same_groups(ranks, kind, options, sampled):
    whole = epoch(ranks, kind=kind, **options)
    assert any(any(capped) for _, _, capped in whole)
    least = min(len(steps) for steps, _, _ in whole)  # None has left its peers.
    for place in range(0, least, sampled(every=9).get("every", 1)):

        def run(exchange, place=place):
            steps, states, _ = whole[exchange.rank]
            loader = loader_of(exchange, kind, **options)
            loader.load_state_dict(states[place])
            same = loader.state_dict() == states[place]
            return same, [*map(described, loader)] == steps[place:]

        assert on_ranks(ranks, run) == [(True, True)] * ranks


def test_caps_are_for_several_ranks_and_the_cost_of_the_budget():
    (one,) = epoch(1)
    assert not any(one[2])
    own = epoch(2, cost_fn=len)
    assert not any(any(capped) for _, _, capped in own)
