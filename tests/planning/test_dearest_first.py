"""The first groups of an epoch are those of the longest samples."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pools import budgets, lognormal, long_budgets, run

from odb_nodes.planning import MAX_AGE_WINDOWS, RollingPool, TokenBudget
from odb_nodes.tools.simulate import simulate_steps


def pool_of(lengths, budget, window=None):
    pool = RollingPool(TokenBudget.of(budget), window or len(lengths))
    pool.add(lengths, lengths, [0] * len(lengths), range(len(lengths)))
    pool.pulled = len(lengths)
    return pool


@pytest.mark.parametrize("draining", [False, True])
@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (TokenBudget(100), [[40, 50], [30, 20, 10]]),
        (TokenBudget(100, layout="packed"), [[40, 50, 10], [30, 20]]),
        (TokenBudget(45), [[50], [40], [30], [20, 10]]),  # 50 is oversize
        (TokenBudget(100, row_sizes="even"), [[40, 50], [30, 20], [10]]),
        (TokenBudget(100, attention_tokens=50), [[50], [40], [30, 20], [10]]),
    ],
)
def test_the_longest_samples_go_first_as_many_as_the_budget_holds(budget, expected, draining):
    pool, groups = pool_of([40, 30, 50, 20, 10], budget), []
    while len(pool):
        groups.append(pool.take(draining=draining, dearest=True))
    assert groups == expected


@given(
    lengths=st.lists(st.integers(1, 120), max_size=200),
    budget=budgets | long_budgets,
    window=st.integers(1, 50),
    first=st.integers(1, 100),
)
def test_nothing_is_lost_or_waits_too_long(lengths, budget, window, first):
    groups, age = run(lengths, budget, window, dearest_first=first)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    assert age <= MAX_AGE_WINDOWS * window
    for group in groups:
        costs = budget.cost([lengths[i] for i in group])
        assert costs <= budget.tokens or len(group) == 1


@given(
    lengths=st.lists(st.integers(1, 120), min_size=1, max_size=200),
    budget=budgets | long_budgets,
    window=st.integers(1, 50),
)
def test_the_first_group_holds_the_longest_sample_of_the_pool(lengths, budget, window):
    group = run(lengths, budget, window, dearest_first=1)[0][0]
    assert max(lengths[i] for i in group) == max(lengths[:window])


def test_the_oldest_sample_does_not_wait_for_all_of_the_dearest():
    lengths = [10, *[50] * 2000]
    groups, age = run(lengths, 100, 16, dearest_first=1000)
    assert age <= MAX_AGE_WINDOWS * 16
    assert next(at for at, group in enumerate(groups) if 0 in group) < 30


def test_only_the_first_groups_are_others():
    lengths = lognormal(4000)
    plain, dear = (run(lengths, 16_384, 256, dearest_first=first)[0] for first in (0, 4))
    assert max(lengths[i] for i in dear[0]) == max(lengths[:256])
    assert all(16_384 // 2 < max(lengths[i] for i in one) * len(one) for one in dear[:4])
    assert dear[:4] != plain[:4]
    assert abs(len(dear) - len(plain)) <= 3


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_the_longest_samples_of_all_ranks_are_in_the_first_round(layout):
    lengths, budget = lognormal(8000), TokenBudget(32_768, layout=layout, attention_tokens=8192)
    longest_pooled = [max(lengths[rank : 4 * 256 : 4]) for rank in range(4)]

    def longest_of_ranks(first):
        job = {"world_size": 4, "budget": budget, "window": 256, "dearest_first": first}
        steps = list(simulate_steps(lengths, **job))[:4]
        return [max(s.tokens for step in steps for s in step[rank]) for rank in range(4)]

    pairs = zip(longest_of_ranks(4), longest_pooled, strict=True)
    assert all(found >= pooled for found, pooled in pairs)  # a longer one may have come
    assert sum(longest_of_ranks(0)) < sum(longest_pooled)
