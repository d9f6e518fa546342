"""The batches of an optimizer step, divided into parts that are computed one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from odb_nodes.core.alignment.aligned_round import LossRule
from odb_nodes.core.planning.group_costs import best_filler
from odb_nodes.core.planning.rounds import cut_by_length
from odb_nodes.core.sample import LeftOut, Sample
from odb_nodes.core.sample_block import SampleBlock
from odb_nodes.core.step_info import StepInfo, fields_of_rows

OUT_OF_MEMORY = "out of memory"
"""The reason in the `LeftOut` of a skipped sample."""


@dataclass(frozen=True)
class StepPart:
    """Samples that are computed at once: a batch of an optimizer step, or a part of it."""

    batch: int  # number of the batch in the step
    samples: list[Sample]  # sorted as in the batch
    info: StepInfo  # counts these samples; `loss_scale` weighs their mean loss
    cost: int  # in the unit of the budget
    is_whole: bool  # whether these are all samples of the planned batch
    number: int = 0  # number of the part in the batch


class StepParts:
    """The batches of this rank's optimizer step, and their parts."""

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

    def __iter__(self) -> Iterator[StepPart]:
        return chain.from_iterable(map(self.of_batch, range(len(self._parts))))

    def of_batch(self, number: int) -> Iterator[StepPart]:
        """Yield the parts of a batch."""
        parts = self._parts[number]
        info = self._kept(number)
        is_whole = len(parts) == 1 and not self._skipped[number]
        for place, samples in enumerate(parts):
            part_info = info if is_whole else self._part_info(info, samples)
            yield StepPart(number, samples, part_info, self._cost(samples), is_whole, place)
        for place in range(len(parts), len(parts) + self._fillers[number]):
            samples = [*chain(*parts)]
            filler = [samples[best_filler(SampleBlock.of(samples))]]
            filler_info = replace(_with_rows(info, []), is_filler=True, loss_scale=0.0)
            yield StepPart(number, filler, filler_info, self._cost(filler), False, place)

    def halve(self, cost: int) -> bool:
        """Halve each part that costs at least `cost`; return whether any was halved."""
        is_any_halved = False
        for number, parts in enumerate(self._parts):
            self._parts[number] = []
            for samples in parts:
                is_halved = len(samples) > 1 and self._cost(samples) >= cost
                self._parts[number] += _cut_by_length(samples, 2) if is_halved else [samples]
                is_any_halved |= is_halved
        return is_any_halved

    def cut(self, pieces: int) -> None:
        """Cut each batch into `pieces` parts by length; filler parts have weight 0."""
        for number, (samples,) in enumerate(self._parts):
            self._parts[number] = _cut_by_length(samples, pieces)
            self._fillers[number] = pieces - len(self._parts[number])

    def skip(self, part: StepPart) -> None:
        """Leave out the samples of a part."""
        parts = self._parts[part.batch]
        self._parts[part.batch] = [samples for samples in parts if samples is not part.samples]
        if not part.info.is_filler:
            self._skipped[part.batch] += part.samples

    def skipped(self) -> list[tuple[int, int]]:
        """Return the number of skipped samples and targets of each batch."""
        return [
            (len(samples), sum(sample.targets for sample in samples)) for samples in self._skipped
        ]

    def skipped_parts(self) -> Iterator[tuple[StepPart, StepPart | None]]:
        """Yield the skipped and the kept samples of each batch that has skipped some, as parts."""
        for number, samples in enumerate(self._skipped):
            if samples:
                info = self._weighed(_with_rows(self._infos[number], samples))
                skipped = StepPart(number, samples, info, self._cost(samples), is_whole=False)
                kept = [*chain(*self._parts[number])]
                info = self._kept(number)
                yield (
                    skipped,
                    StepPart(number, kept, info, self._cost(kept), False) if kept else None,
                )

    def loss_factor(self, skipped: Sequence[tuple[int, int]]) -> float:
        """Return the factor of the gradients once samples were skipped, on any rank."""
        before = self._infos[0]
        after = _without(before, *map(sum, zip(*skipped, strict=True)))
        if self._rule.scaling == "none":
            return 1.0
        counted = "optimizer_samples" if self._rule.scaling == "approx" else "optimizer_targets"
        old, new = getattr(before, counted), getattr(after, counted)
        return old / new if new else 0.0

    def infos(self, skipped: Sequence[tuple[int, int]]) -> list[StepInfo]:
        """Return the `StepInfo` of each batch without skipped samples."""
        samples, targets = map(sum, zip(*skipped, strict=True))
        infos = []
        for number, (all_samples, all_targets) in enumerate(skipped):
            info = _without(self._kept(number), samples, targets)
            info = replace(
                info,
                all_samples_this_step=info.all_samples_this_step - all_samples,
                all_targets=info.all_targets - all_targets,
            )
            infos.append(self._weighed(info))
        return infos

    def _kept(self, number: int) -> StepInfo:
        """Return the `StepInfo` of a batch without this rank's skipped samples."""
        info, skipped = self._infos[number], self._skipped[number]
        if not skipped:
            return info
        kept = [*chain(*self._parts[number])]
        left_out = [LeftOut(sample.key, sample.source, OUT_OF_MEMORY) for sample in skipped]
        info = replace(info, is_filler=not kept, left_out=(*info.left_out, *left_out))
        return self._weighed(_with_rows(info, kept))

    def _part_info(self, info: StepInfo, samples: list[Sample]) -> StepInfo:
        if info.is_filler:
            return info
        part = _with_rows(info, samples)
        count, total = part.local_targets, info.local_targets
        if not total:  # The loss is a mean over samples.
            count, total = part.local_samples, info.local_samples
        return replace(part, loss_scale=info.loss_scale * count / total if total else 0.0)

    def _weighed(self, info: StepInfo) -> StepInfo:
        return replace(info, loss_scale=self._rule.scale(info))


def _with_rows(info: StepInfo, samples: list[Sample]) -> StepInfo:
    return replace(
        info,
        local_samples=len(samples),
        local_targets=sum(sample.targets for sample in samples),
        local_tokens=sum(sample.tokens - sample.padding for sample in samples),
        **fields_of_rows(samples),
    )


def _without(info: StepInfo, samples: int, targets: int) -> StepInfo:
    return replace(
        info,
        optimizer_samples=info.optimizer_samples - samples,
        optimizer_targets=info.optimizer_targets - targets,
    )


def _cut_by_length(samples: Sequence[Sample], pieces: int) -> list[list[Sample]]:
    parts = cut_by_length([sample.tokens for sample in samples], pieces)
    return [[samples[index] for index in part] for part in parts]
