"""The steps of one round as one rank sees them: their weights, and their groups in states."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate, pairwise
from operator import or_
from typing import Any, Literal, get_args

import numpy as np

from odb_nodes._core.checks import check_choice
from odb_nodes.errors import StateError
from odb_nodes.planning.facts import Facts
from odb_nodes.planning.group_costs import GroupCostEstimator, counted_in
from odb_nodes.planning.rank_plan import SettledRound
from odb_nodes.planning.rounds import COLUMNS
from odb_nodes.planning.table import IntArray
from odb_nodes.sample_block import SampleBlock
from odb_nodes.step_info import StepInfo, facts_of_rows

LossScaling = Literal["exact", "approx", "none"]


@dataclass(frozen=True, kw_only=True)
class LossRule:
    """How the losses of all ranks and micro-steps become one."""

    accumulate: int  # steps of an optimizer step
    world_size: int = 0  # ranks whose gradients are averaged; 0 until that is known
    scaling: LossScaling = "exact"  # see `RankAligner`
    # which of the batches of a step that a rank takes one after the other is this one
    batch: int = 0
    batches: int = 1  # number of those: the virtual ranks that it hosts

    def __post_init__(self) -> None:
        check_choice("loss_scaling", self.scaling, get_args(LossScaling))

    def scale(self, info: StepInfo) -> float:
        """Return what this rank's mean loss is multiplied by."""
        samples = info.local_samples, info.optimizer_samples
        targets = info.local_targets, info.optimizer_targets
        return self.scale_of(samples, targets, is_filler=info.is_filler)

    def scale_of(
        self, samples: tuple[int, int], targets: tuple[int, int], *, is_filler: bool
    ) -> float:
        """Return what this rank's mean loss is multiplied by."""
        if self.scaling == "none" or is_filler:
            return float(not is_filler) / self.batches
        local, total = targets if self.scaling == "exact" else samples
        return self.world_size * local / total if total else 0.0


def info_of_step(
    settled: SettledRound,
    index: int,
    group: SampleBlock,
    rule: LossRule,
    measure: GroupCostEstimator,
    **facts: Any,
) -> StepInfo:
    """Return the `StepInfo` of a step of a round.

    Args:
        settled: the round.
        index: number of the step in it.
        group: the samples of this rank, none for a step that it fills.
        rule: how losses become one.
        measure: has measured the groups.
        facts: fields of the `StepInfo` that do not follow from the round.
    """
    micro_step = index % rule.accumulate
    # Few rows: Python's integers are faster than arrays.
    first = index - micro_step
    together = settled.totals[first : first + rule.accumulate].tolist()
    samples, targets, _, most_cost, *_ = together[micro_step]
    all_samples, all_targets, all_flags, _, *of_tasks = zip(*together, strict=True)
    flags, is_filler = together[micro_step][2], not len(group)
    of_own = len(group), int(group.targets.sum())
    of_step = sum(all_samples), sum(all_targets)
    return StepInfo(
        local_samples=of_own[0],
        local_targets=of_own[1],
        all_samples_this_step=samples,
        all_targets=targets,
        most_cost=most_cost,
        is_filler=is_filler,
        micro_step=micro_step * rule.batches + rule.batch,
        micro_steps=len(together) * rule.batches,
        loss_scale=rule.scale_of(
            (of_own[0], of_step[0]), (of_own[1], of_step[1]), is_filler=is_filler
        ),
        optimizer_samples=of_step[0],
        optimizer_targets=of_step[1],
        modalities=measure.modalities_in(flags),
        counted=counted_in(reduce(or_, all_flags)),
        world_size=rule.world_size,
        batches_per_step=rule.batches,
        task_targets=dict(zip(measure.tasks, map(sum, of_tasks), strict=True)),
        **facts_of_rows(group),
        **facts,
    )


# --- in states ------------------------------------------------------------------------------------


def totals_to_bytes(totals: IntArray) -> bytes | None:
    """Return the totals of the steps of a round, 32 bytes a step, and 8 for each task."""
    # Not b"": `torch.load(weights_only=True)` refuses empty bytes.
    return totals.astype("<i8").tobytes() or None


def totals_from_bytes(data: bytes | None, tasks: int = 0) -> IntArray:
    """Return the totals that `totals_to_bytes` was given."""
    columns = COLUMNS - 1 + tasks
    integers = np.frombuffer(data or b"", "<i8").astype(np.int64)
    if len(integers) % columns or (integers < 0).any():
        raise StateError("the steps of a round are damaged. Use an earlier checkpoint.")
    return integers.reshape(-1, columns)


def digest_of_totals(totals: IntArray) -> int:
    """Return a number that is the same on all ranks of the same round."""
    return zlib.crc32(totals.astype("<i8").tobytes())


GroupsContent = tuple[list[int], bytes | None]
"""The samples of each group, 0 for a step that is filled; and their ordinals, 8 bytes each."""


class PlannedOrdinals:
    """The ordinals of planned groups: part of a state."""

    def __init__(self, groups: Sequence[Facts | None]) -> None:
        self._groups = groups

    def to_state(self) -> GroupsContent:
        """Return the ordinals of each group as plain data."""
        ordinals = [group.ordinal for group in self._groups if group is not None]
        sizes = [0 if group is None else len(group) for group in self._groups]
        return sizes, np.concatenate(ordinals).astype("<i8").tobytes() if ordinals else None


def ordinals_of(content: GroupsContent) -> list[IntArray]:
    """Return the ordinals of each group, (n,)."""
    sizes, data = content
    ordinals = np.frombuffer(data or b"", "<i8").astype(np.int64)
    if min(sizes, default=0) < 0 or sum(sizes) != len(ordinals):
        raise StateError("the groups of a round are damaged. Use an earlier checkpoint.")
    return [ordinals[start:stop] for start, stop in pairwise([0, *accumulate(sizes)])]
