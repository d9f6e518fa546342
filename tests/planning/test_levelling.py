"""The last round of an epoch: when it begins, who gives what to whom, and into what it is cut."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pools import budgets

from odb_nodes import Sample, TokenBudget
from odb_nodes.planning.levelling import UNKNOWN_LEFT, Rest, gifts, receivers, work_of
from odb_nodes.planning.rounds import CostReport, begins_last_round
from odb_nodes.sample_block import SampleBlock

lengths = st.lists(st.integers(1, 200), max_size=80)


def report(left, groups=4, samples=10):
    table = np.zeros((groups, 5), dtype=np.int64)
    table[:, 0] = samples
    return CostReport(table, groups, ended=not left, left=left)


@pytest.mark.parametrize(
    ("left", "begins"),
    [
        ([400, 639], True),  # 10 samples a step: less than 2 rounds of 32 steps on one rank,
        ([640, 640], False),
        ([0, 1_280], True),  # and no more than 4 rounds on any.
        ([0, 1_281], False),
        ([100, UNKNOWN_LEFT], False),
        ([100, -1], False),  # one cannot give
        ([0, 0], False),  # nothing is left
        ([100], False),  # nobody to share with
    ],
)
def test_the_last_round_begins_when_a_rank_has_little_left_and_none_has_much(left, begins):
    assert begins_last_round([report(one) for one in left], next_steps=32) is begins


def test_a_round_without_groups_is_followed_by_no_last_one():
    assert not begins_last_round([report(5, groups=0)] * 2, 4)


@given(lengths, st.floats(-100, 5_000))
def test_gifts_are_different_samples_that_the_surplus_has_room_for(tokens, surplus):
    work = work_of(tokens, TokenBudget(200))
    given_away = gifts(work, surplus)
    assert len({*given_away}) == len(given_away)
    assert work[given_away].sum() <= max(0, surplus)
    kept = [cost for index, cost in enumerate(work) if index not in given_away]
    assert not kept or min(kept) > surplus - work[given_away].sum()  # no other one fits


def test_gifts_are_long_samples_between_which_others_stay():
    work = np.sort(np.random.default_rng(0).lognormal(6, 1, 1_000).astype(np.int64))
    given_away = gifts(work, work.sum() / 20)
    assert len(given_away) < 25  # each is made a second time
    assert sum(index >= 1_000 - 80 for index in given_away) == 10  # every eighth


@given(st.lists(lengths, min_size=2, max_size=6))
def test_ranks_that_receive_come_as_near_to_each_other_as_samples_allow(ranks):
    budget = TokenBudget(200)
    works = [work_of(tokens, budget) for tokens in ranks]
    totals = [int(work.sum()) for work in works]
    mean = sum(totals) / len(totals)
    given_away = [work[gifts(work, work.sum() - mean)] for work in works]
    chosen = receivers(totals, given_away)
    after = [total - work.sum() for total, work in zip(totals, given_away, strict=True)]
    for costs, to in zip(given_away, chosen, strict=True):
        assert len(costs) == len(to)
        for cost, rank in zip(costs, to, strict=True):
            after[rank] += cost
    assert sum(after) == sum(totals)
    assert max(after) <= max(totals)
    assert min(after) >= min(totals)
    # Whatever a rank keeps above the mean is less than each sample that it has.
    assert max(after) - mean <= 200


@given(lengths, budgets, st.integers(0, 5))
def test_the_rest_is_cut_into_as_few_groups_as_asked_for_at_the_least_cost(tokens, budget, more):
    samples = SampleBlock.of(
        [Sample(None, length, 1, index % 4) for index, length in enumerate(tokens)]
    )
    rest = Rest(samples, budget)
    groups = rest.groups(rest.fewest + more)
    assert sorted(index for group in groups for index in group) == [*range(len(samples))]
    assert len(groups) <= rest.fewest + more

    def dearest(cut):
        return max((budget.cost([tokens[index] for index in group]) for group in cut), default=0)

    assert dearest(groups) <= dearest(rest.groups(rest.fewest))  # also if a sample is oversize
    for group in groups:
        patches = sum(samples[index].patches for index in group)
        alone = len(group) == 1
        assert alone or budget.cost([tokens[index] for index in group]) <= budget.tokens
        assert alone or patches <= (budget.max_patches or patches)
        assert len(group) <= (budget.max_samples or len(group))


def test_more_groups_make_the_dearest_one_cheaper_also_beside_an_oversize_sample():
    lengths, costs = [*range(10, 60)], []
    for beside, more in (([], 0), ([], 4), ([], 8), ([500], 8)):
        samples = SampleBlock.of([Sample(None, length, 1) for length in [*lengths, *beside]])
        rest = Rest(samples, TokenBudget(400))
        cut = [[samples[at].tokens for at in group] for group in rest.groups(rest.fewest + more)]
        costs.append(max(max(group) * len(group) for group in cut if group != beside))
    assert costs[0] > costs[1] > costs[2]
    assert max(costs[2:]) < 0.83 * costs[0]


def test_fewer_groups_than_the_budget_needs_are_refused():
    samples = SampleBlock.of([Sample(None, 30, 1)] * 9)
    with pytest.raises(ValueError, match="`most` must be at least 3, but is 2"):
        Rest(samples, TokenBudget(90)).groups(2)
