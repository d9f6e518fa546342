"""Rounds: the steps that ranks plan after one exchange, from a few integers of each rank.

A rank reports its groups of a round, and a ladder of splits: what its groups would become if it had
to make one more of them, and one more again. Every rank then knows how every other rank will split,
so one exchange settles a round, even at the end of the data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt

from odb_nodes._core.hashing import hash_ints
from odb_nodes.planning.auto_window import chosen_window
from odb_nodes.planning.budget import round_up
from odb_nodes.planning.caps import agreed_caps, caps_of_round, costs_of, joined_costs, times_of
from odb_nodes.planning.facts import Facts
from odb_nodes.planning.group_planner import PoolReport, RoundSettings
from odb_nodes.planning.table import IntArray

Uneven = Literal["fill", "stop"]

SAMPLES, TARGETS, COSTS, REST_COSTS, FLAGS = range(5)
COLUMNS = 5  # integers per row of a report, before those of tasks
HEADER = 9  # integers before the rows in a report's message
FLAG_BITS = 30  # most modalities: the flags of two groups share one integer
_FLAG_MASK = (1 << FLAG_BITS) - 1
FILLER = -1  # stands for a group where a rank has none left for a step


@dataclass(frozen=True)
class GroupCost:
    """What the other ranks need to know of a group."""

    samples: int
    targets: int  # supervised tokens
    cost: int  # what its batch costs under the budget
    flags: int = 0  # bit mask of the modalities in the group
    tasks: tuple[int, ...] = ()  # supervised tokens of each task
    # what a step with it takes, in any unit that all ranks share. `None`: as much as it costs
    time: int | None = None

    @property
    def costs(self) -> int:
        """Time and cost as one integer."""
        return joined_costs(self.cost if self.time is None else self.time, self.cost)


@dataclass(frozen=True)
class CostReport:
    """What one rank tells the others about a round."""

    # (groups + splits, 5 + tasks) int64. A row of a group holds samples, targets, time and cost as
    # one integer, 0, flags, and the targets of each task. A row of a split holds the same of the
    # part that is split off, in column 3 time and cost of the rest, and in column 4 the flags of
    # both
    table: IntArray
    groups: int  # number of rows that are groups; the rows after them are splits
    ended: bool  # whether the rank has no more groups after these
    # whether the rank has, or has had, a sample that it can fill steps with
    has_filler: bool = True
    # the `tokens` of the budget that it asks all ranks for, from the next round on; 0 for none
    max_tokens: int = 0
    # samples that it has after these groups, as far as it knows; -1 where it cannot share them with
    # other ranks. See `odb_nodes.planning.levelling`
    left: int = -1
    pool: PoolReport = field(default_factory=PoolReport)  # what it tells of its pool

    def to_message(self) -> IntArray:
        """Return the report as (9 + (5 + tasks) * rows + n,) int64."""
        offer, lengths = self.pool
        told = (self.groups, self.ended, self.has_filler, self.max_tokens, self.left, *lengths)
        header = np.array((len(self.table), len(offer), *told), dtype=np.int64)
        return np.concatenate((header, self.table.ravel(), offer))

    @classmethod
    def from_message(cls, message: IntArray, tasks: int = 0) -> CostReport:
        """Return the report that a message begins with."""
        rows, offered, groups, ended, has_filler, *told = message[:HEADER].tolist()
        max_tokens, left, *lengths = told
        columns = COLUMNS + tasks
        stop = HEADER + columns * rows
        table, offer = message[HEADER:stop].reshape(rows, columns), message[stop : stop + offered]
        pool = PoolReport(offer, (lengths[0], lengths[1]))
        return cls(table, groups, bool(ended), bool(has_filler), max_tokens, left, pool)

    @staticmethod
    def message_size(steps: int, tasks: int = 0) -> int:
        """Return the most integers in a message about a round of `steps` steps."""
        return HEADER + (COLUMNS + tasks) * steps + steps + 1


@dataclass(frozen=True)
class RoundPlan:
    """The steps of a round."""

    # samples, targets, flags, highest cost and targets of each task of each step over all ranks,
    # (steps, 4 + tasks) int64
    totals: IntArray
    groups: IntArray  # index of the group of each rank and step, or `FILLER`, (ranks, steps) int64
    splits: list[int]  # number of splits that each rank has to make
    last: bool  # whether the epoch ends with this round


def row_of(group: GroupCost) -> list[int]:
    """Return the row of a group in the table of a report."""
    return [group.samples, group.targets, group.costs, 0, group.flags, *group.tasks]


class SplitLadder:
    """Groups, and what they become when they are split one after the other.

    Each split takes the group of the longest time that has two samples or more, orders it by
    length, and cuts it in the middle: the shorter half becomes a group of its own, at the end. So
    what a rank splits next follows from times and numbers of samples, which all ranks are told.
    """

    def __init__(self, groups: Sequence[Facts], measure: Callable[[Facts], GroupCost]) -> None:
        self._measure = measure
        self._groups = [*groups]
        self.costs = [measure(group) for group in groups]
        self._parts: list[tuple[int, Facts, Facts]] = []
        self._after = list(self.costs)

    def split(self) -> tuple[GroupCost, GroupCost] | None:
        """Split once more and return the costs of both parts; `None` if no group can be split."""
        parent = _next_to_split(
            np.array([one.costs for one in self._after], np.int64),
            np.array([one.samples for one in self._after], np.int64),
        )
        if parent is None:
            return None
        whole = self.groups(len(self._parts))[parent]
        off, rest = map(whole.take, cut_by_length(whole.lengths, 2))
        self._parts.append((parent, off, rest))
        costs = self._measure(off), self._measure(rest)
        self._after[parent] = costs[1]
        self._after.append(costs[0])
        return costs

    def groups(self, splits: int) -> list[Facts]:
        """Return the groups after `splits` splits."""
        groups = list(self._groups)
        for parent, off, rest in self._parts[:splits]:
            groups[parent] = rest
            groups.append(off)
        return groups


def report_of(
    ladder: SplitLadder,
    most: int,
    *,
    has_ended: bool,
    may_split: bool,
    has_filler: bool = True,
    left: int,
    pool: PoolReport,
    tasks: int = 0,
    max_tokens: int = 0,
) -> CostReport:
    """Return the report of the groups of a ladder, with splits up to `most` if the rank may split.

    Args:
        ladder: the groups of a round.
        most: steps of the round.
        has_ended: whether the rank has no group after these.
        may_split: whether groups are split where a rank has fewer than others.
        has_filler: whether the rank has, or has had, a sample to fill steps with.
        left: see `CostReport`.
        pool: what the rank tells of its pool.
        tasks: number of the tasks whose targets are reported.
        max_tokens: see `CostReport`.
    """
    rows = [row_of(cost) for cost in ladder.costs]
    groups = len(rows)
    while has_ended and may_split and len(rows) < most and (split := ladder.split()) is not None:
        off, rest = split
        row = row_of(off)
        row[REST_COSTS], row[FLAGS] = rest.costs, off.flags << FLAG_BITS | rest.flags
        rows.append(row)
    table = np.array(rows, dtype=np.int64).reshape(-1, COLUMNS + tasks)
    return CostReport(table, groups, has_ended, has_filler, max_tokens, left, pool)


def cut_by_length(tokens: Sequence[int], pieces: int) -> list[list[int]]:
    """Return the rows of up to `pieces` parts of a group, of like lengths and numbers of samples.

    The shortest samples come first; each part is in the order of the group.
    """
    by_length = sorted(range(len(tokens)), key=tokens.__getitem__)
    bounds = [len(tokens) * piece // pieces for piece in range(pieces + 1)]
    return [sorted(by_length[start:stop]) for start, stop in pairwise(bounds) if start < stop]


def plan_round(
    reports: Sequence[CostReport], *, uneven: Uneven, key: int, accumulate: int = 1
) -> RoundPlan:
    """Return the plan of a round, the same on every rank.

    Groups are matched by time: those of all ranks that take longest share a step, so do the next,
    and so on. That minimizes the sum, over steps, of the longest time of a step. One permutation
    then shuffles the steps; those of an optimizer step have samples of unlike lengths.
    """
    if len(reports) == 1:
        return _plan_alone(reports[0], accumulate, key)
    ended = [report.ended for report in reports]
    steps, last = max(report.groups for report in reports), all(ended)
    if uneven == "stop" and any(ended):
        steps, last = min(report.groups for report in reports if report.ended), True
    splits = [
        min(max(0, steps - report.groups), len(report.table) - report.groups)
        if uneven == "fill"
        else 0
        for report in reports
    ]
    pieces = np.zeros((len(reports), steps, reports[0].table.shape[1]), dtype=np.int64)
    sizes = np.zeros((len(reports), 1), dtype=np.int64)
    for rank, report in enumerate(reports):
        rows = _apply(report, splits[rank])[:steps]
        pieces[rank, : len(rows)] = rows
        sizes[rank] = len(rows)
    times = times_of(pieces[:, :, COSTS])
    order = np.argsort(-times, axis=1, kind="stable")
    of_steps = np.take_along_axis(pieces, order[:, :, None], axis=1).sum(axis=0)
    costs = np.take_along_axis(costs_of(pieces[:, :, COSTS]), order, axis=1).sum(axis=0)
    lengths = costs / np.maximum(of_steps[:, SAMPLES], 1)
    order = order[:, spread_steps(lengths, accumulate, key)]
    chosen = np.take_along_axis(pieces, order[:, :, None], axis=1)
    groups = np.where(order < sizes, order, FILLER)
    return RoundPlan(_totals(chosen), groups, splits, last)


def _plan_alone(report: CostReport, accumulate: int, key: int) -> RoundPlan:
    """Return the plan of a single rank: all of its groups, with nothing to match.

    They are in the order in which they came, or as micro-steps of unlike lengths.
    """
    table, groups = report.table[: report.groups], np.arange(report.groups)
    if accumulate > 1:
        lengths = costs_of(table[:, COSTS]) / np.maximum(table[:, SAMPLES], 1)
        groups = spread_steps(lengths, accumulate, key)
        table = table[groups]
    totals = table[:, [SAMPLES, TARGETS, FLAGS, COSTS, *range(COLUMNS, table.shape[1])]]
    totals[:, 3] = costs_of(totals[:, 3])
    return RoundPlan(totals, groups[None], [0], report.ended)


def step_totals(groups: Sequence[Sequence[GroupCost]]) -> IntArray:
    """Return the `totals` of a `RoundPlan`, of steps that are planned already."""
    rows = [[row_of(group) for group in of_rank] for of_rank in groups]
    return _totals(np.array(rows, dtype=np.int64))


def _totals(pieces: IntArray) -> IntArray:
    samples, targets = pieces[:, :, SAMPLES].sum(axis=0), pieces[:, :, TARGETS].sum(axis=0)
    flags = np.bitwise_or.reduce(pieces[:, :, FLAGS], axis=0)
    most_cost = costs_of(pieces[:, :, COSTS]).max(axis=0, initial=0)
    of_tasks = pieces[:, :, COLUMNS:].sum(axis=0)
    return np.column_stack((samples, targets, flags, most_cost, of_tasks))


def shuffled(count: int, key: int) -> IntArray:
    """Return a permutation of `range(count)` that depends on `key` alone, on no library."""
    return np.array(sorted(range(count), key=lambda index: hash_ints(key, index)), dtype=np.int64)


def spread_steps(
    lengths: npt.NDArray[np.float64], accumulate: int, key: int, steps_before: int = 0
) -> IntArray:
    """Return an order of steps, so that those of an optimizer step have unlike lengths.

    The steps are put in order of length and cut into `accumulate` parts. Each optimizer step has
    one of each part; the rest of one that has begun, and what is over at the end, are of any. It
    depends on `key` alone.

    Args:
        lengths: how long the samples of each step are on average, (n,).
        accumulate: steps of an optimizer step.
        key: what the order is drawn from.
        steps_before: of the epoch.
    """
    order = shuffled(len(lengths), key)
    begun, order = np.split(order, [-steps_before % accumulate])
    whole = len(order) // accumulate
    if accumulate == 1 or not whole:
        return np.concatenate((begun, order))
    kept, over = order[: whole * accumulate], order[whole * accumulate :]
    strata = kept[np.argsort(lengths[kept], kind="stable")].reshape(accumulate, whole)
    of_each = [part[shuffled(whole, hash_ints(key, at))] for at, part in enumerate(strata)]
    micro = np.stack([shuffled(accumulate, hash_ints(key, step, 1)) for step in range(whole)])
    spread = np.take_along_axis(np.stack(of_each, axis=1), micro, axis=1)
    return np.concatenate((begun, spread.ravel(), over))


def _apply(report: CostReport, splits: int) -> IntArray:
    """Return the rows of a report's groups after `splits` splits."""
    rows = report.table[: report.groups].copy()
    for row in report.table[report.groups : report.groups + splits]:
        parent = _next_to_split(rows[:, COSTS], rows[:, SAMPLES])
        if parent is None:
            raise ValueError("a report must not hold more splits than its groups allow.")
        off, rest = row.copy(), rows[parent].copy()
        off[REST_COSTS], off[FLAGS] = 0, row[FLAGS] >> FLAG_BITS
        rest[:COSTS] -= off[:COSTS]
        rest[COLUMNS:] -= off[COLUMNS:]
        rest[COSTS], rest[FLAGS] = row[REST_COSTS], row[FLAGS] & _FLAG_MASK
        rows[parent] = rest
        rows = np.concatenate((rows, off[None]))
    return rows


def _next_to_split(costs: IntArray, samples: IntArray) -> int | None:
    """Return the index of the group to split next; `None` if none has two samples."""
    candidates = np.where(samples > 1, times_of(costs), -1)
    parent = int(candidates.argmax()) if len(candidates) else -1
    return parent if parent >= 0 and candidates[parent] >= 0 else None


LEAST_ROUNDS = 2  # the last round begins when a rank has less than this left for, in rounds
MOST_ROUNDS = 4
"""It does not begin as long as a rank has more left than this, in rounds: it holds all of it."""


def begins_last_round(reports: Sequence[CostReport], steps: int) -> bool:
    """Tell whether the next round is the last, of all that is left, where a round has `steps`."""
    left = [report.left for report in reports]
    groups = sum(report.groups for report in reports)
    if len(reports) == 1 or min(left) < 0 or not any(left) or not groups:
        return False
    samples = sum(int(report.table[: report.groups, SAMPLES].sum()) for report in reports)
    of_a_round = steps * samples / groups
    return min(left) < LEAST_ROUNDS * of_a_round and max(left) <= MOST_ROUNDS * of_a_round


MOST_STEPS_ALONE = 4  # steps of a round of a single rank: it holds the samples of all of them


def round_steps(number: int, world_size: int, round_size: int, accumulate: int) -> int:
    """Return the number of steps of a round in which no data ends: 1, 2, 3, ... `round_size`.

    The first batch waits for a round of one step. Each round has a fourth more steps than the one
    before, and at least one more, so its groups are ready while that one is emitted, unless
    training is hardly slower than processing. A single rank settles rounds with nobody: 1, 2, 4
    spread what a round costs over its steps, unless it has micro-steps to mix. All are rounded up
    to a multiple of `accumulate`.

    Args:
        number: number of the round in its epoch, from 0.
        world_size: number of ranks.
        round_size: most steps of a round.
        accumulate: steps of an optimizer step.
    """
    if world_size == 1 and accumulate == 1:
        return min(round_size, MOST_STEPS_ALONE, 1 << min(number, 16))
    steps = 1
    for _ in range(number):
        if steps >= round_size:
            break
        steps += max(1, steps // 4)
    return round_up(min(round_size, steps), accumulate)


def next_settings(
    reports: Sequence[CostReport],
    present: RoundSettings,
    *,
    next_steps: int,
    planned_steps: int,
    round_size: int,
) -> RoundSettings:
    """Return the settings of the next round, which follow from all reports.

    Args:
        reports: of all ranks.
        present: settings of the round that was reported.
        next_steps: steps of the next round.
        planned_steps: steps of the epoch so far. The last round shares out as much as these, up to
            what it shares out later in an epoch: the first rounds are too short for it.
        round_size: most steps of a round.
    """
    asked = [one for one in (present.max_tokens, *(report.max_tokens for report in reports)) if one]
    agreed = agreed_caps([report.pool.offer for report in reports])
    return RoundSettings(
        max_tokens=min(asked, default=0),
        caps=tuple(caps_of_round(agreed, next_steps).tolist()),
        window=present.window or chosen_window([report.pool.lengths for report in reports]),
        is_last=begins_last_round(reports, min(round_size, planned_steps + next_steps)),
    )
