"""The last round of an epoch: the groups that a rank cuts its samples into."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pools import budgets, facts_of, lognormal

from odb_nodes import TokenBudget
from odb_nodes.core.planning import StepTime
from odb_nodes.core.planning.level_cut import LevelCut

few = settings(max_examples=max(20, settings.default.max_examples // 5))

lengths = st.lists(st.integers(1, 200), max_size=40)
step_times = st.sampled_from([None, StepTime(squares=1 / 40), StepTime(squares=1, patches=9)])


@given(lengths, budgets, st.integers(0, 5), step_times)
@few
def test_the_rest_is_cut_into_as_few_groups_as_asked_for(tokens, budget, more, step_time):
    samples = facts_of(tokens, patches=np.arange(len(tokens)) % 4)
    level_cut = LevelCut(samples, budget, step_time)
    groups = level_cut.groups(level_cut.fewest + more)
    assert sorted(index for group in groups for index in group) == [*range(len(samples))]
    assert len(groups) <= level_cut.fewest + more

    def largest(cut):
        return max((budget.cost([tokens[index] for index in group]) for group in cut), default=0)

    if step_time is None:  # also if a sample is oversize
        assert largest(groups) <= largest(level_cut.groups(level_cut.fewest))
    for group in groups:
        patches = sum(samples.patches[index] for index in group)
        alone = len(group) == 1
        assert alone or budget.cost([tokens[index] for index in group]) <= budget.tokens
        assert alone or patches <= (budget.max_patches or patches)
        assert len(group) <= (budget.max_samples or len(group))


def test_more_groups_make_the_largest_one_cheaper_also_beside_an_oversize_sample():
    lengths, costs = [*range(10, 60)], []
    for beside, more in (([], 0), ([], 4), ([], 8), ([500], 8)):
        samples = facts_of([*lengths, *beside])
        level_cut = LevelCut(samples, TokenBudget(400))
        cut = [samples.take(group).lengths for group in level_cut.groups(level_cut.fewest + more)]
        costs.append(max(max(group) * len(group) for group in cut if group != beside))
    assert costs[0] > costs[1] > costs[2]
    assert max(costs[2:]) < 0.83 * costs[0]


@pytest.mark.parametrize("more", [1, 2, 5])
def test_a_cheaper_largest_group_would_make_more_groups(more):
    """The search is exact for padded rows under no further limit, of fewer than 2**14 tokens."""
    for seed in range(4):
        tokens = np.random.default_rng(seed).integers(1, 60, 30).tolist()
        level_cut = LevelCut(facts_of(tokens), budget := TokenBudget(400))
        most = level_cut.fewest + more
        cut = [[tokens[index] for index in group] for group in level_cut.groups(most)]
        largest = max(map(budget.cost, cut))
        assert len(cut) <= most and largest > max(tokens)
        assert LevelCut(facts_of(tokens), TokenBudget(largest - 1)).fewest > most


def test_groups_of_one_shape_are_cut_as_the_budget_cuts_them():
    tokens = [*range(1, 40)]
    level_cut = LevelCut(facts_of(tokens), TokenBudget(200, shapes=3))
    assert level_cut.groups(level_cut.fewest + 9) == level_cut.groups(level_cut.fewest)


def test_nothing_is_left_to_cut():
    level_cut = LevelCut(facts_of([]), TokenBudget(90))
    assert (level_cut.fewest, level_cut.groups(0), level_cut.groups(5)) == (0, [], [])


def test_fewer_groups_than_the_budget_needs_are_refused():
    samples = facts_of([30] * 9)
    with pytest.raises(ValueError, match="`most` must be at least 3, but is 2"):
        LevelCut(samples, TokenBudget(90)).groups(2)


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_the_groups_of_the_rest_take_about_as_long_as_each_other(layout):
    tokens = lognormal(300, cv=1.0, seed=3)
    budget, step_time = TokenBudget(16_384, layout=layout), StepTime(squares=1 / 800)

    def longest(by):
        level_cut = LevelCut(facts_of(tokens), budget, by)
        groups = level_cut.groups(LevelCut(facts_of(tokens), budget).fewest + 3)
        times = [
            step_time.of_group([tokens[index] for index in group], [0] * len(group), budget)
            for group in groups
        ]
        return max(times)

    assert longest(step_time) < 0.95 * longest(None)
