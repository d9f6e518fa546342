"""The end of a packed row: the one or two samples that fill its remaining room."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from odb_nodes._support.arrays import IntArray
from odb_nodes.core.planning.table import PATCHES, TOKENS

NO_LIMIT = 2**62


class Room(NamedTuple):
    """How much more a row may hold."""

    cost: int
    samples: int
    patches: int

    def beside(self, table: IntArray, columns: IntArray) -> Room:
        """Return the room that remains beside samples of a pool."""
        return Room(
            self.cost - int(table[TOKENS, columns].sum()),
            self.samples - len(columns),
            self.patches - int(table[PATCHES, columns].sum()),
        )


class Filling(NamedTuple):
    """At most two samples, and how much the row misses with them."""

    columns: tuple[int, ...]
    missed: int


Fill = Callable[[IntArray, Room, IntArray], Filling]
"""(columns of the free samples, room, columns of the row so far) -> the best filling."""


def exchanged(
    table: IntArray, oldest: IntArray, room: Room, most_exchanged: int, fill: Fill
) -> tuple[IntArray, int]:
    """Return the columns of a row of the oldest samples, and how much the row misses.

    The last of the oldest samples give way to one or two other samples if these fill the row
    better. Each turn keeps one of the oldest samples fewer than the previous turn, and may take the
    samples that were given up. The first sample always stays. Of equally good rows the first wins,
    which keeps most of the oldest samples.

    table: the pool, with costs in place of tokens; oldest: columns of the oldest samples that fit
    together, by age; room: the room of an empty row.
    """
    free = np.ones(table.shape[1], dtype=bool)
    free[oldest] = False
    columns, least = oldest, NO_LIMIT
    for count in range(len(oldest), max(len(oldest) - most_exchanged, 1) - 1, -1):
        kept = oldest[:count]
        free[oldest[count:]] = True
        filling = fill(np.flatnonzero(free), room.beside(table, kept), kept)
        if filling.missed < least:
            columns = np.concatenate((kept, np.array(filling.columns, dtype=np.int64)))
            least = filling.missed
        if least <= 0:
            break
    return columns, least


def fullest_filling(table: IntArray, free: IntArray, room: Room) -> Filling:
    """Return the one or two free samples that leave the least of a room's cost."""
    fitting = _fitting(table, free, room)
    if not len(fitting) or room.samples < 1:
        return Filling((), room.cost)
    costs, patches = table[TOKENS, fitting], table[PATCHES, fitting]
    single = Filling((int(fitting[-1]),), room.cost - int(costs[-1]))
    if room.samples < 2 or not single.missed:
        return single
    shorter, longer = _longest_partners(costs, room)
    fits = (longer > shorter) & (patches[shorter] + patches[longer] <= room.patches)
    sums = np.where(fits, costs[shorter] + costs[longer], 0)
    if not len(sums) or int(sums.max()) <= int(costs[-1]):
        return single
    pair = int(sums.argmax())
    columns = int(fitting[shorter[pair]]), int(fitting[longer[pair]])
    return Filling(columns, room.cost - int(sums[pair]))


def nearest_filling(
    table: IntArray, extra: IntArray, free: IntArray, room: Room, target: int
) -> Filling:
    """Return the one or two free samples that best fill a room and have the target as their extra.

    Missed cost, and extra above the target, count twice. extra: the extra of each pooled sample,
    (n,).
    """

    def missed(costs: IntArray, extras: IntArray) -> IntArray:
        above = extras - target
        return 2 * np.maximum(room.cost - costs, 0) + np.abs(above) + np.maximum(above, 0)

    fitting = _fitting(table, free, room)
    if not len(fitting) or room.samples < 1:
        nothing = np.zeros(1, np.int64)
        return Filling((), int(missed(nothing, nothing)[0]))
    costs, extras, patches = table[TOKENS, fitting], extra[fitting], table[PATCHES, fitting]
    alone = missed(costs, extras)
    best = int(alone.argmin())
    single = Filling((int(fitting[best]),), int(alone[best]))
    if room.samples < 2:
        return single
    shorter, longer = _longest_partners(costs, room)
    # The next shorter partner may have an extra that is nearer to the target.
    shorter, longer = np.concatenate((shorter, shorter)), np.concatenate((longer, longer - 1))
    fits = (longer > shorter) & (patches[shorter] + patches[longer] <= room.patches)
    shorter, longer = shorter[fits], longer[fits]
    if not len(shorter):
        return single
    together = missed(costs[shorter] + costs[longer], extras[shorter] + extras[longer])
    pair = int(together.argmin())
    if together[pair] >= single.missed:
        return single
    columns = int(fitting[shorter[pair]]), int(fitting[longer[pair]])
    return Filling(columns, int(together[pair]))


def _fitting(table: IntArray, free: IntArray, room: Room) -> IntArray:
    """Return the columns of the free samples that fit into a room alone."""
    fitting = free[: np.searchsorted(table[TOKENS, free], room.cost, side="right")]
    if room.patches < NO_LIMIT // 2:
        fitting = fitting[table[PATCHES, fitting] <= room.patches]
    return fitting


def _longest_partners(costs: IntArray, room: Room) -> tuple[IntArray, IntArray]:
    """Return pairs of ascending costs: each of at most half the room, and its largest partner.

    A sample of at most half the room leaves room for another sample of its cost, so its partner
    never comes before it in the table. If no other sample fits, the partner is the sample itself.
    """
    shorter = np.arange(np.searchsorted(costs, room.cost // 2, side="right"))
    longer = np.searchsorted(costs, room.cost - costs[shorter], side="right") - 1
    return shorter, longer
