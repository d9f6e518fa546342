"""Groups of packed samples: the oldest, and those that fill the rest of the row best."""

from __future__ import annotations

import numpy as np

from odb_nodes._support.arrays import IntArray
from odb_nodes.core.planning.aimed_packing import Aim, aimed_row, flat_targets, is_poor, profile_of
from odb_nodes.core.planning.budget import TokenBudget
from odb_nodes.core.planning.caps import NO_CAPS, joined_costs, times_of
from odb_nodes.core.planning.row_filling import (
    NO_LIMIT,
    Filling,
    Room,
    exchanged,
    fullest_filling,
    nearest_filling,
)
from odb_nodes.core.planning.step_time import StepTime
from odb_nodes.core.planning.table import ORDINALS, PATCHES, TOKENS, first_fit

MAX_EXCHANGED = 3
"""How many of the oldest samples may give way to samples that fill the row better."""
MAX_EXCHANGED_AIMED = 8
"""How many of the oldest samples may give way to samples that come nearer to a row's target."""


class Packing:
    """Chooses the oldest samples that fit together, and exchanges the last for a better filling.

    The oldest sample is in every group, so no sample waits for long. The last 0 to `MAX_EXCHANGED`
    of the oldest samples give way to the one or two pooled samples that leave the least of the
    budget unused: two numbers of a sorted list whose sum is nearest to a third number.

    A sample costs its tokens and its attention. If all rows have one shape, only the tokens count:
    attention adds at most as much as for one sample of the row's length.
    """

    def __init__(self, budget: TokenBudget, step_time: StepTime | None = None) -> None:
        self._budget = budget
        self._step_time = step_time
        # Whether a sample costs its tokens alone. A new cost of `TokenBudget` changes this line.
        self._in_tokens = budget.attention_tokens is None or budget.shapes is not None
        # With attention, the cost of a full row is no multiple, so the row may be rounded up.
        rounding = budget.pad_to_multiple_of - 1
        self.room = Room(
            budget.capacity if self._in_tokens else budget.tokens - rounding,
            NO_LIMIT if budget.max_samples is None else budget.max_samples,
            NO_LIMIT if budget.max_patches is None else budget.max_patches,
        )
        """The room of an empty row."""

    def choose(self, table: IntArray, _youngest_anchor: int, _caps: IntArray = NO_CAPS) -> IntArray:
        """Return the columns of the next group, which always holds the oldest sample."""
        table = self._in_costs(table)

        def fill(free: IntArray, room: Room, _row: IntArray) -> Filling:
            return fullest_filling(table, free, room)

        return exchanged(table, self._oldest(table), self.room, MAX_EXCHANGED, fill)[0]

    def offer(self, table: IntArray, count: int) -> IntArray:
        """Return the offer for the caps of the next round, (1 + count,) int64.

        All groups cost about the budget, so without `step_time` it is empty, (0,).
        """
        if self._step_time is None or not table.shape[1]:
            return NO_CAPS
        costs = self.costs(table[TOKENS])
        room = self.room
        full_rows = max(len(costs) / room.samples, int(table[PATCHES].sum()) / room.patches)
        if full_rows > int(costs.sum()) / room.cost:
            return NO_CAPS  # Rows are full by samples or patches, not by cost.
        targets = flat_targets(costs, self._extra(table), self.room.cost, count)
        if not len(targets):
            return NO_CAPS
        tokens = self._budget.tokens
        return np.concatenate(([tokens], joined_costs(targets, np.full_like(targets, tokens))))

    def least_cap_time(self, table: IntArray, column: int) -> int:
        """Return the least time of a cap that allows a row with this sample."""
        extra = self._extra(table)
        costs = self.costs(table[TOKENS])
        beside = max(self.room.cost - int(costs[column]), 0)
        return int(extra[column]) + round(profile_of(costs, extra).light_density * beside)

    def aimed(self, table: IntArray, cap: int, due: int | None) -> IntArray:
        """Return the columns of a row that takes as long as a cap allows.

        due: the column of a sample that the row must hold.
        """
        extra, in_costs = self._extra(table), self._in_costs(table)
        aim = Aim(self.room, times_of(cap))
        columns, missed = aimed_row(in_costs, extra, aim, due)
        # A row has no columns if all samples are oversize.
        if is_poor(missed, aim) or not len(columns):
            oldest, oldest_missed = self._nearest_of_oldest(in_costs, extra, aim)
            if oldest_missed < missed or not len(columns):
                return oldest
        return columns

    def _nearest_of_oldest(
        self, table: IntArray, extra: IntArray, aim: Aim
    ) -> tuple[IntArray, int]:
        """Return the oldest samples that fit, of which the last are exchanged for the target."""

        def fill(free: IntArray, room: Room, row: IntArray) -> Filling:
            return nearest_filling(table, extra, free, room, aim.target - int(extra[row].sum()))

        return exchanged(table, self._oldest(table), self.room, MAX_EXCHANGED_AIMED, fill)

    def _extra(self, table: IntArray) -> IntArray:
        assert self._step_time is not None
        return self._step_time.extra(table[TOKENS], table[PATCHES])

    def largest(self, table: IntArray) -> IntArray:
        """Return the columns of the longest sample, and of the longest others that fit."""
        return np.flatnonzero(np.isin(table[ORDINALS], self.partition(table)[0]))

    def partition(self, table: IntArray) -> list[IntArray]:
        """Return the ordinals of the groups of all samples: first fit, longest first.

        Without one of the groups, the other samples form the same other groups: see `first_fit`.
        """
        costs = self._in_costs(table)[TOKENS]
        needs = np.stack((costs, np.ones_like(costs), table[PATCHES]))
        rooms = np.broadcast_to(np.array(self.room)[:, None], needs.shape)
        return [table[ORDINALS, group] for group in first_fit(needs, rooms)]

    def _in_costs(self, table: IntArray) -> IntArray:
        """Return the table with costs in place of tokens; the order is the same."""
        if self._in_tokens:
            return table
        return np.concatenate((self.costs(table[TOKENS])[None], table[TOKENS + 1 :]))

    def costs(self, tokens: IntArray) -> IntArray:
        """Return the costs of samples of these lengths in a row, (n,)."""
        if self._in_tokens:
            return tokens
        budget = self._budget
        costs = budget.row_cost(tokens)
        # A sample may be oversize only because the width of its row is rounded up.
        costs[tokens > budget.capacity] = budget.tokens + 1
        return costs

    def _oldest(self, table: IntArray) -> IntArray:
        """Return the columns of the oldest samples that fit together, at least one, by age."""
        ordinals = table[ORDINALS]
        pooled = table.shape[1]
        count = 32
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
