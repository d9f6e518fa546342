"""Caps: what the groups of a round may cost at most, one cap each, the same on all ranks.

The groups of a step take as long as the dearest of them. Where the longest samples leave room, as
three rows of 5,000 tokens do under a budget of 16,384, groups of ranks differ in cost even when
they are matched. So each rank tells the others which costs its own pool would give. The median over
the ranks, quantile by quantile, is what all of them cut their next groups to.
"""

from __future__ import annotations

import numpy as np

from odb_nodes.planning.table import IntArray

LEAST_BUDGETS = 8  # a pool of fewer budgets offers no costs: it fills groups better without caps
MOST_FILL = 0.98
"""Caps that are fuller than this on average are none: they cost more padding than they save."""
_FULL = 0.985  # a group that costs this share of the budget counts as full

NO_CAPS: IntArray = np.empty(0, dtype=np.int64)


def quantiles(costs: IntArray, count: int) -> IntArray:
    """Return `count` values that are spread as costs are, (n,) int64 in order; none of none.

    They are interpolated at the middle of each `count`-th part.
    """
    if not len(costs):
        return NO_CAPS
    at = (np.arange(count) + 0.5) / count * len(costs) - 0.5
    return np.interp(at, np.arange(len(costs)), costs).astype(np.int64)


def offered_costs(costs: IntArray, pool_cost: int, budget_tokens: int, count: int) -> IntArray:
    """Return what a rank tells the others of its pool: nothing, (0,), where that is too small.

    Otherwise `budget_tokens`, and the costs from the highest down, (1 + count,) int64.
    """
    if pool_cost < LEAST_BUDGETS * budget_tokens or not len(costs):
        return NO_CAPS
    offer = quantiles(costs, count)
    offer = np.where(offer > _FULL * budget_tokens, budget_tokens, offer)
    return np.concatenate(([budget_tokens], offer))


def agreed_caps(offers: list[IntArray]) -> IntArray:
    """Return the caps that follow from what all ranks offer, from the highest down."""
    given = [offer for offer in offers if len(offer)]
    if 2 * len(given) <= len(offers) or len({int(offer[0]) for offer in given}) > 1:
        return NO_CAPS
    caps = np.median(np.stack(given)[:, 1:], axis=0).astype(np.int64)
    return NO_CAPS if caps.mean() > MOST_FILL * caps[0] else caps


def caps_of_round(agreed: IntArray, steps: int) -> IntArray:
    """Return the caps of a round's groups, ascending, from what `agreed_caps` has returned."""
    return quantiles(agreed, steps)[::-1]


def without_cap_of(caps: IntArray, cost: int) -> IntArray:
    """Return ascending caps without the smallest one that holds a cost, or else the largest."""
    return np.delete(caps, min(int(np.searchsorted(caps, cost)), len(caps) - 1))
