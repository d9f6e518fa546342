"""Batches of an optimizer step, in parts that are computed one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from odb_nodes.alignment.aligned_round import LossRule
from odb_nodes.planning.group_costs import best_filler
from odb_nodes.planning.rounds import cut_by_length
from odb_nodes.sample import LeftOut, Sample
from odb_nodes.sample_block import SampleBlock
from odb_nodes.step_info import StepInfo, facts_of_rows

OUT_OF_MEMORY = "out of memory"
"""Reason of the `LeftOut` of a sample that was skipped."""


@dataclass(frozen=True)
class Part:
    """Samples that are computed at once.

    Attributes:
        batch: the number of their batch in the optimizer step.
        samples: the samples, in the order of their batch.
        info: the `StepInfo` of a batch of these alone; its `loss_scale` weighs their mean loss.
        cost: what they cost, in the unit of the budget.
        is_whole: whether they are a whole batch, as it was planned.
        number: of the part in its batch.
    """

    batch: int
    samples: list[Sample]
    info: StepInfo
    cost: int
    is_whole: bool
    number: int = 0


class StepParts:
    """The batches of an optimizer step of this rank, and the parts that they are computed in."""

    def __init__(
        self,
        batches: Sequence[tuple[list[Sample], StepInfo]],
        rule: LossRule,
        cost: Callable[[Sequence[Sample]], int],
    ) -> None:
        self._rule, self._cost = rule, cost
        self._infos = [info for _, info in batches]
        self._parts = [[samples] for samples, _ in batches]
        self._skipped: list[list[Sample]] = [[] for _ in batches]
        self._fillers = [0] * len(batches)

    def __len__(self) -> int:
        return sum(map(len, self._parts)) + sum(self._fillers)

    def __iter__(self) -> Iterator[Part]:
        for number in range(len(self._parts)):
            yield from self.of(number)

    def of(self, number: int) -> Iterator[Part]:
        """Yield the parts of a batch."""
        parts, info = self._parts[number], self._kept(number)
        is_whole = len(parts) == 1 and not self._skipped[number]
        for place, samples in enumerate(parts):
            own = info if is_whole else self._of_part(info, samples)
            yield Part(number, samples, own, self._cost(samples), is_whole, place)
        for place in range(len(parts), len(parts) + self._fillers[number]):
            samples = [*chain(*parts)]
            filler = [samples[best_filler(SampleBlock.of(samples))]]
            yield Part(number, filler, _of_filler(info), self._cost(filler), False, place)

    def halve(self, cost: int) -> bool:
        """Halve each part that costs so much, or more."""
        halved = False
        for number, parts in enumerate(self._parts):
            self._parts[number] = []
            for samples in parts:
                halves = [samples]
                if len(samples) > 1 and self._cost(samples) >= cost:
                    halves, halved = _cut(samples, 2), True
                self._parts[number] += halves
        return halved

    def cut(self, pieces: int) -> None:
        """Cut each batch into `pieces` parts, of samples of like length.

        Where a batch has fewer samples, one of them is computed again, without weight.
        """
        for number, (samples,) in enumerate(self._parts):
            self._parts[number] = _cut(samples, pieces)
            self._fillers[number] = pieces - len(self._parts[number])

    def skip(self, part: Part) -> None:
        """Leave out the samples of a part."""
        parts = self._parts[part.batch]
        self._parts[part.batch] = [samples for samples in parts if samples is not part.samples]
        if not part.info.is_filler:
            self._skipped[part.batch] += part.samples

    def skipped(self) -> list[tuple[int, int]]:
        """Return samples and targets that were left out of each batch."""
        return [(len(some), sum(one.targets for one in some)) for some in self._skipped]

    def skipped_parts(self) -> Iterator[Part]:
        """Yield what was left out of each batch, where anything was."""
        for number, samples in enumerate(self._skipped):
            if samples:
                info = self._with_rows(self._infos[number], samples)
                yield Part(number, samples, info, self._cost(samples), is_whole=False)

    def kept_part(self, number: int) -> Part | None:
        """Return what is left of a batch, as one part; `None` where that is nothing."""
        samples = [sample for some in self._parts[number] for sample in some]
        if not samples:
            return None
        is_whole = not self._skipped[number]
        return Part(number, samples, self._kept(number), self._cost(samples), is_whole)

    def loss_factor(self, left_out: Sequence[tuple[int, int]]) -> float:
        """Return what the gradients are multiplied by, where samples were left out on any rank."""
        before = self._infos[0]
        after = _without(before, *map(sum, zip(*left_out, strict=True)))
        if self._rule.scaling == "none":
            return 1.0
        if self._rule.scaling == "approx":
            old, new = before.optimizer_samples, after.optimizer_samples
        else:
            old, new = before.optimizer_targets, after.optimizer_targets
        return old / new if new else 0.0

    def infos(self, left_out: Sequence[tuple[int, int]]) -> list[StepInfo]:
        """Return the `StepInfo` of each batch as it was computed."""
        samples, targets = map(sum, zip(*left_out, strict=True))
        done = []
        for number, (all_samples, all_targets) in enumerate(left_out):
            info = self._kept(number)
            info = replace(
                _without(info, samples, targets),
                all_samples_this_step=info.all_samples_this_step - all_samples,
                all_targets=info.all_targets - all_targets,
            )
            done.append(replace(info, loss_scale=self._rule.scale(info)))
        return done

    def _kept(self, number: int) -> StepInfo:
        """Return the `StepInfo` of a batch without what was left out of it on this rank."""
        info, skipped = self._infos[number], self._skipped[number]
        if not skipped:
            return info
        kept = [sample for samples in self._parts[number] for sample in samples]
        left_out = [LeftOut(one.key, one.source, OUT_OF_MEMORY) for one in skipped]
        return self._with_rows(
            replace(info, is_filler=not kept, left_out=(*info.left_out, *left_out)), kept
        )

    def _of_part(self, info: StepInfo, samples: list[Sample]) -> StepInfo:
        if info.is_filler:
            return info
        own = self._with_rows(info, samples)
        mine, whole = own.local_targets, info.local_targets
        if not whole:  # a loss of its own kind, of samples
            mine, whole = own.local_samples, info.local_samples
        share = mine / whole if whole else 0.0
        return replace(own, loss_scale=info.loss_scale * share)

    def _with_rows(self, info: StepInfo, samples: list[Sample]) -> StepInfo:
        info = replace(
            info,
            local_samples=len(samples),
            local_targets=sum(sample.targets for sample in samples),
            local_tokens=sum(sample.tokens for sample in samples),
            **facts_of_rows(samples),
        )
        return replace(info, loss_scale=self._rule.scale(info))


def _without(info: StepInfo, samples: int, targets: int) -> StepInfo:
    return replace(
        info,
        optimizer_samples=info.optimizer_samples - samples,
        optimizer_targets=info.optimizer_targets - targets,
    )


def _of_filler(info: StepInfo) -> StepInfo:
    """Return the `StepInfo` of samples that are computed without weight."""
    return replace(
        info,
        is_filler=True,
        local_samples=0,
        local_targets=0,
        local_tokens=0,
        loss_scale=0.0,
        **facts_of_rows([]),
    )


def _cut(samples: Sequence[Sample], pieces: int) -> list[list[Sample]]:
    parts = cut_by_length([sample.tokens for sample in samples], pieces)
    return [[samples[index] for index in part] for part in parts]
