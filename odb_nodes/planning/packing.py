"""Groups of packed samples: the oldest, and those that fill the rest of the row best."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from odb_nodes.planning.aimed_packing import (
    NO_LIMIT,
    Aim,
    Room,
    aimed_row,
    cheap_samples,
    flat_targets,
    is_poor,
    nearest_row,
)
from odb_nodes.planning.budget import TokenBudget
from odb_nodes.planning.caps import NO_CAPS, joined_costs, times_of
from odb_nodes.planning.step_time import StepTime
from odb_nodes.planning.table import ORDINALS, PATCHES, TOKENS, IntArray, first_fit

MAX_EXCHANGED = 3  # most of the oldest samples that may give way to others that fill the row better


class _Filling(NamedTuple):
    """At most two samples, by their columns, and the cost that they fill."""

    cost: int
    columns: tuple[int, ...]


class Packing:
    """Chooses the oldest samples that fit together, and exchanges the last for a better filling.

    The oldest sample is in every group, so none waits for long. Of the others the last 0 to
    `MAX_EXCHANGED` give way to the one or two pooled samples that leave the least of the budget
    unused: two numbers of a sorted row whose sum is nearest to a third.

    A sample costs its tokens and what attention adds. Where all rows have one shape, its tokens
    alone count: however they fill it, attention adds no more than for one sample as long.
    """

    def __init__(self, budget: TokenBudget, step_time: StepTime | None = None) -> None:
        self._budget = budget
        self._step_time = step_time
        # Whether a sample costs its tokens alone: another cost of `TokenBudget` is named here, too.
        self._in_tokens = budget.attention_tokens is None or budget.shapes is not None
        # What attention adds is no multiple, so any row may be rounded up.
        rounding = budget.pad_to_multiple_of - 1
        self.room = Room(
            budget.capacity if self._in_tokens else budget.tokens - rounding,
            NO_LIMIT if budget.max_samples is None else budget.max_samples,
            NO_LIMIT if budget.max_patches is None else budget.max_patches,
        )
        """What a row holds."""

    def choose(self, table: IntArray, _youngest_anchor: int, _caps: IntArray = NO_CAPS) -> IntArray:
        """Return the columns of the next group. It holds the oldest sample, whatever the anchor."""
        table = self._in_costs(table)
        # Each round keeps the `count` oldest samples, one fewer than the round before, and fills
        # what they leave with one or two of all the others, those given up included. `count` ends
        # at 1 or above, so the oldest sample stays; a round whose filling is empty still yields a
        # group, so there is always a best one. Of equally full groups the first wins, which keeps
        # the most of the oldest.
        oldest = self._oldest(table)
        free = np.ones(table.shape[1], dtype=bool)
        free[oldest] = False
        best, kept, best_cost = _Filling(0, ()), len(oldest), -1
        for count in range(len(oldest), max(len(oldest) - MAX_EXCHANGED, 1) - 1, -1):
            free[oldest[count:]] = True
            room = self._room_beside(table, oldest[:count])
            filling = _fill(table, np.flatnonzero(free), room)
            cost = self.room.cost - room.cost + filling.cost
            if cost > best_cost:
                best, best_cost, kept = filling, cost, count
            if best_cost >= self.room.cost:
                break
        return np.concatenate((oldest[:kept], np.array(best.columns, dtype=np.int64)))

    def offer(self, table: IntArray, count: int) -> IntArray:
        """Return what is offered for the caps of the next round, (1 + count,) int64.

        All groups cost about the budget, so nothing is, (0,), where time is of no concern.
        """
        if self._step_time is None or not table.shape[1]:
            return NO_CAPS
        costs, room = self.costs(table[TOKENS]), self.room
        of_limits = max(len(costs) / room.samples, int(table[PATCHES].sum()) / room.patches)
        if of_limits > int(costs.sum()) / room.cost:  # Rows are not filled by what they cost.
            return NO_CAPS
        targets = flat_targets(costs, self._extra(table), self.room.cost, count)
        if not len(targets):
            return NO_CAPS
        tokens = self._budget.tokens
        return np.concatenate(([tokens], joined_costs(targets, np.full_like(targets, tokens))))

    def least_time(self, table: IntArray, column: int) -> int:
        """Return what a row with a sample takes at least beside its tokens."""
        extra = self._extra(table)
        costs = self.costs(table[TOKENS])
        density = cheap_samples(costs, extra)[1]
        beside = max(self.room.cost - int(costs[column]), 0)
        return int(extra[column]) + round(density * beside)

    def aimed(self, table: IntArray, cap: int, due: int | None) -> IntArray:
        """Return the columns of a row that takes as long as a cap allows.

        due: the column of a sample that is in it, if it must be.
        """
        extra, in_costs = self._extra(table), self._in_costs(table)
        aim = Aim(self.room, times_of(cap))
        columns, missed = aimed_row(in_costs, extra, aim, due)
        if is_poor(missed, aim):
            others, missed_by_others = nearest_row(in_costs, extra, self._oldest(in_costs), aim)
            if missed_by_others < missed or not len(columns):  # All may be oversize.
                return others
        return columns

    def _extra(self, table: IntArray) -> IntArray:
        assert self._step_time is not None
        return self._step_time.extra(table[TOKENS], table[PATCHES])

    def largest(self, table: IntArray) -> IntArray:
        """Return the columns of the longest sample, and of the longest others that fit, in turn."""
        return np.flatnonzero(np.isin(table[ORDINALS], self.partition(table)[0]))

    def partition(self, table: IntArray) -> list[IntArray]:
        """Return the ordinals of the groups that all samples make: first fit, longest first.

        Without one of the groups, the partition is that of the others, see `first_fit`.
        """
        costs = self._in_costs(table)[TOKENS]
        needs = np.stack((costs, np.ones_like(costs), table[PATCHES]))
        rooms = np.broadcast_to(np.array(self.room)[:, None], needs.shape)
        return [table[ORDINALS, group] for group in first_fit(needs, rooms)]

    def _in_costs(self, table: IntArray) -> IntArray:
        """Return the table with costs in place of tokens, which leaves it in order."""
        if self._in_tokens:
            return table
        return np.concatenate((self.costs(table[TOKENS])[None], table[TOKENS + 1 :]))

    def costs(self, tokens: IntArray) -> IntArray:
        """Return what samples of these lengths take of a row, (n,)."""
        if self._in_tokens:
            return tokens
        budget = self._budget
        costs = budget.row_cost(tokens)
        # Where the width of a row is rounded up, a sample may be oversize by that alone.
        costs[tokens > budget.capacity] = budget.tokens + 1
        return costs

    def _oldest(self, table: IntArray) -> IntArray:
        """Return the columns of the oldest samples that fit together, at least one, by age."""
        ordinals, pooled, count = table[ORDINALS], table.shape[1], 32
        while True:
            count = min(2 * count, pooled)
            columns: IntArray = np.argpartition(ordinals, count - 1)[:count]
            columns = columns[ordinals[columns].argsort()]
            fits = (table[TOKENS, columns].cumsum() <= self.room.cost) & (
                table[PATCHES, columns].cumsum() <= self.room.patches
            )
            fitting = count if fits.all() else int(fits.argmin())
            if fitting < count or count == pooled:
                return columns[: max(1, min(fitting, self.room.samples))]

    def _room_beside(self, table: IntArray, columns: IntArray) -> Room:
        return Room(
            self.room.cost - int(table[TOKENS, columns].sum()),
            self.room.samples - len(columns),
            self.room.patches - int(table[PATCHES, columns].sum()),
        )


def _fill(table: IntArray, columns: IntArray, room: Room) -> _Filling:
    """Return the one or two samples that fill a room best."""
    if room.samples < 1:
        return _Filling(0, ())
    costs, patches = table[TOKENS, columns], table[PATCHES, columns]
    limited = room.patches < NO_LIMIT // 2
    if limited:
        fits = patches <= room.patches
        columns, costs, patches = columns[fits], costs[fits], patches[fits]
    fitting = int(np.searchsorted(costs, room.cost, side="right"))
    if not fitting:
        return _Filling(0, ())
    one = _Filling(int(costs[fitting - 1]), (int(columns[fitting - 1]),))
    if room.samples < 2 or one.cost == room.cost:
        return one
    # The shorter of two takes at most half the room, so a sample of its own length still fits: its
    # longest partner is never before it, and is itself where no other fits, which is no pair.
    shorter = costs[: np.searchsorted(costs, room.cost // 2, side="right")]
    longer = np.searchsorted(costs[:fitting], room.cost - shorter, side="right") - 1
    sums = shorter + costs[longer]
    sums[longer == np.arange(len(shorter))] = 0
    if limited:
        sums[patches[: len(shorter)] + patches[longer] > room.patches] = 0
    if not len(sums) or (best := int(sums.argmax())) < 0 or sums[best] <= one.cost:
        return one
    return _Filling(int(sums[best]), (int(columns[best]), int(columns[longer[best]])))
