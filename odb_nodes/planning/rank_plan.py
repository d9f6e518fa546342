"""The plan of one rank: which samples form its groups, and which groups its steps.

It knows facts of samples alone. Its owner feeds them, carries the reports between ranks, and finds
the data of the steps:

    while (samples := plan.advance()) > 0:
        plan.feed(...)  # or `plan.end()`
    agreement = plan.agree(all_gather(plan.report()))
    plan.settle(agreement)
    while plan.steps:
        group = plan.steps.popleft()
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from odb_nodes._core.checks import MAX_COUNT, check_count
from odb_nodes._core.hashing import hash_ints
from odb_nodes.planning.budget import TokenBudget, round_up
from odb_nodes.planning.facts import NO_FACTS, Facts
from odb_nodes.planning.group_planner import GroupPlanner, RoundSettings
from odb_nodes.planning.levelling import UNKNOWN_LEFT, Rest, gifts, receivers, work_of
from odb_nodes.planning.options import JobOptions
from odb_nodes.planning.rounds import (
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
from odb_nodes.planning.table import IntArray


class Agreement(NamedTuple):
    """What all ranks conclude from the reports of a round."""

    plan: RoundPlan
    settings: RoundSettings  # of the next round


class RankPlan:
    """Plans the steps of one rank in an epoch, in rounds that all ranks settle together.

    A round is formed group by group, as samples come, and one group further: a rank that finds out
    too late that its data has ended could no longer keep a sample to fill with. The last round is
    formed of all that is left, which the ranks share out first: `give`, `receive`, `cut`.

    Args:
        budget: the budget that groups are formed under.
        options: window, round size and seed, and what else decides groups and steps.
        rank: this rank, of `world_size` that share steps.
        epoch: the epoch, which the order of steps depends on.
        cost: facts of a group -> what a step with it costs, in any unit that all ranks share.
            Default: its cost under the budget.
        epoch_samples: returns the samples of the epoch, or `None` where their number is not known.
        shares_rest: whether other ranks can make the samples of this one.
        tasks: number of the tasks whose targets reports have.
    """

    def __init__(
        self,
        budget: TokenBudget,
        options: JobOptions,
        *,
        rank: int = 0,
        world_size: int = 1,
        epoch: int = 0,
        cost: Callable[[Facts], int] | None = None,
        epoch_samples: Callable[[], int | None] = lambda: None,
        shares_rest: bool = True,
        tasks: int = 0,
    ) -> None:
        self._options, self._rank, self._world_size = options, rank, world_size
        self._epoch, self._epoch_samples, self._tasks = epoch, epoch_samples, tasks
        self._cost = cost or self._budget_cost
        self._shares_rest = shares_rest and options.uneven == "fill"
        self._full_round = round_up(options.round_size, options.accumulate)
        self._offered_caps = self._full_round if world_size > 1 and cost is None else 0
        self._planner = GroupPlanner(
            budget, options.window, options.dearest_first, options.diversity, epoch_samples
        )
        self._planner.follows_ranks = True
        self._waiting = NO_FACTS  # facts of the pool, by ordinal
        self.round = 0
        """The number of the coming round."""
        self.settings = RoundSettings()
        """What all ranks form the groups of the coming round under."""
        self.is_last = False
        """Whether the round that was settled is the last one of the epoch."""
        self.steps: deque[Facts | None] = deque()
        """The groups of the settled round that are still to come; `None` for a filler step."""
        self._formed: list[Facts] = []  # groups of the coming round, and that after them
        self._is_formed = False
        self._rest = NO_FACTS
        self._planned_steps = 0  # of the settled rounds
        self._last_steps = 0  # of the last round, once it is cut

    @property
    def pulled(self) -> int:
        """Samples that were fed so far, those that no group will hold included."""
        return self._planner.pool.pulled

    # --- samples come --------------------------------------------------------------------------

    def advance(self) -> int:
        """Form groups of the coming round, and return how many samples the next one waits for.

        0: the round is formed, and `report` says what the other ranks must know.
        """
        while not self._is_formed:
            if (room := self._planner.room()) > 0:
                return room
            self._form()
        return 0

    def feed(self, facts: Facts, pulled: int) -> None:
        """Take up the facts of samples that were pulled, ordinals ascending.

        pulled: how many were pulled for that, those that no group will hold included.
        """
        self._planner.pool.pulled += pulled
        self._planner.add(facts.ordinal, facts.tokens, facts.patches, facts.task)
        self._waiting = Facts.joined([self._waiting, facts])

    def end(self) -> None:
        """Note that the epoch has no more samples."""
        self._planner.ended = True

    def _form(self) -> None:
        """Form the next group, or none where no sample is left."""
        if not len(self._planner.pool):
            self._use_settings(len(self._formed), to_end=True)
            self._is_formed = True
            return
        rows = np.searchsorted(self._waiting.ordinal, self._planner.next_group())
        self._formed.append(self._waiting.take(rows))
        self._waiting = self._waiting.without(rows)
        self._use_settings(len(self._formed))
        self._is_formed = len(self._formed) > self.most_steps and not self.settings.is_last

    @property
    def most_steps(self) -> int:
        """The steps of the coming round, unless the data ends."""
        options = self._options
        return round_steps(self.round, self._world_size, options.round_size, options.accumulate)

    def _use_settings(self, formed: int, *, to_end: bool = False) -> None:
        """Have groups formed under the settings of the round, after so many of its groups.

        Caps are for the groups after the first, which was formed with the round before. The group
        after them gets the largest one on all ranks, so that a round has the same caps on all.
        """
        caps = () if self.settings.is_last else self.settings.caps
        if formed == 1 or (to_end and not formed):
            self._planner.use(self.settings, caps[:-1])
        if to_end or (formed == self.most_steps and not self.settings.is_last):
            self._planner.use(self.settings, caps[-1:])

    # --- a round is settled --------------------------------------------------------------------

    def report(self) -> CostReport:
        """Return what the other ranks must know of the coming round."""
        groups = self._groups_of_round
        self._ladder = SplitLadder(groups, self._measure)
        return report_of(
            self._ladder,
            self._last_steps or self.most_steps,
            has_ended=len(groups) == len(self._formed),
            may_split=self._options.uneven == "fill",
            left=self._left(),
            pool=self._planner.report(self._offered_caps),
            tasks=self._tasks,
        )

    @property
    def _groups_of_round(self) -> list[Facts]:
        return self._formed if self.settings.is_last else self._formed[: self.most_steps]

    def agree(self, reports: Sequence[CostReport]) -> Agreement:
        """Return what follows from the reports of all ranks: the same on each of them."""
        options = self._options
        key = hash_ints(options.seed, self._epoch, self.round)
        following = round_steps(
            self.round + 1, self._world_size, options.round_size, options.accumulate
        )
        plan = plan_round(reports, uneven=options.uneven, key=key)
        settings = next_settings(
            reports,
            self.settings,
            next_steps=following,
            planned_steps=self._planned_steps + len(plan.totals),
            round_size=self._full_round,
        )
        return Agreement(plan, settings)

    def settle(self, agreement: Agreement) -> None:
        """Take up the steps of a round, and begin to form the next one."""
        plan = agreement.plan
        groups = self._ladder.groups(plan.splits[self._rank])
        chosen = plan.groups[self._rank].tolist()
        self.steps.extend(None if index == FILLER else groups[index] for index in chosen)
        self._formed = self._formed[len(self._groups_of_round) :]
        self.settings, self.is_last = agreement.settings, plan.last
        self.round += 1
        self._planned_steps += len(plan.totals)
        self._is_formed = False
        if self._formed:
            self._use_settings(1)

    def _left(self) -> int:
        """Return `CostReport.left`: of the samples from the lookahead on."""
        if not self._shares_rest:
            return -1
        lookahead = self._formed[len(self._groups_of_round) :]
        if not lookahead:
            return 0
        length = self.pulled if self._planner.ended else self._epoch_samples()
        if length is None:
            return UNKNOWN_LEFT
        return len(lookahead[0]) + len(self._waiting) + max(0, length - self.pulled)

    def _measure(self, group: Facts) -> GroupCost:
        tasks = np.bincount(group.task, group.targets, self._tasks) if self._tasks else ()
        return GroupCost(
            samples=len(group),
            targets=int(group.targets.sum()),
            cost=check_count("cost_fn", self._cost(group), 0),
            flags=int(np.bitwise_or.reduce(group.flags)),
            tasks=tuple(map(int, tasks)),
        )

    def _budget_cost(self, group: Facts) -> int:
        return min(self._planner.budget.cost(group.lengths), MAX_COUNT)

    # --- the last round, of all that is left ---------------------------------------------------

    def rest_cost(self) -> int:
        """Return what all that is left costs without padding, once the last round is formed."""
        self._rest = Facts.joined(self._formed)
        return int(self._work(self._rest).sum())

    def give(self, costs: Sequence[int]) -> Facts:
        """Return the samples that this rank gives away, where all ranks have these `rest_cost`."""
        work = self._work(self._rest)
        surplus = costs[self._rank] - sum(costs) / len(costs)
        rows = gifts(work, surplus)
        given = self._rest.take(rows)
        self._rest = self._rest.without(rows)
        return given

    def receive(self, costs: Sequence[int], given: Sequence[Facts]) -> Facts:
        """Return the samples that this rank gets of those that each rank gives away."""
        to = receivers(costs, [self._work(facts) for facts in given])
        own = [
            facts.take([row for row, rank in enumerate(ranks) if rank == self._rank])
            for facts, ranks in zip(given, to, strict=True)
        ]
        received = Facts.joined(own).numbered_from(self.pulled)
        self._planner.pool.pulled += len(received)
        self._rest = Facts.joined([self._rest, received])
        return received

    def fewest_steps(self) -> int:
        """Return how many groups the samples of this rank need."""
        self._cut = Rest(self._rest, self._group_budget)
        return self._cut.fewest

    def cut(self, steps: int) -> None:
        """Form the groups of the last round, which has so many steps on every rank."""
        self._last_steps = steps
        self._formed = [self._rest.take(rows) for rows in self._cut.groups(steps)]
        self._rest = NO_FACTS

    @property
    def _group_budget(self) -> TokenBudget:
        return self._planner.limits.of_groups(self._planner.budget)

    def _work(self, facts: Facts) -> IntArray:
        return work_of(facts.tokens, self._group_budget)
