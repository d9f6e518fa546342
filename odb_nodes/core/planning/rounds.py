"""Rounds: the steps that ranks plan after one exchange, from a few integers of each rank.

A rank reports its groups of a round, and a ladder of splits: its groups after one split, after two
splits, and so on. So every rank knows how every other rank will split groups, and one exchange
settles a round, even at the end of the data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt

from odb_nodes._support.arrays import IntArray
from odb_nodes._support.hashing import hash_ints
from odb_nodes.core.planning.auto_window import chosen_window
from odb_nodes.core.planning.budget import round_up
from odb_nodes.core.planning.caps import (
    agreed_caps,
    caps_of_round,
    costs_of,
    joined_costs,
    times_of,
)
from odb_nodes.core.planning.facts import Facts
from odb_nodes.core.planning.group_planner import PoolReport, RoundSettings

Uneven = Literal["fill", "stop"]

SAMPLES, TARGETS, COSTS, LONGER_COSTS, FLAGS = range(5)
COLUMNS = 5  # integers per row of a report, before the columns of tasks
HEADER = 9  # integers before the rows in a report's message
FLAG_BITS = 30  # most modalities: the flags of two groups share one integer
_FLAG_MASK = (1 << FLAG_BITS) - 1
UNKNOWN_REMAINING = 2**62  # `CostReport.remaining` if the length of a source is unknown
FILLER = -1  # stands for a group if a rank has no group for a step


@dataclass(frozen=True)
class GroupCost:
    """The report of a group to the other ranks."""

    samples: int
    targets: int  # supervised tokens
    cost: int  # cost of its batch under the budget
    flags: int = 0  # bit mask of the modalities in the group
    tasks: tuple[int, ...] = ()  # supervised tokens of each task
    time: int | None = None  # time of its step, in a unit that all ranks share; `None`: its cost

    @property
    def costs(self) -> int:
        """Time and cost as one integer."""
        return joined_costs(self.cost if self.time is None else self.time, self.cost)


@dataclass(frozen=True)
class CostReport:
    """The report of one rank to all ranks about a round."""

    # (groups + splits, 5 + tasks) int64. A row of a group holds samples, targets, time and cost as
    # one integer, 0, flags, and the targets of each task. A row of a split holds the same of the
    # shorter half, but in column 3 time and cost of the longer half, and in column 4 both flags.
    table: IntArray
    groups: int  # number of rows that are groups; the other rows are splits
    ended: bool  # whether the rank has no more groups after these
    has_filler: bool = True  # whether the rank has, or has had, a sample to fill steps with
    max_tokens: int = 0  # lower `tokens` that the rank requests from the next round on; 0: none
    # number of the rank's samples after these groups, if it is known; -1 if other ranks cannot make
    # these samples. See `planning.levelling`.
    remaining: int = -1
    pool: PoolReport = field(default_factory=PoolReport)

    def to_message(self) -> IntArray:
        """Return the report as (9 + (5 + tasks) * rows + n,) int64."""
        offer, lengths = self.pool
        fields = (self.groups, self.ended, self.has_filler, self.max_tokens, self.remaining)
        header = np.array((len(self.table), len(offer), *fields, *lengths), dtype=np.int64)
        return np.concatenate((header, self.table.ravel(), offer))

    @classmethod
    def from_message(cls, message: IntArray, tasks: int = 0) -> CostReport:
        """Return the report at the start of a message."""
        header = message[:HEADER].tolist()
        rows, offered, groups, ended, has_filler, max_tokens, remaining, *lengths = header
        columns = COLUMNS + tasks
        stop = HEADER + columns * rows
        table = message[HEADER:stop].reshape(rows, columns)
        offer = message[stop : stop + offered]
        pool = PoolReport(offer, (lengths[0], lengths[1]))
        return cls(table, groups, bool(ended), bool(has_filler), max_tokens, remaining, pool)

    @staticmethod
    def message_size(steps: int, tasks: int = 0) -> int:
        """Return the most integers in a message about a round of `steps` steps."""
        return HEADER + (COLUMNS + tasks) * steps + steps + 1


@dataclass(frozen=True)
class RoundPlan:
    """The steps of a round."""

    # for each step, over all ranks: samples, targets, flags, highest cost, and targets of each
    # task, (steps, 4 + tasks) int64
    totals: IntArray
    groups: IntArray  # index of the group of each rank and step, or `FILLER`, (ranks, steps) int64
    splits: list[int]  # number of splits of each rank
    last: bool  # whether the epoch ends with this round


def table_row(group: GroupCost) -> list[int]:
    """Return the row of a group in the table of a report."""
    return [group.samples, group.targets, group.costs, 0, group.flags, *group.tasks]


class SplitLadder:
    """Groups, and the groups that they become when they are split one after the other.

    Each split takes the group of the longest time among groups of two samples or more, orders its
    samples by length, and cuts it in the middle: the shorter half becomes a new group at the end.
    So the next split of a rank follows from times and numbers of samples, which all ranks know.
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
            np.array([cost.costs for cost in self._after], np.int64),
            np.array([cost.samples for cost in self._after], np.int64),
        )
        if parent is None:
            return None
        whole = self.groups(len(self._parts))[parent]
        shorter, longer = map(whole.take, cut_by_length(whole.lengths, 2))
        self._parts.append((parent, shorter, longer))
        costs = self._measure(shorter), self._measure(longer)
        self._after[parent] = costs[1]
        self._after.append(costs[0])
        return costs

    def groups(self, splits: int) -> list[Facts]:
        """Return the groups after `splits` splits."""
        groups = list(self._groups)
        for parent, shorter, longer in self._parts[:splits]:
            groups[parent] = longer
            groups.append(shorter)
        return groups


def report_of(
    ladder: SplitLadder,
    most: int,
    *,
    has_ended: bool,
    may_split: bool,
    has_filler: bool = True,
    remaining: int,
    pool: PoolReport,
    tasks: int = 0,
    max_tokens: int = 0,
) -> CostReport:
    """Return the report of a ladder's groups; if it `may_split`, with splits up to `most` groups.

    See `CostReport` for the other arguments.
    """
    rows = [table_row(cost) for cost in ladder.costs]
    groups = len(rows)
    while has_ended and may_split and len(rows) < most:
        split = ladder.split()
        if split is None:
            break
        shorter, longer = split
        row = table_row(shorter)
        row[LONGER_COSTS] = longer.costs
        row[FLAGS] = shorter.flags << FLAG_BITS | longer.flags
        rows.append(row)
    table = np.array(rows, dtype=np.int64).reshape(-1, COLUMNS + tasks)
    return CostReport(table, groups, has_ended, has_filler, max_tokens, remaining, pool)


def cut_by_length(tokens: Sequence[int], pieces: int) -> list[list[int]]:
    """Cut a group by length into up to `pieces` parts of like sizes; return the rows of each part.

    The shortest samples come first; each part is in the order of the group.
    """
    by_length = sorted(range(len(tokens)), key=tokens.__getitem__)
    bounds = [len(tokens) * piece // pieces for piece in range(pieces + 1)]
    return [sorted(by_length[start:stop]) for start, stop in pairwise(bounds) if start < stop]


def plan_round(
    reports: Sequence[CostReport], *, uneven: Uneven, seed: int, accumulate: int = 1
) -> RoundPlan:
    """Return the plan of a round, the same on every rank.

    Groups are matched by time: the longest groups of all ranks share a step, then the second
    longest, and so on. This minimizes the sum, over steps, of the longest time of a step. One
    permutation then shuffles the steps, so that the micro-steps of an optimizer step have samples
    of different lengths.
    """
    if len(reports) == 1:
        return _plan_alone(reports[0], accumulate, seed)
    ended = [report.ended for report in reports]
    steps = max(report.groups for report in reports)
    last = all(ended)
    if uneven == "stop" and any(ended):
        steps = min(report.groups for report in reports if report.ended)
        last = True
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
    samples = np.take_along_axis(pieces[:, :, SAMPLES], order, axis=1).sum(axis=0)
    costs = np.take_along_axis(costs_of(pieces[:, :, COSTS]), order, axis=1).sum(axis=0)
    lengths = costs / np.maximum(samples, 1)
    order = order[:, spread_steps(lengths, accumulate, seed)]
    chosen = np.take_along_axis(pieces, order[:, :, None], axis=1)
    groups = np.where(order < sizes, order, FILLER)
    return RoundPlan(_totals(chosen), groups, splits, last)


def _plan_alone(report: CostReport, accumulate: int, seed: int) -> RoundPlan:
    """Return the plan of a single rank: its groups in their order, or spread over micro-steps."""
    table = report.table[: report.groups]
    groups = np.arange(report.groups)
    if accumulate > 1:
        lengths = costs_of(table[:, COSTS]) / np.maximum(table[:, SAMPLES], 1)
        groups = spread_steps(lengths, accumulate, seed)
        table = table[groups]
    totals = table[:, [SAMPLES, TARGETS, FLAGS, COSTS, *range(COLUMNS, table.shape[1])]]
    totals[:, 3] = costs_of(totals[:, 3])
    return RoundPlan(totals, groups[None], [0], report.ended)


def step_totals(groups: Sequence[Sequence[GroupCost]]) -> IntArray:
    """Return the `totals` of a `RoundPlan` for steps whose groups, by rank, are planned already."""
    rows = [[table_row(group) for group in groups_of_rank] for groups_of_rank in groups]
    return _totals(np.array(rows, dtype=np.int64))


def _totals(pieces: IntArray) -> IntArray:
    samples, targets = pieces[:, :, SAMPLES].sum(axis=0), pieces[:, :, TARGETS].sum(axis=0)
    flags = np.bitwise_or.reduce(pieces[:, :, FLAGS], axis=0)
    most_cost = costs_of(pieces[:, :, COSTS]).max(axis=0, initial=0)
    task_targets = pieces[:, :, COLUMNS:].sum(axis=0)
    return np.column_stack((samples, targets, flags, most_cost, task_targets))


def shuffled(count: int, seed: int) -> IntArray:
    """Return a permutation of `range(count)` that depends on `seed` alone, not on versions."""
    return np.array(sorted(range(count), key=lambda index: hash_ints(seed, index)), dtype=np.int64)


def spread_steps(
    lengths: npt.NDArray[np.float64], accumulate: int, seed: int, steps_before: int = 0
) -> IntArray:
    """Return an order of steps in which the micro-steps of an optimizer step differ in length.

    The steps are put in order of length and cut into `accumulate` parts. Each optimizer step has
    one step of each part. An optimizer step that has begun before, or that is incomplete at the
    end, has steps of any part.

    lengths: mean length of the samples of each step, (n,); seed: seed of the order; steps_before:
    steps of the epoch before these.
    """
    order = shuffled(len(lengths), seed)
    begun, order = np.split(order, [-steps_before % accumulate])
    whole = len(order) // accumulate
    if accumulate == 1 or not whole:
        return np.concatenate((begun, order))
    kept, over = order[: whole * accumulate], order[whole * accumulate :]
    strata = kept[np.argsort(lengths[kept], kind="stable")].reshape(accumulate, whole)
    mixed = [part[shuffled(whole, hash_ints(seed, number))] for number, part in enumerate(strata)]
    micro = np.stack([shuffled(accumulate, hash_ints(seed, step, 1)) for step in range(whole)])
    spread = np.take_along_axis(np.stack(mixed, axis=1), micro, axis=1)
    return np.concatenate((begun, spread.ravel(), over))


def _apply(report: CostReport, splits: int) -> IntArray:
    """Return the rows of a report's groups after `splits` splits."""
    rows = report.table[: report.groups].copy()
    for row in report.table[report.groups : report.groups + splits]:
        parent = _next_to_split(rows[:, COSTS], rows[:, SAMPLES])
        if parent is None:
            raise ValueError("a report must not hold more splits than its groups allow.")
        shorter, longer = row.copy(), rows[parent].copy()
        shorter[LONGER_COSTS] = 0
        shorter[FLAGS] = row[FLAGS] >> FLAG_BITS
        longer[:COSTS] -= shorter[:COSTS]
        longer[COLUMNS:] -= shorter[COLUMNS:]
        longer[COSTS] = row[LONGER_COSTS]
        longer[FLAGS] = row[FLAGS] & _FLAG_MASK
        rows[parent] = longer
        rows = np.concatenate((rows, shorter[None]))
    return rows


def _next_to_split(costs: IntArray, samples: IntArray) -> int | None:
    """Return the index of the group to split next; `None` if none has two samples."""
    candidates = np.where(samples > 1, times_of(costs), -1)
    parent = int(candidates.argmax()) if len(candidates) else -1
    return parent if parent >= 0 and candidates[parent] >= 0 else None


LEAST_ROUNDS = 2  # the last round may begin once a rank has samples for fewer rounds
MOST_ROUNDS = 4
"""The last round does not begin before every rank has samples for at most so many rounds, because
a rank must hold all its samples of the last round."""


def begins_last_round(reports: Sequence[CostReport], steps: int) -> bool:
    """Return whether the next round is the last, if a round has `steps` steps."""
    remaining = [report.remaining for report in reports]
    groups = sum(report.groups for report in reports)
    if len(reports) == 1 or min(remaining) < 0 or not any(remaining) or not groups:
        return False
    samples = sum(int(report.table[: report.groups, SAMPLES].sum()) for report in reports)
    in_round = steps * samples / groups  # samples of a rank in a round, on average
    return min(remaining) < LEAST_ROUNDS * in_round and max(remaining) <= MOST_ROUNDS * in_round


MOST_STEPS_ALONE = 4  # most steps of a round of a single rank, which holds all their samples


def round_steps(number: int, world_size: int, round_size: int, accumulate: int) -> int:
    """Return the number of steps of a round in which no data ends: 1, 2, 3, ... `round_size`.

    The first batch waits for a round of one step. Each round has a fourth more steps than the
    previous round, and at least one step more, so its groups are ready during the previous round,
    unless training is hardly slower than processing. A single rank waits for no other rank: rounds
    of 1, 2 and 4 steps spread the work of a round over its steps, unless there are micro-steps to
    mix. All numbers are rounded up to a multiple of `accumulate`, the steps of an optimizer step.

    number: number of the round in its epoch, from 0; round_size: most steps of a round.
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
    """Return the settings of the next round, which follow from the reports of all ranks.

    present: settings of the reported round; next_steps: steps of the next round; planned_steps:
    steps of the epoch so far, as many as the last round shares out, up to a full round.
    """
    limits = [present.max_tokens, *(report.max_tokens for report in reports)]
    agreed = agreed_caps([report.pool.offer for report in reports])
    return RoundSettings(
        max_tokens=min((tokens for tokens in limits if tokens), default=0),
        caps=tuple(caps_of_round(agreed, next_steps).tolist()),
        window=present.window or chosen_window([report.pool.lengths for report in reports]),
        is_last=begins_last_round(reports, min(round_size, planned_steps + next_steps)),
    )
