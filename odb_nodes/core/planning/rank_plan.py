"""The plan of one rank: which samples form its groups, and which groups its steps.

A plan knows only the facts of samples. Its owner adds the facts, exchanges the reports between
ranks, and has the data of the steps:

    while True:
        while plan.lacks() > 0:
            ...  # add samples to `plan.planner`, or end it
        if plan.is_between_rounds:
            plan.settle(plan.agree(all_gather(plan.report())))
        group = plan.next_step()
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from odb_nodes._support.arrays import IntArray
from odb_nodes._support.hashing import hash_ints
from odb_nodes.core.planning.budget import TokenBudget, round_up
from odb_nodes.core.planning.facts import NO_FACTS, Facts
from odb_nodes.core.planning.group_planner import GroupPlanner, RoundSettings, UserGroups
from odb_nodes.core.planning.level_cut import LevelCut
from odb_nodes.core.planning.levelling import Moves, moves_of, remaining_message
from odb_nodes.core.planning.options import JobOptions
from odb_nodes.core.planning.rounds import (
    COLUMNS,
    FILLER,
    UNKNOWN_REMAINING,
    CostReport,
    GroupCost,
    RoundPlan,
    SplitLadder,
    next_settings,
    plan_round,
    report_of,
    round_steps,
)
from odb_nodes.core.planning.step_time import StepTime, aim_of

LAST_GROUPS_A_STEP = 2
"""Groups of the last round that are formed with each step of the previous round."""


class Agreement(NamedTuple):
    """The conclusion of all ranks from the reports of a round."""

    plan: RoundPlan
    settings: RoundSettings  # the settings of the next round


@dataclass
class SettledRound:
    """The steps of a round, and this rank's groups for them."""

    totals: IntArray  # see `RoundPlan.totals`
    groups: list[Facts | None] = field(default_factory=list)  # `None` for a filler step
    emitted: int = 0  # number of emitted steps

    def __len__(self) -> int:
        return len(self.totals)

    @property
    def is_over(self) -> bool:
        """Whether all steps are emitted."""
        return self.emitted == len(self.totals)

    def next_group(self) -> Facts | None:
        """Return the group of the next step, and count the step as emitted."""
        group, self.groups[self.emitted] = self.groups[self.emitted], None
        self.emitted += 1
        return group

    @property
    def remaining(self) -> list[Facts | None]:
        """The groups of the steps that come next."""
        return self.groups[self.emitted :]


class RankPlan:
    """Plans the steps of one rank in an epoch, in rounds that all ranks settle together.

    The groups of a round are formed during the steps of the previous round, some with each step.
    With the first step of an epoch, or after a restore, no group is formed, so that this step waits
    for its own samples alone. One group more than the round needs is formed, because a rank must
    know early that its data has ended, to keep a sample to fill with. The last round holds all
    remaining samples, which the ranks share out first: see `LastRound`.

    planner: forms the groups of the samples that the owner adds; measure: facts of a group -> its
    report to the other ranks; epoch: decides the order of steps; shares_rest: whether other ranks
    can make the samples of this rank; tasks: number of tasks whose targets are in reports.
    """

    def __init__(
        self,
        planner: GroupPlanner | UserGroups,
        options: JobOptions,
        measure: Callable[[Facts], GroupCost],
        *,
        rank: int = 0,
        world_size: int = 1,
        epoch: int = 0,
        shares_rest: bool = True,
        tasks: int = 0,
    ) -> None:
        self._step_time = aim_of(options.step_time) if world_size > 1 else None
        planner.follow_ranks(self._step_time)
        self.planner, self._options, self._measure = planner, options, measure
        self._rank, self._world_size, self._epoch, self._tasks = rank, world_size, epoch, tasks
        self._shares_rest = shares_rest and options.uneven == "fill" and world_size > 1
        self._full_round = round_up(options.round_size, options.accumulate)
        self._offered_caps = self._full_round if world_size > 1 else 0
        self._no_steps = np.empty((0, COLUMNS - 1 + tasks), dtype=np.int64)
        self.round = 0
        """The number of the coming round."""
        self.step = 0
        """The number of the next step in the epoch."""
        self.settings = RoundSettings()
        """Settings of the coming round."""
        self.settled = SettledRound(self._no_steps)
        """The settled steps; none between two rounds."""
        self.is_last = False
        """Whether the settled round is the last round of the epoch."""
        self.formed: list[Facts] = []
        """The groups of the coming round, and the first group of the round after it."""
        self._reported: tuple[SplitLadder, LastRound | None] | None = None
        self._is_first_step = True  # whether no step was taken since the beginning or a restore

    def restore(
        self,
        *,
        round: int,
        step: int,
        settings: RoundSettings,
        settled: SettledRound,
        is_last: bool,
        formed: list[Facts],
    ) -> None:
        """Set the attributes of a saved plan, whose `planner` is restored already."""
        self.round, self.step, self.settings = round, step, settings
        self.settled, self.is_last, self.formed = settled, is_last, formed
        self._is_first_step = True

    # --- groups are formed ----------------------------------------------------------------------

    @property
    def is_between_rounds(self) -> bool:
        """Whether the next round must be settled before the next step."""
        return self.settled.is_over and not self.is_last

    @property
    def is_at_end(self) -> bool:
        """Whether all steps of the epoch are emitted."""
        return self.is_last and self.settled.is_over

    @property
    def most_steps(self) -> int:
        """Number of steps of the coming round, unless data ends."""
        options = self._options
        return round_steps(self.round, self._world_size, options.round_size, options.accumulate)

    def lacks(self) -> int:
        """Form the groups that are due before the next step, as far as samples suffice.

        Returns:
            How many samples the planner needs for the next group; 0 if all are formed.
        """
        while not self.planner.is_done and self._is_due():
            if (room := self.planner.room()) > 0:
                return room
            self.formed.append(self.planner.next_group())
            self._use_settings()
        return 0

    def _is_due(self) -> bool:
        """Return whether another group must be formed before the next step."""
        if self.is_last:
            return False
        formed = len(self.formed)
        settled = self.settled
        is_last = self.settings.is_last
        if settled.is_over:
            return is_last or formed <= self.most_steps
        if self._is_first_step:
            return False
        steps_out = settled.emitted + 1
        if is_last:
            return formed < steps_out * LAST_GROUPS_A_STEP
        return formed < steps_out * (self.most_steps + 1) // len(settled)

    def _use_settings(self) -> None:
        """Give the planner the settings of the round before the first group that needs them.

        The first group of a round was formed with the previous round, so the caps begin with the
        second group. The group after the round gets the largest cap on every rank, so that all
        ranks use the same caps.
        """
        caps = () if self.settings.is_last else self.settings.caps
        if len(self.formed) <= 1:  # 0 at the end of the data: `replan` may put samples back.
            self.planner.use(self.settings, caps[:-1])
        if len(self.formed) == self.most_steps and not self.settings.is_last:
            self.planner.use(self.settings, caps[-1:])

    # --- a round is settled --------------------------------------------------------------------

    def last_round(self) -> LastRound:
        """Return the last round, which holds all remaining samples."""
        assert isinstance(self.planner, GroupPlanner)
        samples = Facts.joined(self.formed)
        budget = self.planner.group_budget
        return LastRound(samples, budget, self._rank, self._world_size, self._step_time)

    def report(
        self, last_round: LastRound | None = None, *, has_filler: bool = True, max_tokens: int = 0
    ) -> CostReport:
        """Return the report to the other ranks about the coming round.

        last_round: the last round, once it is cut; `None` before the last round. See `CostReport`
        for the other arguments.
        """
        groups = self.groups_of_round(last_round)
        ladder = SplitLadder(groups, self._measure)
        self._reported = ladder, last_round
        return report_of(
            ladder,
            self.most_steps if last_round is None else last_round.steps,
            has_ended=last_round is not None or len(groups) == len(self.formed),
            may_split=self._options.uneven == "fill",
            has_filler=has_filler or bool(groups),
            remaining=self._remaining(self.formed[len(groups) :] if last_round is None else ()),
            pool=self.planner.report(self._offered_caps),
            tasks=self._tasks,
            max_tokens=max_tokens,
        )

    def groups_of_round(self, last_round: LastRound | None) -> list[Facts]:
        """Return the groups of the coming round, before groups are split."""
        return self.formed[: self.most_steps] if last_round is None else last_round.groups

    def agree(self, reports: Sequence[CostReport]) -> Agreement:
        """Return the plan and settings that follow from all reports, and are equal on all ranks."""
        options = self._options
        seed = hash_ints(options.seed, self._epoch, self.round)
        following = round_steps(
            self.round + 1, self._world_size, options.round_size, options.accumulate
        )
        # On a single rank, groups of a node of the user keep their order.
        mixes = len(reports) > 1 or isinstance(self.planner, GroupPlanner)
        accumulate = options.accumulate if mixes else 1
        plan = plan_round(reports, uneven=options.uneven, seed=seed, accumulate=accumulate)
        settings = next_settings(
            reports,
            self.settings,
            next_steps=following,
            planned_steps=self.step + len(plan.totals),
            round_size=self._full_round,
        )
        return Agreement(plan, settings)

    def settle(self, agreement: Agreement) -> list[Facts]:
        """Begin a settled round; return the groups that are in no step.

        There are such groups with `uneven="stop"`, if another rank has ended.
        """
        assert self._reported is not None
        ladder, last_round = self._reported
        self._reported = None
        plan = agreement.plan
        chosen = plan.groups[self._rank].tolist()
        groups = ladder.groups(plan.splits[self._rank])
        step_groups = [None if index == FILLER else groups[index] for index in chosen]
        further = [] if last_round is not None else self.formed[self.most_steps :]
        dropped: list[Facts] = []
        if plan.last:
            dropped = [group for index, group in enumerate(groups) if index not in {*chosen}]
            dropped = dropped + further
            further = []
        self.settled = SettledRound(plan.totals, step_groups)
        self.is_last, self.settings, self.formed = plan.last, agreement.settings, further
        self.round += 1
        self._use_settings()
        return dropped

    def next_step(self) -> Facts | None:
        """Return the group of the next step; `None` for a filler step."""
        group = self.settled.next_group()
        self.step += 1
        self._is_first_step = False
        self._end_round()
        return group

    def replan(self, steps: int) -> Facts:
        """End the round after `steps` of its steps, and return the samples of all further groups.

        The owner puts these samples back into the pool.
        """
        settled = self.settled
        steps = min(steps, len(settled))
        further = [*settled.groups[steps:], *self.formed]
        self.settled = SettledRound(settled.totals[:steps], settled.groups[:steps], settled.emitted)
        self.is_last, self.formed = False, []
        self._end_round()
        return Facts.joined([group for group in further if group is not None])

    def _end_round(self) -> None:
        if self.settled.is_over and not self.is_last:
            self.settled = SettledRound(self._no_steps)

    def _remaining(self, further: Sequence[Facts]) -> int:
        """Return `CostReport.remaining`, from the first group after the round on."""
        if not self._shares_rest or not isinstance(self.planner, GroupPlanner):
            return -1
        if not further:
            return 0
        # Of data that ranks do not share, a rank may have far more than other ranks.
        if (further[0].sharers != self._world_size).any():
            return -1
        pooled = self.planner.samples_left()
        return UNKNOWN_REMAINING if pooled is None else sum(map(len, further)) + pooled


class LastRound:
    """The last round of a rank: remaining samples, which ranks share out and cut into groups."""

    def __init__(
        self,
        samples: Facts,
        budget: TokenBudget,
        rank: int,
        world_size: int,
        step_time: StepTime | None = None,
    ) -> None:
        self._samples, self.budget, self._step_time = samples, budget, step_time
        self._rank = rank
        self._shared = samples.sharers == world_size
        self.given_away = NO_FACTS
        """The samples that this rank gives away."""
        self.groups: list[Facts] = []
        """The groups, after `cut`."""
        self.steps = 0
        """The number of steps, after `cut`."""

    def message(self) -> IntArray:
        """Return the message about all samples to the other ranks, (n,) int64."""
        return remaining_message(self._samples, self._shared, self.budget, self._step_time)

    def moves(self, messages: Sequence[IntArray]) -> Moves:
        """Return which samples each rank gives away, from the messages of all ranks."""
        return moves_of(messages, self.budget, self._step_time)

    def give(self, moves: Moves) -> list[tuple[int, int]]:
        """Give samples away; return the samples that this rank gets.

        A sample that this rank gets is named by (giving rank, row among what that rank gives).
        """
        rows = np.flatnonzero(self._shared)[[row for row, _ in moves[self._rank]]]
        self.given_away = self._samples.take(rows)
        self._samples = self._samples.without(rows)
        return [
            (giver, row)
            for giver, moves_of_giver in enumerate(moves)
            for row, (_, receiver) in enumerate(moves_of_giver)
            if receiver == self._rank
        ]

    def add(self, received: Facts) -> None:
        """Add samples that other ranks have given."""
        self._samples = Facts.joined([self._samples, received])

    def fewest_steps(self) -> int:
        """Return the number of groups that the samples of this rank need."""
        self._cut = LevelCut(self._samples, self.budget, self._step_time)
        return self._cut.fewest

    def cut(self, steps: int) -> None:
        """Form the groups of the round, which has `steps` steps on every rank."""
        self.steps = steps
        self.groups = [self._samples.take(rows) for rows in self._cut.groups(steps)]
