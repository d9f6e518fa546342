"""Packed rows of all ranks that take about the same time, from samples whose lengths are known.

The samples that take longest are dealt out first, each to the row with the least time among rows
with room. So rows are level in time and have mixed lengths, and the short samples, which come last,
fill them.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush

import numpy as np

from odb_nodes._support.arrays import IntArray
from odb_nodes.core.planning.budget import round_up
from odb_nodes.core.planning.packing import Packing

STEPS = 32
"""Steps whose rows are dealt out together. In fewer rows, the largest samples make a difference."""
LEAST_ROWS = 512
"""Rows that are dealt out together, at least, if there are few ranks."""
FILLED = 0.999
"""Share of the rows' room that is dealt out. Samples without room wait for the next rows."""
_HAS_NO_ROOM = 2**62


def level_rows(
    tokens: IntArray, extra: IntArray, packing: Packing, world_size: int, window: int | None
) -> Iterator[list[IntArray]]:
    """Yield the rows of an epoch, as the places of their samples, some whole steps at a time.

    tokens, extra: length of each sample, and time beside its tokens, in the order of the epoch,
    (n,); window: about how many samples of each rank are dealt out together. Default: any number.
    """
    room = packing.room.cost
    costs = np.minimum(packing.costs(tokens), room)  # An oversize sample fills a row alone.
    needs = np.maximum(costs, room // packing.room.samples)
    sums = np.cumsum(needs)
    parts = round(int(sums[-1]) / (room * max(STEPS * world_size, LEAST_ROWS)))
    if window is not None:
        parts = max(parts, -(-len(tokens) // (window * world_size)))
    waiting = np.empty(0, np.int64)
    start = 0
    for part in range(1, parts):
        stop = int(np.searchsorted(sums, int(sums[-1]) * part // parts, "right"))
        places = np.concatenate((waiting, np.arange(start, stop)))
        waiting, start = places, stop
        need = np.append(0, np.cumsum(needs[places]))
        rows = min(int(need[-1] / (room * FILLED)), len(places)) // world_size * world_size
        if rows:  # If there are too many samples, the youngest wait, not the shortest.
            count = max(rows, int(np.searchsorted(need, rows * room * FILLED, "right")) - 1)
            oldest = places[:count]
            dealt, unplaced = _dealt(costs[oldest], extra[oldest], packing, rows)
            yield [oldest[row] for row in dealt]
            unplaced_places = oldest[np.array(sorted(unplaced), np.int64)]
            waiting = np.concatenate((unplaced_places, places[count:]))
    places = np.concatenate((waiting, np.arange(start, len(tokens))))
    last = fewest_rows(costs[places], extra[places], packing, world_size)
    yield [places[row] for row in last]


def fewest_rows(
    costs: IntArray, extra: IntArray, packing: Packing, multiple: int = 1
) -> list[list[int]]:
    """Return level rows of all samples; their number is the smallest multiple that is found."""
    room = packing.room
    rows = max(-(-int(costs.sum()) // room.cost), -(-len(costs) // room.samples))
    rows = round_up(rows, multiple)
    while (dealt := rows_of_all(costs, extra, packing, rows)) is None:
        rows += multiple
    return dealt


def rows_of_all(
    costs: IntArray, extra: IntArray, packing: Packing, most: int
) -> list[list[int]] | None:
    """Return at most `most` level rows of all samples; `None` if none are found.

    costs: cost of each sample, at most the room of a row, (n,); extra: its time beside its tokens.
    """
    for times in (costs + extra, extra):  # Nearly full rows may be level only in extra.
        dealt, unplaced = _dealt(costs, extra, packing, most, times)
        if not unplaced:
            return dealt
    return None


def _dealt(
    costs: IntArray,
    extra: IntArray,
    packing: Packing,
    rows: int,
    times: IntArray | None = None,
) -> tuple[list[list[int]], list[int]]:
    """Return the samples of each row, and the samples without room.

    times: times of the samples, in which rows are levelled, (n,). Default: `extra`.
    """
    most = packing.room.samples
    order = np.lexsort((-costs, -extra))
    columns = (order, costs[order], (extra if times is None else times)[order])
    room = [packing.room.cost] * rows
    row_times = np.zeros(rows, np.int64)  # `_HAS_NO_ROOM` for a row without room for the sample
    time_of_blocked = dict[int, int]()
    blocked: list[tuple[int, int]] = []  # (-room, number) of rows without room
    dealt = [list[int]() for _ in range(rows)]
    unplaced = list[int]()
    for sample, cost, time in zip(*(column.tolist() for column in columns), strict=True):
        while blocked and -blocked[0][0] >= cost:
            row = heappop(blocked)[1]
            row_times[row] = time_of_blocked.pop(row)
        row = int(row_times.argmin())
        while room[row] < cost and row_times[row] != _HAS_NO_ROOM:
            heappush(blocked, (-room[row], row))
            time_of_blocked[row] = int(row_times[row])
            row_times[row] = _HAS_NO_ROOM
            row = int(row_times.argmin())
        if row_times[row] == _HAS_NO_ROOM:
            unplaced.append(sample)
            continue
        dealt[row].append(sample)
        room[row] -= cost
        row_times[row] += time
        if len(dealt[row]) == most:
            row_times[row] = _HAS_NO_ROOM
    for empty in [row for row in dealt if not row]:  # The last samples may take no time.
        largest = max(dealt, key=len)
        if len(largest) > 1:
            empty.append(largest.pop())
    return [row for row in dealt if row], unplaced
