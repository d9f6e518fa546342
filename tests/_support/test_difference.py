"""The first place where two values differ."""

import math

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from odb_nodes._support.difference import difference


class LargestResult(TorchDispatchMode):
    """Notes the bytes of the largest tensor that is made."""

    def __init__(self):
        super().__init__()
        self.most_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.most_bytes = max(self.most_bytes, result.nbytes)
        return result


@pytest.mark.parametrize(
    ("expected_value", "value", "message"),
    [
        (torch.zeros(2, 3), torch.tensor([[0.0] * 3, [0, 1, 1]]), "[(1, 1)] is 1.0 instead of 0.0"),
        (np.array([1, 2]), np.array([1, 3]), "[(1,)] is 3 instead of 2"),
        (np.array(1), np.array(2), "[()] is 2 instead of 1"),
        (torch.tensor(math.nan), torch.tensor(0.0), "[()] is 0.0 instead of nan"),
        (np.array([math.nan]), np.array([math.nan]), None),
        (torch.zeros(0, 3), torch.zeros(0, 3), None),
        (torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr(), None),
        (torch.eye(3).to_sparse(), 2 * torch.eye(3).to_sparse(), "[(0, 0)] is 2.0 instead of 1.0"),
        ({1: 2, "a": 3}, {"1": 2, "a": 3}, " has keys ['1', 'a'] instead of ['a', 1]"),
    ],
)
def test_the_first_place_that_differs_is_named(expected_value, value, message):
    assert difference(expected_value, value) == message


def test_large_tensors_that_differ_take_less_memory_than_they_have():
    zeros, ones = torch.zeros(100, 100), torch.ones(100, 100)
    with LargestResult() as largest:
        assert difference(zeros, ones) == "[(0, 0)] is 1.0 instead of 0.0"
    assert 0 < largest.most_bytes < zeros.nbytes
