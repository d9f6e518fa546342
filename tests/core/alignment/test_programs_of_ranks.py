"""Random programs that all ranks follow, each at its own pace: no false error, no hang, no loss."""

import random
import time

import pytest
from aligned_ranks import graph, on_ranks, shard
from torchdata.nodes import Prefetcher

from odb_nodes import Loader
from odb_nodes.core.nodes.read_ahead import ReadAhead

SEEDS, SAMPLED = 240, 10
ACTIONS = ("iterate", "iterate", "save", "load the last", "load an old one", "finish", "close")


def pytest_generate_tests(metafunc):
    seeds = SEEDS if metafunc.config.getoption("--exhaustive") else SAMPLED
    metafunc.parametrize("seed", range(seeds))


class Follower:
    """One rank: a loader, and what it has seen and saved."""

    def __init__(self, loader, pace):
        self.loader, self.pace = loader, pace
        self.saved, self.seen = [], []

    def dawdle(self):
        if self.pace.random() < 0.5:
            time.sleep(self.pace.random() * 0.03)

    def act(self, action, number):
        self.dawdle()
        if action == "iterate":
            for _, item in zip(range(number), self.loader, strict=False):
                self.seen.append(item.info.step)
                if self.pace.random() < 0.25:
                    self.dawdle()
        if action in ("iterate", "save"):
            self.saved.append(self.loader.state_dict())
        elif action.startswith("load") and self.saved:
            place = -1 if action == "load the last" else number % len(self.saved)
            self.loader.load_state_dict(self.saved[place])
        elif action == "finish":
            self.seen.append(f"{len(list(self.loader))} steps")
        elif action == "close":
            self.loader.close()


@pytest.mark.filterwarnings("ignore:.uneven=.stop:UserWarning")
def test_a_program(seed):
    rng = random.Random(seed)
    program = [(rng.choice(ACTIONS), rng.randint(0, 12)) for _ in range(rng.randint(3, 9))]
    sizes = [rng.randint(0, 80) for _ in range(rng.choice([2, 2, 3]))]
    sizes[0] += 5  # an epoch without any sample is an error
    uneven = rng.choice(["fill", "fill", "stop"])
    above = rng.choice([None, ReadAhead, Prefetcher])

    def follow(exchange):
        rank = exchange.rank
        node = graph(exchange, shard(rank, sizes[rank]), uneven=uneven)
        loader = Loader(above(node, 3) if above else node)
        follower = Follower(loader, random.Random(1000 * seed + rank))
        for action, number in program:
            follower.act(action, number)
        list(loader)  # what is left of the epoch, or one more
        whole = [
            sample.data["id"] for item in loader if not item.info.is_filler for sample in item[0]
        ]
        loader.close()
        return follower.seen, whole

    seen, epochs = zip(*on_ranks(len(sizes), follow), strict=True)
    assert all(of_rank == seen[0] for of_rank in seen), program
    if uneven == "fill":
        expected = [
            [sample["id"] for sample in shard(rank, size)] for rank, size in enumerate(sizes)
        ]
        assert [sorted(epoch) for epoch in epochs] == expected, program
