"""A packed row that takes a given time: one that is full, of samples whose lengths fit that.

What samples take beside their tokens, attention above all, is here called their extra. Few samples
have most of it, and they decide that of a row. So the oldest of these dear ones come first, as long
as the rest of the row can still have what is then left of the target: no less than cheap samples
have, and well below what the largest have. One or two dear ones of the whole pool follow, cheap
ones by age, and then the two samples that fill the row and meet the target best.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from odb_nodes._core.checks import MAX_COUNT
from odb_nodes.planning.caps import costs_of, quantiles
from odb_nodes.planning.table import ORDINALS, PATCHES, TOKENS, IntArray

NO_LIMIT = 2**62
DEAR = 0.8  # quantile of the extra of a pool, above which a sample is dear
STEEP = 0.33  # share of the highest extra that the rest of a row could have, left to be met
LEAST_ROWS = 4  # of a pool, for it to have a target for each
_OLDEST = 128  # samples by age that a row is begun with
_OLDEST_DEAR = 16
_EDGES = 64  # parts of a row, for each of which the highest extra is known
_GOOD = 0.003  # share of row and target that may be missed: nothing better is looked for
_POOR = 0.02  # from here on, another way to fill the row is tried, too
_MOST_GIVEN_BACK = 3


class Room(NamedTuple):
    """How much more a row may hold."""

    cost: int
    samples: int
    patches: int


class Aim(NamedTuple):
    """What a row is filled for."""

    room: Room  # of an empty row
    target: int  # the extra that it should have


class _Sample(NamedTuple):
    """A waiting sample."""

    column: int
    cost: int
    extra: int
    patches: int


class _Pool:
    """Waiting samples by cost, with their extra, and which of them are free."""

    def __init__(self, table: IntArray, extra: IntArray) -> None:
        self.costs, self.patches, self.ages = table[TOKENS], table[PATCHES], table[ORDINALS]
        self.extra = extra
        self.free = np.ones(len(extra), dtype=bool)
        self.dear, self.cheap_density, self.dear_cost = cheap_samples(self.costs, extra)

    def samples(self, columns: IntArray) -> Iterator[_Sample]:
        """Yield the samples of some columns."""
        values = (columns, self.costs[columns], self.extra[columns], self.patches[columns])
        return map(_Sample, *(column.tolist() for column in values))


def cheap_samples(costs: IntArray, extra: IntArray) -> tuple[int, float, int]:
    """Return from which extra a sample is dear, the extra of cheap ones per cost, and a cost.

    That cost is the one that four of five samples are below.
    """
    at = int(DEAR * (len(extra) - 1))
    dear = int(np.partition(extra, at)[at])
    is_cheap = extra <= dear
    return dear, float(extra[is_cheap].sum() / max(costs[is_cheap].sum(), 1)), int(costs[at])


def flat_targets(costs: IntArray, extra: IntArray, room: int, count: int) -> IntArray:
    """Return the extra of `count` rows, from the highest down, as equal as the largest allow; or
    none, (0,), of fewer than `LEAST_ROWS`.

    Each of the largest samples has a row of its own, whose rest is filled with cheap ones. All
    other extra is poured over the rows, into those with the least first.
    """
    rows = int(np.minimum(costs, room).sum()) // room
    if rows < LEAST_ROWS:
        return np.empty(0, np.int64)
    density = cheap_samples(costs, extra)[1]
    top = np.argsort(-extra, kind="stable")[:rows]
    beside = np.maximum(room - costs[top], 0)
    least = np.sort(np.rint(extra[top] + density * beside).astype(np.int64))[::-1]
    total = int(extra.sum())
    before = np.concatenate(([0], np.cumsum(least)[:-1]))
    level = (total - before) // (rows - np.arange(rows))
    reached = level >= least
    flat = np.maximum(least, level[int(reached.argmax())] if reached.any() else 0)
    return costs_of(quantiles(np.minimum(flat, MAX_COUNT), count))


def aimed_row(table: IntArray, extra: IntArray, aim: Aim, due: int | None) -> tuple[IntArray, int]:
    """Return the columns of a row, and what it misses of its room and of its target.

    Args:
        table: that of the pool, its lengths in what they take of a row.
        extra: that of each sample, (n,).
        aim: what the row is filled for.
        due: the column of a sample that is in the row, if it must be.
    """
    pool = _Pool(table, extra)
    row = _Row(pool, aim)
    row.begin(due)
    row.add_dear()
    row.add_by_age()
    return row.filled()


class _Row:
    """A row that is filled."""

    def __init__(self, pool: _Pool, aim: Aim) -> None:
        self._pool, self._aim = pool, aim
        self._part = -(-aim.room.cost // _EDGES)
        edges = np.arange(_EDGES + 2) * self._part
        places = np.searchsorted(pool.costs, edges, side="right")
        highest = np.maximum.accumulate(pool.extra / np.maximum(pool.costs, 1))
        # the highest extra per cost of samples that fit into a room, by parts of a row
        self._densest = highest[np.maximum(places - 1, 0)]
        self._of_part: list[float] = self._densest.tolist()
        self._cost, self._samples, self._patches = aim.room  # that are left
        self._target = min(aim.target, int(0.9 * self._most(aim.room.cost)))
        self._extra = self._target  # that is left to be met
        self._taken: list[_Sample] = []

    def _most(self, cost: int) -> float:
        """Return the highest extra that samples which fill a room could have."""
        return cost * self._of_part[max(cost, 0) // self._part]

    def _take(self, sample: _Sample) -> None:
        self._cost -= sample.cost
        self._extra -= sample.extra
        self._patches -= sample.patches
        self._samples -= 1
        self._taken.append(sample)

    def _give_back(self) -> None:
        sample = self._taken.pop()
        self._cost += sample.cost
        self._extra += sample.extra
        self._patches += sample.patches
        self._samples += 1
        self._pool.free[sample.column] = True

    @property
    def _cheap_would_do(self) -> bool:
        """Whether cheap samples, or nearly those alone, meet what is left of the target."""
        return self._extra - self._pool.cheap_density * self._cost < 0.3 * self._pool.dear

    def begin(self, due: int | None) -> None:
        """Take the oldest dear samples that leave a rest which can be met."""
        pool = self._pool
        dear = np.flatnonzero(pool.extra > pool.dear)
        columns = dear[pool.ages[dear].argsort()[:_OLDEST_DEAR]]
        if due is not None:
            columns = np.concatenate(([due], columns[columns != due]))
        for sample in pool.samples(columns):
            cost, extra = self._cost - sample.cost, self._extra - sample.extra
            is_met = cost >= 0 and pool.cheap_density * cost <= extra <= STEEP * self._most(cost)
            fits = sample.patches <= self._patches and self._samples > 0
            if (is_met and fits) or sample.column == due:
                self._take(sample)
                if self._cheap_would_do:
                    return

    def add_dear(self) -> None:
        """Take up to two samples that leave what cheap ones have."""
        pool = self._pool
        for _ in range(2):
            if self._cheap_would_do or self._samples < 1:
                return
            pool.free[[sample.column for sample in self._taken]] = False
            cost, extra = self._cost - pool.costs, self._extra - pool.extra
            missed: NDArray[np.float64] = extra - pool.cheap_density * cost
            most = cost * self._densest[np.maximum(cost // self._part, 0)]
            missed = np.where(missed < 0, -20 * missed, missed)
            missed += 3 * np.maximum(extra - STEEP * most, 0)
            missed[~pool.free | (cost < 0) | (pool.patches > self._patches)] = np.inf
            column = int(missed.argmin())
            if missed[column] == np.inf:
                return
            self._take(*pool.samples(np.array([column])))

    def add_by_age(self) -> None:
        """Take old samples that leave a rest which can be met, until few more fit."""
        pool, count = self._pool, min(_OLDEST, len(self._pool.free))
        density, of_part, part = pool.cheap_density, self._of_part, self._part
        is_short = self._extra < density * self._cost
        oldest = np.argpartition(pool.ages, count - 1)[:count]
        taken = {sample.column for sample in self._taken}
        for sample in pool.samples(oldest[pool.ages[oldest].argsort()]):
            if self._cost <= pool.dear_cost or self._samples <= 2:
                return
            cost, extra = self._cost - sample.cost, self._extra - sample.extra
            if cost < 0 or sample.patches > self._patches or sample.column in taken:
                continue
            has_least = extra >= 0.6 * density * cost
            has_least = has_least or (is_short and sample.extra <= density * sample.cost)
            if has_least and extra <= max(0.9 * of_part[cost // part], 1.5 * density) * cost:
                self._take(sample)

    def filled(self) -> tuple[IntArray, int]:
        """Return the columns of the row with the best two samples more, and what they miss."""
        taken, least = [sample.column for sample in self._taken], NO_LIMIT
        best = taken
        self._pool.free[taken] = False
        for _ in range(_MOST_GIVEN_BACK + 1):
            room = Room(self._cost, self._samples, self._patches)
            pair, missed = _best_pair(self._pool, room, self._extra)
            if missed < least:
                best, least = [*(sample.column for sample in self._taken), *pair], missed
            is_good = least < _GOOD * (self._aim.room.cost + self._target)
            if is_good or len(self._taken) < 2:
                break
            self._give_back()
        return np.array(best, dtype=np.int64), least


def is_poor(missed: int, aim: Aim) -> bool:
    """Tell whether a row misses so much that another may be better."""
    return missed > _POOR * (aim.room.cost + aim.target)


def nearest_row(
    table: IntArray, extra: IntArray, oldest: IntArray, aim: Aim
) -> tuple[IntArray, int]:
    """Return the oldest samples that fit, with up to eight of them exchanged for two others."""
    pool = _Pool(table, extra)
    pool.free[oldest] = False
    best, least = oldest, NO_LIMIT
    for count in range(len(oldest), max(len(oldest) - 8, 1) - 1, -1):
        kept = oldest[:count]
        pool.free[oldest[count:]] = True
        room = Room(
            aim.room.cost - int(pool.costs[kept].sum()),
            aim.room.samples - count,
            aim.room.patches - int(pool.patches[kept].sum()),
        )
        pair, missed = _best_pair(pool, room, aim.target - int(extra[kept].sum()))
        if missed < least:
            best, least = np.array((*kept.tolist(), *pair), dtype=np.int64), missed
        if not least:
            break
    return best, least


def _best_pair(pool: _Pool, room: Room, extra: int) -> tuple[tuple[int, ...], int]:
    """Return the one or two free samples that fill a room with an extra best, and what they miss.

    Cost that is missed counts twice, as does extra above the target.
    """
    fitting = np.flatnonzero(pool.free[: np.searchsorted(pool.costs, room.cost, side="right")])
    if room.patches < NO_LIMIT // 2:
        fitting = fitting[pool.patches[fitting] <= room.patches]
    nothing = 2 * max(room.cost, 0) + abs(extra) + max(-extra, 0)
    if not len(fitting) or room.samples < 1:
        return (), nothing
    costs, extras, patches = pool.costs[fitting], pool.extra[fitting], pool.patches[fitting]

    def missed(costs: IntArray, extras: IntArray) -> IntArray:
        above = extras - extra
        return 2 * (room.cost - costs) + np.abs(above) + np.maximum(above, 0)

    alone = missed(costs, extras)
    single = int(alone.argmin())
    best, least = (int(fitting[single]),), int(alone[single])
    if room.samples < 2:
        return best, least
    shorter = np.arange(np.searchsorted(costs, room.cost // 2, side="right"))
    longer = np.searchsorted(costs, room.cost - costs[shorter], side="right") - 1
    shorter, longer = np.concatenate((shorter, shorter)), np.concatenate((longer, longer - 1))
    fits = (longer > shorter) & (patches[shorter] + patches[longer] <= room.patches)
    shorter, longer = shorter[fits], longer[fits]
    if len(shorter):
        both = missed(costs[shorter] + costs[longer], extras[shorter] + extras[longer])
        pair = int(both.argmin())
        if both[pair] < least:
            return (int(fitting[shorter[pair]]), int(fitting[longer[pair]])), int(both[pair])
    return best, least
