"""Plan the steps of a whole job, on any number of ranks, in one process.

The simulation drives a `RankPlan` for each rank, or a `KnownJob` if lengths are known.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypedDict

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

from odb_nodes._support.arrays import IntArray
from odb_nodes._support.checks import MAX_COUNT, check_bool, keep_count
from odb_nodes.core.planning.auto_window import WindowSize, WindowStart
from odb_nodes.core.planning.budget import TokenBudget
from odb_nodes.core.planning.facts import Facts
from odb_nodes.core.planning.group_costs import samples_of, time_of_group
from odb_nodes.core.planning.group_planner import GroupPlanner
from odb_nodes.core.planning.known_epochs import KnownJob, known_window
from odb_nodes.core.planning.options import JobOptions
from odb_nodes.core.planning.rank_plan import LastRound, RankPlan
from odb_nodes.core.planning.rounds import GroupCost, Uneven
from odb_nodes.core.planning.runs import check_diversity
from odb_nodes.core.planning.sample_costs import SampleCosts
from odb_nodes.core.planning.step_time import StepTime, TimeFn, step_time_of
from odb_nodes.core.sample_block import SampleBlock

if TYPE_CHECKING:
    from typing_extensions import Unpack

Step = list[SampleBlock | None]  # the group of each rank; `None` for a rank that fills the step


@dataclass(frozen=True, kw_only=True)
class SimulationOptions(JobOptions):
    """A job whose steps are planned without running it. See `ODBDataLoader` for other fields.

    Args:
        world_size: number of ranks.
        budget: padded tokens of a group, or a `TokenBudget`.
        step_time: as for `RankAligner`. A function gets samples with their tokens, their index in
            the lengths as `data`, and no patches.
        lengths_known: whether to plan all samples of an epoch together, as a loader with `lengths`
            does. `window` is then the number of samples of each rank that are planned together;
            `"auto"`: all samples.

    Raises:
        TypeError, ValueError: an argument is not valid.
    """

    world_size: int
    budget: int | TokenBudget
    lengths_known: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        keep_count(self, "world_size")
        budget = TokenBudget.of(self.budget)
        check_diversity(self.diversity, budget)
        if check_bool("lengths_known", self.lengths_known):
            reasons = {
                "`diversity`": bool(self.diversity),
                "`max_patches`": budget.max_patches is not None,
                "a number as `row_sizes`": isinstance(budget.row_sizes, int),
            }
            for reason in [reason for reason, holds in reasons.items() if holds]:
                raise ValueError(
                    f"`lengths_known` must be False with {reason}, which needs more than "
                    "lengths. Leave out one of the two."
                )


class _JobKeywords(TypedDict):
    world_size: int
    budget: int | TokenBudget


class SimulationKeywords(_JobKeywords, total=False):
    """The fields of `SimulationOptions`, as the types of keyword arguments."""

    window: WindowSize
    round_size: int
    uneven: Uneven
    largest_first: int
    diversity: float
    window_start: WindowStart
    accumulate: int
    seed: int
    step_time: StepTime | TimeFn | None
    lengths_known: bool


def simulate_steps(lengths: npt.ArrayLike, **options: Unpack[SimulationKeywords]) -> Iterator[Step]:
    """Yield the steps of the first epoch. Arguments and errors are as in `simulate`."""
    job = SimulationOptions(**options)
    samples = SampleCosts.of_lengths(lengths)
    samples = samples._replace(targets=samples.tokens - 1)
    order = np.arange(len(samples.tokens))
    shards = [order[rank :: job.world_size] for rank in range(job.world_size)]
    return plan_steps(samples, shards, job)


def plan_steps(
    samples: SampleCosts,
    shards: Sequence[IntArray],
    job: SimulationOptions,
    *,
    epoch: int = 0,
    shares_rest: bool = True,
    knows_length: bool = True,
    in_order: bool = False,
) -> Iterator[Step]:
    """Yield the steps of an epoch. Each rank reads the samples of its shard, in their order.

    in_order: whether shards keep the order of the dataset, which `known_window` depends on.
    """
    if job.lengths_known:
        yield from _known_steps(samples, shards, job, epoch, in_order=in_order)
        return
    budget = TokenBudget.of(job.budget)
    job = replace(job, step_time=step_time_of(job.step_time, budget))
    left_out = samples.are_left_out(budget)
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
            rounds: list[LastRound] | list[None] = [None] * len(plans)
            if plans[0].settings.is_last:
                rounds = _share_last_round(feeders)
            pairs = [*zip(plans, rounds, strict=True)]
            agreement = plans[0].agree([plan.report(last_round) for plan, last_round in pairs])
            for plan in plans:
                plan.settle(agreement)
        if not plans[0].settled.is_over:
            yield [feeder.next_group() for feeder in feeders]


def _known_steps(
    samples: SampleCosts,
    shards: Sequence[IntArray],
    job: SimulationOptions,
    epoch: int,
    *,
    in_order: bool,
) -> Iterator[Step]:
    order = np.empty(sum(map(len, shards)), np.int64)
    for rank, shard in enumerate(shards):
        order[rank :: len(shards)] = shard
    known_job = KnownJob(
        budget=TokenBudget.of(job.budget),
        world_size=job.world_size,
        window=known_window(job.window, in_order=in_order),
        largest_first=job.largest_first,
        accumulate=job.accumulate,
        seed=job.seed,
        step_time=job.step_time,
    )
    plan = known_job.plan(samples, order, epoch)
    for step in range(len(plan)):
        groups = [plan.group(step, rank) for rank in range(job.world_size)]
        if job.uneven == "stop" and not all(map(len, groups)):
            return
        yield [_block(samples, group) if len(group) else None for group in groups]


def _block(samples: SampleCosts, rows: IntArray) -> SampleBlock:
    return samples_of(rows, samples.tokens[rows], samples.targets[rows], samples.patches[rows])


def _share_last_round(feeders: Sequence[_Feeder]) -> list[LastRound]:
    """Share out the remaining samples of the ranks, and cut them into the last round's groups."""
    rounds = [feeder.plan.last_round() for feeder in feeders]
    moves = rounds[0].moves([last_round.message() for last_round in rounds])
    received = [last_round.give(moves) for last_round in rounds]
    items_given = [
        feeder.items[last_round.given_away.ordinal]
        for feeder, last_round in zip(feeders, rounds, strict=True)
    ]
    for feeder, last_round, rows in zip(feeders, rounds, received, strict=True):
        items = [items_given[giver][row] for giver, row in rows]
        last_round.add(feeder.take_over(np.array(items, np.int64)))
    steps = max([last_round.fewest_steps() for last_round in rounds])
    for last_round in rounds:
        last_round.cut(steps)
    return rounds


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
        self._samples = samples
        self._length = len(shard)
        self._admitted = np.flatnonzero(~left_out[shard])
        self.items = shard
        """Row of the dataset of each sample, by ordinal."""
        self._sharers = job.world_size if shares_rest else 0
        self._step_time = job.step_time
        self._planner = GroupPlanner(
            TokenBudget.of(job.budget),
            job.window,
            job.largest_first,
            job.diversity,
            partial(int, len(shard)) if knows_length else lambda: None,
            window_start=job.window_start,
        )
        self.plan = RankPlan(
            self._planner,
            job,
            self._measure,
            rank=rank,
            world_size=job.world_size,
            epoch=epoch,
            shares_rest=shares_rest,
        )

    def feed(self) -> None:
        """Feed the plan until all due groups are formed."""
        while (room := self.plan.lacks()) > 0:
            start = self._planner.pool.pulled
            stop = start + room
            if stop > self._length:  # As in a node, the end is known only after the last sample.
                self._planner.end()
            rows = slice(*np.searchsorted(self._admitted, (start, stop)).tolist())
            self._planner.add(self._facts(self._admitted[rows]), min(stop, self._length) - start)

    def take_over(self, items: IntArray) -> Facts:
        """Add samples that another rank has given."""
        first = len(self.items)
        self.items = np.concatenate((self.items, items))
        return self._facts(np.arange(first, first + len(items)))

    def next_group(self) -> SampleBlock | None:
        """Return the samples of the next step, whose data are their rows in the dataset."""
        group = self.plan.next_step()
        return None if group is None else _block(self._samples, self.items[group.ordinal])

    def _facts(self, ordinals: IntArray) -> Facts:
        samples = self._samples
        items = self.items[ordinals]
        return Facts(
            ordinal=ordinals,
            tokens=samples.tokens[items],
            targets=samples.targets[items],
            patches=samples.patches[items],
            task=samples.tasks[items],
            sharers=self._sharers,
        )

    def _measure(self, group: Facts) -> GroupCost:
        budget = self._planner.budget
        items = self.items[group.ordinal]
        time = time_of_group(
            self._step_time,
            group.tokens,
            group.patches,
            budget,
            partial(_block, self._samples, items),
        )
        cost = min(budget.cost(group.lengths), MAX_COUNT)
        return GroupCost(len(group), int(group.targets.sum()), cost, time=time)
