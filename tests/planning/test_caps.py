"""Caps: what ranks offer, what they agree on, and the groups that are cut to it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pools import pool_of

from odb_nodes import TokenBudget
from odb_nodes.planning.caps import (
    NO_CAPS,
    agreed_caps,
    caps_of_round,
    offered_costs,
)
from odb_nodes.tools.simulate import lognormal_lengths, simulate


def test_a_pool_offers_the_costs_of_its_full_groups():
    # From the longest down: 1 x 70, 2 x 40, 3 x 30, 10 x 10; what is left is not full.
    pool = pool_of([70, 40, 40, *[30] * 3, *[10] * 65], 100)
    assert pool.offer(9).tolist() == [100, 100, 100, 100, 100, 100, 100, 90, 80, 70]


@pytest.mark.parametrize(
    "budget", [TokenBudget(100, layout="packed"), TokenBudget(100, shapes=3), TokenBudget(120)]
)
def test_packed_rows_and_fixed_shapes_and_small_pools_offer_nothing(budget):
    assert not len(pool_of([70, 40, 40, *[30] * 3, *[10] * 65], budget).offer(9))


def test_what_is_nearly_full_counts_as_full():
    offer = offered_costs(np.array([99, 98, 50]), pool_cost=800, budget_tokens=100, count=3)
    assert offer.tolist() == [100, 100, 98, 50]
    assert not len(offered_costs(np.array([99, 98, 50]), 799, 100, 3))
    assert not len(offered_costs(NO_CAPS, 900, 100, 3))


def test_the_median_of_the_ranks_is_agreed_on_where_most_offer_something():
    costs = [[100, 90, 40], [90, 80, 50], [95, 70, 10]]
    offers = [np.array([100, *of_rank]) for of_rank in costs]
    assert agreed_caps(offers).tolist() == [95, 80, 40]
    assert agreed_caps([*offers, NO_CAPS, NO_CAPS]).tolist() == [95, 80, 40]
    assert agreed_caps([*offers, NO_CAPS, NO_CAPS, NO_CAPS]).tolist() == []
    assert agreed_caps([NO_CAPS]).tolist() == []
    assert agreed_caps([np.array([100, 100, 97])]).tolist() == []  # there is nothing to gain
    assert agreed_caps([*offers, np.array([90, 80, 40, 10])]).tolist() == []  # another budget
    assert caps_of_round(np.array([100, 90, 40]), 3).tolist() == [40, 90, 100]


@given(
    lengths=st.lists(st.integers(1, 60), min_size=40, max_size=120),
    caps=st.lists(st.integers(20, 100), min_size=1, max_size=6),
    sizes=st.sampled_from(["any", "even", "friendly"]),
    most=st.none() | st.integers(1, 9),
)
def test_each_group_fits_a_cap_of_its_own(lengths, caps, sizes, most):
    budget = TokenBudget(100, row_sizes=sizes, max_samples=most)
    pool = pool_of(lengths, budget)
    pool.caps = np.sort(caps)
    left = sorted(caps)
    while left and len(pool):
        group = [lengths[number] for number in pool.take()]
        cost = budget.cost(group)
        fitting = [cap for cap in left if cap >= cost]
        assert fitting or len(group) == 1
        left.remove(fitting[0] if fitting else left[-1])
        assert pool.caps.tolist() == left


@pytest.mark.slow
def test_ranks_are_level_where_the_longest_samples_leave_room():
    lengths = lognormal_lengths(16 * 6_000, cv=1.0, seed=3)
    level = simulate(lengths, world_size=16, budget=16_384, window=256)
    # A cost of its own, though the same: no caps.
    plain = simulate(lengths, world_size=16, budget=16_384, window=256, cost_fn=padded)
    assert level.balance > plain.balance + 0.008
    assert level.efficiency > plain.efficiency + 0.006
    assert level.length_spread > plain.length_spread


def padded(group):
    return max(sample.tokens for sample in group) * len(group)
