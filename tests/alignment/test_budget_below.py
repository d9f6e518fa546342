from concurrent.futures import ThreadPoolExecutor

import pytest
from torchdata.nodes import IterableWrapper

from odb_nodes import Loader, RankAligner, Sample, TokenBudget, WindowBucketer
from odb_nodes.alignment.exchange.in_process import InProcessHub
from odb_nodes.alignment.group_reader import cost_below
from odb_nodes.planning.group_costs import BudgetCost, padded_tokens

BUDGETS = [
    TokenBudget(60),
    TokenBudget(60, pad_to_multiple_of=8),
    TokenBudget(60, layout="packed"),
    TokenBudget(60, layout="packed", max_samples=3),
    TokenBudget(60, shapes=5),
    TokenBudget(60, attention_tokens=30),
    TokenBudget(60, attention_tokens=30, layout="packed"),
]


def samples(lengths):
    return [Sample(i, n, n - 1) for i, n in enumerate(lengths)]


def bucketer(budget, lengths=(5,), window=8):
    return WindowBucketer(IterableWrapper(samples(lengths)), budget, window)


@pytest.mark.parametrize("budget", BUDGETS, ids=str)
def test_a_group_costs_what_the_budget_below_says(budget):
    cost = cost_below(bucketer(budget))
    assert cost(samples([5, 9, 20])) == budget.cost([5, 9, 20])


def test_packed_groups_cost_their_sum_and_padded_ones_their_rectangle():
    assert BudgetCost(TokenBudget(60, layout="packed"))(samples([5, 9, 20])) == 34
    assert BudgetCost(TokenBudget(60))(samples([5, 9, 20])) == 60
    assert cost_below(IterableWrapper([])) is padded_tokens


def test_a_cost_with_attention_is_one_that_all_ranks_can_be_told():
    sample = Sample(0, 10**6, 1)
    assert BudgetCost(TokenBudget(60, attention_tokens=1))([sample]) == 2**31 - 1


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_the_layout_is_in_the_fingerprint_of_the_aligner(layout):
    aligner = RankAligner(bucketer(TokenBudget(60, layout=layout)))
    aligner.reset(None)
    assert aligner.state_dict()["config"]["cost_fn"] == f"{layout}_tokens"


@pytest.mark.parametrize("budget", BUDGETS, ids=str)
@pytest.mark.parametrize("sizes", [(60, 60), (30, 90), (2, 120), (50, 0)])
def test_ranks_split_the_groups_of_every_layout_in_the_tail(budget, sizes):
    hub = InProcessHub(len(sizes), 20.0)

    def run(rank):
        lengths = [2 + (7 * i + rank) % 23 for i in range(sizes[rank])]
        aligner = RankAligner(bucketer(budget, lengths), hub.exchange(rank), timeout_s=20.0)
        return list(Loader(aligner))

    with ThreadPoolExecutor(len(sizes)) as pool:
        ranks = list(pool.map(run, range(len(sizes))))
    assert len({len(steps) for steps in ranks}) == 1
    for size, steps in zip(sizes, ranks, strict=True):
        groups = [item.samples for item in steps if not item.info.is_filler]
        assert sorted(sample.data for group in groups for sample in group) == list(range(size))
        for group in groups:
            assert budget.cost([sample.tokens for sample in group]) <= 60
