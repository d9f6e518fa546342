"""Other ways to make batches of the same samples, and what they come to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Literal, get_args

import numpy as np
import torch

from odb_nodes._core.checks import check_choice, check_count
from odb_nodes.planning import RollingPool, SimulationOptions, TokenBudget
from odb_nodes.planning.table import IntArray
from odb_nodes.tools.figures import (
    BatchShapes,
    Figures,
    shapes_of_lengths,
    shapes_of_rows,
    shapes_of_steps,
)
from odb_nodes.tools.length_table import LengthTable
from odb_nodes.tools.rebalance import rebalanced_batches
from odb_nodes.tools.table_epoch import TableEpoch

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


@dataclass(frozen=True, kw_only=True)
class Baselines:
    """Compares ways to make batches of a table's samples.

    Args:
        epoch: the samples.
        batch_size: samples of a fixed batch; default: as many of the longest as the budget holds.
    """

    epoch: TableEpoch
    batch_size: int | None = None

    def figures(self, strategy: Strategy, job: SimulationOptions) -> Figures:
        """Return what a strategy comes to; of some samples, with the counts of the whole dataset.

        Args:
            strategy: one of `STRATEGIES`.
            job: ranks, budget, window, accumulation and seed.

        Raises:
            ValueError: there is no step.
        """
        check_choice("strategy", strategy, STRATEGIES)
        found = Figures.of(self.shapes(strategy, job), TokenBudget.of(job.budget))
        table = self.epoch.table
        if table.is_whole:
            return found
        factor = table.num_samples / len(self.epoch.order(job)[0])
        return replace(found, steps=round(found.steps * factor), rows=round(found.rows * factor))

    def fixed_size(self, budget: TokenBudget) -> int:
        """Return the number of samples of a fixed batch."""
        if self.batch_size is not None:
            return check_count("batch_size", self.batch_size)
        longest = int(self.epoch.table.kept(budget).tokens.max())
        return max(1, budget.tokens // budget.row_cost(budget.width(longest)))

    def shapes(self, strategy: Strategy, job: SimulationOptions) -> BatchShapes:
        """Return the shapes of a strategy's batches, of the samples that the loader would read."""
        budget, world_size = TokenBudget.of(job.budget), job.world_size
        if strategy == "odb_nodes":
            return shapes_of_steps(self.epoch.steps(job), budget)
        table, shards = self.epoch.order(job)
        table = table.kept(budget)
        if strategy == "sorted windows":
            read = [shard[table.tokens[shard] > 0] for shard in shards]
            ranks = [_windows(table, shard, budget, self.epoch.window(job)) for shard in read]
            return shapes_of_lengths(zip_longest(*ranks, fillvalue=()), budget)
        drawn = np.sort(np.concatenate(shards))  # a mixture may leave rows out, or repeat them
        drawn = drawn[table.tokens[drawn] > 0]
        if strategy == "offline":
            return _offline(table, drawn, budget, world_size)
        lengths = table.tokens[drawn]
        size = self.fixed_size(budget)
        steps: Iterable[Sequence[Sequence[int]]]
        if strategy == "batch_rebalance":
            steps = rebalanced_batches(
                lengths.tolist(),
                batch_size=size,
                world_size=world_size,
                accumulate=job.accumulate,
                seed=job.seed,
            )
        else:
            generator = torch.Generator().manual_seed(job.seed)
            order = torch.randperm(len(lengths), generator=generator).numpy()
            if strategy == "group_by_length":
                order = grouped_by_length(lengths, order, size * job.accumulate)
            steps = dealt(order, size, world_size)
        return shapes_of_rows(steps, lengths, budget.pad_to_multiple_of)


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


def _offline(table: LengthTable, rows: IntArray, budget: TokenBudget, ranks: int) -> BatchShapes:
    groups = _cut(table, rows, budget)
    groups.sort(key=budget.cost, reverse=True)
    steps = [groups[at : at + ranks] for at in range(0, len(groups), ranks)]
    if steps:
        steps[-1] += [[]] * (ranks - len(steps[-1]))
    return shapes_of_lengths(steps, budget)


def _windows(
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
