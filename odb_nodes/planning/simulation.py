"""Plan the steps of a whole job, on any number of ranks, in one process.

`RankAligner` plans with the same functions, so the steps are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, TypedDict

import numpy as np
import numpy.typing as npt

from odb_nodes._core.checks import check_count
from odb_nodes._core.hashing import hash_ints
from odb_nodes.errors import SampleError
from odb_nodes.planning.alignment import FILLER, CostReport, Uneven, make_report, plan_round
from odb_nodes.planning.budget import TokenBudget
from odb_nodes.planning.group_costs import BudgetCost, CostFn, GroupCostEstimator, tokens_of
from odb_nodes.planning.options import JobOptions
from odb_nodes.planning.pool import RollingPool
from odb_nodes.planning.rounds import round_steps
from odb_nodes.planning.table import IntArray
from odb_nodes.sample import Sample

if TYPE_CHECKING:
    from typing_extensions import Unpack

_FIRST_EPOCH = 0

Step = list[list[Sample] | None]
"""The group of each rank; `None` for a rank that has no sample left."""


@dataclass(frozen=True, kw_only=True)
class SimulationOptions(JobOptions):
    """A job to plan without running it. See `ODBDataLoader` for the fields not explained here.

    Args:
        world_size: number of ranks.
        budget: padded tokens of a group, or a `TokenBudget`.
        cost_fn: group -> cost, by which the groups of a step are matched. The samples have their
            tokens, their index into the lengths as `data`, and no patches. Default: the cost under
            the budget.

    Raises:
        TypeError, ValueError: an argument is not valid.
    """

    world_size: int
    budget: int | TokenBudget
    cost_fn: CostFn | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("world_size", self.world_size)
        TokenBudget.of(self.budget)


class _JobKeywords(TypedDict):
    world_size: int
    budget: int | TokenBudget


class SimulationKeywords(_JobKeywords, total=False):
    """The fields of `SimulationOptions`, as the types of keyword arguments."""

    window: int
    round_size: int
    uneven: Uneven
    dearest_first: int
    accumulate: int
    seed: int
    cost_fn: CostFn | None


def simulate_steps(lengths: npt.ArrayLike, **options: Unpack[SimulationKeywords]) -> Iterator[Step]:
    """Yield the steps of the first epoch. Arguments and errors are those of `simulate`."""
    return steps_of(lengths, SimulationOptions(**options))


def steps_of(lengths: npt.ArrayLike, job: SimulationOptions) -> Iterator[Step]:
    """Yield the steps of the first epoch of a job. See `simulate_steps`."""
    tokens, budget = _check_lengths(lengths), TokenBudget.of(job.budget)
    if budget.oversize == "error" and budget.is_oversize(longest := int(tokens.max())):
        raise SampleError(f"a sample of {longest} tokens exceeds {budget} on its own.")
    shards = [range(rank, len(tokens), job.world_size) for rank in range(job.world_size)]
    cost_fn = job.cost_fn or BudgetCost(budget)
    ranks = [_Rank(tokens, shard, job, cost_fn) for shard in shards]
    for number in count():
        most = round_steps(
            number,
            world_size=job.world_size,
            round_size=job.round_size,
            accumulate=job.accumulate,
        )
        reports = [rank.report(most) for rank in ranks]
        plan = plan_round(reports, uneven=job.uneven, key=hash_ints(job.seed, _FIRST_EPOCH, number))
        groups = [rank.groups(splits) for rank, splits in zip(ranks, plan.splits, strict=True)]
        for step in plan.groups.T.tolist():
            yield [
                None if index == FILLER else of_rank[index]
                for of_rank, index in zip(groups, step, strict=True)
            ]
        if plan.last:
            return


class _Rank:
    """Does on one rank what `WindowBucketer` and `RankAligner` do."""

    def __init__(
        self,
        tokens: IntArray,
        shard: range,
        job: SimulationOptions,
        cost_fn: CostFn,
    ) -> None:
        self._shard, self._tokens = shard, tokens[shard.start :: shard.step]
        self._budget = TokenBudget.of(job.budget)
        self._estimator = GroupCostEstimator(cost_fn, {})
        self._dearest_left = job.dearest_first
        self._pool: RollingPool[int] = RollingPool(self._budget, job.window)  # places in the shard
        self._ended = False  # As in a node, known only when a pull finds nothing.

    def report(self, most: int) -> CostReport:
        """Return the costs of the next round's groups."""
        groups: list[list[Sample]] = []
        while self._refill() and len(groups) < most:
            dearest = self._dearest_left > 0
            self._dearest_left -= dearest
            group = self._pool.take(draining=self._ended, dearest=dearest)
            groups.append(self._samples(group))
        report, self._ladder = make_report(
            groups, most=most, ended=not len(self._pool), measure=self._estimator, tokens=tokens_of
        )
        return report

    def groups(self, splits: int) -> list[list[Sample]]:
        """Return the groups of the round after `splits` splits."""
        return self._ladder.groups(splits)

    def _refill(self) -> bool:
        """Fill the pool, and return whether it holds anything."""
        pool, drop = self._pool, self._budget.oversize == "drop"
        while not self._ended and (room := pool.room()) > 0:
            lengths = self._tokens[pool.pulled : pool.pulled + room].tolist()
            kept = [
                (place, length)
                for place, length in enumerate(lengths, pool.pulled)
                if not (drop and self._budget.is_oversize(length))
            ]
            pool.pulled += len(lengths)
            places = [place for place, _ in kept]
            pool.add(places, [length for _, length in kept], [0] * len(kept), places)
            self._ended = len(lengths) < room
        return len(pool) > 0

    def _samples(self, places: list[int]) -> list[Sample]:
        lengths = self._tokens[places].tolist()
        return [
            Sample(self._shard[place], length, length - 1)
            for place, length in zip(places, lengths, strict=True)
        ]


def _check_lengths(lengths: npt.ArrayLike) -> IntArray:
    tokens = np.asarray(lengths)
    if tokens.ndim != 1 or not tokens.size or tokens.dtype.kind not in "iu" or tokens.min() < 1:
        raise ValueError(
            "`lengths` must be one row of integers of at least 1, one for each sample, but is "
            f"{lengths!r:.80} instead."
        )
    return tokens.astype(np.int64)
