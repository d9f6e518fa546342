"""The end of an epoch on many ranks: what is left is shared out evenly, for one last round.

Shards of the same number of samples differ in tokens by chance, so their ranks would end at
different steps. Before that, each rank reads what is left of its shard. All tell each other how
long these samples are, and conclude alike which of them go from ranks with more than the average to
ranks with less; and all of them cut what they have into the same number of groups.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from odb_nodes.planning.budget import TokenBudget
from odb_nodes.planning.facts import Facts
from odb_nodes.planning.level_rows import fewest_rows, rows_of_all
from odb_nodes.planning.packing import Packing
from odb_nodes.planning.pool import grouping_of
from odb_nodes.planning.runs import LengthRuns
from odb_nodes.planning.step_time import StepTime
from odb_nodes.planning.table import ORDINALS, PATCHES, TOKENS, IntArray

UNKNOWN_LEFT = 2**62  # stands for the samples that are left where a source does not know its length

_STRIDE = 8  # between samples that are given away, in order of length
_TRIES = 14  # to find the cost of the largest group; each cuts all samples anew
_TURNS = 2  # in which ranks are levelled in time and in cost
_CHEAP = 0.9  # share of a rank's samples that take little beside their tokens
_TRIES_OF_FIRST_FIT = 2  # which takes 0.1 s for 20,000 of them


def work_of(tokens: npt.ArrayLike, budget: TokenBudget) -> IntArray:
    """Return what samples of some lengths cost under a budget without padding, (n,) int64."""
    return budget.row_cost(np.asarray(tokens, dtype=np.int64))


def gifts(work: IntArray, surplus: float) -> list[int]:
    """Return which samples a rank gives away: long ones, so that they are few.

    Of those that its surplus has room for it keeps seven of eight in order of length, so its
    lengths stay spread as those of others; what is then left of the surplus is filled with any.
    `work` is what each of its samples costs, (n,) int64.
    """
    longest_first = np.argsort(-work, kind="stable")
    given = []
    for start in range(_STRIDE):
        for index in longest_first[start::_STRIDE].tolist():
            if work[index] <= surplus:
                surplus -= work[index]
                given.append(index)
    return given


def receivers(totals: Sequence[int], given: Sequence[IntArray]) -> list[list[int]]:
    """Return to which rank each given sample goes: the largest first, to whom has the least.

    `totals`: what all samples of each rank cost; `given`: those that it gives, (n,) int64 each.
    """
    kept = [int(total - work.sum()) for total, work in zip(totals, given, strict=True)]
    heap = [(total, rank) for rank, total in enumerate(kept)]
    heapq.heapify(heap)
    chosen = [[0] * len(work) for work in given]
    every = [
        (-cost, rank, index)
        for rank, work in enumerate(given)
        for index, cost in enumerate(work.tolist())
    ]
    for minus_cost, rank, index in sorted(every):
        total, receiver = heap[0]
        heapq.heapreplace(heap, (total - minus_cost, receiver))
        chosen[rank][index] = receiver
    return chosen


Moves = list[list[tuple[int, int]]]
"""Of each rank, the places of the samples that it gives away, and who gets them."""


def moves_of(told: Sequence[IntArray], budget: TokenBudget, step_time: StepTime | None) -> Moves:
    """Return which samples each rank gives away: their places among its own, and to which rank.

    Ranks are levelled in cost; or, in turns, in what steps take beside their tokens, and in cost by
    samples that take little beside.

    Args:
        told: what each rank has, see `told_of`.
        budget: of a group.
        step_time: what a step takes, where groups are formed for that.
    """
    fixed = np.array([one[:TOLD_FIRST] for one in told])
    columns = [one[TOLD_FIRST:].reshape(2, -1) for one in told]
    sizes = [one.shape[1] for one in columns]
    tokens, patches = np.concatenate(columns, axis=1)
    owners = np.repeat(np.arange(len(told)), sizes)
    holders, work = owners.copy(), _needs(tokens, patches, budget)
    if step_time is None:
        _level(holders, work, fixed[:, 0], np.ones(len(work), dtype=bool))
    else:
        extra = step_time.extra(tokens, patches)
        density = extra / tokens
        # Such samples decide the longest times of a rank, which others are to share.
        rows = max(int(work.sum()) // budget.tokens, 1)
        is_dear = extra > int(extra.sum()) // rows
        _deal(
            holders, np.flatnonzero(is_dear)[np.argsort(-extra[is_dear], kind="stable")], len(told)
        )
        for _ in range(_TURNS):
            _level(holders, extra, fixed[:, 1], ~is_dear)
            limits = [_quantile(density[holders == rank]) for rank in range(len(told))]
            _level(holders, work, fixed[:, 0], density <= np.array(limits)[holders])
    first = np.concatenate(([0], np.cumsum(sizes)))
    moves: Moves = [[] for _ in told]
    for index in np.flatnonzero(holders != owners).tolist():
        giver = int(owners[index])
        moves[giver].append((index - int(first[giver]), int(holders[index])))
    return moves


def _needs(tokens: IntArray, patches: IntArray, budget: TokenBudget) -> IntArray:
    """Return which part of a group each sample takes, of that limit which it takes most of, (n,).

    It is in the unit of `budget.tokens`.
    """
    needs = work_of(tokens, budget)
    if budget.max_samples is not None:
        needs = np.maximum(needs, budget.tokens // budget.max_samples)
    if budget.max_patches is not None:
        needs = np.maximum(needs, patches * budget.tokens // budget.max_patches)
    return needs


def _quantile(values: npt.NDArray[np.float64]) -> float:
    return float(np.quantile(values, _CHEAP)) if len(values) else 0.0


def _deal(holders: IntArray, samples: IntArray, ranks: int) -> None:
    """Have each rank hold one of the first `ranks` samples, one of the next, and so on."""
    for start in range(0, len(samples) // ranks * ranks, ranks):
        part = samples[start : start + ranks]
        first = np.unique(holders[part], return_index=True)[1]
        has_none = np.setdiff1d(np.arange(ranks), holders[part])
        holders[np.delete(part, first)] = has_none


def _level(
    holders: IntArray, work: IntArray, fixed: IntArray, may_move: npt.NDArray[np.bool_]
) -> None:
    """Have ranks with more than the average give samples to ranks with less; change `holders`."""
    totals = fixed + np.bincount(holders, work, len(fixed)).astype(np.int64)
    mean = int(totals.sum()) / len(totals)
    given = []
    for rank, total in enumerate(totals.tolist()):
        movable = np.flatnonzero((holders == rank) & may_move)
        given.append(movable[gifts(work[movable], total - mean)])
    to = receivers(totals.tolist(), [work[rows] for rows in given])
    for rows, ranks in zip(given, to, strict=True):
        holders[rows] = ranks


TOLD_FIRST = 2  # integers of what a rank tells before its samples: see `told_of`


def told_of(
    samples: Facts, may_move: npt.NDArray[np.bool_], budget: TokenBudget, step_time: StepTime | None
) -> IntArray:
    """Return what a rank tells the others of what it has left, (2 + 2 n,) int64.

    First come cost and extra of the samples that cannot move, then tokens and patches of each of
    the n others.
    """
    kept, others = samples.take(np.flatnonzero(~may_move)), samples.take(np.flatnonzero(may_move))
    extra = 0 if step_time is None else int(step_time.extra(kept.tokens, kept.patches).sum())
    first = (int(_needs(kept.tokens, kept.patches, budget).sum()), extra)
    return np.concatenate((np.array(first, np.int64), others.tokens, others.patches))


class Rest:
    """The samples that a rank has for the last round, as they are cut into groups."""

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
        """Return the indices of the samples of each group: at most `most`, each as cheap as found.

        A sample that exceeds the budget on its own is a group.
        """
        if most < self.fewest:
            raise ValueError(f"`most` must be at least {self.fewest}, but is {most} instead.")
        budget, found = self._budget, self._fewest
        if self._step_time is not None and self._table.shape[1]:
            found = self._level_groups(most, self._step_time)
        else:
            by_first_fit = budget.layout == "packed" or budget.max_patches is not None
            found = self._least_groups(
                most,
                range(self._least(most), budget.tokens),
                lambda tokens: self._cut(replace(budget, tokens=tokens)),
                _TRIES_OF_FIRST_FIT if by_first_fit else _TRIES,
            )
        return [sorted(group.tolist()) for group in found]

    def _least_groups(
        self, most: int, limits: range, cut: Callable[[int], list[IntArray]], tries: int
    ) -> list[IntArray]:
        """Return at most so many groups, cut by the least of some limits that is found."""
        found, low, high = self._fewest, limits.start, limits.stop
        for _ in range(tries):
            if low >= high:
                break
            middle = (low + high) // 2
            groups = cut(middle)
            if len(groups) <= most:
                found, high = groups, middle
            else:
                low = middle + 1
        return found

    def _level_groups(self, most: int, step_time: StepTime) -> list[IntArray]:
        """Return groups that take about as long as each other."""
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
        return self._least_groups(most, limits, lambda time: runs.cut(table, time), _TRIES)

    def _costs_and_extra(self, step_time: StepTime) -> tuple[IntArray, IntArray]:
        packing, tokens = Packing(self._budget), self._table[TOKENS]
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

    def _least(self, groups: int) -> int:
        """Return the least that the largest of so many groups costs, oversize ones left aside."""
        budget, lengths = self._budget, self._table[TOKENS]
        fitting = lengths[lengths <= budget.capacity]
        if budget.shapes is not None or not len(fitting):  # Groups of one shape cost the same.
            return budget.tokens
        multiple = budget.pad_to_multiple_of
        longest = budget.row_cost(-(-int(fitting[-1]) // multiple) * multiple)
        return max(longest, int(work_of(fitting, budget).sum()) // groups)

    def _cut(self, budget: TokenBudget) -> list[IntArray]:
        return grouping_of(budget).partition(self._table) if self._table.shape[1] else []
