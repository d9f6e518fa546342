"""A hash of integers: random numbers that depend on their arguments alone, on no library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

_MASK64 = 2**64 - 1
_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def hash_ints(*values: int) -> int:
    """Return a 64-bit hash of integers: SplitMix64 (Steele et al., 2014), absorbing one by one."""
    state = 0
    for value in values:
        state = (state + (value & _MASK64) + _STEP) & _MASK64
        state = ((state ^ (state >> 30)) * _FIRST) & _MASK64
        state = ((state ^ (state >> 27)) * _SECOND) & _MASK64
        state ^= state >> 31
    return state


def hash_rows(*columns: Sequence[int]) -> list[int]:
    """Return `hash_ints` of each row of columns of one length: faster from 16 rows up."""
    state: Any = np.uint64(0)
    for column in columns:
        state = state + np.array([value & _MASK64 for value in column], np.uint64)
        state += np.uint64(_STEP)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(_FIRST)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(_SECOND)
        state ^= state >> np.uint64(31)
    return state.tolist()  # type: ignore[no-any-return]
