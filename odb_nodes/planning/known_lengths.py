"""Plan a whole epoch of samples whose lengths are known, over all ranks at once.

Padded groups are cut from all samples in order of length, so nearly nothing is padding. Packed
groups take the samples in the order of the epoch, and fill what is left of a row from a reserve of
waiting ones, so their lengths stay mixed. Groups of equal cost then share a step, and one
permutation shuffles the steps. Every rank computes the same plan, without a message.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from odb_nodes.planning.budget import TokenBudget, round_up
from odb_nodes.planning.facts import Facts
from odb_nodes.planning.group_costs import samples_of, time_of_group
from odb_nodes.planning.level_rows import level_rows
from odb_nodes.planning.levelling import Rest
from odb_nodes.planning.packing import Packing
from odb_nodes.planning.pool import grouping_of
from odb_nodes.planning.rounds import cut_by_length, shuffled, spread_steps
from odb_nodes.planning.step_time import StepTime, TimeFn, aim_of
from odb_nodes.planning.table import ORDINALS, TOKENS, IntArray

RESERVE = 1024
"""Samples that wait while packed rows are filled: enough that one of them fits almost any gap."""

_LEVELLED_STEPS = 8
"""The groups of so many steps are cut anew where their number is no multiple of the ranks'."""
_COST_LEVELS = 256
"""Groups share a step if their costs are in the same of so many parts of the budget. Those of
exactly equal costs would have equal widths, and a step samples of one length."""
_WIDEST_KEY = 1 << 40  # above the number of any sample


class EpochPlan:
    """The steps of an epoch: for each, a group of samples for each rank.

    Args:
        groups: the groups of the first step, a rank each, then those of the second, and so on. Of
            the last step, some ranks may have none.
        world_size: number of ranks.
    """

    def __init__(self, groups: Sequence[IntArray], world_size: int) -> None:
        sizes = np.fromiter(map(len, groups), np.int64, len(groups))
        self._rows = np.concatenate([*groups, np.empty(0, np.int64)]).astype(np.int64)
        self._stops = np.append(0, np.cumsum(sizes))
        self._world_size = world_size

    def __len__(self) -> int:
        """Return the number of steps."""
        return -(-(len(self._stops) - 1) // self._world_size)

    def group(self, step: int, rank: int) -> IntArray:
        """Return the samples of a rank in a step, (n,); none where the rank has none left."""
        at = step * self._world_size + rank
        return (
            self._rows[self._stops[at] : self._stops[at + 1]]
            if at + 1 < len(self._stops)
            else _NONE
        )

    def rows_from(self, step: int, rank: int) -> IntArray:
        """Return all samples of a rank from a step on, (n,)."""
        groups = [self.group(at, rank) for at in range(step, len(self))]
        return np.concatenate([*groups, _NONE])


_NONE = np.empty(0, np.int64)


def plan_known(
    rows: IntArray,
    tokens: IntArray,
    budget: TokenBudget,
    *,
    world_size: int = 1,
    window: int | None = None,
    largest_first: int = 0,
    accumulate: int = 1,
    key: int = 0,
    step_time: StepTime | TimeFn | None = None,
) -> EpochPlan:
    """Plan the samples of an epoch.

    Each sample is in one group. No group costs more than the budget, but for those of one sample
    that does by itself.

    Args:
        rows: numbers of the samples, in the order of the epoch, (n,).
        tokens: length of each of these, (n,).
        budget: of a group.
        world_size: number of ranks that share the steps.
        window: how many samples of each rank are looked at together: the groups of the first
            `window * world_size` come first, but for some samples of packed rows that are levelled
            in time, which wait for the next. Default: all.
        largest_first: how many steps of the longest samples come first.
        accumulate: steps of an optimizer step, which have groups of unlike lengths.
        key: what the order of the steps is drawn from.
        step_time: what the groups of a step are matched by. Default: what they cost under the
            budget, roughly, so that lengths are mixed.
    """
    aim = aim_of(step_time) if world_size > 1 else None
    if budget.layout == "packed" and aim is not None and len(rows):
        extra = aim.extra(tokens, np.zeros_like(tokens))
        parts = level_rows(tokens, extra, Packing(budget), world_size, window)
    else:
        parts = _parts(tokens, budget, world_size, window)
    planned: list[IntArray] = []
    for groups in parts:
        first = 0 if planned else largest_first
        order = _Order(
            budget,
            world_size,
            accumulate,
            key + len(planned),
            first,
            step_time,
            steps_before=len(planned) // world_size,
        )
        planned += [rows[np.sort(group)] for group in order.of(groups, tokens)]
    return EpochPlan(planned, world_size)


def _parts(
    tokens: IntArray, budget: TokenBudget, world_size: int, window: int | None
) -> Iterator[list[IntArray]]:
    """Yield the groups of each window of samples, by their places."""
    size = max(1, len(tokens) if window is None else window * world_size)
    for begin in range(0, len(tokens), size):
        lengths = tokens[begin : begin + size]
        groups = _levelled(_cut(lengths, budget), lengths, budget, world_size)
        yield [begin + group for group in groups]


def _cut(tokens: IntArray, budget: TokenBudget) -> list[IntArray]:
    """Return the groups of samples by their places, (n,) each; the shortest samples last."""
    if budget.layout == "packed":
        return _packed(tokens, budget)
    return grouping_of(budget).partition(_table(tokens, np.arange(len(tokens))))


def _table(tokens: IntArray, places: IntArray) -> IntArray:
    order = tokens.argsort(kind="stable")
    table = np.zeros((3, len(order)), np.int64)
    np.take(tokens, order, out=table[TOKENS])
    np.take(places, order, out=table[ORDINALS])
    return table


def _packed(tokens: IntArray, budget: TokenBudget) -> list[IntArray]:
    """Return packed rows that are filled in the order of the samples.

    A row begins with the oldest sample of the reserve, goes on with those that come next, and ends
    with the samples of the reserve that fill it best.
    """
    packing = Packing(budget)
    costs, room, most = packing.costs(tokens), packing.room.cost, packing.room.samples
    of_each: list[int] = costs.tolist()
    sums = np.append(0, np.cumsum(costs))
    reserve = _Reserve(of_each)
    groups, at, count = list[IntArray](), 0, len(of_each)
    while True:
        while len(reserve) < RESERVE and at < count:
            reserve.add(at)
            at += 1
        if at == count:
            break
        first = reserve.take_oldest()
        group, left = [first], room - of_each[first]
        if left > 0:
            stop = int(np.searchsorted(sums, sums[at] + left, "right")) - 1
            stop = max(at, min(stop, at + most - 1))
            left -= int(sums[stop] - sums[at])
            if stop > at:  # The last one may give way to one that fills the row better.
                last = of_each[stop - 1]
                if reserve.most_within(left + last) > last + reserve.most_within(left):
                    stop, left = stop - 1, left + last
            group += range(at, stop)
            at = stop
        while left > 0 and len(group) < most and (best := reserve.take_fitting(left)) is not None:
            group.append(best)
            left -= of_each[best]
        groups.append(np.array(group, np.int64))
    rest = np.array(reserve.places(), np.int64)
    if len(rest):
        groups += packing.partition(_table(tokens[rest], rest))
    return groups


class _Reserve:
    """Samples that wait for a row: the oldest is taken first, or the one that fits best."""

    def __init__(self, costs: Sequence[int]) -> None:
        self._costs = costs
        self._by_cost: list[int] = []  # cost x _WIDEST_KEY + place
        self._by_age = deque[int]()  # places; some are gone
        self._gone = set[int]()

    def __len__(self) -> int:
        return len(self._by_cost)

    def add(self, place: int) -> None:
        insort(self._by_cost, self._costs[place] * _WIDEST_KEY + place)
        self._by_age.append(place)

    def take_oldest(self) -> int:
        while (place := self._by_age.popleft()) in self._gone:
            self._gone.remove(place)
        key = self._costs[place] * _WIDEST_KEY + place
        del self._by_cost[bisect_right(self._by_cost, key) - 1]
        return place

    def most_within(self, room: int) -> int:
        """Return what the largest sample of at most some cost costs; 0 where none is so small."""
        at = bisect_right(self._by_cost, (room + 1) * _WIDEST_KEY - 1) - 1
        return self._by_cost[at] // _WIDEST_KEY if at >= 0 else 0

    def take_fitting(self, room: int) -> int | None:
        """Return the largest sample of at most some cost; `None` where none is so small."""
        at = bisect_right(self._by_cost, (room + 1) * _WIDEST_KEY - 1) - 1
        if at < 0:
            return None
        place = self._by_cost.pop(at) % _WIDEST_KEY
        self._gone.add(place)
        return place

    def places(self) -> list[int]:
        return [key % _WIDEST_KEY for key in self._by_cost]


def _levelled(
    groups: list[IntArray], tokens: IntArray, budget: TokenBudget, world_size: int
) -> list[IntArray]:
    """Return groups whose number is a multiple of the ranks', where there are enough samples.

    The last ones are cut anew, into some more, which are smaller and alike.
    """
    if not -len(groups) % world_size:
        return groups
    kept = max(0, len(groups) - _LEVELLED_STEPS * world_size)
    wanted = round_up(len(groups), world_size) - kept
    rows = np.concatenate(groups[kept:])
    facts = Facts(ordinal=rows, tokens=tokens[rows], targets=0, patches=0)
    cut = [rows[group] for group in Rest(facts, budget).groups(wanted)]
    while len(cut) < wanted:
        largest = max(range(len(cut)), key=lambda at: len(cut[at]))
        if len(cut[largest]) < 2:
            break
        whole = cut.pop(largest)
        cut += [whole[part] for part in cut_by_length(tokens[whole].tolist(), 2)]
    return [*groups[:kept], *cut]


class _Order(NamedTuple):
    """How the groups of a part of the epoch become steps."""

    budget: TokenBudget
    world_size: int
    accumulate: int
    key: int  # what their order is drawn from
    largest_first: int
    step_time: StepTime | TimeFn | None
    steps_before: int  # of the parts before

    def of(self, groups: list[IntArray], tokens: IntArray) -> Iterator[IntArray]:
        """Yield the groups, those of a step after each other."""
        world_size = self.world_size
        matched = self._matched(groups, tokens)
        steps = len(groups) // world_size  # whole ones
        in_steps = matched[: steps * world_size].reshape(steps, world_size)
        sums, sizes, longest = (
            np.fromiter(values, np.int64, len(groups))[in_steps]
            for values in (
                (tokens[group].sum() for group in groups),
                map(len, groups),
                (tokens[group].max() for group in groups),
            )
        )
        lengths = sums.sum(axis=1) / sizes.sum(axis=1)
        first = np.argsort(-longest.max(axis=1), kind="stable")[: self.largest_first]
        others = shuffled(steps, self.key)
        others = others[~np.isin(others, first)]
        if self.accumulate > 1:
            before = self.steps_before + len(first)
            others = others[spread_steps(lengths[others], self.accumulate, self.key, before)]
        order = np.concatenate((first, others))
        for step in [*order.tolist(), steps]:
            of_ranks = matched[step * world_size : (step + 1) * world_size]
            for rank in range(len(of_ranks)):  # No rank always has the largest.
                yield groups[of_ranks[(rank + step) % len(of_ranks)]]

    def _matched(self, groups: list[IntArray], tokens: IntArray) -> IntArray:
        """Return the numbers of the groups in order of time, those that take longest first."""
        if self.world_size == 1:
            return np.arange(len(groups))
        times = np.fromiter((self._time(group, tokens[group]) for group in groups), np.int64)
        if self.step_time is None:
            times //= max(1, self.budget.tokens // _COST_LEVELS)
        return np.lexsort((shuffled(len(groups), self.key + 1), -times))

    def _time(self, group: IntArray, tokens: IntArray) -> int:
        patches = np.zeros_like(tokens)
        samples = partial(samples_of, group, tokens)
        time = time_of_group(self.step_time, tokens, patches, self.budget, samples)
        return self.budget.cost(tokens.tolist()) if time is None else time
