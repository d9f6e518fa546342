"""The table of a pool: one column per pooled sample, in order of (tokens, ordinal)."""

from __future__ import annotations

import numpy as np

from odb_nodes._support.arrays import IntArray

NO_ROWS: IntArray = np.empty(0, np.int64)

TOKENS, ORDINALS, PATCHES, TASKS = range(4)
"""The rows of the table. `TASKS` exists only where groups depend on it."""


def first_fit(needs: IntArray, rooms: IntArray) -> list[list[int]]:
    """Return all columns in groups: each column, from the last, goes to the first group with room.

    Without the samples of one group, the remaining samples form the same remaining groups.

    needs: how much each sample takes of each limit, (limits, samples) int64; rooms: the limits of a
    group that begins with the sample, (limits, samples) int64.
    """
    free = np.empty(rooms.shape, dtype=np.int64)
    groups: list[list[int]] = []
    for column in range(needs.shape[1] - 1, -1, -1):
        need = needs[:, column, None]
        fits = (free[:, : len(groups)] >= need).all(axis=0)
        index = int(fits.argmax()) if fits.any() else len(groups)
        if index == len(groups):
            free[:, index] = rooms[:, column]
            groups.append([])
        free[:, index] -= need[:, 0]
        groups[index].append(column)
    return groups
