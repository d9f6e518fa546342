"""Groups of padded rows: contiguous runs in order of length, which have little padding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from odb_nodes._support.arrays import IntArray
from odb_nodes._support.checks import MAX_COUNT, check_number
from odb_nodes.core.planning.budget import TokenBudget, allowed_rows
from odb_nodes.core.planning.caps import (
    LEAST_BUDGETS_AIMED,
    NO_CAPS,
    costs_of,
    joined_costs,
    offered_costs,
    quantiles,
    times_of,
)
from odb_nodes.core.planning.step_time import StepTime
from odb_nodes.core.planning.table import ORDINALS, PATCHES, TASKS, TOKENS, first_fit
from odb_nodes.core.sample import Sample, Skipped, name_of
from odb_nodes.errors import SampleError

STEP_COST_SHARE = 0.1
"""Fixed cost of a step, as a share of the budget, which makes fuller groups worth some padding."""

CAP_SHARE = 0.75
"""Weight of the cap in the cost of a step with a capped run. The cost of the run has the rest."""

TIME_SHARE = 0.5
"""Weight of the time that a run uses of its cap. The cost that the run uses has the rest."""


class LengthRuns:
    """Chooses the run that gets the most work done for the cost of its step.

    The work is the cost of the samples without padding: their tokens, if attention costs nothing.
    The cost of a step is the cost of its batch under the budget, and a fixed share of the budget.

    The table is in order of length, so the last sample of a run decides the width of the rows, and
    how many rows the budget holds. So for each sample there is one full run that ends with the
    sample, and only these runs are compared.
    """

    def __init__(
        self, budget: TokenBudget, diversity: float = 0.0, step_time: StepTime | None = None
    ) -> None:
        self._budget = budget
        self._diversity = diversity
        self._step_time = step_time
        ladder = np.array(budget.shape_ladder(), dtype=np.int64).reshape(-1, 2)
        self._ladder_rows, self._ladder_widths = ladder.T

    def choose(self, table: IntArray, youngest_anchor: int, caps: IntArray = NO_CAPS) -> slice:
        """Return the best run that holds an anchor: a sample no younger than `youngest_anchor`."""
        first, stop, costs = self._capped(table, caps) if len(caps) else self._full(table)
        total = _sums_before(self._work(table))
        work = total.take(stop) - total.take(first)
        score = work / (costs + STEP_COST_SHARE * self._budget.tokens)

        anchors = _sums_before(table[ORDINALS] <= youngest_anchor)
        # Equal counts before the first sample and at the end mean that the run holds no anchor. A
        # run that ends with an anchor holds this anchor, so at least one run keeps its score.
        score[anchors.take(stop) == anchors.take(first)] = -1.0
        return self._best(table, first, stop, score)

    def offer(self, table: IntArray, count: int) -> IntArray:
        """Return the offer for the caps of the next round; see `offered_costs`."""
        if self._budget.shapes is not None or not table.shape[1]:
            return NO_CAPS  # Groups of one shape cost the same.
        first, costs, _ = self._runs(table)
        ends = [stop - 1 for start, stop in _tiles(first) if start]  # The first run is not full.
        pool_cost = int(self._work(table).sum())
        budget_tokens = self._budget.tokens
        last = np.array(ends, dtype=np.int64)
        if self._step_time is None:
            descending = np.sort(costs[last])[::-1]
            return offered_costs(descending, pool_cost, budget_tokens, count)
        if pool_cost < LEAST_BUDGETS_AIMED * budget_tokens or not ends:
            return NO_CAPS
        times = self._times(table, first, np.arange(1, len(first) + 1))[1]
        joined = np.sort(joined_costs(np.minimum(times[last], MAX_COUNT), costs[last]))[::-1]
        offer = quantiles(joined, count)
        return np.concatenate(([budget_tokens], offer))

    def least_cap_time(self, table: IntArray, column: int) -> int:
        """Return the least time of a cap that allows a run with this sample: the sample alone."""
        alone = np.array([column])
        return int(self._times(table, alone, alone + 1, alone)[1][0])

    def aimed(self, table: IntArray, cap: int, due: int | None) -> slice:
        """Return the run that best uses the time and the cost of a cap.

        due: the column of a sample that the run must hold.
        """
        row_costs = self._runs(table)[2]
        most_time = max(times_of(cap), 1)
        rows = self._rows_within(table, most_time)
        stop = np.arange(1, len(rows) + 1)
        first = stop - rows
        took = self._times(table, first, stop)[1]
        work = _sums_before(self._work(table))
        done = work.take(stop) - work.take(first)
        real = _sums_before(table[TOKENS] + self._extra(table[TOKENS], table[PATCHES]))
        done_in_time = real.take(stop) - real.take(first)
        score = TIME_SHARE * done_in_time / np.maximum(took, most_time)
        score += (1 - TIME_SHARE) * done / np.maximum(rows * row_costs, costs_of(cap))
        if due is not None:
            score[(first > due) | (stop <= due)] = -1.0
        return self._best(table, first, stop, score)

    def cut(self, table: IntArray, most_time: int) -> list[IntArray]:
        """Return the ordinals of the groups of all samples, cut from the longest down.

        If patches take no time, no group of several samples takes longer than `most_time`.
        """
        rows = self._rows_within(table, most_time)
        first = np.arange(1, len(rows) + 1) - rows
        return [table[ORDINALS, start:stop] for start, stop in _tiles(first)]

    def full_times(self, table: IntArray) -> IntArray:
        """Return the times of the longest runs that end with each sample, (n,)."""
        first = self._runs(table)[0]
        return self._times(table, first, np.arange(1, len(first) + 1))[1]

    def _rows_within(self, table: IntArray, most_time: int) -> IntArray:
        """Return the rows of the longest run that ends with each sample within a time, (n,).

        If patches take time, a run may have fewer rows than the time allows.
        """
        first = self._runs(table)[0]
        stop = np.arange(1, len(first) + 1)
        rows = stop - first
        row_times, times = self._times(table, first, stop)
        fewer = np.minimum((rows * (most_time / times)).astype(np.int64), most_time // row_times)
        return self._allowed(np.where(times > most_time, fewer, rows))

    def _times(
        self, table: IntArray, first: IntArray, stop: IntArray, columns: IntArray | None = None
    ) -> tuple[IntArray, IntArray]:
        """Return for each run the time of a row, and the time of all rows, (n,) each.

        columns: the last samples of the runs. Default: all samples.
        """
        tokens = table[TOKENS] if columns is None else table[TOKENS, columns]
        widths = self._shapes(tokens)[0]
        row_times = widths + self._extra(widths, np.zeros_like(widths))
        encoded = _sums_before(self._extra(np.zeros_like(table[PATCHES]), table[PATCHES]))
        times = (stop - first) * row_times + encoded.take(stop) - encoded.take(first)
        return row_times, times

    def _extra(self, tokens: IntArray, patches: IntArray) -> IntArray:
        assert self._step_time is not None
        return self._step_time.extra(tokens, patches)

    def largest(self, table: IntArray) -> slice:
        """Return the run that ends with the longest sample."""
        return slice(int(self._runs(table)[0][-1]), table.shape[1])

    def partition(self, table: IntArray) -> list[IntArray]:
        """Return the ordinals of the groups of all samples, cut from the longest down.

        These are the fewest groups that `row_sizes` allows. Without one group, the other samples
        form the same other groups, as a pool that is restored in its tail must do.
        """
        # Under `max_patches`, this does not hold for runs: a sample that did not fit into the run
        # before may fit once a neighbour is gone. It holds for `first_fit`.
        if self._budget.max_patches is not None:
            patches = table[PATCHES]
            capacities = self._shapes(table[TOKENS])[1]
            needs = np.stack((np.ones_like(patches), patches))
            rooms = np.stack((capacities, np.full_like(capacities, self._budget.max_patches)))
            return [table[ORDINALS, group] for group in first_fit(needs, rooms)]
        return [table[ORDINALS, start:stop] for start, stop in _tiles(self._runs(table)[0])]

    def _work(self, table: IntArray) -> IntArray:
        return self._budget.row_cost(table[TOKENS])

    def _full(self, table: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """Return first index, stop and cost of the longest run that ends with each sample."""
        first, costs, _ = self._runs(table)
        return first, np.arange(1, len(first) + 1), costs

    def _capped(
        self, table: IntArray, caps: IntArray
    ) -> tuple[IntArray, IntArray, NDArray[np.float64]]:
        """Return first index, stop and cost of two runs that end with each sample.

        The first run is within the largest cap, the second within the next lower cap. The cost is
        mostly the cost of the cap, which other ranks fill.
        """
        first, _, row_costs = self._runs(table)
        stop = np.arange(1, len(first) + 1)
        largest = len(caps) - 1
        most = stop - first
        rows = self._allowed(np.minimum(caps[-1] // row_costs, most))
        costs = rows * row_costs
        above = np.searchsorted(caps, costs)
        next_cap = caps[np.maximum(above - 1, 0)]
        fewer = self._allowed(np.minimum(next_cap // row_costs, most))
        lower_costs = fewer * row_costs
        above = np.concatenate((above, np.searchsorted(caps, lower_costs)))
        costs = np.concatenate((costs, lower_costs))
        # A sample alone may cost more than any cap.
        wanted = np.maximum(caps[np.minimum(above, largest)], costs)
        start = np.concatenate((stop - rows, stop - fewer))
        stop = np.concatenate((stop, stop))
        return start, stop, CAP_SHARE * wanted + (1 - CAP_SHARE) * costs

    def _allowed(self, rows: IntArray) -> IntArray:
        """Return the largest numbers of rows, at most these, that a group may have."""
        return allowed_rows(np.maximum(rows, 1), self._budget.row_sizes)

    def _best(
        self, table: IntArray, first: IntArray, stop: IntArray, score: NDArray[np.float64]
    ) -> slice:
        """Return the run with the best score, or with `diversity` the best sum of fit and mix."""
        best = int(score.argmax())
        if self._diversity:
            best = self._best_mixed(table[TASKS], first, stop, score)
        return slice(int(first[best]), int(stop[best]))

    def _best_mixed(
        self, tasks: IntArray, first: IntArray, stop: IntArray, score: NDArray[np.float64]
    ) -> int:
        """Return the run with the best sum of fit and mix; of equal runs, the best score wins."""
        allowed = np.flatnonzero(score >= 0)
        score = score[allowed]
        # The fit of a full group without padding is 1, and of an oversize sample not more.
        fit = np.minimum((1 + STEP_COST_SHARE) * score, 1)
        mix = diversities(tasks, first[allowed], stop[allowed])
        total = (1 - self._diversity) * fit + self._diversity * mix
        score[total < total.max()] = -1.0
        return int(allowed[score.argmax()])

    def _runs(self, table: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """Return first index, cost and row cost of the longest run that ends with each sample."""
        tokens, patches = table[TOKENS], table[PATCHES]
        budget = self._budget
        widths, capacities = self._shapes(tokens)
        stop = np.arange(1, len(tokens) + 1)
        rows = np.minimum(capacities, stop)
        if budget.max_patches is not None:
            total = _sums_before(patches)
            fits = np.searchsorted(total, total[1:] - budget.max_patches, side="left")
            rows = np.minimum(rows, np.maximum(stop - fits, 1))
        if budget.shapes is None:
            rows = allowed_rows(rows, budget.row_sizes)
        first = stop - rows
        if budget.shapes is not None:
            # With `shapes`, a run costs as much as its shape, even if it does not fill the shape.
            rows = capacities
        row_costs = budget.row_cost(widths)
        return first, rows * row_costs, row_costs

    def _shapes(self, tokens: IntArray) -> tuple[IntArray, IntArray]:
        """Return width and most samples of the groups in which each sample is the longest."""
        budget, multiple = self._budget, self._budget.pad_to_multiple_of
        widths = tokens if multiple == 1 else -(-tokens // multiple) * multiple
        # At least 1, because an oversize sample is a group.
        row_costs = budget.row_cost(widths)
        capacities = np.maximum(budget.tokens // row_costs, 1)
        if budget.max_samples is not None:
            np.minimum(capacities, budget.max_samples, out=capacities)
        if budget.shapes is None:
            return widths, capacities
        step = np.searchsorted(self._ladder_widths, tokens)
        on_ladder = np.minimum(step, len(self._ladder_widths) - 1)
        oversize = step > on_ladder
        return (
            np.where(oversize, widths, self._ladder_widths[on_ladder]),
            np.where(oversize, capacities, self._ladder_rows[on_ladder]),
        )


def _tiles(first: IntArray) -> Iterator[tuple[int, int]]:
    """Yield start and stop of the runs that hold all samples, from the last run down.

    first: first index of the run that ends with each sample, (n,).
    """
    stop = len(first)
    while stop:
        start = int(first[stop - 1])
        yield start, stop
        stop = start


def _sums_before(values: NDArray[Any]) -> IntArray:
    """Return the sum of the values before each index, and of all values: (n,) -> (n + 1,) int64."""
    sums = np.empty(len(values) + 1, dtype=np.int64)
    sums[0] = 0
    np.add.accumulate(values, dtype=np.int64, out=sums[1:])
    return sums


_UNIT = 2.0**24
"""Factor that makes count x log(count) an integer: exact enough, and below 2**63."""


def check_diversity(diversity: Any, budget: TokenBudget) -> float:
    """Return `diversity` as a float."""
    weight = check_number("diversity", diversity, "[0, 1]")
    if weight and budget.layout == "packed":
        raise ValueError(
            f"`diversity` must be 0 where groups are packed, but is {diversity} instead. A packed "
            "row is filled with the oldest samples, so its tasks are as mixed as the data."
        )
    return weight


def check_has_task(sample: Sample | Skipped) -> None:
    """Raise a `SampleError` if a sample has no task, and so cannot be mixed by tasks."""
    if isinstance(sample, Sample) and not sample.task_name:
        raise SampleError(
            f"`diversity` must be 0 where samples have no task, but a sample{name_of(sample)} has "
            "none. Mix a dict of datasets, whose names are the tasks, or return "
            "`Observation(tokens, task=...)` from `observe`."
        )


def diversities(tasks: IntArray, first: IntArray, stop: IntArray) -> NDArray[np.float64]:
    """Return how evenly each run mixes the tasks of a pool: from 0, one task, to 1, all alike.

    The result is the entropy of the run's counts of tasks, divided by the logarithm of the number
    of tasks in the pool. The numbering of tasks makes no difference, not even in the last bit.

    tasks: task of each pooled sample, (n,); first, stop: range of each run, (m,) int64 each.
    """
    rows = stop - first
    kinds = np.flatnonzero(np.bincount(tasks))
    if len(kinds) < 2:
        return np.zeros(len(rows))
    # With counts c of n rows, the entropy is log n - (sum of c log c) / n. The terms are integers,
    # so the order of the sum makes no difference.
    counts = np.arange(int(rows.max()) + 1)
    terms = np.rint(counts * np.log(np.maximum(counts, 1)) * _UNIT).astype(np.int64)
    entropies = terms[rows]
    seen = np.zeros(len(tasks) + 1, dtype=np.int64)
    for kind in kinds:
        np.cumsum(tasks == kind, out=seen[1:])
        entropies -= terms[seen[stop] - seen[first]]
    diversity: NDArray[np.float64] = entropies / (rows * (np.log(len(kinds)) * _UNIT))
    return diversity
