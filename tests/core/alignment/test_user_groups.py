"""Groups that a node has formed, and takes back, and the sample that fills steps."""

import random
from itertools import islice

import numpy as np
import pytest
from aligned_ranks import on_ranks
from torchdata.nodes import BaseNode

from odb_nodes import Loader, RankAligner, Sample, TokenBudget
from odb_nodes.core.alignment.user_groups import GroupReader
from odb_nodes.core.contract import copy_state
from odb_nodes.core.nodes.planned_groups import PlannedGroups


class TakesBack(BaseNode):
    """Yields groups of two samples, and notes those that are put back."""

    can_restore = True

    def __init__(self):
        super().__init__()
        self.given, self.put = 0, []

    def reset(self, initial_state=None):
        super().reset(initial_state)

    def get_state(self):
        return {"given": self.given}

    def next(self):
        self.given += 2
        return [Sample([number], 1, 1) for number in (self.given - 2, self.given - 1)]

    def put_back(self, samples):
        self.put += [sample.data[0] for sample in samples]


def test_samples_that_are_put_back_leave_all_but_the_filler():
    node = TakesBack()
    node.reset(None)
    reader = GroupReader(node)
    for _ in range(3):
        reader.fill()
    reader.store.keep_filler(2)
    reader.put_back(reader.facts_of(np.arange(2, 6)))
    assert node.put == [2, 3, 4, 5]
    assert reader.store.filler == 2 and reader.store.ordinals().tolist() == [0, 1, 2]
    reader.store.keep_filler(0)
    assert reader.store.ordinals().tolist() == [0, 1]  # as of a filler that a step has had


def planned_loader(exchange, seed, tokens):
    """Ranks whose samples are often longer than was told, so that some steps are filled."""
    draw = random.Random(seed)
    size, ranks = draw.choice([61, 85, 100]), draw.choice([3, 4])
    known_lengths = [draw.randint(1, 30) for _ in range(size)]
    lengths = [length + (draw.random() < 0.6) * draw.randint(0, 25) for length in known_lengths]
    assert ranks == exchange.world_size

    def process(number):
        return Sample({"id": number}, lengths[number], 1)

    budget, place = TokenBudget(tokens, oversize="alone"), (exchange.rank, ranks)
    node = PlannedGroups(known_lengths, process, budget, seed=1, rank=place[0], world_size=place[1])
    return Loader(RankAligner(node, exchange, 24, accumulate=3, timeout_s=10))


@pytest.mark.filterwarnings("ignore:.*(exceed|longer)")
@pytest.mark.parametrize(("seed", "ranks", "steps"), [(5035, 4, 10)])
def test_a_state_after_a_lower_budget_within_an_optimizer_step_loads_with_its_fillers(
    seed, ranks, steps
):
    def saved(exchange):
        loader = planned_loader(exchange, seed, 40)
        states = [copy_state(loader.state_dict()) for _ in islice(loader, steps)]
        loader.close()
        return states[-1]

    def lowered(exchange):
        loader = planned_loader(exchange, seed, 30)
        loader.load_state_dict(states[exchange.rank], change_budget=True)
        item = next(iter(loader))
        state = copy_state(loader.state_dict())
        loader.close()
        return state, item.info.is_filler

    def rest(exchange):
        loader = planned_loader(exchange, seed, 30)
        loader.load_state_dict(lower[exchange.rank][0], change_budget=True)
        return [item.info.is_filler for item in loader]

    states = on_ranks(ranks, saved)
    lower = on_ranks(ranks, lowered)
    assert any(of_rank[:2].count(True) for of_rank in on_ranks(ranks, rest))
