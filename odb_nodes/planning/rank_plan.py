"""The plan of one rank: which samples form its groups, and which groups its steps.

It knows facts of samples alone. Its owner feeds them, carries the reports between ranks, and finds
the data of the steps:

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

from odb_nodes._core.hashing import hash_ints
from odb_nodes.planning.budget import TokenBudget, round_up
from odb_nodes.planning.facts import NO_FACTS, Facts
from odb_nodes.planning.group_planner import GivenGroups, GroupPlanner, RoundSettings
from odb_nodes.planning.levelling import UNKNOWN_LEFT, Moves, Rest, moves_of, told_of
from odb_nodes.planning.options import JobOptions
from odb_nodes.planning.rounds import (
    COLUMNS,
    FILLER,
    CostReport,
    GroupCost,
    RoundPlan,
    SplitLadder,
    next_settings,
    plan_round,
    report_of,
    round_steps,
)
from odb_nodes.planning.step_time import StepTime, aim_of
from odb_nodes.planning.table import IntArray

REST_GROUPS_A_STEP = 2
"""Groups of the last round that are formed with each step of the one before."""


class Agreement(NamedTuple):
    """What all ranks conclude from the reports of a round."""

    plan: RoundPlan
    settings: RoundSettings  # of the next round


@dataclass
class SettledRound:
    """The steps of a round, and this rank's groups for them."""

    totals: IntArray  # see `RoundPlan.totals`
    groups: list[Facts | None] = field(default_factory=list)  # `None` fills a step
    emitted: int = 0  # steps that are out

    def __len__(self) -> int:
        return len(self.totals)

    @property
    def is_over(self) -> bool:
        """Whether all steps are out."""
        return self.emitted == len(self.totals)

    def next_group(self) -> Facts | None:
        """Return the group of the next step, which is out then."""
        group, self.groups[self.emitted] = self.groups[self.emitted], None
        self.emitted += 1
        return group

    @property
    def remaining(self) -> list[Facts | None]:
        """The groups of the steps that are to come."""
        return self.groups[self.emitted :]


class RankPlan:
    """Plans the steps of one rank in an epoch, in rounds that all ranks settle together.

    The groups of a round are formed while the one before is emitted: some with each step, but the
    first of an epoch or after a restore, which waits for no samples but its own. One group further
    is formed: a rank that finds out too late that its data has ended could no longer keep a sample
    to fill with. The last round is formed of all that is left, which the ranks share out first: see
    `rest`.

    Args:
        planner: forms the groups. The owner adds samples to it.
        options: round size and seed, and what else decides steps.
        measure: facts of a group -> what the other ranks need to know of it.
        rank: this rank, of `world_size` that share steps.
        epoch: the epoch, which the order of steps depends on.
        shares_rest: whether other ranks can make the samples of this one.
        tasks: number of the tasks whose targets reports have.
    """

    def __init__(
        self,
        planner: GroupPlanner | GivenGroups,
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
        """What all ranks form the groups of the coming round under."""
        self.settled = SettledRound(self._no_steps)
        """The steps that are settled; none between two rounds."""
        self.is_last = False
        """Whether the round that was settled is the last one of the epoch."""
        self.formed: list[Facts] = []
        """The groups of the coming round, and the first one after it."""
        self._reported: tuple[SplitLadder, LastRound | None] | None = None
        # Of an epoch, or after a restore: it waits for no samples but its own.
        self._is_first_step = True

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
        """Go to where a plan stood, whose attributes these are; `planner` is there already."""
        self.round, self.step, self.settings = round, step, settings
        self.settled, self.is_last, self.formed = settled, is_last, formed
        self._is_first_step = True

    # --- groups are formed ----------------------------------------------------------------------

    @property
    def is_between_rounds(self) -> bool:
        """Whether the next round is to be settled before there is a step."""
        return self.settled.is_over and not self.is_last

    @property
    def is_at_end(self) -> bool:
        """Whether all steps of the epoch are out."""
        return self.is_last and self.settled.is_over

    @property
    def most_steps(self) -> int:
        """The steps of the coming round, unless the data ends."""
        options = self._options
        return round_steps(self.round, self._world_size, options.round_size, options.accumulate)

    def lacks(self) -> int:
        """Form the groups that are due before the next step, as far as there are samples.

        Returns:
            How many samples the planner needs for the next group; 0 where all are formed.
        """
        while not self.planner.is_done and self._is_due():
            if (room := self.planner.room()) > 0:
                return room
            self.formed.append(self.planner.next_group())
            self._use_settings()
        return 0

    def _is_due(self) -> bool:
        """Tell whether another group is to be formed before the next step."""
        if self.is_last:
            return False
        formed, settled, is_last = len(self.formed), self.settled, self.settings.is_last
        if settled.is_over:
            return is_last or formed <= self.most_steps
        if self._is_first_step:
            return False
        steps_out = settled.emitted + 1
        if is_last:
            return formed < steps_out * REST_GROUPS_A_STEP
        return formed < steps_out * (self.most_steps + 1) // len(settled)

    def _use_settings(self) -> None:
        """Have groups formed under the settings of the round, after so many of its groups.

        Caps are for the groups after the first, which was formed with the round before. The group
        after them gets the largest one on all ranks, so that a round has the same caps on all.
        """
        caps = () if self.settings.is_last else self.settings.caps
        if len(self.formed) <= 1:  # 0 where the data has ended: `replan` may put samples back
            self.planner.use(self.settings, caps[:-1])
        if len(self.formed) == self.most_steps and not self.settings.is_last:
            self.planner.use(self.settings, caps[-1:])

    # --- a round is settled --------------------------------------------------------------------

    def rest(self) -> LastRound:
        """Return all that is left, where the coming round is the last one."""
        assert isinstance(self.planner, GroupPlanner)
        samples = Facts.joined(self.formed)
        budget = self.planner.group_budget
        return LastRound(samples, budget, self._rank, self._world_size, self._step_time)

    def report(
        self, rest: LastRound | None = None, *, has_filler: bool = True, max_tokens: int = 0
    ) -> CostReport:
        """Return what the other ranks must know of the coming round.

        Args:
            rest: what `rest` has returned, once it is cut.
            has_filler: whether the rank had a sample to fill with before.
            max_tokens: the tokens of a budget that it asks all ranks for; 0 for none.
        """
        groups = self.groups_of_round(rest)
        ladder = SplitLadder(groups, self._measure)
        self._reported = ladder, rest
        return report_of(
            ladder,
            self.most_steps if rest is None else rest.steps,
            has_ended=rest is not None or len(groups) == len(self.formed),
            may_split=self._options.uneven == "fill",
            has_filler=has_filler or bool(groups),
            left=self._left(self.formed[len(groups) :] if rest is None else ()),
            pool=self.planner.report(self._offered_caps),
            tasks=self._tasks,
            max_tokens=max_tokens,
        )

    def groups_of_round(self, rest: LastRound | None) -> list[Facts]:
        """Return the groups of the coming round, before some of them are split."""
        return self.formed[: self.most_steps] if rest is None else rest.groups

    def agree(self, reports: Sequence[CostReport]) -> Agreement:
        """Return what follows from the reports of all ranks: the same on each of them."""
        options = self._options
        key = hash_ints(options.seed, self._epoch, self.round)
        following = round_steps(
            self.round + 1, self._world_size, options.round_size, options.accumulate
        )
        # Groups of a node of the user keep the order of that node, where none are matched.
        mixes = len(reports) > 1 or isinstance(self.planner, GroupPlanner)
        accumulate = options.accumulate if mixes else 1
        plan = plan_round(reports, uneven=options.uneven, key=key, accumulate=accumulate)
        settings = next_settings(
            reports,
            self.settings,
            next_steps=following,
            planned_steps=self.step + len(plan.totals),
            round_size=self._full_round,
        )
        return Agreement(plan, settings)

    def settle(self, agreement: Agreement) -> list[Facts]:
        """Take up the steps of a round, and begin to form the next one.

        Returns:
            The groups that no step has: with `uneven="stop"`, where another rank has ended.
        """
        assert self._reported is not None
        (ladder, rest), self._reported = self._reported, None
        plan, chosen = agreement.plan, agreement.plan.groups[self._rank].tolist()
        groups = ladder.groups(plan.splits[self._rank])
        of_steps = [None if index == FILLER else groups[index] for index in chosen]
        further = [] if rest is not None else self.formed[self.most_steps :]
        dropped: list[Facts] = []
        if plan.last:
            dropped = [group for index, group in enumerate(groups) if index not in {*chosen}]
            dropped, further = dropped + further, []
        self.settled = SettledRound(plan.totals, of_steps)
        self.is_last, self.settings, self.formed = plan.last, agreement.settings, further
        self.round += 1
        self._use_settings()
        return dropped

    def next_step(self) -> Facts | None:
        """Return the group of the next step, `None` where a filler is to be taken."""
        group = self.settled.next_group()
        self.step += 1
        self._is_first_step = False
        self._end_round()
        return group

    def replan(self, steps: int) -> Facts:
        """End the round after so many of its steps, and return the samples of all further groups.

        They are to be put back into the pool.
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

    def _left(self, further: Sequence[Facts]) -> int:
        """Return `CostReport.left`: of the samples from the first group after the round on."""
        if not self._shares_rest or not isinstance(self.planner, GroupPlanner):
            return -1
        if not further:
            return 0
        # Of data that a rank has for itself, it may have far more.
        if (further[0].sharers != self._world_size).any():
            return -1
        left = self.planner.samples_left()
        return UNKNOWN_LEFT if left is None else sum(map(len, further)) + left


class LastRound:
    """What a rank has left for the last round, which ranks share out before they cut it."""

    def __init__(
        self,
        samples: Facts,
        budget: TokenBudget,
        rank: int,
        world_size: int,
        step_time: StepTime | None = None,
    ) -> None:
        self._samples, self.budget, self._step_time = samples, budget, step_time
        self._rank, self._shared = rank, samples.sharers == world_size
        self.given = NO_FACTS
        """The samples that this rank has given away."""
        self.groups: list[Facts] = []
        """The groups, once they are cut."""
        self.steps = 0
        """The steps of the round, once it is cut."""

    def told(self) -> IntArray:
        """Return what the other ranks must know of all samples, (n,) int64."""
        return told_of(self._samples, self._shared, self.budget, self._step_time)

    def moves(self, told: Sequence[IntArray]) -> Moves:
        """Return which samples each rank gives away, where all ranks have told this."""
        return moves_of(told, self.budget, self._step_time)

    def give(self, moves: Moves) -> list[tuple[int, int]]:
        """Give samples away.

        Returns:
            Which samples this rank gets: who gives each, and its row among those that are `given`.
        """
        rows = np.flatnonzero(self._shared)[[row for row, _ in moves[self._rank]]]
        self.given = self._samples.take(rows)
        self._samples = self._samples.without(rows)
        return [
            (giver, row)
            for giver, of_giver in enumerate(moves)
            for row, (_, receiver) in enumerate(of_giver)
            if receiver == self._rank
        ]

    def add(self, received: Facts) -> None:
        """Take up samples that other ranks have given."""
        self._samples = Facts.joined([self._samples, received])

    def fewest_steps(self) -> int:
        """Return how many groups the samples of this rank need."""
        self._rest = Rest(self._samples, self.budget, self._step_time)
        return self._rest.fewest

    def cut(self, steps: int) -> None:
        """Form the groups of the round, which has so many steps on every rank."""
        self.steps = steps
        self.groups = [self._samples.take(rows) for rows in self._rest.groups(steps)]
