"""Costs of groups, as other ranks are told them, and the choice of the sample to fill with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from odb_nodes._core.checks import MAX_COUNT, check_callable, check_count, check_names
from odb_nodes._core.hashing import stable_name
from odb_nodes.errors import SampleError
from odb_nodes.planning.budget import TokenBudget
from odb_nodes.planning.rounds import FLAG_BITS, GroupCost
from odb_nodes.sample import COUNTED, Sample, name_of
from odb_nodes.sample_block import KIND, SampleBlock, kinds_of, naming_samples

MOST_MODALITIES = FLAG_BITS - len(COUNTED)
_COUNTED_BITS = {kind: 1 << MOST_MODALITIES + bit for bit, kind in enumerate(COUNTED)}

CostFn = Callable[[Sequence[Sample]], int]

has_image: Callable[[Sample], Any] = attrgetter("patches")
"""Sample -> its image patches, which are true where it has some."""


def counted_in(flags: int) -> str:
    """Return which of `COUNTED` the flags of groups name, joined by "+"."""
    return "+".join(kind for kind, bit in _COUNTED_BITS.items() if flags & bit)


def padded_tokens(group: Sequence[Sample]) -> int:
    """Return the longest sample's tokens times the number of samples."""
    return int(SampleBlock.of(group).tokens.max()) * len(group)


class BudgetCost:
    """Maps a group to its cost under a budget: 2**31 - 1 at most, as large as costs may be."""

    def __init__(self, budget: TokenBudget) -> None:
        self._budget = budget

    @property
    def fingerprint_name(self) -> str:
        """The budget's layout; its sizes are in the fingerprint of the `WindowBucketer`."""
        return f"{self._budget.layout}_tokens"

    def __call__(self, group: Sequence[Sample]) -> int:
        """Return the tokens of a group's batch, padding included, and what attention adds."""
        return min(self._budget.cost(SampleBlock.of(group).lengths), MAX_COUNT)


class GroupCostEstimator:
    """Measures groups: samples, targets, cost and modalities."""

    def __init__(
        self,
        cost_fn: CostFn,
        modalities: Mapping[str, Callable[[Sample], bool]] | None,
        tasks: Sequence[str] = (),
    ) -> None:
        check_callable("cost_fn", cost_fn)
        self.cost_fn = cost_fn
        self.modalities = {"image": has_image} if modalities is None else dict(modalities)
        self.tasks = check_names("tasks", tasks)
        if len(self.modalities) > MOST_MODALITIES:
            raise ValueError(
                f"`modalities` must be at most {MOST_MODALITIES}, but are {len(self.modalities)}."
            )

    def __call__(self, group: SampleBlock) -> GroupCost:
        """Return the samples, targets, cost and modalities of a group."""
        counted = {kind.counted for kind in kinds_of({*group.facts[KIND].tolist()})}
        flags = sum(_COUNTED_BITS[one] for one in counted if one)
        for bit, is_in in enumerate(self.modalities.values()):
            with naming_samples("modalities", group):
                told = (
                    group.patches.tolist() if is_in is has_image else [is_in(one) for one in group]
                )
                flags |= any(told) << bit
        with naming_samples("cost_fn", group):
            cost = self.cost_fn(group)
        return GroupCost(
            samples=len(group),
            targets=int(group.targets.sum()),
            cost=check_count("cost_fn", cost, 0),
            flags=flags,
            tasks=self._targets_of_tasks(group) if self.tasks else (),
        )

    def modalities_in(self, flags: int) -> tuple[str, ...]:
        """Return the names of the modalities in the flags of groups."""
        return tuple(name for bit, name in enumerate(self.modalities) if flags >> bit & 1)

    def fingerprint(self) -> dict[str, Any]:
        """Return what decides the costs."""
        names = {"modalities": [*self.modalities], "tasks": [*self.tasks]}
        return {"cost_fn": stable_name(self.cost_fn), **names}

    def _targets_of_tasks(self, group: SampleBlock) -> tuple[int, ...]:
        targets = dict.fromkeys(self.tasks, 0)
        for row, (kind, count) in enumerate(zip(group.kinds, group.targets.tolist(), strict=True)):
            if kind.task_name not in targets:
                raise SampleError(
                    f"the task of a sample{name_of(group[row])} is {kind.task_name!r}, which is "
                    f"none of `tasks`: {[*self.tasks]}. Name it there, or in `Observation.task`."
                )
            targets[kind.task_name] += count
        return (*targets.values(),)


def best_filler(samples: SampleBlock) -> int:
    """Return which sample is best to fill with: one with targets, few patches and few tokens."""
    return int(np.lexsort((samples.tokens, samples.patches, samples.targets == 0))[0])
