"""Full packed rows that take a target time.

The *extra* of a sample is its time beside its tokens, mainly attention. Few samples, the heavy
samples, have most of the extra of a pool, and decide the extra of a row. So a row begins with the
oldest heavy samples that leave a target which other samples can meet: at least the extra of light
samples, and well below the extra of the heaviest. Then follow one or two heavy samples of the whole
pool, light samples by age, and last the two samples that best fill the row and meet the target.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from odb_nodes._support.arrays import IntArray
from odb_nodes._support.checks import MAX_COUNT
from odb_nodes.core.planning.caps import costs_of, quantiles
from odb_nodes.core.planning.row_filling import NO_LIMIT, Room, nearest_filling
from odb_nodes.core.planning.table import ORDINALS, PATCHES, TOKENS

LEAST_ROWS = 4  # a pool that fills fewer rows has no targets
_HEAVY_QUANTILE = 0.8  # a sample with more extra than this quantile of the pool is heavy
_OLDEST = 128  # the oldest samples, which may be added by age
_OLDEST_HEAVY = 16  # the oldest heavy samples, which may begin a row
_MOST_HEAVY_ADDED = 2
_MOST_GIVEN_BACK = 3
_EDGES = 64  # parts of a row, for each of which the highest extra is known
# Shares of the highest extra of samples that would fill the rest of a row:
_MOST_TARGET = 0.9  # a higher target is lowered to this
_STEEP = 0.33  # heavy samples leave at most this of the target
_MOST_LEFT = 0.9  # samples by age leave at most this
# Multiples of the extra of light samples that would fill the rest of a row:
_LEAST_LIGHT = 0.6  # samples by age leave at least this of the target
_MOST_LIGHT = 1.5  # samples by age may always leave this
_NEARLY_LIGHT = 0.3  # share of a heavy sample's extra that light samples may miss of a target
# Weights of a missed target when a heavy sample is chosen; the weight of too little extra is 1:
_TOO_HEAVY = 20
_TOO_STEEP = 3
_GOOD = 0.003  # share of row and target that may be missed: no better row is looked for
_POOR = 0.02  # if a row misses a larger share, another way to fill the row is tried


class Aim(NamedTuple):
    """The aim of a row."""

    room: Room  # the room of the empty row
    target: int  # the extra that the row should have


class _PooledSample(NamedTuple):
    column: int
    cost: int
    extra: int
    patches: int


class PoolProfile(NamedTuple):
    """The limits between heavy and light samples of a pool."""

    heavy: int  # a sample with more extra is heavy
    light_density: float  # extra of the light samples per cost
    usual_cost: int  # four of five samples cost at most this


def profile_of(costs: IntArray, extra: IntArray) -> PoolProfile:
    """Return the profile of samples: costs, ascending, and extra, (n,) each."""
    index = int(_HEAVY_QUANTILE * (len(extra) - 1))
    heavy = int(np.partition(extra, index)[index])
    is_light = extra <= heavy
    density = float(extra[is_light].sum() / max(costs[is_light].sum(), 1))
    return PoolProfile(heavy, density, int(costs[index]))


class _PooledSamples:
    """Samples of a pool by cost, with their extra, and which of them are free."""

    def __init__(self, table: IntArray, extra: IntArray) -> None:
        self.table, self.extra = table, extra
        self.costs, self.patches, self.ages = table[TOKENS], table[PATCHES], table[ORDINALS]
        self.free = np.ones(len(extra), dtype=bool)
        self.heavy, self.light_density, self.usual_cost = profile_of(self.costs, extra)

    def samples(self, columns: IntArray) -> Iterator[_PooledSample]:
        """Yield the samples in these columns."""
        values = (columns, self.costs[columns], self.extra[columns], self.patches[columns])
        return map(_PooledSample, *(column.tolist() for column in values))


def flat_targets(costs: IntArray, extra: IntArray, room: int, count: int) -> IntArray:
    """Return the extra of `count` rows, from the highest down, as equal as the heaviest allow.

    Empty, (0,), if the pool fills fewer than `LEAST_ROWS` rows.

    Each of the heaviest samples is the only heavy sample of a row, which light samples fill. The
    other extra is poured over the rows, first into the rows with the least.
    """
    rows = int(np.minimum(costs, room).sum()) // room
    if rows < LEAST_ROWS:
        return np.empty(0, np.int64)
    density = profile_of(costs, extra).light_density
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
    """Return the columns of a row, and how much it misses of its room and its target.

    table: the pool, with costs in place of tokens; due: column of a sample that the row must hold.
    """
    pool = _PooledSamples(table, extra)
    row = _Row(pool, aim)
    row.begin(due)
    row.add_heavy()
    row.add_by_age()
    return row.filled()


class _Row:
    def __init__(self, pool: _PooledSamples, aim: Aim) -> None:
        self._pool, self._aim = pool, aim
        self._part = -(-aim.room.cost // _EDGES)
        edges = np.arange(_EDGES + 2) * self._part
        places = np.searchsorted(pool.costs, edges, side="right")
        highest = np.maximum.accumulate(pool.extra / np.maximum(pool.costs, 1))
        # The highest extra per cost of the samples that fit into a room, by parts of a row.
        self._densest = highest[np.maximum(places - 1, 0)]
        self._densest_list: list[float] = self._densest.tolist()
        self._cost, self._samples, self._patches = aim.room  # the room that is free
        self._target = min(aim.target, int(_MOST_TARGET * self._most(aim.room.cost)))
        self._extra = self._target  # the part of the target that is not met yet
        self._taken: list[_PooledSample] = []

    def _most(self, cost: int) -> float:
        """Return the highest extra of samples that would fill a room."""
        return cost * self._densest_list[max(cost, 0) // self._part]

    def _take(self, sample: _PooledSample) -> None:
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
    def _light_would_do(self) -> bool:
        """Whether light samples, or nearly light samples, meet the remaining target."""
        pool = self._pool
        return self._extra - pool.light_density * self._cost < _NEARLY_LIGHT * pool.heavy

    def begin(self, due: int | None) -> None:
        """Take the oldest heavy samples that leave a target which other samples can meet."""
        pool = self._pool
        heavy = np.flatnonzero(pool.extra > pool.heavy)
        columns = heavy[pool.ages[heavy].argsort()[:_OLDEST_HEAVY]]
        if due is not None:
            columns = np.concatenate(([due], columns[columns != due]))
        for sample in pool.samples(columns):
            cost, extra = self._cost - sample.cost, self._extra - sample.extra
            is_met = cost >= 0 and pool.light_density * cost <= extra <= _STEEP * self._most(cost)
            fits = sample.patches <= self._patches and self._samples > 0
            if (is_met and fits) or sample.column == due:
                self._take(sample)
                if self._light_would_do:
                    return

    def add_heavy(self) -> None:
        """Take up to two samples that leave a target which light samples meet."""
        pool = self._pool
        for _ in range(_MOST_HEAVY_ADDED):
            if self._light_would_do or self._samples < 1:
                return
            pool.free[[sample.column for sample in self._taken]] = False
            cost, extra = self._cost - pool.costs, self._extra - pool.extra
            missed: NDArray[np.float64] = extra - pool.light_density * cost
            most = cost * self._densest[np.maximum(cost // self._part, 0)]
            missed = np.where(missed < 0, -_TOO_HEAVY * missed, missed)
            missed += _TOO_STEEP * np.maximum(extra - _STEEP * most, 0)
            missed[~pool.free | (cost < 0) | (pool.patches > self._patches)] = np.inf
            column = int(missed.argmin())
            if missed[column] == np.inf:
                return
            self._take(*pool.samples(np.array([column])))

    def add_by_age(self) -> None:
        """Take old samples that leave a target which can be met, until few more samples fit."""
        pool = self._pool
        count = min(_OLDEST, len(self._pool.free))
        density, densest, part = pool.light_density, self._densest_list, self._part
        is_short = self._extra < density * self._cost
        oldest = np.argpartition(pool.ages, count - 1)[:count]
        in_row = {sample.column for sample in self._taken}
        for sample in pool.samples(oldest[pool.ages[oldest].argsort()]):
            if self._cost <= pool.usual_cost or self._samples <= 2:
                return
            cost, extra = self._cost - sample.cost, self._extra - sample.extra
            if cost < 0 or sample.patches > self._patches or sample.column in in_row:
                continue
            has_least = extra >= _LEAST_LIGHT * density * cost
            has_least = has_least or (is_short and sample.extra <= density * sample.cost)
            most = max(_MOST_LEFT * densest[cost // part], _MOST_LIGHT * density)
            if has_least and extra <= most * cost:
                self._take(sample)

    def filled(self) -> tuple[IntArray, int]:
        """Fill the row with the best two samples; return its columns, and how much it misses."""
        best = [sample.column for sample in self._taken]
        least = NO_LIMIT
        self._pool.free[best] = False
        for _ in range(_MOST_GIVEN_BACK + 1):
            room = Room(self._cost, self._samples, self._patches)
            pool = self._pool
            free = np.flatnonzero(self._pool.free)
            pair, missed = nearest_filling(pool.table, pool.extra, free, room, self._extra)
            if missed < least:
                best = [*(sample.column for sample in self._taken), *pair]
                least = missed
            is_good = least < _GOOD * (self._aim.room.cost + self._target)
            if is_good or len(self._taken) < 2:
                break
            self._give_back()
        return np.array(best, dtype=np.int64), least


def is_poor(missed: int, aim: Aim) -> bool:
    """Return whether a row misses so much that another row may be better."""
    return missed > _POOR * (aim.room.cost + aim.target)
