"""The batches that `train_sampling_strategy="batch_rebalance"` of transformers makes.

Its `BatchRebalanceSampler` of version 5.23, from lengths alone and without transformers. The costs
of all groups are computed from their numbers of samples, where the sampler copies the samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate as running_sums

import torch

__all__ = ["rebalanced_batches"]

SQUARE_COST = 0.001
"""Its weight of rows x length^2 beside rows x length."""

Batches = list[list[int]]


def rebalanced_batches(
    lengths: Sequence[int], *, batch_size: int, world_size: int, accumulate: int, seed: int
) -> Iterator[Batches]:
    """Yield the batch of each rank, step by step, in its first epoch."""
    groups = world_size * accumulate
    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(seed)).tolist()
    per_step = batch_size * groups
    for start in range(0, len(order), per_step):
        taken = order[start : start + per_step]
        if len(taken) < groups:
            taken += (order * math.ceil(groups / len(order)))[: groups - len(taken)]
        taken.sort(key=lengths.__getitem__, reverse=True)
        split = _Split([lengths[index] for index in taken], groups, world_size, per_step)
        counts = split.balanced()
        ends = [*running_sums(counts)]
        parts = [taken[end - count : end] for count, end in zip(counts, ends, strict=True)]
        costs = split.costs(counts)
        ranking = sorted(range(groups), key=costs.__getitem__, reverse=True)
        for slot in range(accumulate):
            yield [parts[group] for group in ranking[slot * world_size : (slot + 1) * world_size]]


class _Split:
    """Splits samples, longest first, into groups of about the same cost, by hill climbing."""

    def __init__(self, lengths: list[int], groups: int, world_size: int, per_step: int) -> None:
        self._lengths, self._groups, self._world_size = lengths, groups, world_size
        self._most_moves = max(30 * groups, per_step)

    def costs(self, counts: Sequence[int]) -> list[float]:
        """Return the cost of each group, where these are their numbers of samples."""
        costs, start = [], 0
        for count in counts:
            costs.append(_cost(count, self._lengths[start]))
            start += count
        return costs

    def balanced(self) -> list[int]:
        """Return the numbers of samples with the smallest spread of costs that was come by."""
        base, more = divmod(len(self._lengths), self._groups)
        counts = [base + (group < more) for group in range(self._groups)]
        best, best_spread = [*counts], float("inf")
        frozen: set[int] = set()
        seen: set[tuple[int, ...]] = set()
        for _ in range(self._most_moves):
            if (key := tuple(counts)) in seen:
                break
            seen.add(key)
            costs = self.costs(counts)
            active = [group for group in range(self._groups) if group not in frozen]
            if len(active) <= 1:
                break
            dearest, cheapest = (pick(active, key=costs.__getitem__) for pick in (max, min))
            spread = costs[dearest] - costs[cheapest]
            if spread < best_spread:
                best, best_spread = [*counts], spread
            if spread == 0:
                break
            if counts[dearest] > 1:
                counts[dearest] -= 1
                counts[cheapest] += 1
            else:
                self._freeze(counts, dearest, costs, frozen)
        return best

    def _freeze(
        self, counts: list[int], dearest: int, costs: list[float], frozen: set[int]
    ) -> None:
        """Fill up the groups that share a step with a sample that is alone, and leave them so."""
        ranking = sorted(range(self._groups), key=costs.__getitem__, reverse=True)
        start = ranking.index(dearest) // self._world_size * self._world_size
        together = set(ranking[start : start + self._world_size])  # and its order is that of a set
        for group in together:
            if group in frozen or group == dearest:
                continue
            while True:
                first = sum(counts[:group])
                if _cost(counts[group] + 1, self._lengths[first]) > costs[dearest]:
                    break
                outside = (
                    other
                    for other in range(self._groups)
                    if other not in frozen and other not in together and counts[other] > 1
                )
                now = self.costs(counts)
                donor = min(outside, key=now.__getitem__, default=None)
                if donor is None:
                    break
                counts[group] += 1
                counts[donor] -= 1
        frozen |= together


def _cost(samples: int, longest: int) -> float:
    # In the order of its operations, since ties decide.
    return samples * longest + SQUARE_COST * samples * longest * longest
