"""Plan the steps of a whole job, on any number of ranks, in one process.

It drives the planners that `WindowBucketer` and `RankAligner` drive, so the steps are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, NamedTuple, TypedDict

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

from odb_nodes._core.checks import check_count
from odb_nodes._core.hashing import hash_ints
from odb_nodes.errors import SampleError
from odb_nodes.planning.auto_window import WindowSize
from odb_nodes.planning.budget import TokenBudget, round_up
from odb_nodes.planning.group_costs import BudgetCost, CostFn, GroupCostEstimator
from odb_nodes.planning.group_planner import GroupPlanner, RoundSettings
from odb_nodes.planning.levelling import UNKNOWN_LEFT, Rest, gifts, receivers, work_of
from odb_nodes.planning.options import JobOptions
from odb_nodes.planning.rounds import (
    FILLER,
    RoundPlanner,
    Uneven,
    next_settings,
    plan_round,
    round_steps,
)
from odb_nodes.planning.runs import check_diversity
from odb_nodes.planning.table import IntArray
from odb_nodes.sample_block import (
    FACTS,
    KIND,
    NONE,
    PATCHES,
    TARGETS,
    TOKENS,
    SampleBlock,
    SampleKind,
    code_of,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

Step = list[SampleBlock | None]  # the group of each rank; `None` for one that fills the step


class SampleCosts(NamedTuple):
    """What planning needs to know of the samples of a dataset, a row each."""

    tokens: IntArray  # length of each sample, (n,) int64; 0 for one that processing skips
    targets: IntArray  # supervised tokens of each, (n,) int64
    patches: IntArray  # image patches of each, (n,) int64
    tasks: IntArray  # number of the task of each, (n,) int64

    def are_oversize(self, budget: TokenBudget) -> NDArray[np.bool_]:
        """Tell which samples exceed a budget on their own, (n,) bool."""
        over: NDArray[np.bool_] = self.tokens > budget.capacity
        if budget.max_patches is not None:
            over = over | (self.patches > budget.max_patches)
        return over


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
        check_diversity(self.diversity, TokenBudget.of(self.budget))


class PlanKeywords(TypedDict, total=False):
    """Options of a plan, as the types of keyword arguments."""

    round_size: int
    uneven: Uneven
    dearest_first: int
    accumulate: int


class _JobKeywords(TypedDict):
    world_size: int
    budget: int | TokenBudget


class SimulationKeywords(_JobKeywords, PlanKeywords, total=False):
    """The fields of `SimulationOptions`, as the types of keyword arguments."""

    window: WindowSize
    diversity: float
    seed: int
    cost_fn: CostFn | None


def simulate_steps(lengths: npt.ArrayLike, **options: Unpack[SimulationKeywords]) -> Iterator[Step]:
    """Yield the steps of the first epoch. Arguments and errors are those of `simulate`."""
    return steps_of(lengths, SimulationOptions(**options))


def steps_of(lengths: npt.ArrayLike, job: SimulationOptions) -> Iterator[Step]:
    """Yield the steps of the first epoch of a job. See `simulate_steps`."""
    tokens = check_lengths(lengths)
    none = np.zeros_like(tokens)
    samples = SampleCosts(tokens, tokens - 1, patches=none, tasks=none)
    order = np.arange(len(tokens))
    return plan_steps(
        samples, [order[rank :: job.world_size] for rank in range(job.world_size)], job
    )


def plan_epoch(
    lengths: npt.ArrayLike,
    budget: int | TokenBudget,
    *,
    world_size: int = 1,
    window: WindowSize = JobOptions.window,
    seed: int = JobOptions.seed,
    costs: npt.ArrayLike | None = None,
    **options: Unpack[PlanKeywords],
) -> list[list[list[int]]]:
    """Plan the batches of samples whose lengths are known, such as rollouts or a packed dataset.

        for step in plan_epoch([len(ids) for ids in rollouts], 16_384, world_size=8):
            batch = [rollouts[index] for index in step[rank]]

    Each sample is planned exactly once, but for those that `oversize="drop"` or `uneven="stop"`
    leave out. All ranks have the same number of steps, and the groups of a step cost about the
    same. The plan depends on the arguments alone. Without `costs` it is the
    first epoch of an `ODBDataLoader(shuffle=False)` whose samples have these lengths, step by step.

    Args:
        lengths: tokens of each sample, (n,). Rank r reads every `world_size`-th, from the r-th on;
            shuffle them for another order.
        budget: padded tokens of a group, or a `TokenBudget`.
        world_size: number of ranks.
        window: samples that wait on each rank to be grouped; `len(lengths)` chooses among all.
        seed: the seed of the order of steps.
        costs: what a step with each sample takes, (n,) integers of at least 0 in any unit; the
            groups of a step are matched by their sums, below 2**31. Default: what the groups cost
            under the budget, padding included.
        options: `round_size`, `uneven`, `dearest_first`, `accumulate`, as for `ODBDataLoader`.

    Returns:
        For each step the indices into `lengths` of each rank's group; none for a rank that has no
        sample left, and computes a filler batch in training.

    Raises:
        TypeError, ValueError: an argument is not valid.
        SampleError: a sample is too long under `oversize="error"`.
    """
    tokens = check_lengths(lengths)
    cost_fn = None if costs is None else _summed(costs, len(tokens))
    job = SimulationOptions(
        world_size=world_size, budget=budget, window=window, seed=seed, cost_fn=cost_fn, **options
    )
    return [
        [[] if group is None else group.data() for group in step] for step in steps_of(tokens, job)
    ]


def _summed(costs: npt.ArrayLike, samples: int) -> CostFn:
    """Return the cost of a group: the sum over its samples."""
    given = np.asarray(costs)
    if given.shape != (samples,) or given.dtype.kind not in "iu" or given.min() < 0:
        raise ValueError(
            f"`costs` must be {samples} integers of at least 0, one for each of `lengths`, but "
            f"is {costs!r:.80} instead."
        )
    own: list[int] = given.tolist()
    return lambda group: check_count("costs", sum(own[sample.data] for sample in group), 0)


def plan_steps(
    samples: SampleCosts,
    shards: Sequence[IntArray],
    job: SimulationOptions,
    *,
    epoch: int = 0,
    shares_rest: bool = True,
    knows_length: bool = True,
) -> Iterator[Step]:
    """Yield the steps of an epoch whose samples each rank reads in an order of its own."""
    budget = TokenBudget.of(job.budget)
    if budget.oversize == "error" and (is_over := samples.are_oversize(budget)).any():
        first = int(is_over.argmax())
        raise SampleError(
            f"a sample of {samples.tokens[first]} tokens and {samples.patches[first]} patches "
            f"exceeds {budget} on its own."
        )
    measure = GroupCostEstimator(job.cost_fn or BudgetCost(budget), {})
    shares_rest = shares_rest and job.uneven == "fill"
    ranks = [
        _ShardPlanner(samples, shard, job, measure, knows_length, shares_rest) for shard in shards
    ]
    full_round = round_up(job.round_size, job.accumulate)
    offered = full_round if job.world_size > 1 and job.cost_fn is None else 0
    settings = RoundSettings()
    for number in count():
        most = round_steps(number, job.world_size, job.round_size, job.accumulate)
        if settings.is_last:
            groups, most = _share_out([rank.read_rest(settings) for rank in ranks], budget)
        else:
            groups = [rank.read(most, settings) for rank in ranks]
            for rank, of_rank in zip(ranks, groups, strict=True):
                rank.read_ahead(of_rank, most)
        reports = [
            rank.report(of_rank, most, offered) for rank, of_rank in zip(ranks, groups, strict=True)
        ]
        plan = plan_round(reports, uneven=job.uneven, key=hash_ints(job.seed, epoch, number))
        groups = [rank.groups(splits) for rank, splits in zip(ranks, plan.splits, strict=True)]
        for step in plan.groups.T.tolist():
            yield [
                None if index == FILLER else of_rank[index]
                for of_rank, index in zip(groups, step, strict=True)
            ]
        if plan.last:
            return
        next_steps = round_steps(number + 1, job.world_size, job.round_size, job.accumulate)
        settings = next_settings(reports, settings, next_steps)


def _share_out(
    rests: Sequence[SampleBlock], budget: TokenBudget
) -> tuple[list[list[SampleBlock]], int]:
    """Share out what ranks have left, and return the groups of each, and the steps of the round.

    Real ranks do it one by one: each chooses its gifts, and is told those of the others.
    """
    works = [work_of(rest.tokens, budget) for rest in rests]
    totals = [int(work.sum()) for work in works]
    mean = sum(totals) / len(totals)
    given = [gifts(work, total - mean) for work, total in zip(works, totals, strict=True)]
    to = receivers(totals, [work[own] for work, own in zip(works, given, strict=True)])
    shares = [
        [rest.take(np.delete(np.arange(len(rest)), own))]
        for rest, own in zip(rests, given, strict=True)
    ]
    for rest, own, of in zip(rests, given, to, strict=True):
        for index, receiver in zip(own, of, strict=True):
            shares[receiver].append(rest.take([index]))
    joined = [SampleBlock.joined(share) for share in shares]
    cuts = [Rest(share, budget) for share in joined]
    steps = max(cut.fewest for cut in cuts)
    groups = [
        [*map(share.take, cut.groups(steps))] for share, cut in zip(joined, cuts, strict=True)
    ]
    return groups, steps


_KIND = code_of(SampleKind("", "", "", None, 0))


class _ShardPlanner(RoundPlanner):
    """Plans the rounds of the shard of one rank."""

    def __init__(
        self,
        samples: SampleCosts,
        shard: IntArray,
        job: SimulationOptions,
        measure: GroupCostEstimator,
        knows_length: bool,
        shares_rest: bool,
    ) -> None:
        self._shard = shard
        columns = (column[shard] for column in samples)
        self._tokens, self._targets, self._patches, self._task_numbers = columns
        budget = TokenBudget.of(job.budget)
        self._left_out = self._tokens == 0
        if budget.oversize == "drop":
            self._left_out |= samples.are_oversize(budget)[shard]
        self._knows_length, self._shares_rest = knows_length, shares_rest
        self._planner = GroupPlanner(  # of places in the shard
            budget,
            job.window,
            job.dearest_first,
            job.diversity,
            lambda: len(shard) if knows_length else None,
        )
        self._planner.follows_ranks = True
        super().__init__(self._planner, measure, may_split=job.uneven == "fill")

    def next_group(self) -> SampleBlock | None:
        """Return the next group, if there is one."""
        self._fill()
        if not len(self._planner.pool):
            return None
        places = self._planner.next_group()
        facts = np.full((FACTS, len(places)), NONE)
        facts[TOKENS], facts[TARGETS] = self._tokens[places], self._targets[places]
        facts[PATCHES], facts[KIND] = self._patches[places], _KIND
        return SampleBlock(facts, {}).with_data(self._shard[places].tolist())

    def left(self) -> int:
        """Return how many samples the rank has left, as far as it knows."""
        if not self._shares_rest:
            return -1
        if self.lookahead is None:
            return 0
        if not (self._knows_length or self._planner.ended):
            return UNKNOWN_LEFT
        pool = self._planner.pool
        return len(self.lookahead) + len(pool) + len(self._shard) - pool.pulled

    def _fill(self) -> None:
        planner, pool = self._planner, self._planner.pool
        while (room := planner.room()) > 0:
            pulled = slice(pool.pulled, pool.pulled + room)
            places = np.flatnonzero(~self._left_out[pulled]) + pool.pulled
            # As in a node, known only when a pull finds nothing.
            planner.ended = pulled.stop > len(self._shard)
            pool.pulled = min(pulled.stop, len(self._shard))
            of_each = (self._tokens, self._patches, self._task_numbers)
            planner.add(places, *(column[places] for column in of_each))


def check_lengths(lengths: npt.ArrayLike) -> IntArray:
    """Return lengths as (n,) int64."""
    tokens = np.asarray(lengths)
    if tokens.ndim != 1 or not tokens.size or tokens.dtype.kind not in "iu" or tokens.min() < 1:
        raise ValueError(
            "`lengths` must be one row of integers of at least 1, one for each sample, but is "
            f"{lengths!r:.80} instead."
        )
    return tokens.astype(np.int64)
