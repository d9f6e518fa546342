"""Rounds: the steps that ranks settle in one exchange, and what they agree on for the next ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from odb_nodes.planning.alignment import CostReport, GroupCost, make_report
from odb_nodes.planning.auto_window import chosen_window
from odb_nodes.planning.budget import round_up
from odb_nodes.planning.caps import agreed_caps, caps_of_round
from odb_nodes.planning.group_planner import PoolReport, RoundSettings
from odb_nodes.planning.levelling import begins_last_round
from odb_nodes.sample_block import SampleBlock

FIRST_ROUND_STEPS = 4
"""Steps of an epoch's first round: few, so the first batch does not wait for a full round."""

MOST_STEPS_ALONE = 4
"""Steps of a round of a single rank: it holds the samples of all of them."""


def round_steps(number: int, world_size: int, round_size: int, accumulate: int) -> int:
    """Return the number of steps of a round in which no data ends: 4, 8, 16, ... `round_size`.

    A single rank settles rounds with nobody: 1, 2, 4 spread what a round costs over its steps.

    Args:
        number: the round's number in its epoch, from 0.
        world_size: number of ranks.
        round_size: steps of a full round.
        accumulate: steps of an optimizer step; a round is rounded up to a multiple of it.
    """
    if world_size == 1:
        return round_up(min(round_size, MOST_STEPS_ALONE, 1 << min(number, 16)), accumulate)
    ramp = FIRST_ROUND_STEPS << min(number, 16)
    return round_up(min(round_size, ramp), accumulate)


def next_settings(
    reports: Sequence[CostReport], present: RoundSettings, next_steps: int
) -> RoundSettings:
    """Return the settings of the next round, which follow from the reports of all ranks.

    Args:
        reports: those for the round that begins.
        present: the settings of that round.
        next_steps: steps of the next round.
    """
    asked = [one for one in (present.max_tokens, *(report.max_tokens for report in reports)) if one]
    agreed = agreed_caps([report.pool.offer for report in reports])
    return RoundSettings(
        max_tokens=min(asked, default=0),
        caps=tuple(caps_of_round(agreed, next_steps).tolist()),
        window=present.window or chosen_window([report.pool.lengths for report in reports]),
        is_last=begins_last_round(reports, next_steps),
    )


class GroupSource(Protocol):
    """What a `RoundPlanner` reads groups from."""

    def next_group(self) -> SampleBlock | None:
        """Return the next group; `None` where the epoch has no more."""

    def use(self, settings: RoundSettings, caps: Sequence[int]) -> None:
        """Form further groups under the settings of a round, and by these caps, one each."""

    def report(self, groups: int) -> PoolReport:
        """Return what the other ranks are told, for caps of so many groups."""

    def left(self, lookahead: SampleBlock | None) -> int:
        """Return `CostReport.left`, where `lookahead` is the group that was taken last."""


class RoundPlanner:
    """Reads the groups of rounds, one further than asked for, and tells what they cost.

    Without that further group, a rank would find out too late that its data has ended: it could
    then no longer keep a sample to fill with.

    Args:
        source: what groups are read from.
        measure: group -> its cost.
        tasks: number of tasks.
        may_split: groups may be split where there are fewer than steps.
    """

    def __init__(
        self,
        source: GroupSource,
        measure: Callable[[SampleBlock], GroupCost],
        tasks: int = 0,
        may_split: bool = True,
    ) -> None:
        self._source, self._measure = source, measure
        self._tasks, self._may_split = tasks, may_split
        self.lookahead: SampleBlock | None = None
        """First group of the next round; `None` where there is none, and before the first read."""

    def read(self, most: int, settings: RoundSettings) -> list[SampleBlock]:
        """Return the groups of a round: `most` of them, or all that are left.

        Caps are for the groups after the first, which was formed with the round before. The group
        after them gets the largest one on all ranks, so that a round has the same caps on all.
        """
        first = self._source.next_group() if self.lookahead is None else self.lookahead
        groups = [] if first is None else [first]
        self._source.use(settings, settings.caps[:-1])
        while groups and len(groups) < most and (group := self._source.next_group()) is not None:
            groups.append(group)
        self._source.use(settings, settings.caps[-1:])
        return groups

    def read_ahead(self, groups: list[SampleBlock], most: int) -> None:
        """Read the group after those of a round, where there may be one."""
        self.lookahead = self._source.next_group() if len(groups) == most else None

    def read_rest(self, settings: RoundSettings) -> SampleBlock:
        """Return all samples that are left."""
        rest, self.lookahead = [] if self.lookahead is None else [self.lookahead], None
        self._source.use(settings, ())
        while (group := self._source.next_group()) is not None:
            rest.append(group)
        return SampleBlock.joined(rest)

    def report(
        self, groups: list[SampleBlock], most: int, offered: int, *, has_filler: bool = True
    ) -> CostReport:
        """Return what the other ranks are told of the groups of a round.

        Args:
            groups: the groups, at most `most`.
            most: steps of the round.
            offered: caps to offer.
            has_filler: whether this rank has, or had, a sample to fill with.
        """
        report, self._ladder = make_report(
            groups,
            most=most,
            ended=self.lookahead is None,
            has_filler=has_filler,
            may_split=self._may_split,
            measure=self._measure,
            tasks=self._tasks,
        )
        left, pool = self._source.left(self.lookahead), self._source.report(offered)
        return replace(report, left=left, pool=pool)

    def groups(self, splits: int) -> list[SampleBlock]:
        """Return the groups of the last report after `splits` splits, once."""
        groups = self._ladder.groups(splits)
        del self._ladder  # which would keep the samples
        return groups
