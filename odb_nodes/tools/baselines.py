"""Compare an `ODBDataLoader` with other ways to make batches of the same samples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Literal, get_args

import numpy as np
import torch

from odb_nodes._compat import transformers as compat
from odb_nodes._support.arrays import IntArray
from odb_nodes._support.checks import check_choice, check_count
from odb_nodes.core.planning import RollingPool, SimulationOptions, StepTime, TokenBudget
from odb_nodes.core.planning.group_costs import samples_of
from odb_nodes.core.sample_block import SampleBlock
from odb_nodes.tools.lengths import LengthTable
from odb_nodes.tools.simulate import Batches, SimulationReport, TableEpoch, measured

__all__ = ["STRATEGIES", "Baselines", "Strategy"]

Strategy = Literal[
    "random", "group_by_length", "batch_rebalance", "sorted windows", "offline", "odb_nodes"
]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
"""`random`: fixed batches in a random order. `group_by_length`, `batch_rebalance`: the
`train_sampling_strategy` of the `Trainer` with this name, by the samplers of transformers 5.23.
`sorted windows`: each rank collects a window, sorts it, cuts it under the budget, and starts over.
`offline`: all samples are sorted by known lengths and cut (or packed) under the budget, longest
first, and batches of similar cost share a step; this is the baseline in the paper on online dynamic
batching (arXiv 2606.19989). `odb_nodes`: the batches of an `ODBDataLoader`."""

WINDOWED: tuple[Strategy, ...] = ("sorted windows", "odb_nodes")
"""Strategies that depend on the window."""

_SAMPLERS = {"group_by_length": "LengthGroupedSampler", "batch_rebalance": "BatchRebalanceSampler"}

Step = Sequence[Sequence[int]]
"""The indices of the samples of each rank's batch."""


def is_available(strategy: Strategy) -> bool:
    """Tell whether a strategy can be simulated: two need a sampler of transformers."""
    return strategy not in _SAMPLERS or compat.sampler_class(_SAMPLERS[strategy]) is not None


@dataclass(frozen=True, kw_only=True)
class Baselines:
    """The batches of each strategy, for the samples of a table.

    Args:
        epoch: the samples.
        batch_size: samples of a fixed batch; default: as many of the longest as the budget holds.
    """

    epoch: TableEpoch
    batch_size: int | None = None

    def figures(self, strategy: Strategy, job: SimulationOptions) -> SimulationReport:
        """Return the report of a strategy. Its counts are estimates if the table has some samples.

        Args:
            strategy: one of `STRATEGIES`.
            job: ranks, budget, window, accumulation and seed.

        Raises:
            ImportError: transformers lacks the sampler of the strategy.
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
        """Return the batches of a strategy, for the samples that a loader would read."""
        check_choice("strategy", strategy, STRATEGIES)
        if strategy == "odb_nodes":
            return self.epoch.batches(job)
        budget, (table, shards) = TokenBudget.of(job.budget), self.epoch.order(job)
        table = table.kept(budget)
        shards = [shard[table.tokens[shard] > 0] for shard in shards]
        rows = np.sort(np.concatenate(shards))  # a mixture may leave rows out, or repeat them
        step_time = job.step_time or StepTime.typical(budget)
        if strategy == "sorted windows":
            window = self.epoch.window(job)
            ranks = [
                [
                    group
                    for start in range(0, len(shard), window)
                    for group in _groups_under(table, shard[start : start + window], budget)
                ]
                for shard in shards
            ]
            return measured(zip_longest(*ranks), budget, step_time)
        if strategy == "offline":
            groups = sorted(
                _groups_under(table, rows, budget),
                key=lambda group: budget.cost(group.lengths),
                reverse=True,
            )
            return measured(_in_steps(groups, job.world_size), budget, step_time)
        steps = fixed_batches(strategy, table.tokens[rows].tolist(), self.fixed_size(budget), job)
        groups_of_steps = (
            [_group(table, rows[np.array(batch, np.int64)]) for batch in step] for step in steps
        )
        multiple = budget.pad_to_multiple_of
        padded = TokenBudget(multiple, pad_to_multiple_of=multiple)
        return measured(groups_of_steps, padded, step_time)


def fixed_batches(
    strategy: Strategy, lengths: list[int], size: int, job: SimulationOptions
) -> Iterable[Step]:
    """Return the steps of a strategy with batches of about `size` samples: sample indices."""
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
    over = len(order) % (size * world_size)
    if world_size > 1 and over:
        order += np.resize(order[: size * world_size], size * world_size - over).tolist()
    batches = [order[start : start + size] for start in range(0, len(order), size)]
    return _in_steps(batches, world_size, filler=[])


def _in_steps(groups: Sequence[Any], ranks: int, filler: Any = None) -> list[tuple[Any, ...]]:
    """Return the groups of all ranks for each step; `filler` completes the last step."""
    return [*zip_longest(*[iter(groups)] * ranks, fillvalue=filler)]


def _groups_under(table: LengthTable, rows: IntArray, budget: TokenBudget) -> list[SampleBlock]:
    """Return samples as groups, longest first."""
    pool = RollingPool(budget, max(1, len(rows)))
    tokens = table.tokens[rows]
    pool.add(np.arange(len(rows)), tokens, table.patches[rows])
    pool.count(len(rows))
    groups = []
    while len(pool):
        groups.append(_group(table, rows[pool.take(draining=True)]))
    return groups


def _group(table: LengthTable, rows: IntArray) -> SampleBlock:
    return samples_of(rows, table.tokens[rows], table.targets[rows], table.patches[rows])
