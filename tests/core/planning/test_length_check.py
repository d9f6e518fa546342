"""Lengths that were passed, compared with observed lengths."""

import numpy as np
import pytest

from odb_nodes import SampleError
from odb_nodes.core.planning.length_check import LengthCheck

PASSED_LENGTHS = np.full(2_000, 20)


def column(numbers, tokens):
    return np.array([*numbers], np.int64), np.full(len(numbers), tokens, np.int64)


def test_lengths_are_refused_once_enough_samples_have_moved():
    so_far = LengthCheck(seen=1_000, moved=260)
    some = so_far.with_group(PASSED_LENGTHS, 20, column(range(19), 20), column([7], 33))
    assert (some.seen, some.moved) == (1_020, 261)
    with pytest.raises(SampleError, match=r"of the first 1030 .* sample 8, which has 44 tokens"):
        some.with_group(PASSED_LENGTHS, 10, column(range(9), 20), column([8], 44))
    assert some.with_group(PASSED_LENGTHS, 10, column(range(10), 20), column([], 0)).seen == 1_030
    few = LengthCheck(seen=2_000, moved=9)
    assert few.with_group(PASSED_LENGTHS, 1, column([], 0), column([7], 33)).moved == 10


def test_lengths_that_are_twice_too_long_are_warned_of():
    with pytest.warns(UserWarning, match="first 1024 samples have 20480 tokens, but .* 9216"):
        LengthCheck().with_group(PASSED_LENGTHS, 1_024, column(range(1_024), 9), column([], 0))
    LengthCheck().with_group(PASSED_LENGTHS, 1_024, column(range(1_024), 10), column([], 0))
