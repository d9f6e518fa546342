"""Groups of packed samples: the oldest, and those that fill the rest of the row best."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pools import pool_of, run

from odb_nodes import TokenBudget

few = settings(max_examples=max(20, settings.default.max_examples // 5))


def packed(tokens, **fields):
    return TokenBudget(tokens, layout="packed", **fields)


def take(lengths, budget, patches=None):
    return [lengths[index] for index in pool_of(lengths, budget, patches).take()]


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([40, 30, 20, 10, 60], [40, 30, 20, 10]),  # the oldest fill the row
        ([40, 30, 50, 29, 7], [40, 30, 29]),  # one that fills the rest best
        ([40, 30, 50, 11, 18, 7], [40, 30, 11, 18]),  # or two
        ([40, 45, 50, 60], [40, 60]),  # in place of the last, where that fills better
        ([40, 55, 30, 31], [40, 30, 31]),  # or two of them
        ([40, 45, 20, 41], [40, 20, 41]),  # the oldest always stays
        ([200, 50, 50], [200]),  # an oversize sample has a row of its own
        ([50, 200, 49], [50, 49]),
        ([100, 1], [100]),
    ],
)
def test_the_rest_is_filled_as_well_as_it_can_be(lengths, expected):
    assert take(lengths, packed(101 if sum(expected) == 101 else 100)) == expected


def test_the_limits_hold_beside_the_tokens():
    assert take([10, 10, 10, 80], packed(100, max_samples=2)) == [10, 80]
    assert take([10, 10, 10, 10], packed(100, max_samples=1)) == [10]
    assert take([10, 11, 12, 13], packed(100, max_patches=5), [4, 2, 1, 0]) == [10, 12, 13]
    assert take([10, 11, 12], packed(100, max_patches=5), [9, 0, 0]) == [10]  # oversize
    assert take([50, 46, 3], packed(100, pad_to_multiple_of=8)) == [50, 46]
    assert take([50, 47, 3], packed(100, pad_to_multiple_of=8)) == [50, 3]


def test_two_that_fill_a_row_have_no_more_patches_together_than_it_may_have():
    # 40 and 30 + 30 would fill it.
    assert take([40, 90, 30, 30, 25], packed(100, max_patches=5), [0, 0, 3, 3, 0]) == [40, 30, 25]
    assert take([40, 90, 30, 30, 25], packed(100, max_patches=6), [0, 0, 3, 3, 0]) == [40, 30, 30]


def test_with_attention_a_sample_that_is_oversize_by_its_padding_shares_no_row():
    budget = packed(200, attention_tokens=8, pad_to_multiple_of=16)
    assert budget.capacity == 32 and budget.cost([33, 1]) <= 200
    assert take([33, 1, 1], budget) == [33]
    assert take([1, 33, 1], budget) == [1, 1]


def brute_force(lengths, capacity):
    """The most tokens of the oldest, less the last 0 to 3, and one or two of the others."""
    total, prefix = 0, 0
    while prefix < len(lengths) and total + lengths[prefix] <= capacity:
        total, prefix = total + lengths[prefix], prefix + 1
    prefix = max(prefix, 1)
    best = 0
    for kept in range(prefix, max(prefix - 3, 1) - 1, -1):
        base, rest = sum(lengths[:kept]), lengths[kept:]
        pairs = [a + b for i, a in enumerate(rest) for b in rest[:i]]
        best = max([best, base, *(base + n for n in [*rest, *pairs] if base + n <= capacity)])
    return best


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=25),
    st.integers(120, 300),
    st.none() | st.integers(10, 100),
)
@few
def test_no_exchange_costs_more_of_the_budget(lengths, tokens, attention):
    budget = packed(tokens, attention_tokens=attention)
    costs = [budget.row_cost(length) for length in lengths]
    group = take(list(lengths), budget)
    assert budget.cost(group) == max(brute_force(costs, tokens), costs[0])
    assert group[0] == lengths[0]


@given(st.lists(st.integers(1, 120), min_size=1, max_size=40), st.integers(60, 150))
@few
def test_the_tail_is_first_fit_longest_first(lengths, capacity):
    groups, _ = run(lengths, packed(capacity), 1000)
    rows = []
    for length in sorted(lengths, reverse=True):
        row = next((row for row in rows if sum(row) + length <= capacity), None)
        if row is None:
            rows.append(row := [])
        row.append(length)
    rows_of_groups = [sorted((lengths[i] for i in group), reverse=True) for group in groups]
    assert sorted(rows_of_groups) == sorted(rows)
    longest = [max(group, key=lambda index: (lengths[index], index)) for group in groups]
    assert longest == sorted(longest)


def test_the_oldest_are_taken_in_order_of_age_however_many_fit():
    """They are looked for among the 64 oldest first, and then among twice as many."""
    for lengths in ([1] * 200, [1 + index % 2 for index in range(200)]):
        for capacity in (63, 64, 65, 130, 150):
            taken, fits = [], 0
            while fits + lengths[len(taken)] <= capacity:
                fits += lengths[len(taken)]
                taken.append(len(taken))
            group = pool_of(lengths, packed(capacity)).take().tolist()
            assert group[: len(taken) - 1] == taken[:-1]
            assert sum(lengths[index] for index in group) == capacity


def test_a_sample_that_does_not_fit_ends_the_oldest_though_a_younger_one_would_fit():
    # 40 and 70 do not fit; so 40 is filled, with 60, not with 30 which is nearer in age.
    assert take([40, 70, 30, 60], packed(100)) == [40, 60]


def test_a_row_is_as_long_as_its_shape_where_all_have_one():
    """However samples fill it, attention adds no more than for one as long."""
    budget = packed(200, attention_tokens=100, shapes=1)
    assert budget.capacity == 100
    assert sum(take([30] * 9, budget)) == 90
    free = packed(200, attention_tokens=100)
    assert sum(take([30] * 9, free)) == 150  # 5 rows of 39


@pytest.mark.parametrize(
    ("lengths", "group"),
    [
        ([10, 50, 40, 30], [50, 40, 10]),  # the longest, and the longest others that fit
        ([10, 50, 60, 30], [60, 30, 10]),
        ([200, 10], [200]),
    ],
)
def test_the_largest_group_is_the_longest_sample_and_the_longest_that_fit_beside_it(lengths, group):
    taken = pool_of(lengths, packed(100)).take(largest=True)
    assert sorted((lengths[index] for index in taken), reverse=True) == group


def test_patches_bound_the_tail_and_the_largest_group_as_well():
    pool = pool_of([10, 11, 12], packed(100, max_patches=5), [4, 2, 3])
    assert pool.take(draining=True).tolist() == [0]
    assert pool.take(draining=True, largest=True).tolist() == [1, 2]


def test_of_equally_full_groups_that_with_the_most_of_the_oldest_is_chosen():
    assert pool_of([60, 20, 20], packed(95)).take().tolist() == [0, 1]


def test_the_oldest_samples_are_taken_by_age():
    lengths = np.random.default_rng(0).permutation(np.arange(1, 101)).tolist()
    budget = packed(sum(lengths[:20]))  # which the oldest twenty fill
    assert pool_of(lengths, budget).take().tolist() == [*range(20)]
