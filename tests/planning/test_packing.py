import pytest
from hypothesis import given
from hypothesis import strategies as st
from pools import pool_of, run

from odb_nodes.planning import TokenBudget


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
def test_no_exchange_costs_more_of_the_budget(lengths, tokens, attention):
    budget = packed(tokens, attention_tokens=attention)
    costs = [budget.row_cost(length) for length in lengths]
    group = take(list(lengths), budget)
    assert budget.cost(group) == max(brute_force(costs, tokens), costs[0])
    assert group[0] == lengths[0]


@given(st.lists(st.integers(1, 120), min_size=1, max_size=120), st.integers(60, 150))
def test_the_tail_is_first_fit_longest_first(lengths, capacity):
    groups, _ = run(lengths, packed(capacity), 1000)
    rows = []
    for length in sorted(lengths, reverse=True):
        row = next((row for row in rows if sum(row) + length <= capacity), None)
        if row is None:
            rows.append(row := [])
        row.append(length)
    found = [sorted((lengths[i] for i in group), reverse=True) for group in groups]
    assert sorted(found) == sorted(rows)
    assert [group[0] for group in groups] == sorted(group[0] for group in groups)
