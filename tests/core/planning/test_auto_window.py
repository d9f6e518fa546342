"""The window that suits the lengths of samples, and the warning where one is too small."""

import warnings

import numpy as np
import pytest

from odb_nodes import TokenBudget
from odb_nodes.core.planning.auto_window import (
    PoolCheck,
    PulledLengths,
    check_window,
    chosen_window,
    parse_window,
    shown,
    window_before_ranks_agree,
    window_samples,
)


def window_of(lengths, patches=None, tokens=10_000, **fields):
    patches = [0] * len(lengths) if patches is None else patches
    return window_samples("auto", TokenBudget(tokens, **fields), lengths, patches)


@pytest.mark.parametrize(
    ("given", "window"),
    [
        (([500] * 10,), 32 * 20),
        (([300, 500, 700],), 32 * 20),
        (([499],), round(32 * 10_000 / 499)),
        (([3, 4],), 4096),  # within limits
        (([5000],), 128),
        # A sample that exceeds the budget fills one group, however long it is.
        (([500] * 9 + [10**6],), round(32 * 10 * 10_000 / 14_500)),
    ],
)
def test_it_holds_32_budgets_within_its_limits(given, window):
    assert window_of(*given) == window


@pytest.mark.parametrize(
    ("patches", "fields", "groups_of"),
    [
        (0, {"max_samples": 8}, 8),
        (0, {"max_samples": 64}, 20),
        (100, {"max_patches": 1000}, 10),
        (200, {"max_patches": 1000, "max_samples": 4}, 4),
        (1, {"max_patches": 1000}, 20),
        # With attention, a row of 500 tokens costs 500 + 500 * 500 / 500.
        (0, {"attention_tokens": 500}, 10),
        (0, {"attention_tokens": 500, "layout": "packed"}, 10),
        (0, {"layout": "packed"}, 20),
    ],
)
def test_a_group_is_full_by_the_limit_that_is_reached_first(patches, fields, groups_of):
    assert window_of([500] * 10, [patches] * 10, **fields) == 32 * groups_of


def test_ranks_choose_by_the_lengths_of_all_whatever_their_budgets():
    small, large = TokenBudget(10_000), TokenBudget(20_000)
    few = PulledLengths().plus(small, [500] * 20, [0] * 20)
    many = few.plus(small, [1000] * 20, [0] * 20)
    assert few.report(small) == (20, 2**20)
    assert many.report(small) == (40, 3 * 2**20)
    assert chosen_window([few.report(small), many.report(small)]) == 32 * 60 // 4
    assert chosen_window([few.report(small), few.report(large)]) == round(32 * 40 / 1.5)
    assert chosen_window([(0, 0), few.report(small)]) == 32 * 20
    assert chosen_window([(0, 0), (0, 0)]) == 0


def test_lengths_that_come_in_parts_count_alike():
    lengths, budget = np.random.default_rng(0).integers(1, 4000, 900), TokenBudget(8000)
    whole = PulledLengths().plus(budget, lengths, lengths)
    parts = PulledLengths()
    for part in np.array_split(lengths, 7):
        parts = parts.plus(budget, part, part)
    assert parts == whole
    assert whole.patches == lengths.sum()


WINDOWS = [
    *((check_window, "window", value) for value in ("Auto", "7", 0, -1, 1.5, True, None, 2**31)),
    *((parse_window, value) for value in ("Auto", "-1", "0", "1.5", "")),
]


@pytest.mark.parametrize("call", WINDOWS)
def test_another_window_is_an_error(call):
    check, *arguments = call
    with pytest.raises((TypeError, ValueError), match="`window` must be "):
        check(*arguments)


def test_a_window_on_the_command_line():
    assert (parse_window("auto"), parse_window("256")) == ("auto", 256)
    assert (shown("auto", 1311), shown(1024, 1024)) == ("auto (1,311)", "1,024")


def test_a_window_that_is_a_number_stays_that_whatever_the_lengths():
    assert window_samples(7, TokenBudget(100), [1] * 99) == 7


def test_an_auto_window_is_within_its_limits_whatever_the_ranks_report():
    assert chosen_window([(1, 2**40)]) == 128
    assert chosen_window([(5, 0)]) == 4096  # they fill no part of a budget that can be told


def test_the_window_does_not_depend_on_which_rank_reports_what():
    reports = [(20, 2**20), (40, 3 * 2**20), (7, 2**19)]
    assert len({chosen_window(order) for order in (reports, reports[::-1])}) == 1
    alone = chosen_window([tuple(map(sum, zip(*reports, strict=True)))])
    assert chosen_window(reports) == alone


def test_a_rank_chooses_by_itself_before_ranks_agree_where_the_epoch_is_four_windows_at_most():
    report = PulledLengths().plus(TokenBudget(1000), [100] * 50, [0] * 50).report(TokenBudget(1000))
    assert chosen_window([report]) == 320
    assert window_before_ranks_agree(report, 4 * 320) == 320
    assert window_before_ranks_agree(report, 4 * 320 + 1) == 0
    assert window_before_ranks_agree(report, None) == 0  # the source has no length


# --- the warning of a pool that is too small -----------------------------------------------------


def messages(groups, window, tokens=60, **fields):
    """The warnings where groups of these lengths come from a full pool."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check = PoolCheck(TokenBudget(tokens, **fields))
        for group in groups:
            check.note(group, window)
    return [str(warning.message) for warning in caught]


PADDED = [[10, 30]] * 16  # 20 tokens on average: a third of the tokens are padding


def test_much_padding_is_warned_of_where_the_pool_holds_fewer_than_six_budgets():
    (message,) = messages(PADDED, 17)
    assert "33% of the tokens of the first 16 batches are padding" in message
    assert "the pool of 17 samples, 20 tokens long on average" in message
    assert "no more than 5.7 budgets of 60 tokens" in message
    assert "`window=36`" in message  # 12 budgets: 12 * 60 / 20
    assert messages(PADDED, 18) == []  # six budgets


@pytest.mark.parametrize(
    ("fields", "window"),
    [
        ({"tokens": 60}, 36),
        ({"tokens": 60, "max_samples": 2}, 24),  # two samples, 2 * 20 tokens, fill a group
        ({"tokens": 60, "max_samples": 9}, 36),
        # Rows cost 20 and 120 with attention, 70 on average: 12 * 600 / 70.
        ({"tokens": 600, "attention_tokens": 10}, 103),
    ],
)
def test_the_window_to_raise_to_holds_twelve_full_groups(fields, window):
    (message,) = messages(PADDED, 4, **fields)
    assert f"`window={window}`" in message
    assert messages(PADDED, window, **fields) == []


def test_it_is_judged_once_by_the_first_sixteen_groups():
    assert messages(PADDED[:15], 8) == []
    assert messages([*[[20, 20]] * 16, *PADDED * 4], 8) == []
    assert len(messages([*PADDED, *[[20, 20]] * 99, *PADDED], 8)) == 1


def test_little_padding_and_packed_rows_are_no_reason_to_warn():
    assert messages([[18, 20]] * 16, 4) == []  # 5 %
    assert messages(PADDED, 4, layout="packed") == []
