"""Costs of groups, as other ranks are told them, and the choice of the sample to fill with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

from odb_nodes._core.checks import MAX_COUNT, check_callable, check_count, check_names
from odb_nodes._core.fingerprints import stable_name
from odb_nodes.errors import SampleError
from odb_nodes.planning.alignment import FLAG_BITS, GroupCost
from odb_nodes.planning.budget import TokenBudget
from odb_nodes.sample import COUNTED, Sample, name_of

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
    return max(sample.tokens for sample in group) * len(group)


def tokens_of(sample: Sample) -> int:
    """Return the length of a sample."""
    return sample.tokens


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
        return min(self._budget.cost([sample.tokens for sample in group]), MAX_COUNT)


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

    def __call__(self, group: Sequence[Sample]) -> GroupCost:
        """Return the samples, targets, cost and modalities of a group."""
        return GroupCost(
            samples=len(group),
            targets=sum([sample.targets for sample in group]),
            cost=check_count("cost_fn", self.cost_fn(group), 0),
            flags=sum(
                1 << bit
                for bit, is_in in enumerate(self.modalities.values())
                if any(map(is_in, group))
            )
            | sum(_COUNTED_BITS[kind] for kind in {sample.counted for sample in group} if kind),
            tasks=self._targets_of_tasks(group) if self.tasks else (),
        )

    def modalities_in(self, flags: int) -> tuple[str, ...]:
        """Return the names of the modalities in the flags of groups."""
        return tuple(name for bit, name in enumerate(self.modalities) if flags >> bit & 1)

    def fingerprint(self) -> dict[str, Any]:
        """Return what decides the costs."""
        names = {"modalities": [*self.modalities], "tasks": [*self.tasks]}
        return {"cost_fn": stable_name(self.cost_fn), **names}

    def _targets_of_tasks(self, group: Sequence[Sample]) -> tuple[int, ...]:
        targets = dict.fromkeys(self.tasks, 0)
        for sample in group:
            if sample.task_name not in targets:
                raise SampleError(
                    f"the task of a sample{name_of(sample)} is {sample.task_name!r}, which is none "
                    f"of `tasks`: {[*self.tasks]}. Name it there, or in `Observation.task`."
                )
            targets[sample.task_name] += sample.targets
        return (*targets.values(),)


def best_filler(groups: Sequence[Sequence[Sample]]) -> Sample:
    """Return the best sample to fill with: one with targets, few patches and few tokens."""
    samples = [*chain.from_iterable(groups)]
    order = [(one.targets == 0, one.patches, one.tokens) for one in samples]
    return samples[order.index(min(order))]
