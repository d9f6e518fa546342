"""Other ways to make batches of the same samples, and what they come to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal, get_args

import numpy as np
import torch

from odb_nodes._compat import transformers as compat
from odb_nodes._support.arrays import IntArray
from odb_nodes._support.checks import check_choice, check_count
from odb_nodes.core.planning import RollingPool, SimulationOptions, TokenBudget
from odb_nodes.tools.lengths import LengthTable
from odb_nodes.tools.simulate import Batches, SimulationReport, TableEpoch, measured

__all__ = ["STRATEGIES", "Baselines", "Strategy"]

Strategy = Literal[
    "random", "group_by_length", "batch_rebalance", "sorted windows", "offline", "odb_nodes"
]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
"""`random`: fixed batches in a random order. `group_by_length`, `batch_rebalance`: what the
`Trainer` makes with that `train_sampling_strategy`, by the samplers of transformers (of 5.23).
`sorted windows`: each rank collects a window, sorts it, cuts it under the budget, and starts over.
`offline`: all lengths are known; all samples are sorted and cut under the budget, longest first, or
packed so, and batches of like cost share a step. That is what the paper on online dynamic batching
(arXiv 2606.19989) holds it up against. `odb_nodes`: what an `ODBDataLoader` makes."""

WINDOWED: tuple[Strategy, ...] = ("sorted windows", "odb_nodes")
"""Those that depend on the window."""

_SAMPLERS = {
    "group_by_length": "LengthGroupedSampler",
    "batch_rebalance": "BatchRebalanceSampler",
}

Step = Sequence[Sequence[int]]
"""The batch of each rank: the lengths of its samples, or their numbers."""


def is_available(strategy: Strategy) -> bool:
    """Tell whether transformers has the sampler of a strategy; ours need none."""
    return strategy not in _SAMPLERS or compat.sampler_class(_SAMPLERS[strategy]) is not None


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
            ImportError: the strategy is one of the `Trainer`, and transformers lacks it.
            ValueError: there is no step.
        """
        return self.epoch.report(job, self.batches(strategy, job))

    def fixed_size(self, budget: TokenBudget) -> int:
        """Return the number of samples of a fixed batch."""
        if self.batch_size is not None:
            return check_count("batch_size", self.batch_size)
        longest = int(self.epoch.table.kept(budget).tokens.max())
        return max(1, budget.tokens // budget.row_cost(budget.width(longest)))

    def batches(self, strategy: Strategy, job: SimulationOptions) -> Batches:
        """Return the batches of a strategy, of the samples that the loader would read."""
        check_choice("strategy", strategy, STRATEGIES)
        if strategy == "odb_nodes":
            return self.epoch.batches(job)
        budget, (table, shards) = TokenBudget.of(job.budget), self.epoch.order(job)
        table = table.kept(budget)
        shards = [shard[table.tokens[shard] > 0] for shard in shards]
        rows = np.sort(np.concatenate(shards))  # a mixture may leave rows out, or repeat them
        if strategy == "sorted windows":
            window = self.epoch.window(job)
            parts = [
                [shard[start : start + window] for start in range(0, len(shard), window)]
                for shard in shards
            ]
            ranks = [
                [group for part in windows for group in _cut(table, part, budget)]
                for windows in parts
            ]
            return measured(zip_longest(*ranks, fillvalue=()), budget)
        if strategy == "offline":
            groups = sorted(_cut(table, rows, budget), key=budget.cost, reverse=True)
            return measured(_in_steps(groups, job.world_size), budget)
        lengths = table.tokens[rows].tolist()
        steps = fixed_batches(strategy, lengths, self.fixed_size(budget), job)
        of_samples = ([[lengths[row] for row in batch] for batch in step] for step in steps)
        multiple = budget.pad_to_multiple_of
        return measured(of_samples, TokenBudget(multiple, pad_to_multiple_of=multiple))


def fixed_batches(
    strategy: Strategy, lengths: list[int], size: int, job: SimulationOptions
) -> Iterable[Step]:
    """Return batches of about `size` samples each, the indices of each rank, step by step."""
    if not is_available(strategy):
        raise ImportError(
            f"`{strategy}` is made by {_SAMPLERS[strategy]} of transformers 5.23 or later: "
            "pip install -U transformers"
        )
    world_size, accumulate, seed = job.world_size, job.accumulate, job.seed
    if strategy == "batch_rebalance":
        return compat.rebalanced_batches(
            lengths, size, world_size=world_size, accumulate=accumulate, seed=seed
        )
    if strategy == "group_by_length":
        order = compat.length_grouped_order(lengths, size * accumulate, seed)
    else:
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(lengths), generator=generator).tolist()
    # As Accelerate deals them out: the first samples fill up the last step of several ranks.
    if world_size > 1 and (over := len(order) % (size * world_size)):
        order += np.resize(order[: size * world_size], size * world_size - over).tolist()
    return _in_steps(
        [order[start : start + size] for start in range(0, len(order), size)], world_size
    )


def _in_steps(groups: Sequence[list[int]], ranks: int) -> list[list[list[int]]]:
    steps = [[*groups[start : start + ranks]] for start in range(0, len(groups), ranks)]
    if steps:
        steps[-1] += [[]] * (ranks - len(steps[-1]))
    return steps


def _cut(table: LengthTable, rows: IntArray, budget: TokenBudget) -> list[list[int]]:
    """Return samples as groups, longest first, by their lengths."""
    pool, tokens = RollingPool(budget, max(1, len(rows))), table.tokens[rows]
    pool.add(np.arange(len(rows)), tokens, table.patches[rows])
    pool.count(len(rows))
    groups = []
    while len(pool):
        groups.append(tokens[pool.take(draining=True)].tolist())
    return groups
