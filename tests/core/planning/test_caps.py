"""Caps: what ranks offer, what they agree on, and the groups that are cut to it."""

from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pools import pool_of

from odb_nodes import TokenBudget
from odb_nodes.core.planning import RollingPool
from odb_nodes.core.planning.caps import (
    NO_CAPS,
    agreed_caps,
    caps_of_round,
    offered_costs,
    quantiles,
    without_cap_of,
)

few = settings(max_examples=max(20, settings.default.max_examples // 5))


def test_nearly_full_groups_count_as_full():
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


def test_quantiles_lie_in_the_middle_of_equal_parts():
    costs = np.array([10, 20, 30, 40])
    assert quantiles(costs, 4).tolist() == [10, 20, 30, 40]
    assert quantiles(costs, 2).tolist() == [15, 35]
    assert quantiles(costs, 1).tolist() == [25]
    assert quantiles(costs, 8).tolist() == [10, 12, 17, 22, 27, 32, 37, 40]
    assert quantiles(np.array([7]), 3).tolist() == [7, 7, 7]
    assert quantiles(NO_CAPS, 3).tolist() == []


def test_caps_that_are_98_percent_full_on_average_are_caps_and_fuller_ones_are_none():
    assert agreed_caps([np.array([100, 100, 96])]).tolist() == [100, 96]
    assert agreed_caps([np.array([1000, 1000, 961])]).tolist() == []


def test_half_of_the_ranks_are_not_most_of_them():
    offer = np.array([100, 90, 40])
    assert agreed_caps([offer, NO_CAPS]).tolist() == []
    assert agreed_caps([offer, offer, NO_CAPS]).tolist() == [90, 40]


offers = st.lists(
    st.lists(st.integers(1, 100), min_size=3, max_size=3).map(
        lambda costs: np.array([100, *sorted(costs, reverse=True)])
    ),
    min_size=1,
    max_size=6,
)


@given(offers, st.integers(0, 2), st.integers(1, 9), st.randoms(use_true_random=False))
@few
def test_caps_ascend_within_the_offers_in_any_order_of_ranks(offers, silent, steps, random):
    ranks = [*offers, *[NO_CAPS] * silent]
    caps = caps_of_round(agreed_caps(ranks), steps).tolist()
    shuffled = random.sample(ranks, len(ranks))
    assert caps_of_round(agreed_caps(shuffled), steps).tolist() == caps
    assert caps == sorted(caps)
    assert len(caps) in (0, steps)
    costs = np.stack(offers)[:, 1:]
    assert all(costs.min() <= cap <= costs.max() for cap in caps)


def test_a_group_uses_up_the_smallest_cap_that_holds_it_or_else_the_largest():
    caps = np.array([10, 20, 20, 30])
    assert without_cap_of(caps, 10).tolist() == [20, 20, 30]
    assert without_cap_of(caps, 11).tolist() == [10, 20, 30]
    assert without_cap_of(caps, 30).tolist() == [10, 20, 20]
    assert without_cap_of(caps, 31).tolist() == [10, 20, 20]


@given(
    lengths=st.lists(st.integers(1, 60), min_size=20, max_size=60),
    caps=st.lists(st.integers(20, 100), min_size=1, max_size=6),
    sizes=st.sampled_from(["any", "even", "friendly"]),
    most=st.none() | st.integers(1, 9),
)
@few
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
    from odb_nodes.tools.simulate import lognormal_lengths, simulate

    lengths = lognormal_lengths(16 * 6_000, cv=1.0, seed=3)
    level = simulate(lengths, world_size=16, budget=16_384, window=256)
    with patch.object(RollingPool, "offer", lambda *_: NO_CAPS):
        plain = simulate(lengths, world_size=16, budget=16_384, window=256)
    assert level.balance > plain.balance + 0.008
    assert level.efficiency > plain.efficiency + 0.006
    assert level.length_spread > plain.length_spread
