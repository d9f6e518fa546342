"""The end of an epoch on many ranks: what is left is shared out evenly, for one last round.

Shards of the same number of samples differ in tokens by chance, so their ranks would end at
different steps. Before that, each rank reads what is left of its shard. Ranks with more than the
average then give some samples, by their keys, to ranks with less; and all of them cut what they
have into the same number of groups.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from odb_nodes.planning.budget import TokenBudget
from odb_nodes.planning.facts import Facts
from odb_nodes.planning.pool import grouping_of
from odb_nodes.planning.table import TOKENS, IntArray

UNKNOWN_LEFT = 2**62  # stands for the samples that are left where a source does not know its length

_STRIDE = 8  # between samples that are given away, in order of length
_TRIES = 14  # to find the cost of the dearest group; each cuts all samples anew
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


class Rest:
    """The samples that a rank has for the last round, as they are cut into groups."""

    def __init__(self, samples: Facts, budget: TokenBudget) -> None:
        table = np.stack((samples.tokens, np.arange(len(samples)), samples.patches))
        self._table = table.take(table[TOKENS].argsort(kind="stable"), axis=1)
        self._budget = budget
        self._fewest = self._cut(budget)

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
        low, high = self._least(most), budget.tokens
        by_first_fit = budget.layout == "packed" or budget.max_patches is not None
        for _ in range(_TRIES_OF_FIRST_FIT if by_first_fit else _TRIES):
            if low >= high:
                break
            middle = (low + high) // 2
            groups = self._cut(replace(budget, tokens=middle))
            if len(groups) <= most:
                found, high = groups, middle
            else:
                low = middle + 1
        return [sorted(group.tolist()) for group in found]

    def _least(self, groups: int) -> int:
        """Return the least that the dearest of so many groups costs, oversize ones left aside."""
        budget, lengths = self._budget, self._table[TOKENS]
        fitting = lengths[lengths <= budget.capacity]
        if budget.shapes is not None or not len(fitting):  # Groups of one shape cost the same.
            return budget.tokens
        multiple = budget.pad_to_multiple_of
        longest = budget.row_cost(-(-int(fitting[-1]) // multiple) * multiple)
        return max(longest, int(work_of(fitting, budget).sum()) // groups)

    def _cut(self, budget: TokenBudget) -> list[IntArray]:
        return grouping_of(budget).partition(self._table) if self._table.shape[1] else []
