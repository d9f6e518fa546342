"""What a training loop needs to know about a step, beside the batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from odb_nodes.sample import Sample

__all__ = [
    "STEP_INFO_KEY",
    "AlignedGroup",
    "SourceCount",
    "StepInfo",
    "count_sources",
    "pop_step_info",
]

STEP_INFO_KEY = "odb_step_info"


class SourceCount(NamedTuple):
    """What a step, or a run, has had of one source."""

    samples: int
    tokens: int


def count_sources(samples: Sequence[Sample]) -> dict[str, SourceCount]:
    """Return samples and tokens by source; nothing where no sample knows its source."""
    if not any(sample.source for sample in samples):
        return {}
    tokens: dict[str, list[int]] = {}
    for sample in samples:
        tokens.setdefault(sample.source, []).append(sample.tokens)
    return {source: SourceCount(len(of_one), sum(of_one)) for source, of_one in tokens.items()}


def add_counts(counts: Iterable[tuple[str, SourceCount]]) -> dict[str, SourceCount]:
    """Return the sums by source."""
    sums: dict[str, SourceCount] = {}
    for source, (samples, tokens) in counts:
        before = sums.get(source, SourceCount(0, 0))
        sums[source] = SourceCount(before.samples + samples, before.tokens + tokens)
    return sums


@dataclass(frozen=True, kw_only=True)
class StepInfo:
    """Counts of one step, and what its loss weighs.

    An optimizer step is made of `micro_steps` steps; it is one unless gradients are accumulated.
    "All" is over the ranks of the `RankAligner`, or this rank alone where there is none.

    Attributes:
        step: number of the step in its epoch, from 0, the same on all ranks.
        local_samples: samples of this rank; 0 in a filler step.
        local_targets: supervised tokens of this rank; 0 in a filler step.
        all_samples_this_step: samples of all ranks.
        all_targets: supervised tokens of all ranks.
        loss_scale: multiplies this rank's mean loss over its supervised tokens, so that the mean of
            the gradients over ranks, summed over the micro-steps, is the gradient of the mean loss
            over all supervised tokens of the optimizer step. NaN times 0 is NaN: where a batch has
            no supervised token, take a sum divided by `max(local_targets, 1)`.
        is_filler: this rank has no samples left for the step. Its batch is a real one, so that all
            ranks compute the same; its loss weighs nothing.
        micro_step: number of the step in its optimizer step, from 0.
        micro_steps: steps of this optimizer step; fewer than `accumulate` at the end of an epoch.
        optimizer_samples: samples of all ranks and micro-steps of this optimizer step.
        optimizer_targets: supervised tokens of all ranks and micro-steps of this optimizer step.
        modalities: those that are in the step's batch of any rank, as the `RankAligner` names them.
        local_sources: name of the source -> samples and unpadded tokens of this rank. They add up
            to `local_samples`; empty in a filler step, and where sources have no names.
    """

    step: int
    local_samples: int
    local_targets: int
    all_samples_this_step: int
    all_targets: int
    loss_scale: float = 1.0
    is_filler: bool = False
    micro_step: int = 0
    micro_steps: int = 1
    optimizer_samples: int
    optimizer_targets: int
    modalities: tuple[str, ...] = ()
    local_sources: Mapping[str, SourceCount] = field(default_factory=dict, hash=False)

    @property
    def ends_optimizer_step(self) -> bool:
        """Whether the optimizer steps after this step's backward."""
        return self.micro_step == self.micro_steps - 1

    @classmethod
    def of_one_rank(cls, samples: Sequence[Sample], step: int) -> StepInfo:
        """Return the counts of a step that is not shared with other ranks."""
        targets = sum(sample.targets for sample in samples)
        return cls(
            step=step,
            local_samples=len(samples),
            local_targets=targets,
            all_samples_this_step=len(samples),
            all_targets=targets,
            optimizer_samples=len(samples),
            optimizer_targets=targets,
            local_sources=count_sources(samples),
        )


class AlignedGroup(NamedTuple):
    """A group with the `StepInfo` of its step: what a `RankAligner` yields."""

    samples: list[Sample]
    info: StepInfo


def pop_step_info(batch: MutableMapping[str, Any]) -> StepInfo:
    """Take the `StepInfo` out of a batch, which is then what the model takes.

    Raises:
        KeyError: the batch has none: it was taken out before, or does not come from this library.
    """
    try:
        info: StepInfo = batch.pop(STEP_INFO_KEY)
    except KeyError:
        raise KeyError(
            f"the batch has no `{STEP_INFO_KEY}`: it was popped before, or the batch does not come "
            f"from a `GroupCollator`. Its keys are {sorted(map(str, batch))}."
        ) from None
    return info
