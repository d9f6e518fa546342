"""Caps: limits of cost and time for the groups of a round, one each, the same on all ranks.

A step takes as long as its largest group. If the longest samples leave room, as three rows of
5,000 tokens do under a budget of 16,384, the matched groups of ranks differ. So each rank reports
the costs, or times, that groups of its pool would have. The median over the ranks, quantile by
quantile, is the cap for which all ranks form their next groups.

A cap is one integer, of a time and a cost: see `joined_costs`. The time is 0 if groups are formed
by cost alone. Packed rows are always full, so their time is the time beside their tokens.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from odb_nodes._support.arrays import IntArray

LEAST_BUDGETS = 8  # a pool of fewer budgets offers no costs: it fills groups better without caps
LEAST_BUDGETS_AIMED = 16  # the limit for padded groups that are formed for a time
MOST_FILL = 0.98
"""Caps that are fuller on average are not used: they cost more padding than they save."""
_FULL = 0.985  # a group that costs this share of the budget counts as full
_BITS = 31  # bits of a cost, which is at most `MAX_COUNT`
_MASK = (1 << _BITS) - 1

NO_CAPS: IntArray = np.empty(0, dtype=np.int64)

Integers = TypeVar("Integers", int, IntArray)


def joined_costs(times: Integers, costs: Integers) -> Integers:
    """Return times and costs as one integer each, in order of time: both 31 bits."""
    return times << _BITS | costs


def times_of(joined: Integers) -> Integers:
    """Return the times in the results of `joined_costs`."""
    return joined >> _BITS


def costs_of(joined: Integers) -> Integers:
    """Return the costs in the results of `joined_costs`."""
    return joined & _MASK


def quantiles(caps: IntArray, count: int) -> IntArray:
    """Return `count` quantiles of caps, (n,) int64 in order; without caps, no quantiles.

    Times and costs are interpolated at the middle of each `count`-th part.
    """
    if not len(caps):
        return NO_CAPS
    # In integers, so that ranks on different processors get equal results.
    parts = 2 * count
    low, beyond = np.divmod((2 * np.arange(count) + 1) * len(caps) - count, parts)
    beyond[(low < 0) | (low >= len(caps) - 1)] = 0
    low = np.clip(low, 0, len(caps) - 1)
    high = np.minimum(low + 1, len(caps) - 1)
    times, costs = (
        (values[low] * (parts - beyond) + values[high] * beyond) // parts
        for values in (times_of(caps), costs_of(caps))
    )
    return joined_costs(times, costs)


def offered_costs(costs: IntArray, pool_cost: int, budget_tokens: int, count: int) -> IntArray:
    """Return the offer of a pool: its budget, and costs from the highest down, (1 + count,) int64.

    Empty, (0,), if the pool is too small.
    """
    if pool_cost < LEAST_BUDGETS * budget_tokens or not len(costs):
        return NO_CAPS
    offer = quantiles(costs, count)
    offer = np.where(offer > _FULL * budget_tokens, budget_tokens, offer)
    return np.concatenate(([budget_tokens], offer))


def agreed_caps(offers: list[IntArray]) -> IntArray:
    """Return the caps that follow from the offers of all ranks, from the highest down."""
    offering = [offer for offer in offers if len(offer)]
    budgets = {int(offer[0]) for offer in offering}
    if 2 * len(offering) <= len(offers) or len(budgets) > 1:
        return NO_CAPS
    offered = np.stack(offering)[:, 1:]
    times, costs = (
        np.median(part, axis=0).astype(np.int64) for part in (times_of(offered), costs_of(offered))
    )
    if not times.any() and costs.mean() > MOST_FILL * budgets.pop():
        return NO_CAPS
    return joined_costs(times, costs)


def caps_of_round(agreed: IntArray, steps: int) -> IntArray:
    """Return the caps of a round's groups, ascending, from the result of `agreed_caps`."""
    return np.sort(quantiles(agreed, steps))


def without_cap_of(caps: IntArray, cost: int) -> IntArray:
    """Return ascending caps without the smallest cap that allows a cost, or else the largest."""
    return np.delete(caps, min(int(np.searchsorted(caps, cost)), len(caps) - 1))
