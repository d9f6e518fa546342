import numpy as np
import pytest

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
        ({"tokens": 8, "layout": "packed"}, ValueError, "`layout`"),
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
