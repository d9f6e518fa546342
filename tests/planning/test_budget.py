import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from odb_nodes import TokenBudget


def test_an_integer_stands_for_padded_tokens():
    assert TokenBudget.of(100) == TokenBudget(100)
    assert TokenBudget.of(TokenBudget(7, max_samples=2)).max_samples == 2
    assert TokenBudget.of(np.int64(5)).tokens == 5


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"tokens": 0}, ValueError, "`tokens` must be in 1..2147483647, but is 0"),
        ({"tokens": -5}, ValueError, "`tokens`"),
        ({"tokens": 2**31}, ValueError, "`tokens`"),
        ({"tokens": 1.5}, TypeError, "`tokens` must be an integer, but is 1.5"),
        ({"tokens": True}, TypeError, "`tokens`"),
        ({"tokens": None}, TypeError, "`tokens`"),
        ({"tokens": 8, "max_samples": 0}, ValueError, "`max_samples`"),
        ({"tokens": 8, "max_patches": "3"}, TypeError, "`max_patches`"),
        ({"tokens": 8, "pad_to_multiple_of": 0}, ValueError, "`pad_to_multiple_of`"),
        ({"tokens": 8, "pad_to_multiple_of": None}, TypeError, "`pad_to_multiple_of`"),
        ({"tokens": 8, "pad_to_multiple_of": 16}, ValueError, "at most `tokens`"),
        (
            {"tokens": 8, "layout": "flat"},
            ValueError,
            r"`layout` must be one of \(.padded., .packed.\), but is",
        ),
        ({"tokens": 8, "shapes": 0}, ValueError, "`shapes`"),
        ({"tokens": 8, "oversize": "skip"}, ValueError, "`oversize`"),
    ],
)
def test_a_field_that_is_not_valid_is_named_with_its_value(fields, error, message):
    with pytest.raises(error, match=message):
        TokenBudget(**fields)


@pytest.mark.parametrize(
    ("tokens", "patches", "multiple", "oversize"),
    [(100, 0, 1, False), (101, 0, 1, True), (97, 0, 32, True), (96, 0, 32, False), (1, 9, 1, True)],
)
def test_a_sample_is_oversize_when_it_fits_no_group(tokens, patches, multiple, oversize):
    budget = TokenBudget(100, max_patches=8, pad_to_multiple_of=multiple)
    assert budget.is_oversize(tokens, patches) is oversize


def test_a_padded_group_costs_its_longest_sample_for_each_of_its_samples():
    budget = TokenBudget(100, pad_to_multiple_of=8)
    assert budget.shape([5, 17, 9]) == (3, 24)
    assert budget.cost([5, 17, 9]) == 72
    assert budget.shape_ladder() == ()


def test_a_packed_group_costs_the_sum_of_its_samples():
    budget = TokenBudget(100, pad_to_multiple_of=8, layout="packed")
    assert budget.shape([5, 17, 9]) == (1, 32)
    assert budget.cost([5, 17, 9]) == 32
    assert budget.capacity == 96
    assert [budget.is_oversize(tokens) for tokens in (96, 97)] == [False, True]


def test_a_packed_group_of_bounded_shapes_has_one():
    budget = TokenBudget(100, pad_to_multiple_of=8, layout="packed", shapes=60)
    assert budget.shape_ladder() == ((1, 96),)
    assert budget.cost([5]) == budget.cost([90, 6]) == 96
    assert budget.shape([97]) == (1, 104)  # oversize: as wide as it must be


budgets = st.builds(
    TokenBudget,
    st.integers(64, 40_000),
    max_samples=st.none() | st.integers(1, 300),
    pad_to_multiple_of=st.sampled_from([1, 8, 64]),
    shapes=st.integers(1, 80),
)


@given(budget=budgets, lengths=st.lists(st.integers(1, 40_000), min_size=1))
def test_a_ladder_holds_every_group_that_the_budget_holds(budget, lengths):
    ladder = budget.shape_ladder()
    assert 1 <= len(ladder) <= budget.shapes
    rows, widths = zip(*ladder, strict=True)
    assert list(widths) == sorted(set(widths)) and widths[-1] == budget.capacity
    assert list(rows) == sorted(rows, reverse=True)
    assert all(row * width <= budget.tokens for row, width in ladder)
    assert all(width % budget.pad_to_multiple_of == 0 for width in widths)
    for length in lengths:
        if budget.is_oversize(length):
            assert budget.shape([length]) not in ladder
            continue
        shape = budget.shape([length])
        assert shape in ladder and shape[1] == budget.width(length) >= length
        assert budget.shape([length] * shape[0]) == shape
