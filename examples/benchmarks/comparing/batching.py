"""The batches of every contender that plans from lengths: indices, for each step and rank."""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import Any

import numpy as np

from comparing.common import rival
from odb_nodes import TokenBudget
from odb_nodes.core.planning import SimulationOptions, StepTime, plan_epoch
from odb_nodes.tools.baselines import fixed_batches
from odb_nodes.tools.lengths import LengthTable
from odb_nodes.tools.simulate import TableEpoch

Step = Sequence[Sequence[int]]
"""The indices of the samples of each rank; none where a rank has nothing left."""

ODB = "online-dynamic-batching"
PADDED, PACKED = "odb_nodes, padded", "odb_nodes, packed"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is to be planned.

    Attributes:
        lengths: tokens of each sample.
        budget: tokens of a batch, padding included.
        ranks: number of ranks.
        window: samples of a rank that wait to be grouped, where a contender has such a buffer.
        seed: of the order.
        accumulate: batches of an optimizer step, for `batch_rebalance`.
        size: samples of a fixed batch; default: so many of the longest as fit.
    """

    lengths: Sequence[int]
    budget: int
    ranks: int = 1
    window: int = 1024
    seed: int = 0
    accumulate: int = 1
    size: int | None = None

    def in_steps(self, batches: list[list[int]]) -> list[Step]:
        """Deal batches out to the ranks in turn."""
        return [
            [*batches[at : at + self.ranks], *[[]] * (at + self.ranks - len(batches))]
            for at in range(0, len(batches), self.ranks)
        ]

    def shuffled(self, count: int | None = None) -> list[int]:
        """Return so many indices in a random order; by default those of the samples."""
        count = len(self.lengths) if count is None else count
        order: list[int] = np.random.default_rng(self.seed).permutation(count).tolist()
        return order

    @property
    def batch_size(self) -> int:
        """Samples of a fixed batch."""
        return self.size or max(1, self.budget // max(self.lengths))


Planner = Callable[[Plan], Iterator[Step]]


def fixed(strategy: Any, plan: Plan) -> Iterator[Step]:
    """Yield the batches of the `Trainer`, by the samplers of transformers."""
    rival("transformers")
    job = SimulationOptions(
        world_size=plan.ranks, budget=plan.budget, seed=plan.seed, accumulate=plan.accumulate
    )
    yield from fixed_batches(strategy, list(plan.lengths), plan.batch_size, job)


def ours(layout: Any, plan: Plan, step_time: StepTime | None = None) -> Iterator[Step]:
    """Yield the batches that `ODBDataLoader` makes."""
    budget = TokenBudget(plan.budget, layout=layout)
    job = SimulationOptions(
        world_size=plan.ranks,
        budget=budget,
        window=plan.window,
        seed=plan.seed,
        step_time=step_time,
    )
    for step in TableEpoch(table=LengthTable.of(plan.lengths)).steps(job):
        yield [[] if group is None else [sample.data for sample in group] for group in step]


def ours_known(layout: Any, plan: Plan) -> Iterator[Step]:
    """Yield the batches that `ODBDataLoader` makes where it knows all lengths ahead."""
    budget = TokenBudget(plan.budget, layout=layout)
    order = np.random.default_rng(plan.seed).permutation(len(plan.lengths))
    lengths = np.array(plan.lengths)[order]
    for step in plan_epoch(lengths, budget, world_size=plan.ranks, seed=plan.seed):
        yield [order[batch].tolist() for batch in step]


def sorted_all(plan: Plan) -> Iterator[Step]:
    """Yield batches of all samples sorted by length, those of like cost at the same time."""
    order = np.argsort(plan.lengths)[::-1].tolist()
    batches: list[list[int]] = []
    width = 0
    for index in order:
        if not batches or width * (len(batches[-1]) + 1) > plan.budget:
            batches.append([])
            width = plan.lengths[index]
        batches[-1].append(index)
    yield from plan.in_steps(batches)


def lhotse(plan: Plan, buffer_size: int = 0, quadratic: float | None = None) -> Iterator[Step]:
    """Yield the batches of lhotse's `DynamicBucketingSampler`; a token is a second."""
    sampling = rival("lhotse.dataset.sampling")
    cuts = lhotse_cuts(plan.lengths)
    samplers = [
        sampling.DynamicBucketingSampler(
            cuts,
            max_duration=float(plan.budget),
            shuffle=True,
            num_buckets=30,  # as in its recipes
            seed=plan.seed,
            buffer_size=buffer_size or plan.window * plan.ranks,  # of all ranks together
            quadratic_duration=quadratic,
            world_size=plan.ranks,
            rank=rank,
        )
        for rank in range(plan.ranks)
    ]
    for step in zip_longest(*samplers, fillvalue=()):
        # Where a rank would have no batch, lhotse repeats samples, as "7_dup0".
        yield [[int(cut.id.partition("_")[0]) for cut in batch] for batch in step]


def lhotse_cuts(lengths: Sequence[int]) -> Any:
    """Return lhotse's manifest of samples of these lengths, whose ids are their indices."""
    dummies = rival("lhotse.testing.dummies")
    one = dummies.dummy_cut(0, duration=1.0)
    cuts = [
        replace(one, id=str(index), duration=float(tokens)) for index, tokens in enumerate(lengths)
    ]
    return rival("lhotse").CutSet.from_cuts(cuts)


def trl_packs(plan: Plan) -> Iterator[Step]:
    """Yield the packed rows of TRL's `pack_dataset`, best fit decreasing, in a random order."""
    trl, datasets = rival("trl"), rival("datasets")
    # Each token says which sample it is of, so that the rows show what was packed.
    tokens = [[index] * length for index, length in enumerate(plan.lengths)]
    packed = trl.pack_dataset(
        datasets.Dataset.from_dict({"input_ids": tokens}), plan.budget, strategy="bfd"
    )
    rows = [list(dict.fromkeys(row)) for row in packed["input_ids"]]
    yield from plan.in_steps([rows[at] for at in plan.shuffled(len(rows))])


def _first_fit(plan: Plan, indices: Iterable[int]) -> list[list[int]]:
    """Return packs: each sample goes into the first one that has room for it."""
    packs: list[list[int]] = []
    room: list[int] = []
    for index in indices:
        tokens = plan.lengths[index]
        fits = next((pack for pack, left in enumerate(room) if left >= tokens), len(room))
        if fits == len(room):
            room.append(plan.budget)
            packs.append([])
        room[fits] -= tokens
        packs[fits].append(index)
    return packs


def axolotl_first_fit(plan: Plan) -> Iterator[Step]:
    """Yield axolotl's multipack, written anew: first fit decreasing, 100,000 samples at a time."""
    order = plan.shuffled()
    packs: list[list[int]] = []
    for at in range(0, len(order), 100_000):
        longest_first = sorted(order[at : at + 100_000], key=lambda one: -plan.lengths[one])
        packs += _first_fit(plan, longest_first)
    yield from plan.in_steps(packs)


def greedy_knapsack(plan: Plan) -> Iterator[Step]:
    """Yield Energon's packing, written anew after the example in its docs.

    Each knapsack takes the longest sample of a buffer that fits, again and again.
    """
    order = plan.shuffled()
    packs: list[list[int]] = []
    size = plan.window * plan.ranks
    for at in range(0, len(order), size):
        buffer = sorted(order[at : at + size], key=plan.lengths.__getitem__)
        sizes = [plan.lengths[index] for index in buffer]
        while buffer:
            pack, left = [], plan.budget
            while (found := bisect.bisect_right(sizes, left) - 1) >= 0:
                left -= sizes.pop(found)
                pack.append(buffer.pop(found))
            packs.append(pack)
    yield from plan.in_steps(packs)


def nemo_first_fit_shuffle(plan: Plan) -> Iterator[Step]:
    """Yield NeMo's `first_fit_shuffle`, written anew: first fit in a random order."""
    yield from plan.in_steps(_first_fit(plan, plan.shuffled()))


def balanced(weights: Sequence[int], parts: int, *, equal: bool = False) -> list[list[int]]:
    """Return the indices of parts of like weight, by Karmarkar and Karp's largest differencing.

    With `equal`, all parts have the same number of indices.
    """
    ascending = np.argsort(weights, kind="stable").tolist()
    each = parts if equal else 1
    heap = []
    for at in range(0, len(ascending), each):
        sums = [(weights[index], [index]) for index in reversed(ascending[at : at + each])]
        sums += [(0, [])] * (parts - len(sums))
        heap.append((sums[-1][0] - sums[0][0], at, sums))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, at, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        sums = [
            (one + other, indices + more)
            for (one, indices), (other, more) in zip(first, reversed(second), strict=True)
        ]
        sums.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (sums[-1][0] - sums[0][0], at, sums))
    return [indices for _, indices in heap[0][2]]


def verl_balance(plan: Plan) -> Iterator[Step]:
    """Yield verl's micro-batches, written anew: a buffer dealt out to ranks, then cut.

    Both by verl's measure of work. All ranks have as many micro-batches as the one that needs most.
    """
    order, lengths = plan.shuffled(), plan.lengths
    work = [24_576 * tokens + tokens**2 for tokens in lengths]

    def parts_of(indices: list[int], parts: int, **options: Any) -> list[list[int]]:
        found = balanced([work[index] for index in indices], parts, **options)
        return [[indices[at] for at in part] for part in found]

    def tokens_of(indices: Iterable[int]) -> int:
        return sum(lengths[index] for index in indices)

    for at in range(0, len(order), plan.window * plan.ranks):
        buffer = order[at : at + plan.window * plan.ranks]
        ranks = parts_of(buffer[: len(buffer) // plan.ranks * plan.ranks], plan.ranks, equal=True)
        count = max(math.ceil(tokens_of(indices) / plan.budget) for indices in ranks)
        cut = [parts_of(indices, count) for indices in ranks]
        while max(tokens_of(batch) for batches in cut for batch in batches) > plan.budget:
            count += 1
            cut = [parts_of(indices, count) for indices in ranks]
        yield from zip(*cut, strict=True)


PADDED_PLANS: dict[str, Planner] = {
    "fixed batches": partial(fixed, "random"),
    "`group_by_length` of transformers": partial(fixed, "group_by_length"),
    "`batch_rebalance` of transformers": partial(fixed, "batch_rebalance"),
    "lhotse, its buffer of 20,000": partial(lhotse, buffer_size=20_000),
    "lhotse, buffer as our window": lhotse,
    PADDED: partial(ours, "padded"),
    f"{PADDED}, lengths known": partial(ours_known, "padded"),
    "oracle: all samples sorted": sorted_all,
}
PACKED_PLANS: dict[str, Planner] = {
    "TRL, best fit decreasing": trl_packs,
    "axolotl's first fit, written anew": axolotl_first_fit,
    "Energon's greedy knapsack, written anew": greedy_knapsack,
    "NeMo's `first_fit_shuffle`, written anew": nemo_first_fit_shuffle,
    "verl's balancer, written anew": verl_balance,
    PACKED: partial(ours, "packed"),
    f"{PACKED}, lengths known": partial(ours_known, "packed"),
}
