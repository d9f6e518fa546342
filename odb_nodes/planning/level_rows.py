"""Packed rows of all ranks that take about as long as each other, of samples that are all known.

The samples that take longest are dealt out first, each to the row that takes the least so far and
has room. So rows are level in time; full, since short samples come last; and of mixed lengths.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush

import numpy as np

from odb_nodes.planning.budget import round_up
from odb_nodes.planning.packing import Packing
from odb_nodes.planning.table import IntArray

STEPS = 32
"""Steps whose rows are dealt out together: with fewer, the largest samples leave them unlike."""
LEAST_ROWS = 512
"""Rows that are dealt out together where ranks are few."""
FILLED = 0.999
"""Share of the rows' room that is dealt out. Samples that still have none wait for more rows."""
_HAS_NO_ROOM = 2**62


def level_rows(
    tokens: IntArray, extra: IntArray, packing: Packing, world_size: int, window: int | None
) -> Iterator[list[IntArray]]:
    """Yield the rows of an epoch, those of some whole steps at a time, by their samples' places.

    Args:
        tokens: length of each sample, in the order of the epoch, (n,).
        extra: what each takes beside its tokens, (n,).
        packing: what a row holds.
        world_size: number of ranks, which share the steps.
        window: about how many samples of each rank are dealt out together. Default: any number.
    """
    room = packing.room.cost
    costs = np.minimum(packing.costs(tokens), room)  # An oversize sample has a row of its own.
    needs = np.maximum(costs, room // packing.room.samples)
    sums = np.cumsum(needs)
    parts = round(int(sums[-1]) / (room * max(STEPS * world_size, LEAST_ROWS)))
    if window is not None:
        parts = max(parts, -(-len(tokens) // (window * world_size)))
    waiting, start = np.empty(0, np.int64), 0
    for part in range(1, parts):
        stop = int(np.searchsorted(sums, int(sums[-1]) * part // parts, "right"))
        places = np.concatenate((waiting, np.arange(start, stop)))
        waiting, start = places, stop
        need = np.append(0, np.cumsum(needs[places]))
        rows = min(int(need[-1] / (room * FILLED)), len(places)) // world_size * world_size
        if rows:  # The youngest wait that these rows are too few for, and not the shortest.
            count = max(rows, int(np.searchsorted(need, rows * room * FILLED, "right")) - 1)
            oldest = places[:count]
            dealt, left = _dealt(costs[oldest], extra[oldest], packing, rows)
            yield [oldest[row] for row in dealt]
            waiting = np.concatenate((oldest[np.array(sorted(left), np.int64)], places[count:]))
    places = np.concatenate((waiting, np.arange(start, len(tokens))))
    last = fewest_rows(costs[places], extra[places], packing, world_size)
    yield [places[row] for row in last]


def fewest_rows(
    costs: IntArray, extra: IntArray, packing: Packing, multiple: int = 1
) -> list[list[int]]:
    """Return level rows of all samples, as few as are found: a multiple of some number."""
    room = packing.room
    rows = max(-(-int(costs.sum()) // room.cost), -(-len(costs) // room.samples))
    rows = round_up(rows, multiple)
    while (dealt := rows_of_all(costs, extra, packing, rows)) is None:
        rows += multiple
    return dealt


def rows_of_all(
    costs: IntArray, extra: IntArray, packing: Packing, most: int
) -> list[list[int]] | None:
    """Return level rows of all samples, at most so many; `None` where none are found.

    Args:
        costs: what each sample takes of a row, no more than its room, (n,).
        extra: what each takes beside its tokens, (n,).
        packing: what a row holds.
        most: number of rows.
    """
    for times in (costs + extra, extra):  # Rows that are nearly full cannot be level in both.
        dealt, left = _dealt(costs, extra, packing, most, times)
        if not left:
            return dealt
    return None


def _dealt(
    costs: IntArray,
    extra: IntArray,
    packing: Packing,
    rows: int,
    times: IntArray | None = None,
) -> tuple[list[list[int]], list[int]]:
    """Return the samples of each row, and those that have no room.

    times: what rows are level in, (n,). Default: `extra`.
    """
    most = packing.room.samples
    order = np.lexsort((-costs, -extra))
    columns = (order, costs[order], (extra if times is None else times)[order])
    room = [packing.room.cost] * rows
    taken = np.zeros(rows, np.int64)  # time of each row; `_HAS_NO_ROOM` for the samples at hand
    time_of_blocked = dict[int, int]()
    blocked: list[tuple[int, int]] = []  # -room and number of such a row
    dealt, left = [list[int]() for _ in range(rows)], list[int]()
    for sample, cost, time in zip(*(column.tolist() for column in columns), strict=True):
        while blocked and -blocked[0][0] >= cost:
            row = heappop(blocked)[1]
            taken[row] = time_of_blocked.pop(row)
        row = int(taken.argmin())
        while room[row] < cost and taken[row] != _HAS_NO_ROOM:
            heappush(blocked, (-room[row], row))
            time_of_blocked[row] = int(taken[row])
            taken[row] = _HAS_NO_ROOM
            row = int(taken.argmin())
        if taken[row] == _HAS_NO_ROOM:
            left.append(sample)
            continue
        dealt[row].append(sample)
        room[row] -= cost
        taken[row] += time
        if len(dealt[row]) == most:
            taken[row] = _HAS_NO_ROOM
    for empty in [row for row in dealt if not row]:  # where the last samples take no time
        largest = max(dealt, key=len)
        if len(largest) > 1:
            empty.append(largest.pop())
    return [row for row in dealt if row], left
