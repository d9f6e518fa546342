"""`StepInfo`: the counts of a step and the weight of its loss."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from odb_nodes.core.sample import COUNTED, LeftOut, Sample
from odb_nodes.core.sample_block import KEY, KIND, NONE, REPEAT, SampleBlock, kinds_of

Batch = MutableMapping[str, Any]

__all__ = [
    "STEP_INFO_KEY",
    "AlignedGroup",
    "SourceCount",
    "StepInfo",
    "pop_step_info",
]

STEP_INFO_KEY = "odb_step_info"


class SourceCount(NamedTuple):
    """Samples and unpadded tokens of one source or task, in a step or a run."""

    samples: int
    tokens: int


def fields_of_rows(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return the fields of a `StepInfo` that describe the samples in its batch."""
    block = SampleBlock.of(samples)
    codes = block.facts[KIND].tolist()
    lengths = block.real_lengths
    distinct = [*{*codes}]
    kinds = dict(zip(distinct, kinds_of(distinct), strict=True))
    sources = [kinds[code].source for code in codes]
    tasks = sources
    if any(kind.task for kind in kinds.values()):
        tasks = [kinds[code].task_name for code in codes]
    keys = block.facts[KEY].tolist()
    if NONE in keys:
        keys = [None if key == NONE else key for key in keys]
    return {
        "local_sources": _counts_by(sources, lengths),
        "keys": tuple(keys),
        "row_sources": tuple(sources),
        "row_tasks": tuple(tasks),
        "local_task_targets": _targets_by(tasks, block.targets.tolist()),
        "local_tasks": _counts_by(tasks, lengths, named_only=True),
        "row_repeats": tuple(block.facts[REPEAT].tolist()),
        "per_rank_sources": frozenset(
            kind.source for kind in kinds.values() if kind.world_size == 1
        ),
    }


def _counts_by(
    names: Sequence[str], lengths: Sequence[int], *, named_only: bool = False
) -> dict[str, SourceCount]:
    """Return samples and tokens by name; an empty dict if no sample has a name."""
    if not any(names):
        return {}
    by_name: dict[str, list[int]] = {}
    for name, length in zip(names, lengths, strict=True):
        if name or not named_only:
            by_name.setdefault(name, []).append(length)
    return {name: SourceCount(len(tokens), sum(tokens)) for name, tokens in by_name.items()}


def _targets_by(names: Sequence[str], counts: Sequence[int]) -> dict[str, int]:
    """Return supervised tokens by name, with "" last; an empty dict if no sample has a name."""
    targets = {name: 0 for name in names if name}
    if targets:
        for name, count in zip(names, counts, strict=True):
            targets[name] = targets.get(name, 0) + count
    return targets


def add_counts(counts: Iterable[tuple[str, SourceCount]]) -> dict[str, SourceCount]:
    """Return the sums by name."""
    sums: dict[str, SourceCount] = {}
    for source, (samples, tokens) in counts:
        sum_before = sums.get(source, SourceCount(0, 0))
        sums[source] = SourceCount(sum_before.samples + samples, sum_before.tokens + tokens)
    return sums


@dataclass(frozen=True, kw_only=True)
class StepInfo:
    """Counts of one step, and the weight of its loss.

    An optimizer step has `micro_steps` steps, 1 unless gradients are accumulated. "All ranks" are
    the ranks of the `RankAligner`, or this rank alone if there is none.

    Attributes:
        step: number of the step in its epoch, from 0, the same on all ranks.
        local_samples: samples of this rank; 0 in a filler step.
        local_targets: supervised tokens of this rank; 0 in a filler step.
        all_samples_this_step: samples of all ranks.
        all_targets: supervised tokens of all ranks.
        most_cost: the highest cost of a batch of the step on any rank, in the unit of
            `TokenBudget.tokens`.
        loss_scale: factor for this rank's mean loss over its supervised tokens. With it, the mean
            of the gradients over ranks, summed over the micro-steps, is the gradient of the mean
            loss over all supervised tokens of the optimizer step. NaN times 0 is NaN: if a batch
            may lack supervised tokens, use the sum of losses over `max(local_targets, 1)`.
        is_filler: whether this rank has no samples left for the step. Its batch is then a sample
            of another step, so that all ranks run the same computation, and its loss has weight 0.
        micro_step: number of the step in its optimizer step, from 0.
        micro_steps: steps of this optimizer step; fewer than `accumulate` at the end of an epoch.
        optimizer_samples: samples of all ranks and micro-steps of this optimizer step.
        optimizer_targets: supervised tokens of all ranks and micro-steps of this optimizer step.
        modalities: names of the `modalities` of the `RankAligner` that occur on any rank.
        local_sources: samples and unpadded tokens of this rank by source. The samples add up to
            `local_samples`; empty in a filler step, and if sources have no names.
        counted: kind of the targets of this optimizer step, on all ranks: `"labels"` that are not
            -100; `"tokens"` of samples without labels; `"samples"` with one label each;
            `"observed"`, counted by `observe`; or several kinds, such as `"labels+tokens"`.
        local_tokens: unpadded tokens of this rank; 0 in a filler step.
        local_padded_tokens: size of the batch's `input_ids`, or the padded tokens planned under
            the budget if they are more; 0 if neither is known.
        keys: key of the sample in each row of the batch; `None` if its source has no keys. Empty in
            a filler step, like `row_sources`, `row_tasks` and `row_repeats`.
        row_sources: name of the source of each row.
        row_tasks: `Sample.task_name` of each row.
        row_repeats: `ItemKey.repeat` of each row, for samples that occur more than once an epoch.
        per_rank_sources: names of the sources whose keys are unique to this rank: the ranks do not
            share the source's data, or the job has one rank.
        left_out: samples of this rank that were left out since the previous step.
        epoch: number of the epoch.
        ends_epoch: whether this is the last step of this rank in the epoch; known only behind a
            `RankAligner`.
        local_task_targets: supervised tokens of this rank, by name of the task.
        local_tasks: samples and unpadded tokens of this rank by `Sample.task_name`. The samples add
            up to `local_samples`; empty in a filler step, and if samples have no tasks.
        task_targets: supervised tokens of all ranks and micro-steps of this optimizer step, by name
            of the task; behind a `RankAligner`, of its `tasks`.
        world_size: ranks whose gradients are averaged.
        batches_per_step: number of `virtual_ranks` that each rank hosts, else 1. Each of their
            batches is a separate `step` and micro-step; "all ranks" are all virtual ranks, so
            these batches have equal counts.
    """

    step: int
    local_samples: int
    local_targets: int
    all_samples_this_step: int
    all_targets: int
    most_cost: int = 0
    loss_scale: float = 1.0
    is_filler: bool = False
    micro_step: int = 0
    micro_steps: int = 1
    optimizer_samples: int
    optimizer_targets: int
    modalities: tuple[str, ...] = ()
    local_sources: Mapping[str, SourceCount] = field(default_factory=dict, hash=False)
    counted: str = ""
    local_tokens: int = 0
    local_padded_tokens: int = 0
    keys: tuple[int | None, ...] = ()
    row_sources: tuple[str, ...] = ()
    row_tasks: tuple[str, ...] = ()
    row_repeats: tuple[int, ...] = ()
    per_rank_sources: frozenset[str] = frozenset()
    left_out: tuple[LeftOut, ...] = ()
    epoch: int = 0
    ends_epoch: bool = False
    local_task_targets: Mapping[str, int] = field(default_factory=dict, hash=False)
    local_tasks: Mapping[str, SourceCount] = field(default_factory=dict, hash=False)
    task_targets: Mapping[str, int] = field(default_factory=dict, hash=False)
    world_size: int = 1
    batches_per_step: int = 1

    def __getattr__(self, name: str) -> Any:
        hint = ": take it out of the batch first, by `pop_step_info(batch)`" if name == "to" else ""
        raise AttributeError(f"`StepInfo` has no attribute {name!r}{hint}.", name=name, obj=self)

    def with_counts(self, **counts: int) -> StepInfo:
        """Return a copy with other counts: a faster `dataclasses.replace`."""
        info = object.__new__(StepInfo)
        vars(info).update(vars(self), **counts)
        return info

    @property
    def ends_optimizer_step(self) -> bool:
        """Whether the optimizer steps after the backward pass of this step."""
        return self.micro_step == self.micro_steps - 1

    @classmethod
    def of_one_rank(cls, samples: Sequence[Sample], step: int, epoch: int = 0) -> StepInfo:
        """Return the counts of a step that is not shared with other ranks."""
        samples = SampleBlock.of(samples)
        targets = int(samples.targets.sum())
        kinds = {kind.counted for kind in samples.kinds}
        row_fields = fields_of_rows(samples)
        return cls(
            step=step,
            local_samples=len(samples),
            local_targets=targets,
            all_samples_this_step=len(samples),
            all_targets=targets,
            optimizer_samples=len(samples),
            optimizer_targets=targets,
            counted="+".join(kind for kind in COUNTED if kind in kinds),
            epoch=epoch,
            task_targets=row_fields["local_task_targets"],
            **row_fields,
        )


class AlignedGroup(NamedTuple):
    """A group with the `StepInfo` of its step, as a `RankAligner` yields it."""

    samples: Sequence[Sample]
    info: StepInfo


def group_of(node: str, item: Any) -> SampleBlock:
    """Return a group that the source of `node` has yielded; raise a `TypeError` if it is none."""
    if isinstance(item, list) and all(isinstance(sample, Sample) for sample in item):
        return SampleBlock.of(item)
    if isinstance(item, SampleBlock):
        return item
    raise TypeError(
        f"`source` of {node} must yield groups, `list[Sample]`, but yielded "
        f"`{type(item).__name__}` instead. Put a `WindowBucketer` before it."
    )


def pop_step_info(batch: Batch) -> StepInfo:
    """Remove the `StepInfo` from a batch and return it. The rest of the batch is the model's input.

    Raises:
        KeyError: the batch has no `StepInfo`: it was popped before, or does not come from this
            library.
    """
    try:
        info: StepInfo = batch.pop(STEP_INFO_KEY)
    except KeyError:
        raise KeyError(
            f"the batch has no `{STEP_INFO_KEY}`: it was popped before, or the batch does not come "
            f"from a `GroupCollator`. Its keys are {sorted(map(str, batch))}."
        ) from None
    return info
