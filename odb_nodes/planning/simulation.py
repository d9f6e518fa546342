"""Plan the steps of a whole job, on any number of ranks, in one process.

It drives a `RankPlan` for each rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypedDict

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

from odb_nodes._core.checks import MAX_COUNT, check_count, keep_count
from odb_nodes.errors import SampleError
from odb_nodes.planning.auto_window import WindowSize
from odb_nodes.planning.budget import TokenBudget
from odb_nodes.planning.facts import Facts
from odb_nodes.planning.group_costs import CostFn
from odb_nodes.planning.group_planner import GroupPlanner
from odb_nodes.planning.options import JobOptions
from odb_nodes.planning.rank_plan import LastRound, RankPlan
from odb_nodes.planning.rounds import GroupCost, Uneven
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
        keep_count(self, "world_size")
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
    left_out = samples.tokens == 0
    if budget.oversize == "drop":
        left_out |= samples.are_oversize(budget)
    feeders = [
        _Feeder(
            samples,
            shard,
            left_out,
            job,
            rank=rank,
            epoch=epoch,
            shares_rest=shares_rest,
            knows_length=knows_length,
        )
        for rank, shard in enumerate(shards)
    ]
    plans = [feeder.plan for feeder in feeders]
    while not plans[0].is_at_end:
        for feeder in feeders:
            feeder.feed()
        if plans[0].is_between_rounds:
            rests: list[LastRound] | list[None] = [None] * len(plans)
            if plans[0].settings.is_last:
                rests = _share_rest(feeders)
            pairs = [*zip(plans, rests, strict=True)]
            agreement = plans[0].agree([plan.report(rest) for plan, rest in pairs])
            for plan in plans:
                plan.settle(agreement)
        if not plans[0].settled.is_over:
            yield [feeder.next_group() for feeder in feeders]


def _share_rest(feeders: Sequence[_Feeder]) -> list[LastRound]:
    """Share out what the ranks have left, and cut it into the groups of the last round."""
    rests = [feeder.plan.rest() for feeder in feeders]
    costs = [rest.cost for rest in rests]
    given = [rest.give(costs) for rest in rests]
    tokens = [facts.tokens for facts in given]
    items = [feeder.items[facts.ordinal] for feeder, facts in zip(feeders, given, strict=True)]
    for feeder, rest in zip(feeders, rests, strict=True):
        received = [items[giver][row] for giver, row in rest.receives(costs, tokens)]
        rest.add(feeder.take_over(np.array(received, np.int64)))
    steps = max([rest.fewest_steps() for rest in rests])
    for rest in rests:
        rest.cut(steps)
    return rests


class _Feeder:
    """Feeds the samples of the shard of one rank into its plan."""

    def __init__(
        self,
        samples: SampleCosts,
        shard: IntArray,
        left_out: NDArray[np.bool_],
        job: SimulationOptions,
        *,
        rank: int,
        epoch: int,
        shares_rest: bool,
        knows_length: bool,
    ) -> None:
        self._samples, self._length = samples, len(shard)
        self._admitted = np.flatnonzero(~left_out[shard])
        self.items = shard
        """Row of the dataset of each sample, by ordinal."""
        self._sharers = job.world_size if shares_rest else 0
        self._cost_fn = job.cost_fn
        self._planner = GroupPlanner(
            TokenBudget.of(job.budget),
            job.window,
            job.dearest_first,
            job.diversity,
            partial(int, len(shard)) if knows_length else lambda: None,
        )
        self.plan = RankPlan(
            self._planner,
            job,
            self._measure,
            rank=rank,
            world_size=job.world_size,
            epoch=epoch,
            has_caps=job.cost_fn is None,
            shares_rest=shares_rest,
        )

    def feed(self) -> None:
        """Feed the plan until all groups are formed that are due."""
        while (room := self.plan.lacks()) > 0:
            start = self._planner.pool.pulled
            stop = start + room
            if stop > self._length:  # As in a node, known only when a pull finds nothing.
                self._planner.end()
            rows = slice(*np.searchsorted(self._admitted, (start, stop)).tolist())
            self._planner.add(self._facts(self._admitted[rows]), min(stop, self._length) - start)

    def take_over(self, items: IntArray) -> Facts:
        """Take up samples that another rank has given."""
        first = len(self.items)
        self.items = np.concatenate((self.items, items))
        return self._facts(np.arange(first, first + len(items)))

    def next_group(self) -> SampleBlock | None:
        """Return the samples of the next step, whose data are their rows in the dataset."""
        group = self.plan.next_step()
        return None if group is None else self._block(group)

    def _facts(self, ordinals: IntArray) -> Facts:
        samples, items = self._samples, self.items[ordinals]
        return Facts(
            ordinal=ordinals,
            tokens=samples.tokens[items],
            targets=samples.targets[items],
            patches=samples.patches[items],
            task=samples.tasks[items],
            sharers=self._sharers,
        )

    def _measure(self, group: Facts) -> GroupCost:
        if self._cost_fn is None:
            cost = min(self._planner.budget.cost(group.lengths), MAX_COUNT)
        else:
            cost = check_count("cost_fn", self._cost_fn(self._block(group)), 0)
        return GroupCost(len(group), int(group.targets.sum()), cost)

    def _block(self, group: Facts) -> SampleBlock:
        facts = np.full((FACTS, len(group)), NONE)
        facts[TOKENS], facts[TARGETS] = group.tokens, group.targets
        facts[PATCHES], facts[KIND] = group.patches, _KIND
        return SampleBlock(facts, {}).with_data(self.items[group.ordinal].tolist())


_KIND = code_of(SampleKind("", "", "", None, 0))


def check_lengths(lengths: npt.ArrayLike) -> IntArray:
    """Return lengths as (n,) int64."""
    tokens = np.asarray(lengths)
    if tokens.ndim != 1 or not tokens.size or tokens.dtype.kind not in "iu" or tokens.min() < 1:
        raise ValueError(
            "`lengths` must be one row of integers of at least 1, one for each sample, but is "
            f"{lengths!r:.80} instead."
        )
    return tokens.astype(np.int64)
