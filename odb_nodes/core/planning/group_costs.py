"""Costs of groups, as ranks report them, and the choice of the sample to fill with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from odb_nodes._support.arrays import IntArray
from odb_nodes._support.checks import (
    MAX_COUNT,
    check_callable,
    check_count,
    check_names,
    check_type,
    describe,
)
from odb_nodes._support.hashing import stable_name
from odb_nodes._support.text import counted
from odb_nodes.core.planning.budget import TokenBudget
from odb_nodes.core.planning.rounds import FLAG_BITS, GroupCost
from odb_nodes.core.planning.step_time import StepTime, TimeFn
from odb_nodes.core.sample import COUNTED, Sample, name_of
from odb_nodes.core.sample_block import (
    FACTS,
    KIND,
    NONE,
    PATCHES,
    TARGETS,
    TOKENS,
    SampleBlock,
    SampleKind,
    code_of,
    kinds_of,
    naming_samples,
)
from odb_nodes.errors import SampleError

MOST_MODALITIES = FLAG_BITS - len(COUNTED)
_COUNTED_BITS = {kind: 1 << MOST_MODALITIES + bit for bit, kind in enumerate(COUNTED)}

has_image: Callable[[Sample], Any] = attrgetter("patches")
"""Sample -> the number of its image patches, which is true for a sample with an image."""


def counted_in(flags: int) -> str:
    """Return which of `COUNTED` the flags of groups name, joined by "+"."""
    return "+".join(kind for kind, bit in _COUNTED_BITS.items() if flags & bit)


def cost_of_group(group: Sequence[Sample], budget: TokenBudget | None) -> int:
    """Return the cost of a group, at most 2**31 - 1; without a budget, its padded tokens."""
    budget = budget or TokenBudget(MAX_COUNT)
    return min(budget.cost(SampleBlock.of(group).lengths), MAX_COUNT)


def samples_of(
    rows: IntArray, tokens: IntArray, targets: IntArray | int = 0, patches: IntArray | int = 0
) -> SampleBlock:
    """Return samples whose data are their row numbers in the dataset."""
    facts = np.full((FACTS, len(rows)), NONE)
    facts[TOKENS], facts[TARGETS], facts[PATCHES], facts[KIND] = tokens, targets, patches, _KIND
    return SampleBlock(facts, {}).with_data(rows.tolist())


_KIND = code_of(SampleKind("", "", "", None, 0))


def time_of_group(
    step_time: StepTime | TimeFn | None,
    tokens: IntArray,
    patches: IntArray,
    budget: TokenBudget | None,
    group: Callable[[], SampleBlock],
) -> int | None:
    """Return the time of a step with a group of these tokens and patches, (n,); `None`: its cost.

    budget: has the layout of the batch; `None`: padded; group: returns the samples for a function
    of the user.
    """
    if step_time is None:
        return None
    if isinstance(step_time, StepTime):
        return step_time.of_group(tokens, patches, budget or TokenBudget(MAX_COUNT))
    samples = group()
    with naming_samples("step_time", samples):
        time = step_time(samples)
    return _check_time(time, step_time, tokens)


def _check_time(time: object, step_time: TimeFn, tokens: IntArray) -> int:
    """Return the time that the user's function returned for a group of these lengths."""
    try:
        return check_count("step_time", time, 0)
    except (TypeError, ValueError) as error:
        group = f"{counted(len(tokens), 'sample')} and {int(tokens.sum())} tokens"
        raise type(error)(
            f"`step_time` must return an integer in 0..{MAX_COUNT}, but {describe(step_time)} "
            f"returned {describe(time)} for a group of {group}, of which the longest sample has "
            f"{int(tokens.max())}. Return the time in a unit in which it is such an integer."
        ) from None


class GroupCostEstimator:
    """Measures groups: samples, targets, cost, time and modalities.

    budget: the budget of groups; `None` if a node of the user forms groups, which then cost their
    padded tokens. See `RankAligner` for the other arguments.
    """

    def __init__(
        self,
        budget: TokenBudget | None,
        step_time: StepTime | TimeFn | None,
        modalities: Mapping[str, Callable[[Sample], bool]] | None,
        tasks: Sequence[str] = (),
    ) -> None:
        self.step_time = step_time
        """The time by which groups are matched; `None`: groups are matched by cost."""
        self._budget = budget
        check_type("modalities", modalities, Mapping | None, "Pass `{name: function of a sample}`.")
        self.modalities = {"image": has_image} if modalities is None else dict(modalities)
        for name, has_modality in self.modalities.items():
            check_callable(f"modalities[{name!r}]", has_modality)
        self.tasks = check_names("tasks", tasks)
        if len(self.modalities) > MOST_MODALITIES:
            raise ValueError(
                f"`modalities` must be at most {MOST_MODALITIES}, but are {len(self.modalities)}."
            )

    def __call__(self, group: SampleBlock) -> GroupCost:
        """Return the samples, targets, cost and modalities of a group."""
        counted = {kind.counted for kind in kinds_of({*group.facts[KIND].tolist()})}
        flags = sum(_COUNTED_BITS[kind] for kind in counted if kind)
        for bit, has_modality in enumerate(self.modalities.values()):
            with naming_samples("modalities", group):
                if has_modality is has_image:
                    is_in_group = bool(group.patches.any())
                else:
                    are_of_modality = [has_modality(sample) for sample in group]
                    is_in_group = any(are_of_modality)
                flags |= is_in_group << bit
        return GroupCost(
            samples=len(group),
            targets=int(group.targets.sum()),
            cost=cost_of_group(group, self._budget),
            time=time_of_group(
                self.step_time, group.tokens, group.patches, self._budget, lambda: group
            ),
            flags=flags,
            tasks=self._targets_of_tasks(group) if self.tasks else (),
        )

    def modalities_in(self, flags: int) -> tuple[str, ...]:
        """Return the names of the modalities in the flags of groups."""
        return tuple(name for bit, name in enumerate(self.modalities) if flags >> bit & 1)

    def fingerprint(self) -> dict[str, Any]:
        """Return the options that decide the costs."""
        names = {"modalities": [*self.modalities], "tasks": [*self.tasks]}
        time = self.step_time
        is_function = time is not None and not isinstance(time, StepTime)
        return {"step_time": stable_name(time) if is_function else repr(time), **names}

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
    """Return the index of the best sample to fill with: targets, few patches, few tokens."""
    return int(np.lexsort((samples.tokens, samples.patches, samples.targets == 0))[0])
