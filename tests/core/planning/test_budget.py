"""What a group may cost: a budget, its ladder of shapes, and limits that are lowered."""

from bisect import bisect_right

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from refusals import refuses

from odb_nodes import TokenBudget
from odb_nodes.core.planning.budget import Limits, allowed_rows

few = settings(max_examples=max(20, settings.default.max_examples // 5))


def test_an_integer_stands_for_padded_tokens():
    assert TokenBudget.of(100) == TokenBudget(100)
    assert TokenBudget.of(TokenBudget(7, max_samples=2)).max_samples == 2
    assert TokenBudget.of(np.int64(5)).tokens == 5


REFUSALS = [
    ({"tokens": 0}, ValueError, "`tokens` must be in 1..2147483647.* is 0"),
    ({"tokens": 2**31}, ValueError, "`tokens`"),
    ({"tokens": 1.5}, TypeError, "`tokens` must be an integer.* is 1.5"),
    ({"tokens": True}, TypeError, "`tokens`"),
    ({"tokens": None}, TypeError, "`tokens`"),
    ({"max_samples": 0}, ValueError, "`max_samples`"),
    ({"max_patches": "3"}, TypeError, "`max_patches`"),
    ({"pad_to_multiple_of": 0}, ValueError, "`pad_to_multiple_of`"),
    ({"pad_to_multiple_of": None}, TypeError, "`pad_to_multiple_of`"),
    ({"pad_to_multiple_of": 16}, ValueError, "at most `tokens`"),
    ({"layout": "flat"}, ValueError, r"`layout` must be one of"),
    ({"shapes": 0}, ValueError, "`shapes`"),
    ({"oversize": "skip"}, ValueError, "`oversize`"),
    ({"row_sizes": "odd"}, ValueError, r"`row_sizes` must be one of"),
    ({"row_sizes": "even", "layout": "packed"}, ValueError, '`row_sizes` must be "any"'),
    ({"row_sizes": 4, "shapes": 3}, ValueError, "`row_sizes` may be a number .4. only with"),
    ({"row_sizes": 4, "oversize": "drop"}, ValueError, "`shapes` is None"),
    ({"row_sizes": 0, "shapes": 3}, ValueError, "`row_sizes` must be in 1"),
    (
        {"row_sizes": 4, "shapes": 3, "oversize": "drop", "max_samples": 3},
        ValueError,
        "`max_samples` must be at least `row_sizes` .4.",
    ),
    ({"attention_tokens": 0}, ValueError, "`attention_tokens`"),
    ({"attention_tokens": 0.5}, TypeError, "`attention_tokens`"),
    ({"attention_tokens": 4, "pad_to_multiple_of": 8}, ValueError, "`tokens` must be at least 24"),
]


test_a_field_that_is_not_valid_is_named_with_its_value = refuses(
    REFUSALS, lambda fields: TokenBudget(**{"tokens": 8, **fields})
)


@pytest.mark.parametrize(
    ("tokens", "patches", "multiple", "oversize"),
    [(100, 0, 1, False), (101, 0, 1, True), (97, 0, 32, True), (96, 0, 32, False), (1, 9, 1, True)],
)
def test_a_sample_is_oversize_when_it_fits_no_group(tokens, patches, multiple, oversize):
    budget = TokenBudget(100, max_patches=8, pad_to_multiple_of=multiple)
    assert budget.is_oversize(tokens, patches) is oversize


@pytest.mark.parametrize(
    ("fields", "group", "shape", "padded", "cost"),
    [
        # The longest sample for each of its samples; packed, the sum of its samples.
        ({"tokens": 100}, [5, 17, 9], (3, 24), 72, 72),
        ({"tokens": 100, "layout": "packed"}, [5, 17, 9], (1, 32), 32, 32),
        # A packed group of bounded shapes has one; an oversize sample is as wide as it must be.
        ({"tokens": 100, "layout": "packed", "shapes": 60}, [90, 6], (1, 96), 96, 96),
        ({"tokens": 100, "layout": "packed", "shapes": 60}, [97], (1, 104), 104, 104),
        # Attention adds to each row as wide as it is; packed, to each sample without padding.
        ({"tokens": 6000, "attention_tokens": 1000}, [997, 300], (2, 1000), 2000, 4000),
        (
            {"tokens": 6000, "attention_tokens": 1000, "layout": "packed"},
            [999, 30, 1000],
            (1, 2032),
            2032,
            2032 + 998 + 0 + 1000,
        ),
    ],
)
def test_what_a_group_costs(fields, group, shape, padded, cost):
    budget = TokenBudget(**fields, pad_to_multiple_of=8)
    assert budget.shape(group) == shape
    assert budget.padded_tokens(group) == padded
    assert budget.cost(group) == cost
    for method in (budget.cost, budget.shape, budget.padded_tokens):
        with pytest.raises(ValueError, match="`tokens` must have the length of one sample"):
            method([])


def test_a_row_of_attention_tokens_costs_twice_its_tokens():
    budget = TokenBudget(6000, attention_tokens=1000)
    assert [budget.row_cost(width) for width in (1, 31, 32, 1000, 2000)] == [1, 31, 33, 2000, 6000]
    assert budget.batch_cost((2, 2000), [997, 300]) == 12_000
    assert (
        "`tokens` is 6000, the cost of a row of 2000 with `attention_tokens=1000`"
        in budget.limit_of(2001)
    )


@pytest.mark.parametrize(
    ("fields", "ladder"),
    [
        ({}, [(21, 20), (13, 49), (6, 107), (2, 322), (1, 645)]),
        ({"row_sizes": "even"}, [(20, 21), (12, 53), (6, 107), (2, 322), (1, 645)]),
        ({"row_sizes": "friendly"}, [(16, 26), (12, 53), (6, 107), (2, 322), (1, 645)]),
        ({"row_sizes": 3, "oversize": "drop"}, [(21, 7), (21, 16), (15, 43), (6, 107), (3, 215)]),
        # With attention there are fewer rows of long samples.
        ({"attention_tokens": 100}, [(21, 5), (21, 15), (12, 38), (4, 86), (1, 209)]),
        ({"attention_tokens": 100, "layout": "packed"}, [(1, 209)]),
    ],
)
def test_the_shapes_of_a_ladder(fields, ladder):
    assert TokenBudget(645, shapes=5, max_samples=21, **fields).shape_ladder() == (*ladder,)


@given(
    tokens=st.integers(1, 2**31 - 1),
    attention=st.integers(1, 2**31 - 1),
    multiple=st.integers(1, 128),
    layout=st.sampled_from(["padded", "packed"]),
)
def test_capacity_is_the_widest_row_that_the_budget_holds(tokens, attention, multiple, layout):
    fields = {"attention_tokens": attention, "pad_to_multiple_of": multiple, "layout": layout}
    if multiple > tokens or multiple + multiple * multiple // attention > tokens:
        with pytest.raises(ValueError, match="tokens"):
            TokenBudget(tokens, **fields)
        return
    budget = TokenBudget(tokens, **fields)
    wider = budget.capacity + multiple
    assert budget.row_cost(budget.capacity) <= tokens < budget.row_cost(wider)
    assert budget.capacity % multiple == 0
    assert budget.cost([budget.capacity]) <= tokens
    assert not budget.is_oversize(budget.capacity) and budget.is_oversize(wider)


budgets = st.builds(
    TokenBudget,
    st.integers(16_000, 80_000),
    attention_tokens=st.none() | st.integers(1, 100_000),
    max_samples=st.none() | st.integers(1, 300),
    pad_to_multiple_of=st.sampled_from([1, 8, 64]),
    shapes=st.integers(1, 80),
    row_sizes=st.sampled_from(["any", "even", "friendly"]),
)


COARSE = TokenBudget(4096, shapes=1, attention_tokens=16, pad_to_multiple_of=64)
"""Of which a whole row leaves much unused."""
SIXES = TokenBudget(16_000, shapes=9, row_sizes=6, oversize="drop", attention_tokens=900)
"""Of which all shapes have a multiple of 6 rows."""


@given(budget=budgets, lengths=st.lists(st.integers(1, 40_000), min_size=1))
@example(budget=COARSE, lengths=[190])
@example(budget=SIXES, lengths=[1, 60, 1160])
def test_a_ladder_holds_every_group_that_the_budget_holds(budget, lengths):
    ladder = budget.shape_ladder()
    assert 1 <= len(ladder) <= budget.shapes
    rows, widths = zip(*ladder, strict=True)
    assert list(widths) == sorted(set(widths)) and widths[-1] == budget.capacity
    assert list(rows) == sorted(rows, reverse=True)
    assert all(row * budget.row_cost(width) <= budget.tokens for row, width in ladder)
    assert all(width % budget.pad_to_multiple_of == 0 for width in widths)
    for length in lengths:
        if budget.is_oversize(length):
            assert budget.shape([length]) not in ladder
            continue
        shape = budget.shape([length])
        assert shape in ladder and shape[1] == budget.width(length) >= length
        assert budget.shape([length] * shape[0]) == shape


# --- row sizes ------------------------------------------------------------------------------------


EVEN = {1, *range(2, 2000, 2)}
FRIENDLY = {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536}
ALLOWED = {"any": set(range(1, 2000)), "even": EVEN, "friendly": FRIENDLY}


@pytest.mark.parametrize(("sizes", "allowed"), ALLOWED.items())
def test_rows_are_the_next_smaller_number_allowed(sizes, allowed):
    rows, numbers = np.arange(1, 2000), sorted(allowed)
    expected = [numbers[bisect_right(numbers, number) - 1] for number in rows.tolist()]
    assert allowed_rows(rows, sizes).tolist() == expected


def test_the_largest_numbers_of_rows_are_rounded_as_well():
    most = np.array([2**31 - 1, 2**31 - 2, 3 << 29])
    assert allowed_rows(most, "friendly").tolist() == [3 << 29] * 3
    assert allowed_rows(most, "even").tolist() == [2**31 - 2, 2**31 - 2, 3 << 29]


def test_multiples_of_a_number_of_rows_are_allowed_and_may_be_none():
    assert allowed_rows(np.array([1, 5, 6, 11, 12]), 6).tolist() == [0, 0, 6, 6, 12]


# --- errors, fingerprints, and limits that are lowered -------------------------------------------


@pytest.mark.parametrize(
    ("fields", "tokens", "limit"),
    [
        ({}, 101, "`tokens` is 100"),
        ({"max_patches": 5}, 100, "`max_patches` is 5"),  # the tokens fit
        ({"max_patches": 5}, 101, "`tokens` is 100"),
        (
            {"pad_to_multiple_of": 32},
            97,
            "`tokens` is 100, so a sample may have 96 (multiples of 32)",
        ),
        (
            {"row_sizes": 4, "shapes": 3, "oversize": "drop"},
            26,
            "`tokens` is 100, so a sample may have 25 (4 rows, multiples of 1)",
        ),
        (
            {"attention_tokens": 10},
            28,
            "`tokens` is 100, the cost of a row of 27 with `attention_tokens=10`",
        ),
    ],
)
def test_an_error_names_the_limit_that_a_sample_exceeds(fields, tokens, limit):
    assert TokenBudget(100, **fields).limit_of(tokens) == limit


def test_the_fingerprint_has_each_field_and_may_be_changed():
    budget = TokenBudget(100, max_samples=3)
    fingerprint = budget.fingerprint()
    assert TokenBudget(**fingerprint) == budget
    fingerprint["tokens"] = 5
    assert budget.tokens == 100


some_limits = st.builds(
    Limits,
    st.integers(1, 300),
    st.none() | st.integers(1, 9),
    st.none() | st.integers(1, 40),
    st.integers(1, 300),
    st.none() | st.integers(1, 40),
)


def is_within(lower, upper):
    pairs = zip(lower, upper, strict=True)
    return all(most is None or (least is not None and least <= most) for least, most in pairs)


@given(some_limits, some_limits)
@few
def test_limits_that_are_tightened_are_the_tighter_of_each_two_in_any_order(first, second):
    both = first.tightened(second)
    assert both == second.tightened(first) == both.tightened(first)
    assert is_within(both, first) and is_within(both, second)
    pairs = zip(both, first, second, strict=True)
    assert all(limit in (first_limit, other) for limit, first_limit, other in pairs)


def test_the_limits_of_a_budget_change_neither_its_groups_nor_its_samples():
    budget = TokenBudget(100, max_samples=4, max_patches=9, pad_to_multiple_of=8)
    limits = Limits.of(budget)
    assert limits.group_budget(budget) == limits.sample_budget(budget) == budget


def test_lower_limits_bound_groups_and_samples_and_nothing_else():
    budget = TokenBudget(100, max_samples=4, pad_to_multiple_of=8)
    limits = Limits(50, 2, 7, 60, 8)
    groups, samples = limits.group_budget(budget), limits.sample_budget(budget)
    assert groups == TokenBudget(50, max_samples=2, max_patches=7, pad_to_multiple_of=8)
    assert samples == TokenBudget(60, max_samples=4, max_patches=8, pad_to_multiple_of=8)


def test_groups_are_never_asked_to_be_smaller_than_the_smallest_batch():
    budget = TokenBudget(100, pad_to_multiple_of=8, attention_tokens=32)
    lowest = Limits.of(budget)._replace(tokens=1)
    assert lowest.group_budget(budget).tokens == budget.smallest_cost == 8 + 2
