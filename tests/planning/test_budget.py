import numpy as np
import pytest
from hypothesis import example, given
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
        ({"tokens": 8, "row_sizes": "odd"}, ValueError, r"`row_sizes` must be one of"),
        (
            {"tokens": 8, "row_sizes": "even", "layout": "packed"},
            ValueError,
            '`row_sizes` must be "any" where `layout` is "packed"',
        ),
        ({"tokens": 8, "attention_tokens": 0}, ValueError, "`attention_tokens`"),
        ({"tokens": 8, "attention_tokens": 0.5}, TypeError, "`attention_tokens`"),
        (
            {"tokens": 8, "attention_tokens": 4, "pad_to_multiple_of": 8},
            ValueError,
            "`tokens` must be at least 24, what the shortest row costs with `attention_tokens=4`",
        ),
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


def test_a_row_of_attention_tokens_costs_twice_its_tokens():
    budget = TokenBudget(6000, attention_tokens=1000)
    assert [budget.row_cost(width) for width in (1, 31, 32, 1000, 2000)] == [1, 31, 33, 2000, 6000]
    assert budget.capacity == 2000
    assert [budget.is_oversize(tokens) for tokens in (2000, 2001)] == [False, True]
    assert budget.limit_of(2001) == (
        "`tokens` is 6000, with `attention_tokens=1000` that of a row of 2000"
    )


def test_attention_adds_to_the_cost_of_a_padded_group_for_each_row_as_wide_as_it_is():
    budget = TokenBudget(6000, attention_tokens=1000, pad_to_multiple_of=8)
    assert budget.shape([997, 300]) == (2, 1000)
    assert budget.padded_tokens([997, 300]) == 2000
    assert budget.cost([997, 300]) == 4000
    assert budget.batch_cost((2, 2000), [997, 300]) == 12_000


def test_attention_adds_to_the_cost_of_a_packed_group_for_each_sample_without_padding():
    budget = TokenBudget(6000, attention_tokens=1000, pad_to_multiple_of=8, layout="packed")
    assert budget.padded_tokens([999, 30, 1000]) == 2032
    assert budget.cost([999, 30, 1000]) == 2032 + 998 + 0 + 1000
    assert budget.capacity == 2000


def test_with_attention_a_ladder_has_fewer_rows_of_long_samples():
    budget = TokenBudget(6000, attention_tokens=1000, shapes=3)
    assert budget.shape_ladder() == ((49, 110), (9, 457), (1, 2000))
    assert budget.cost([80, 80]) == 49 * (110 + 12)
    packed = TokenBudget(6000, attention_tokens=1000, shapes=3, layout="packed")
    assert packed.shape_ladder() == ((1, 2000),)
    assert packed.cost([1500, 500]) == 2000 + 2250 + 250


@pytest.mark.parametrize(
    ("sizes", "rows"),
    [("any", [1, 2, 6, 13, 21]), ("even", [1, 2, 6, 12, 20]), ("friendly", [1, 2, 6, 12, 16])],
)
def test_the_shapes_of_a_ladder_have_rows_of_the_sizes_asked_for(sizes, rows):
    ladder = TokenBudget(645, shapes=5, max_samples=21, row_sizes=sizes).shape_ladder()
    assert [count for count, _ in reversed(ladder)] == rows


def test_a_field_that_states_were_saved_without_is_in_the_fingerprint_where_it_is_set():
    before = {"max_samples", "max_patches", "pad_to_multiple_of", "layout", "oversize", "shapes"}
    assert set(TokenBudget(9).fingerprint()) == {"tokens", *before}
    assert TokenBudget(9, attention_tokens=4).fingerprint()["attention_tokens"] == 4
    assert TokenBudget(9, row_sizes="even").fingerprint()["row_sizes"] == "even"


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


@given(budget=budgets, lengths=st.lists(st.integers(1, 40_000), min_size=1))
@example(budget=COARSE, lengths=[190])
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


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("method", ["cost", "shape", "padded_tokens"])
def test_a_group_of_no_samples_is_an_error(layout, method):
    with pytest.raises(ValueError, match="`tokens` must have the length of one sample or more"):
        getattr(TokenBudget(10, layout=layout), method)([])
