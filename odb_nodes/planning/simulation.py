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

from odb_nodes._core.checks import check_count, keep_count
from odb_nodes.errors import SampleError
from odb_nodes.planning.auto_window import WindowSize
from odb_nodes.planning.budget import TokenBudget
from odb_nodes.planning.facts import Facts
from odb_nodes.planning.group_costs import CostFn
from odb_nodes.planning.options import JobOptions
from odb_nodes.planning.rank_plan import RankPlan
from odb_nodes.planning.rounds import Uneven
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
    cost_fn = job.cost_fn
    cost = None if cost_fn is None else (lambda group: cost_fn(_block(group)))
    left_out = samples.tokens == 0
    if budget.oversize == "drop":
        left_out |= samples.are_oversize(budget)
    feeders = []
    for rank, shard in enumerate(shards):
        plan = RankPlan(
            budget,
            job,
            rank=rank,
            world_size=job.world_size,
            epoch=epoch,
            cost=cost,
            epoch_samples=partial(int, len(shard)) if knows_length else lambda: None,
            shares_rest=shares_rest,
        )
        feeders.append(_Feeder(plan, samples, shard, left_out))
    plans = [feeder.plan for feeder in feeders]
    while not plans[0].is_last:
        for feeder in feeders:
            feeder.advance()
        if plans[0].settings.is_last:
            _share_rest(plans)
        agreement = plans[0].agree([plan.report() for plan in plans])
        for plan in plans:
            plan.settle(agreement)
        while plans[0].steps:
            groups = [plan.steps.popleft() for plan in plans]
            yield [None if group is None else _block(group) for group in groups]


def _share_rest(plans: Sequence[RankPlan]) -> None:
    """Share out what the ranks have left, and cut it into the groups of the last round."""
    costs = [plan.rest_cost() for plan in plans]
    given = [plan.give(costs) for plan in plans]
    for plan in plans:
        plan.receive(costs, given)
    steps = max([plan.fewest_steps() for plan in plans])
    for plan in plans:
        plan.cut(steps)


class _Feeder:
    """Feeds the samples of the shard of one rank into its plan."""

    def __init__(
        self, plan: RankPlan, samples: SampleCosts, shard: IntArray, left_out: NDArray[np.bool_]
    ) -> None:
        self.plan = plan
        facts = Facts(
            ordinal=np.arange(len(shard)),
            tokens=samples.tokens[shard],
            targets=samples.targets[shard],
            patches=samples.patches[shard],
            task=samples.tasks[shard],
            flags=np.zeros_like(shard),
            item=shard,
        )
        self._facts = facts.take(np.flatnonzero(~left_out[shard]))
        self._samples = len(shard)

    def advance(self) -> None:
        """Feed the plan until its round is formed."""
        plan = self.plan
        while (room := plan.advance()) > 0:
            stop = plan.pulled + room
            if stop > self._samples:  # As in a node, known only when a pull finds nothing.
                plan.end()
            rows = slice(*np.searchsorted(self._facts.ordinal, (plan.pulled, stop)).tolist())
            plan.feed(self._facts.take(rows), min(stop, self._samples) - plan.pulled)


_KIND = code_of(SampleKind("", "", "", None, 0))


def _block(group: Facts) -> SampleBlock:
    """Return the samples of a group, whose data are their rows in the dataset."""
    facts = np.full((FACTS, len(group)), NONE)
    facts[TOKENS], facts[TARGETS] = group.tokens, group.targets
    facts[PATCHES], facts[KIND] = group.patches, _KIND
    return SampleBlock(facts, {}).with_data(group.item.tolist())


def check_lengths(lengths: npt.ArrayLike) -> IntArray:
    """Return lengths as (n,) int64."""
    tokens = np.asarray(lengths)
    if tokens.ndim != 1 or not tokens.size or tokens.dtype.kind not in "iu" or tokens.min() < 1:
        raise ValueError(
            "`lengths` must be one row of integers of at least 1, one for each sample, but is "
            f"{lengths!r:.80} instead."
        )
    return tokens.astype(np.int64)
