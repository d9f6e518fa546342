"""The groups of the last round: all remaining samples of a rank, in groups of similar cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from odb_nodes._support.arrays import IntArray
from odb_nodes.core.planning.budget import TokenBudget
from odb_nodes.core.planning.facts import Facts
from odb_nodes.core.planning.level_rows import fewest_rows, rows_of_all
from odb_nodes.core.planning.packing import Packing
from odb_nodes.core.planning.pool import grouping_of
from odb_nodes.core.planning.runs import LengthRuns
from odb_nodes.core.planning.step_time import StepTime
from odb_nodes.core.planning.table import ORDINALS, PATCHES, TOKENS

_TRIES = 14  # tries to find the cost of the largest group; each cuts all samples anew
_TRIES_OF_FIRST_FIT = 2  # first fit takes 0.1 s for 20,000 samples


class LevelCut:
    """Cuts the samples of a rank for the last round into groups of similar cost or time."""

    def __init__(
        self, samples: Facts, budget: TokenBudget, step_time: StepTime | None = None
    ) -> None:
        table = np.stack((samples.tokens, np.arange(len(samples)), samples.patches))
        self._table = table.take(table[TOKENS].argsort(kind="stable"), axis=1)
        self._budget, self._step_time = budget, step_time
        self._fewest = self._fewest_groups()

    @property
    def fewest(self) -> int:
        """The number of groups that the budget needs."""
        return len(self._fewest)

    def groups(self, most: int) -> list[list[int]]:
        """Return the indices of the samples of each group, of at most `most` groups.

        An oversize sample is a group.
        """
        if most < self.fewest:
            raise ValueError(f"`most` must be at least {self.fewest}, but is {most} instead.")
        budget = self._budget
        if self._step_time is not None and self._table.shape[1]:
            groups = self._level_groups(most, self._step_time)
        else:
            by_first_fit = budget.layout == "packed" or budget.max_patches is not None
            groups = self._smallest_groups(
                most,
                range(self._least_cost(most), budget.tokens),
                lambda tokens: self._cut(replace(budget, tokens=tokens)),
                _TRIES_OF_FIRST_FIT if by_first_fit else _TRIES,
            )
        return [sorted(group.tolist()) for group in groups]

    def _smallest_groups(
        self, most: int, limits: range, cut: Callable[[int], list[IntArray]], tries: int
    ) -> list[IntArray]:
        """Return at most `most` groups, cut by the lowest limit that a bisection finds."""
        smallest = self._fewest
        low, high = limits.start, limits.stop
        for _ in range(tries):
            if low >= high:
                break
            middle = (low + high) // 2
            groups = cut(middle)
            if len(groups) <= most:
                smallest = groups
                high = middle
            else:
                low = middle + 1
        return smallest

    def _level_groups(self, most: int, step_time: StepTime) -> list[IntArray]:
        table, budget = self._table, self._budget
        if budget.max_patches is not None:
            return self._fewest
        if budget.layout == "packed":
            rows = rows_of_all(*self._costs_and_extra(step_time), Packing(budget), most)
            return self._fewest if rows is None else [table[ORDINALS, row] for row in rows]
        if budget.shapes is not None:
            return self._fewest
        runs = LengthRuns(budget, step_time=step_time)
        times = runs.full_times(table)
        limits = range(int(times.min()), int(times.max()))
        return self._smallest_groups(most, limits, lambda time: runs.cut(table, time), _TRIES)

    def _costs_and_extra(self, step_time: StepTime) -> tuple[IntArray, IntArray]:
        packing = Packing(self._budget)
        tokens = self._table[TOKENS]
        costs = np.minimum(packing.costs(tokens), packing.room.cost)
        return costs, step_time.extra(tokens, self._table[PATCHES])

    def _fewest_groups(self) -> list[IntArray]:
        budget, step_time = self._budget, self._step_time
        if not self._table.shape[1]:
            return []
        if step_time is None or budget.layout == "padded" or budget.max_patches is not None:
            return self._cut(budget)
        rows = fewest_rows(*self._costs_and_extra(step_time), Packing(budget))
        return [self._table[ORDINALS, row] for row in rows]

    def _least_cost(self, groups: int) -> int:
        """Return a lower bound of the cost of the largest group, oversize samples excepted."""
        budget = self._budget
        lengths = self._table[TOKENS]
        fitting = lengths[lengths <= budget.capacity]
        if budget.shapes is not None or not len(fitting):  # Groups of one shape cost the same.
            return budget.tokens
        multiple = budget.pad_to_multiple_of
        longest = budget.row_cost(-(-int(fitting[-1]) // multiple) * multiple)
        return max(longest, int(budget.row_cost(fitting).sum()) // groups)

    def _cut(self, budget: TokenBudget) -> list[IntArray]:
        return grouping_of(budget).partition(self._table) if self._table.shape[1] else []
