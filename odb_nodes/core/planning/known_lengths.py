"""Plan a whole epoch of samples whose lengths are known, over all ranks at once.

Padded groups are cut from all samples in order of length, so there is little padding. Packed groups
take the samples in the order of the epoch, so lengths stay mixed; waiting samples of a reserve fill
the end of each row. Groups of equal cost then share a step, and one permutation shuffles the steps.
Every rank computes the same plan, without a message.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from odb_nodes._support.arrays import IntArray
from odb_nodes.core.planning.budget import TokenBudget, round_up
from odb_nodes.core.planning.facts import Facts
from odb_nodes.core.planning.group_costs import samples_of, time_of_group
from odb_nodes.core.planning.level_cut import LevelCut
from odb_nodes.core.planning.level_rows import level_rows
from odb_nodes.core.planning.packing import Packing
from odb_nodes.core.planning.pool import grouping_of
from odb_nodes.core.planning.rounds import cut_by_length, shuffled, spread_steps
from odb_nodes.core.planning.step_time import StepTime, TimeFn, aim_of
from odb_nodes.core.planning.table import NO_ROWS, ORDINALS, TOKENS

RESERVE = 1024
"""Samples that wait while packed rows are filled: enough that one of them fits almost any gap."""

SAMPLES_TOGETHER = 2**23
"""Most samples of all ranks that are planned together without a window: a limit of memory."""

_LEVELLED_STEPS = 8
"""Steps whose groups are cut anew if the number of groups is no multiple of the number of ranks."""
_COST_LEVELS = 256
"""The budget is cut into so many parts, and groups whose costs are in the same part share a step.
If costs had to be equal, the groups of a step would have samples of equal length."""
_WIDEST_KEY = 1 << 40  # above the number of any sample


class EpochPlan:
    """The steps of an epoch: for each step, a group of samples for each rank.

    groups: the groups of all ranks in the first step, then in the second, and so on. In the last
    step, some ranks may have no group.
    """

    def __init__(self, groups: Sequence[IntArray], world_size: int) -> None:
        sizes = np.fromiter(map(len, groups), np.int64, len(groups))
        self._numbers = np.concatenate([*groups, NO_ROWS]).astype(np.int64, copy=False)
        self._stops = np.append(0, np.cumsum(sizes))
        self._world_size = world_size

    def __len__(self) -> int:
        """Return the number of steps."""
        return -(-(len(self._stops) - 1) // self._world_size)

    def group(self, step: int, rank: int) -> IntArray:
        """Return the samples of a rank in a step, (n,); the last step may have none of the rank."""
        index = step * self._world_size + rank
        if index + 1 >= len(self._stops):
            return NO_ROWS
        return self._numbers[self._stops[index] : self._stops[index + 1]]

    def numbers_from(self, step: int, rank: int) -> IntArray:
        """Return all samples of a rank from a step on, (n,)."""
        groups = [self.group(further, rank) for further in range(step, len(self))]
        return np.concatenate([*groups, NO_ROWS])


def plan_known(
    numbers: IntArray,
    tokens: IntArray,
    budget: TokenBudget,
    *,
    world_size: int = 1,
    window: int | None = None,
    largest_first: int = 0,
    accumulate: int = 1,
    seed: int = 0,
    step_time: StepTime | TimeFn | None = None,
) -> EpochPlan:
    """Plan the samples of an epoch: each is in one group, within the budget unless oversize.

    Args as for `plan_epoch`, and:
        numbers, tokens: numbers and lengths of the samples, in the order of the epoch, (n,) each.
        window: `None` for all samples, up to `SAMPLES_TOGETHER` over all ranks; a longer epoch has
            windows of equal size. In packed rows that are levelled in time, some samples wait for
            the next window.
        seed: seed of the order of the steps.
        step_time: `None` matches groups roughly by their costs, so that lengths are mixed.
    """
    if window is None and len(numbers) > SAMPLES_TOGETHER:
        windows = -(-len(numbers) // SAMPLES_TOGETHER)
        window = -(-len(numbers) // (windows * world_size))
    aim = aim_of(step_time) if world_size > 1 else None
    if budget.layout == "packed" and aim is not None and len(numbers):
        extra = aim.extra(tokens, np.zeros_like(tokens))
        parts = level_rows(tokens, extra, Packing(budget), world_size, window)
    else:
        parts = _parts(tokens, budget, world_size, window)
    planned: list[IntArray] = []
    for groups in parts:
        order = _StepOrder(
            budget,
            world_size,
            accumulate,
            seed + len(planned),
            0 if planned else largest_first,
            step_time,
            steps_before=len(planned) // world_size,
        )
        planned += [numbers[np.sort(group)] for group in order.apply(groups, tokens)]
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

    A row begins with the oldest sample of the reserve. The next samples in order follow. The row
    ends with the samples of the reserve that fill it best.
    """
    packing = Packing(budget)
    costs = packing.costs(tokens)
    room = packing.room.cost
    most = packing.room.samples
    cost_of: list[int] = costs.tolist()
    sums = np.append(0, np.cumsum(costs))
    reserve = _Reserve(cost_of)
    groups = list[IntArray]()
    place = 0
    count = len(cost_of)
    while True:
        while len(reserve) < RESERVE and place < count:
            reserve.add(place)
            place += 1
        if place == count:
            break
        first = reserve.take_oldest()
        group = [first]
        free = room - cost_of[first]
        if free > 0:
            stop = int(np.searchsorted(sums, sums[place] + free, "right")) - 1
            stop = max(place, min(stop, place + most - 1))
            free -= int(sums[stop] - sums[place])
            if stop > place:  # The last sample may give way to one that fills the row better.
                last = cost_of[stop - 1]
                if reserve.most_within(free + last) > last + reserve.most_within(free):
                    stop -= 1
                    free += last
            group += range(place, stop)
            place = stop
        while free > 0 and len(group) < most:
            best = reserve.take_fitting(free)
            if best is None:
                break
            group.append(best)
            free -= cost_of[best]
        groups.append(np.array(group, np.int64))
    waiting = np.array(reserve.places(), np.int64)
    if len(waiting):
        groups += packing.partition(_table(tokens[waiting], waiting))
    return groups


class _Reserve:
    """Samples that wait for a row, which takes the oldest sample, or the sample that fits best."""

    def __init__(self, costs: Sequence[int]) -> None:
        self._costs = costs
        self._by_cost: list[int] = []  # cost x _WIDEST_KEY + place
        self._by_age = deque[int]()  # places, of which some are gone
        self._gone = set[int]()  # places that `take_fitting` has taken

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
        """Return the cost of the largest sample that fits into a room; 0 if none fits."""
        index = self._largest_within(room)
        return self._by_cost[index] // _WIDEST_KEY if index >= 0 else 0

    def take_fitting(self, room: int) -> int | None:
        """Return the largest sample that fits into a room; `None` if none fits."""
        index = self._largest_within(room)
        if index < 0:
            return None
        place = self._by_cost.pop(index) % _WIDEST_KEY
        self._gone.add(place)
        return place

    def _largest_within(self, room: int) -> int:
        return bisect_right(self._by_cost, (room + 1) * _WIDEST_KEY - 1) - 1

    def places(self) -> list[int]:
        return [key % _WIDEST_KEY for key in self._by_cost]


def _levelled(
    groups: list[IntArray], tokens: IntArray, budget: TokenBudget, world_size: int
) -> list[IntArray]:
    """Return groups whose number is a multiple of the number of ranks, if samples suffice.

    The last groups are cut anew into more groups, smaller and of similar cost.
    """
    if not -len(groups) % world_size:
        return groups
    kept = max(0, len(groups) - _LEVELLED_STEPS * world_size)
    wanted = round_up(len(groups), world_size) - kept
    numbers = np.concatenate(groups[kept:])
    facts = Facts(ordinal=numbers, tokens=tokens[numbers], targets=0, patches=0)
    cut = [numbers[group] for group in LevelCut(facts, budget).groups(wanted)]
    while len(cut) < wanted:
        largest = max(range(len(cut)), key=lambda index: len(cut[index]))
        if len(cut[largest]) < 2:
            break
        whole = cut.pop(largest)
        cut += [whole[part] for part in cut_by_length(tokens[whole].tolist(), 2)]
    return [*groups[:kept], *cut]


class _StepOrder(NamedTuple):
    """The options that decide how the groups of a window become steps."""

    budget: TokenBudget
    world_size: int
    accumulate: int
    seed: int  # seed of the order of steps
    largest_first: int
    step_time: StepTime | TimeFn | None
    steps_before: int  # steps of earlier windows

    def apply(self, groups: list[IntArray], tokens: IntArray) -> Iterator[IntArray]:
        """Yield the groups of the first step, then of the second, and so on."""
        world_size = self.world_size
        matched = self._matched(groups, tokens)
        steps = len(groups) // world_size  # steps in which each rank has a group
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
        further = shuffled(steps, self.seed)
        further = further[~np.isin(further, first)]
        if self.accumulate > 1:
            before = self.steps_before + len(first)
            further = further[spread_steps(lengths[further], self.accumulate, self.seed, before)]
        order = np.concatenate((first, further))
        for step in [*order.tolist(), steps]:
            in_step = matched[step * world_size : (step + 1) * world_size]
            for rank in range(len(in_step)):  # Rotated: no rank always has the largest group.
                yield groups[in_step[(rank + step) % len(in_step)]]

    def _matched(self, groups: list[IntArray], tokens: IntArray) -> IntArray:
        """Return the numbers of the groups, from the longest time down."""
        if self.world_size == 1:
            return np.arange(len(groups))
        times = np.fromiter((self._time(group, tokens[group]) for group in groups), np.int64)
        if self.step_time is None:
            times //= max(1, self.budget.tokens // _COST_LEVELS)
        return np.lexsort((shuffled(len(groups), self.seed + 1), -times))

    def _time(self, group: IntArray, tokens: IntArray) -> int:
        patches = np.zeros_like(tokens)
        samples = partial(samples_of, group, tokens)
        time = time_of_group(self.step_time, tokens, patches, self.budget, samples)
        return self.budget.cost(tokens.tolist()) if time is None else time
