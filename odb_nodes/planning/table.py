"""The table of a pool: one column per pooled sample, in order of (tokens, ordinal)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]

TOKENS, ORDINALS, PATCHES = range(3)
"""Its rows."""


def first_fit(needs: IntArray, rooms: IntArray) -> list[list[int]]:
    """Return all columns in groups: each, the longest first, in the first group that has room.

    Without one of the groups, the others are the same: no sample of a later group fitted into it,
    and no sample of an earlier one came to it.

    Args:
        needs: (limits, samples) int64, what each sample takes of each limit.
        rooms: (limits, samples) int64, what a group has that each sample begins.
    """
    left = np.empty(rooms.shape, dtype=np.int64)
    groups: list[list[int]] = []
    for column in range(needs.shape[1] - 1, -1, -1):
        need = needs[:, column, None]
        fits = (left[:, : len(groups)] >= need).all(axis=0)
        index = int(fits.argmax()) if fits.any() else len(groups)
        if index == len(groups):
            left[:, index] = rooms[:, column]
            groups.append([])
        left[:, index] -= need[:, 0]
        groups[index].append(column)
    return groups
