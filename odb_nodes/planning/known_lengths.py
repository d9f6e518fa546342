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

import numpy as np

from odb_nodes.planning.budget import TokenBudget, round_up
from odb_nodes.planning.facts import Facts
from odb_nodes.planning.levelling import Rest
from odb_nodes.planning.packing import Packing
from odb_nodes.planning.pool import grouping_of
from odb_nodes.planning.rounds import cut_by_length, shuffled
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
    dearest_first: int = 0,
    key: int = 0,
    costs: IntArray | None = None,
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
            `window * world_size` come first. Default: all.
        dearest_first: how many steps of the longest samples come first.
        key: what the order of the steps is drawn from.
        costs: what a step with each sample takes, (n,), by whose sums the groups of a step are
            matched. Default: what the groups cost under the budget.
    """
    size = max(1, len(rows) if window is None else window * world_size)
    planned: list[IntArray] = []
    for begin in range(0, len(rows), size):
        part, lengths = rows[begin : begin + size], tokens[begin : begin + size]
        cut = _levelled(_cut(lengths, budget), lengths, budget, world_size)
        first = dearest_first if not begin else 0
        of_part = None if costs is None else costs[begin : begin + size]
        steps = _steps(cut, lengths, budget, world_size, key + begin, first, of_part)
        planned += [part[np.sort(group)] for group in steps]
    return EpochPlan(planned, world_size)


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


def _steps(
    groups: list[IntArray],
    tokens: IntArray,
    budget: TokenBudget,
    world_size: int,
    key: int,
    dearest_first: int,
    costs_of_samples: IntArray | None,
) -> Iterator[IntArray]:
    """Yield the groups in steps of about equal cost, the steps in an order drawn from `key`."""
    by_cost = np.arange(len(groups))
    if world_size > 1:
        if costs_of_samples is None:
            sums = (budget.cost(tokens[group].tolist()) for group in groups)
            costs, most = np.fromiter(sums, np.int64), budget.tokens
        else:
            sums = (int(costs_of_samples[group].sum()) for group in groups)
            costs = np.fromiter(sums, np.int64)
            most = int(costs.max())
        level = costs // max(1, most // _COST_LEVELS)
        by_cost = np.lexsort((shuffled(len(groups), key + 1), -level))
    steps = len(groups) // world_size  # whole ones
    order = shuffled(steps, key)
    if dearest_first:
        longest = np.fromiter((tokens[group].max() for group in groups), np.int64)
        of_step = longest[by_cost[: steps * world_size]].reshape(steps, world_size).max(axis=1)
        first = np.argsort(-of_step, kind="stable")[:dearest_first]
        order = np.concatenate((first, order[~np.isin(order, first)]))
    for step in [*order.tolist(), steps]:
        of_ranks = by_cost[step * world_size : (step + 1) * world_size]
        for rank in range(len(of_ranks)):  # No rank always has the dearest.
            yield groups[of_ranks[(rank + step) % len(of_ranks)]]
