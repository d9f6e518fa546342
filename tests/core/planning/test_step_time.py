"""The time of a step: from tokens, pairs of tokens and patches, in whole tokens."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pools import budgets
from refusals import refuses

from odb_nodes import TokenBudget
from odb_nodes.core.planning import StepTime
from odb_nodes.core.planning.budget import ATTENTION_TOKENS
from odb_nodes.core.planning.step_time import aim_of, check_step_time, step_time_of

few = settings(max_examples=max(20, settings.default.max_examples // 5))

PADDED, PACKED = TokenBudget(1_000), TokenBudget(1_000, layout="packed")
NO_PATCHES = [0, 0]


def ints(*values):
    return np.array(values, np.int64)


def test_extra_is_what_a_sample_takes_beside_its_tokens_in_tokens():
    times = StepTime(squares=0.1, patches=2)
    assert times.extra(ints(10, 20), ints(0, 3)).tolist() == [10, 46]
    # It is in tokens, whatever a token takes.
    assert StepTime(tokens=4, squares=0.4, patches=8).extra(ints(10, 20), ints(0, 3)).tolist() == [
        10,
        46,
    ]
    assert StepTime().extra(ints(10, 20), ints(0, 3)).tolist() == [0, 0]
    assert times.extra(ints(), ints()).dtype == np.int64


def test_each_term_is_rounded_for_each_sample_so_that_sums_have_no_order():
    times = StepTime(squares=0.3, patches=0.7)
    assert times.extra(ints(1, 2, 3), ints(0, 0, 0)).tolist() == [0, 1, 3]
    assert times.extra(ints(1, 2, 3), ints(1, 1, 1)).tolist() == [1, 2, 4]
    lengths = [1, 1, 1, 2]
    assert times.of_group(lengths, [0] * 4, PACKED) == 5 + 0 + 0 + 0 + 1


def test_no_time_is_above_31_bits():
    times = StepTime(squares=1e9, patches=2**31 - 1, base=2**31 - 1)
    assert times.extra(ints(2**20, 1), ints(0, 5)).tolist() == [2**31 - 1] * 2
    assert times.of_group([2**20], [5], PADDED) == 2**31 - 1


@pytest.mark.parametrize("unit", [5e-324, 1e-300, 1, 1e100])
def test_times_are_numbers_in_any_unit(unit):
    for times in (StepTime(tokens=unit), StepTime(tokens=unit, squares=unit * 2**30)):
        assert times.extra(ints(0, 2**31 - 1), ints(0, 0)).min() >= 0
        assert 1 <= times.of_group([3], [0], PADDED) <= 2**31 - 1
        assert 0 < times.seconds_of(2.0**31, 2.0**62) < float("inf")
    assert not np.isnan(times.half_at)


def test_padded_rows_attend_over_their_whole_width():
    times = StepTime(squares=0.1, patches=2, base=7)
    assert times.of_group([10, 20], [0, 3], PADDED) == 40 + 2 * 40 + 6 + 7
    assert times.of_group([10, 20], [0, 3], PACKED) == 30 + 10 + 40 + 6 + 7


def test_a_group_takes_as_long_as_the_batch_that_it_becomes():
    times = StepTime(squares=0.1)
    wide = TokenBudget(1_000, pad_to_multiple_of=16)
    assert times.of_group([10, 20], NO_PATCHES, wide) == 2 * 32 + 2 * round(0.1 * 32**2)
    wide_row = TokenBudget(1_000, pad_to_multiple_of=16, layout="packed")
    assert times.of_group([10, 20], NO_PATCHES, wide_row) == 32 + 10 + 40  # padding attends to none
    (rows, width), *_ = [
        shape for shape in TokenBudget(120, shapes=3).shape_ladder() if shape[1] >= 20
    ]
    on_ladder = times.of_group([10, 20], NO_PATCHES, TokenBudget(120, shapes=3))
    assert on_ladder == rows * (width + round(0.1 * width**2))


@given(
    st.lists(st.tuples(st.integers(1, 200), st.integers(0, 30)), min_size=1, max_size=20),
    budgets,
    st.builds(
        StepTime,
        tokens=st.floats(0.01, 9),
        squares=st.floats(0, 3),
        patches=st.floats(0, 3),
        base=st.floats(0, 99),
    ),
    st.randoms(use_true_random=False),
)
@few
def test_the_time_of_a_group_does_not_depend_on_the_order_of_samples(
    samples, budget, times, random
):
    def time(samples):
        tokens, patches = zip(*samples, strict=True)
        return times.of_group(tokens, patches, budget)

    measured = time(samples)
    assert type(measured) is int
    assert measured == time(random.sample(samples, len(samples)))
    tokens, patches = zip(*samples, strict=True)
    assert measured >= min(budget.padded_tokens(tokens), 2**31 - 1)
    exact = times.seconds_of(budget.padded_tokens(tokens), squares_of(tokens, budget), sum(patches))
    rows = max(len(samples), budget.shape(tokens)[0])
    assert abs(measured - exact / times.tokens) <= 1.5 + 0.5 * rows + 1e-9 * measured


def squares_of(tokens, budget):
    if budget.layout == "packed":
        return sum(length**2 for length in tokens)
    rows, width = budget.shape(tokens)
    return rows * width**2


def test_seconds_are_in_the_unit_of_the_fields():
    times = StepTime(tokens=2, squares=3, patches=5, base=7)
    assert times.seconds_of(10, 100) == 7 + 20 + 300
    assert times.seconds_of(ints(10, 1), ints(100, 1), ints(1, 0)).tolist() == [332, 12]


def test_a_typical_model_takes_as_long_for_attention_as_for_tokens_at_one_length():
    for budget, length in (
        (PACKED, ATTENTION_TOKENS),
        (TokenBudget(1_000, layout="packed", attention_tokens=300), 300),
    ):
        typical = StepTime.typical(budget)
        assert typical == StepTime(squares=1 / length)
        assert typical.extra(ints(length), ints(0)).tolist() == [length]


def test_ranks_are_level_in_time_without_being_asked_to_where_steps_are_mixed():
    assert step_time_of(None, PACKED) == StepTime.typical(PACKED)
    assert step_time_of(None, PADDED) is None
    assert step_time_of(None, None) is None
    for given_time in (StepTime(), StepTime(squares=2), len):
        for budget in (PACKED, PADDED, None):
            assert step_time_of(given_time, budget) is given_time


def test_a_step_time_without_terms_is_refused():
    check_step_time(None)
    for neither in (3, "squares"):
        with pytest.raises(TypeError, match="`step_time`"):
            check_step_time(neither)


def test_groups_are_formed_for_times_that_costs_do_not_tell():
    assert aim_of(None) is None
    assert aim_of(len) is None
    assert StepTime(base=9).is_of_tokens and aim_of(StepTime(base=9)) is None
    for times in (StepTime(squares=1), StepTime(patches=1)):
        assert not times.is_of_tokens and aim_of(times) is times


def test_fields_are_numbers_and_are_known_by_their_values():
    assert StepTime(tokens=1, squares=2) == StepTime(tokens=1.0, squares=2.0)
    assert str(StepTime(squares=0.25)) == "StepTime(tokens=1, squares=0.25)"
    assert str(StepTime(tokens=2, patches=3, base=4)) == "StepTime(tokens=2, patches=3, base=4)"


test_arguments_that_are_not_valid_are_named = refuses(
    [
        ({"tokens": 0}, ValueError, r"`tokens` must be in \(0, 1e100\], but is 0"),
        ({"tokens": 1e200}, ValueError, "`tokens` must be in .* but is 1e.200"),
        (
            {"squares": 1e10},
            ValueError,
            r"`squares` must be at most 2147483647 times `tokens` \(1\)",
        ),
        ({"tokens": 1e-300, "base": 1e300}, ValueError, "`base` must be .* but is 1e.300"),
        ({"tokens": 1e-9, "patches": 9}, ValueError, "`patches` must be at most"),
        ({"tokens": -1.0}, ValueError, "`tokens`"),
        ({"squares": -0.1}, ValueError, r"`squares` must be in \[0, inf\), but is -0.1"),
        ({"squares": float("inf")}, ValueError, "`squares`"),
        ({"patches": float("nan")}, ValueError, "`patches`"),
        ({"base": -1}, ValueError, "`base`"),
        ({"squares": "1"}, TypeError, "`squares` must be a number"),
        ({"tokens": None}, TypeError, "`tokens` must be a number"),
    ],
    lambda fields: StepTime(**fields),
)
