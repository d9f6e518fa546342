"""The window that suits the lengths of samples."""

import numpy as np
import pytest

from odb_nodes import TokenBudget
from odb_nodes.planning.auto_window import (
    PulledLengths,
    check_window,
    chosen_window,
    parse_window,
    shown,
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
    few = PulledLengths().and_of(small, [500] * 20, [0] * 20)
    many = few.and_of(small, [1000] * 20, [0] * 20)
    assert few.report(small) == (20, 2**20)
    assert many.report(small) == (40, 3 * 2**20)
    assert chosen_window([few.report(small), many.report(small)]) == 32 * 60 // 4
    assert chosen_window([few.report(small), few.report(large)]) == round(32 * 40 / 1.5)
    assert chosen_window([(0, 0), few.report(small)]) == 32 * 20
    assert chosen_window([(0, 0), (0, 0)]) == 0


def test_lengths_that_come_in_parts_count_alike():
    lengths, budget = np.random.default_rng(0).integers(1, 4000, 900), TokenBudget(8000)
    whole = PulledLengths().and_of(budget, lengths, lengths)
    parts = PulledLengths()
    for part in np.array_split(lengths, 7):
        parts = parts.and_of(budget, part, part)
    assert parts == whole
    assert whole.patches == lengths.sum()


REFUSALS = [
    *((check_window, "window", value) for value in ("Auto", "7", 0, -1, 1.5, True, None, 2**31)),
    *((parse_window, value) for value in ("Auto", "-1", "0", "1.5", "")),
]


@pytest.mark.parametrize("call", REFUSALS)
def test_another_window_is_an_error(call):
    check, *given = call
    with pytest.raises((TypeError, ValueError), match="`window` must be "):
        check(*given)


def test_a_window_on_the_command_line():
    assert (parse_window("auto"), parse_window("256")) == ("auto", 256)
    assert (shown("auto", 1311), shown(1024, 1024)) == ("auto (1,311)", "1,024")
