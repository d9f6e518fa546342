"""Which samples ranks give each other before the last round of an epoch.

Shards of the same number of samples differ in tokens by chance, so their ranks would end at
different steps. So each rank first reads the rest of its shard. All ranks send each other the
lengths of these samples, and compute which samples go from ranks with more than the average to
ranks with less. `level_cut` then cuts the samples into the same number of groups on all ranks.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from odb_nodes._support.arrays import IntArray
from odb_nodes.core.planning.budget import TokenBudget
from odb_nodes.core.planning.facts import Facts
from odb_nodes.core.planning.step_time import StepTime

_STRIDE = 8  # every eighth sample in order of length is given away first
_TURNS = 2  # alternations of levelling by time, then by cost
_LIGHT_QUANTILE = 0.9  # quantile of the extra time per token, below which a sample is light
_HEADER = 2  # integers of a message before its samples: see `remaining_message`


def gifts(work: IntArray, surplus: float) -> list[int]:
    """Return which samples, of these costs, (n,), a rank gives away to reduce its surplus.

    Long samples are preferred, so that few move. Every eighth sample in descending order of length
    comes first, so that the kept lengths stay spread; then any sample that fits.
    """
    longest_first = np.argsort(-work, kind="stable")
    to_give = []
    for start in range(_STRIDE):
        for index in longest_first[start::_STRIDE].tolist():
            if work[index] <= surplus:
                surplus -= work[index]
                to_give.append(index)
    return to_give


def receivers(totals: Sequence[int], works: Sequence[IntArray]) -> list[list[int]]:
    """Return which rank gets each sample that is given away.

    The largest sample comes first. Each goes to the rank with the least cost so far.

    totals: cost of all samples of each rank; works: costs of the samples that each rank gives away.
    """
    heap = [
        (int(total - work.sum()), rank)
        for rank, (total, work) in enumerate(zip(totals, works, strict=True))
    ]
    heapq.heapify(heap)
    chosen = [[0] * len(work) for work in works]
    samples = [
        (-cost, rank, index)
        for rank, work in enumerate(works)
        for index, cost in enumerate(work.tolist())
    ]
    for minus_cost, rank, index in sorted(samples):
        total, receiver = heap[0]
        heapq.heapreplace(heap, (total - minus_cost, receiver))
        chosen[rank][index] = receiver
    return chosen


Moves = list[list[tuple[int, int]]]
"""For each rank, the samples that it gives away: (place among its samples, receiving rank)."""


def remaining_message(
    samples: Facts, may_move: npt.NDArray[np.bool_], budget: TokenBudget, step_time: StepTime | None
) -> IntArray:
    """Return the message of a rank about its remaining samples, (2 + 2 n,) int64.

    First come cost and extra of all samples that cannot move; then the tokens of the n samples that
    may move, and then their patches.
    """
    fixed, movable = samples.take(np.flatnonzero(~may_move)), samples.take(np.flatnonzero(may_move))
    cost = int(_needs(fixed.tokens, fixed.patches, budget).sum())
    extra = 0 if step_time is None else int(step_time.extra(fixed.tokens, fixed.patches).sum())
    header = np.array((cost, extra), np.int64)
    return np.concatenate((header, movable.tokens, movable.patches))


def moves_of(
    messages: Sequence[IntArray], budget: TokenBudget, step_time: StepTime | None
) -> Moves:
    """Return which samples each rank gives away, from the `remaining_message` of each rank.

    Ranks are levelled in cost. With `step_time`, ranks are levelled in turns: in time beside
    tokens, and then in cost, by samples that take little time beside their tokens.
    """
    ranks = len(messages)
    fixed_costs, fixed_extra = np.array([message[:_HEADER] for message in messages]).T
    columns = [message[_HEADER:].reshape(2, -1) for message in messages]
    sizes = [column.shape[1] for column in columns]
    tokens, patches = np.concatenate(columns, axis=1)
    owners = np.repeat(np.arange(ranks), sizes)
    holders = owners.copy()
    work = _needs(tokens, patches, budget)
    if step_time is None:
        _level(holders, work, fixed_costs, np.ones(len(work), dtype=bool))
    else:
        extra = step_time.extra(tokens, patches)
        density = extra / tokens
        # The heaviest samples decide the longest steps of a rank, so they are shared out first.
        rows = max(int(work.sum()) // budget.tokens, 1)
        is_heavy = extra > int(extra.sum()) // rows
        heaviest_first = np.argsort(-extra[is_heavy], kind="stable")
        _deal(holders, np.flatnonzero(is_heavy)[heaviest_first], ranks)
        for _ in range(_TURNS):
            _level(holders, extra, fixed_extra, ~is_heavy)
            limits = [_light_limit(density[holders == rank]) for rank in range(ranks)]
            _level(holders, work, fixed_costs, density <= np.array(limits)[holders])
    first = np.concatenate(([0], np.cumsum(sizes)))
    moves: Moves = [[] for _ in range(ranks)]
    for index in np.flatnonzero(holders != owners).tolist():
        giver = int(owners[index])
        moves[giver].append((index - int(first[giver]), int(holders[index])))
    return moves


def _needs(tokens: IntArray, patches: IntArray, budget: TokenBudget) -> IntArray:
    """Return the share of a limit that each sample takes at most, times `budget.tokens`, (n,)."""
    needs = budget.row_cost(tokens)
    if budget.max_samples is not None:
        needs = np.maximum(needs, budget.tokens // budget.max_samples)
    if budget.max_patches is not None:
        needs = np.maximum(needs, patches * budget.tokens // budget.max_patches)
    return needs


def _light_limit(densities: npt.NDArray[np.float64]) -> float:
    return float(np.quantile(densities, _LIGHT_QUANTILE)) if len(densities) else 0.0


def _deal(holders: IntArray, samples: IntArray, ranks: int) -> None:
    """Give each rank one of the first `ranks` samples, one of the next `ranks`, and so on."""
    for start in range(0, len(samples) // ranks * ranks, ranks):
        part = samples[start : start + ranks]
        first = np.unique(holders[part], return_index=True)[1]
        has_none = np.setdiff1d(np.arange(ranks), holders[part])
        holders[np.delete(part, first)] = has_none


def _level(
    holders: IntArray, work: IntArray, fixed: IntArray, may_move: npt.NDArray[np.bool_]
) -> None:
    """Have ranks with more than the average give samples to ranks with less; change `holders`.

    fixed: sums over the samples of each rank that cannot move, (ranks,).
    """
    totals = fixed + np.bincount(holders, work, len(fixed)).astype(np.int64)
    mean = int(totals.sum()) / len(totals)
    moving = []
    for rank, total in enumerate(totals.tolist()):
        movable = np.flatnonzero((holders == rank) & may_move)
        moving.append(movable[gifts(work[movable], total - mean)])
    chosen = receivers(totals.tolist(), [work[samples] for samples in moving])
    for samples, ranks in zip(moving, chosen, strict=True):
        holders[samples] = ranks
