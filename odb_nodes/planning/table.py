"""The table of a pool: one column per pooled sample, in order of (tokens, ordinal)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]

TOKENS, ORDINALS, PATCHES, TASKS = range(4)
"""The rows of the table. The last one is there only where groups depend on it."""


def first_fit(needs: IntArray, rooms: IntArray) -> list[list[int]]:
    """Return all columns in groups: each column, from the last, goes to the first group with room.

    If one of the groups is taken out, the rest makes the others again: a sample of a later group
    did not fit into it, and a sample of an earlier group never came to it. Both are (limits,
    samples) int64: what each sample takes of each limit, and the limits of a group that it begins.
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
