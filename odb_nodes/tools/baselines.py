"""Other ways to make batches of the same samples, and what they come to."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate as running_sums
from itertools import zip_longest
from typing import Literal, get_args

import numpy as np
import torch

from odb_nodes._core.checks import check_choice, check_count
from odb_nodes.planning import RollingPool, SimulationOptions, TokenBudget
from odb_nodes.planning.table import IntArray
from odb_nodes.tools.lengths import LengthTable
from odb_nodes.tools.simulate import Batches, SimulationReport, TableEpoch

__all__ = ["STRATEGIES", "Baselines", "Strategy"]

Strategy = Literal[
    "random", "group_by_length", "batch_rebalance", "sorted windows", "offline", "odb_nodes"
]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
"""`random`: fixed batches in a random order. `group_by_length`, `batch_rebalance`: what the
`Trainer` of transformers 5.23 makes with that `train_sampling_strategy`. `sorted windows`: each
rank collects a window, sorts it, cuts it under the budget, and starts over. `offline`: all lengths
are known; all samples are sorted and cut under the budget, longest first, or packed so, and batches
of like cost share a step. That is what the paper on online dynamic batching (arXiv 2606.19989)
holds it up against. `odb_nodes`: what an `ODBDataLoader` makes."""

WINDOWED: tuple[Strategy, ...] = ("sorted windows", "odb_nodes")
"""Those that depend on the window."""

_MOST_MEGABATCHES = 50
SQUARE_COST = 0.001
"""The weight that `batch_rebalance` gives rows x length^2 beside rows x length."""

Step = Sequence[Sequence[int]]
"""The batch of each rank: the lengths of its samples, or their numbers."""


@dataclass(frozen=True, kw_only=True)
class Baselines:
    """Compares ways to make batches of a table's samples.

    Args:
        epoch: the samples.
        batch_size: samples of a fixed batch; default: as many of the longest as the budget holds.
    """

    epoch: TableEpoch
    batch_size: int | None = None

    def figures(self, strategy: Strategy, job: SimulationOptions) -> SimulationReport:
        """Return what a strategy comes to; of some samples, with the counts of the whole dataset.

        Args:
            strategy: one of `STRATEGIES`.
            job: ranks, budget, window, accumulation and seed.

        Raises:
            ValueError: there is no step.
        """
        check_choice("strategy", strategy, STRATEGIES)
        batches = self.batches(strategy, job)
        report = SimulationReport.of_batches(batches, TokenBudget.of(job.budget))
        return report.scaled(self.epoch.scale(job))

    def fixed_size(self, budget: TokenBudget) -> int:
        """Return the number of samples of a fixed batch."""
        if self.batch_size is not None:
            return check_count("batch_size", self.batch_size)
        longest = int(self.epoch.table.kept(budget).tokens.max())
        return max(1, budget.tokens // budget.row_cost(budget.width(longest)))

    def batches(self, strategy: Strategy, job: SimulationOptions) -> Batches:
        """Return the batches of a strategy, of the samples that the loader would read."""
        budget = TokenBudget.of(job.budget)
        if strategy == "odb_nodes":
            return self.epoch.batches(job)
        table, shards = self.epoch.order(job)
        table = table.kept(budget)
        shards = [shard[table.tokens[shard] > 0] for shard in shards]
        if strategy == "sorted windows":
            window = self.epoch.window(job)
            ranks = [_sorted_windows(table, shard, budget, window) for shard in shards]
            return Batches.of(zip_longest(*ranks, fillvalue=()), budget)
        rows = np.sort(np.concatenate(shards))  # a mixture may leave rows out, or repeat them
        if strategy == "offline":
            groups = sorted(_cut(table, rows, budget), key=budget.cost, reverse=True)
            return Batches.of(_in_steps(groups, job.world_size), budget)
        lengths = table.tokens[rows].tolist()
        steps = self._fixed(strategy, lengths, self.fixed_size(budget), job)
        of_samples = ([[lengths[row] for row in batch] for batch in step] for step in steps)
        multiple = budget.pad_to_multiple_of
        return Batches.of(of_samples, TokenBudget(multiple, pad_to_multiple_of=multiple))

    def _fixed(
        self, strategy: Strategy, lengths: list[int], size: int, job: SimulationOptions
    ) -> Iterable[Step]:
        """Return batches of about `size` samples each, step by step."""
        generator = torch.Generator().manual_seed(job.seed)
        order = torch.randperm(len(lengths), generator=generator).numpy()
        if strategy == "batch_rebalance":
            return rebalanced_batches(
                lengths, order.tolist(), size, world_size=job.world_size, accumulate=job.accumulate
            )
        if strategy == "group_by_length":
            order = grouped_by_length(np.array(lengths), order, size * job.accumulate)
        return dealt(order, size, job.world_size)


def _in_steps(groups: Sequence[list[int]], ranks: int) -> list[list[list[int]]]:
    steps = [[*groups[at : at + ranks]] for at in range(0, len(groups), ranks)]
    if steps:
        steps[-1] += [[]] * (ranks - len(steps[-1]))
    return steps


def _sorted_windows(
    table: LengthTable, rows: IntArray, budget: TokenBudget, window: int
) -> list[list[int]]:
    parts = [rows[at : at + window] for at in range(0, len(rows), window)]
    return [group for part in parts for group in _cut(table, part, budget)]


def _cut(table: LengthTable, rows: IntArray, budget: TokenBudget) -> list[list[int]]:
    """Return samples as groups, longest first, by their lengths."""
    pool, tokens = RollingPool(budget, max(1, len(rows))), table.tokens[rows]
    pool.add(np.arange(len(rows)), tokens, table.patches[rows])
    pool.pulled = len(rows)
    groups = []
    while len(pool):
        groups.append(tokens[pool.take(draining=True)].tolist())
    return groups


def grouped_by_length(lengths: IntArray, order: IntArray, batch_size: int) -> IntArray:
    """Return the order of `LengthGroupedSampler` of transformers."""
    batches = max(1, min(len(lengths) // (4 * batch_size), _MOST_MEGABATCHES))
    size = batches * batch_size
    parts = [order[start : start + size] for start in range(0, len(order), size)]
    parts = [part[np.argsort(-lengths[part], kind="stable")] for part in parts]
    longest = int(np.argmax([lengths[part[0]] for part in parts]))
    first, other = parts[0][0], parts[longest][0]
    parts[0][0], parts[longest][0] = other, first
    return np.concatenate(parts)


def dealt(order: IntArray, batch_size: int, world_size: int) -> list[list[list[int]]]:
    """Return the batch of each rank, step by step, as Accelerate deals fixed batches out.

    On several ranks the first samples fill up the last step, so that all of its batches are full.
    """
    if world_size > 1 and (over := len(order) % (batch_size * world_size)):
        first = order[: batch_size * world_size]
        order = np.concatenate((order, np.resize(first, batch_size * world_size - over)))
    flat = order.tolist()
    batches = [flat[at : at + batch_size] for at in range(0, len(flat), batch_size)]
    return [batches[at : at + world_size] for at in range(0, len(batches), world_size)]


def rebalanced_batches(
    lengths: Sequence[int],
    order: Sequence[int],
    batch_size: int,
    *,
    world_size: int,
    accumulate: int,
) -> Iterator[Step]:
    """Yield the batches of `BatchRebalanceSampler` of transformers 5.23 in its first epoch.

    The costs of groups are computed from their numbers of samples, where it copies the samples.
    """
    groups = world_size * accumulate
    per_step = batch_size * groups
    for start in range(0, len(order), per_step):
        taken = [*order[start : start + per_step]]
        if len(taken) < groups:
            taken += ([*order] * math.ceil(groups / len(order)))[: groups - len(taken)]
        taken.sort(key=lengths.__getitem__, reverse=True)
        split = _Split([lengths[index] for index in taken], groups, world_size, per_step)
        counts = split.balanced()
        ends = [*running_sums(counts)]
        parts = [taken[end - count : end] for count, end in zip(counts, ends, strict=True)]
        costs = split.costs(counts)
        ranking = sorted(range(groups), key=costs.__getitem__, reverse=True)
        for slot in range(accumulate):
            yield [parts[group] for group in ranking[slot * world_size : (slot + 1) * world_size]]


class _Split:
    """Splits samples, longest first, into groups of about the same cost, by hill climbing."""

    def __init__(self, lengths: list[int], groups: int, world_size: int, per_step: int) -> None:
        self._lengths, self._groups, self._world_size = lengths, groups, world_size
        self._most_moves = max(30 * groups, per_step)

    def costs(self, counts: Sequence[int]) -> list[float]:
        """Return the cost of each group, where these are their numbers of samples."""
        costs, start = [], 0
        for count in counts:
            costs.append(_cost(count, self._lengths[start]))
            start += count
        return costs

    def balanced(self) -> list[int]:
        """Return the numbers of samples with the smallest spread of costs that was come by."""
        base, more = divmod(len(self._lengths), self._groups)
        counts = [base + (group < more) for group in range(self._groups)]
        best, best_spread = [*counts], float("inf")
        frozen: set[int] = set()
        seen: set[tuple[int, ...]] = set()
        for _ in range(self._most_moves):
            if (key := tuple(counts)) in seen:
                break
            seen.add(key)
            costs = self.costs(counts)
            active = [group for group in range(self._groups) if group not in frozen]
            if len(active) <= 1:
                break
            dearest, cheapest = (pick(active, key=costs.__getitem__) for pick in (max, min))
            spread = costs[dearest] - costs[cheapest]
            if spread < best_spread:
                best, best_spread = [*counts], spread
            if spread == 0:
                break
            if counts[dearest] > 1:
                counts[dearest] -= 1
                counts[cheapest] += 1
            else:
                self._freeze(counts, dearest, costs, frozen)
        return best

    def _freeze(
        self, counts: list[int], dearest: int, costs: list[float], frozen: set[int]
    ) -> None:
        """Fill up the groups that share a step with a sample that is alone, and leave them so."""
        ranking = sorted(range(self._groups), key=costs.__getitem__, reverse=True)
        start = ranking.index(dearest) // self._world_size * self._world_size
        together = set(ranking[start : start + self._world_size])  # and its order is that of a set
        for group in together:
            if group in frozen or group == dearest:
                continue
            while True:
                first = sum(counts[:group])
                if _cost(counts[group] + 1, self._lengths[first]) > costs[dearest]:
                    break
                outside = (
                    other
                    for other in range(self._groups)
                    if other not in frozen and other not in together and counts[other] > 1
                )
                now = self.costs(counts)
                donor = min(outside, key=now.__getitem__, default=None)
                if donor is None:
                    break
                counts[group] += 1
                counts[donor] -= 1
        frozen |= together


def _cost(samples: int, longest: int) -> float:
    # In the order of its operations, since ties decide.
    return samples * longest + SQUARE_COST * samples * longest * longest
