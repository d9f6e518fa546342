"""Rows of integers: one per sample."""

from collections import UserDict

import numpy as np
import pytest
import torch

from odb_nodes.core.token_values import flatten_row
from odb_nodes.errors import SampleError


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_rows_and_their_batches_of_one_are_rows(kind):
    assert list(flatten_row("input_ids", kind([3, 4]))) == [3, 4]
    assert list(flatten_row("input_ids", kind([[3, 4]]))) == [3, 4]


@pytest.mark.parametrize("values", ["text" * 1000, {"input_ids": [1] * 1000}, UserDict(a=[1]), 5])
def test_what_is_no_row_is_cut_in_the_error(values):
    with pytest.raises(
        SampleError, match=r"`input_ids` must be a list.*\[\"input_ids\"\]"
    ) as caught:
        flatten_row("input_ids", values)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("kind", [np.int64, torch.tensor])
@pytest.mark.parametrize("count", [1, 3])
def test_a_list_of_integers_of_numpy_or_torch_is_a_row(kind, count):
    assert len(flatten_row("input_ids", [kind(5)] * count)) == count
