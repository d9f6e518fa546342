"""The steps of a round on one rank: their loss and `StepInfo`, and their groups in states."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import Any, Literal, get_args

import numpy as np

from odb_nodes._support.arrays import IntArray, int64_bytes, int64_state
from odb_nodes._support.checks import check_choice
from odb_nodes.core.contract import EpochState, SourceState
from odb_nodes.core.contract.state import integers_of
from odb_nodes.core.nodes.sample_store import StoreContent
from odb_nodes.core.planning.facts import Facts
from odb_nodes.core.planning.group_costs import GroupCostEstimator, counted_in
from odb_nodes.core.planning.group_planner import RoundSettings
from odb_nodes.core.planning.rank_plan import SettledRound
from odb_nodes.core.planning.rounds import COLUMNS
from odb_nodes.core.sample_block import SampleBlock
from odb_nodes.core.step_info import StepInfo, fields_of_rows
from odb_nodes.errors import StateError

LossScaling = Literal["exact", "approx", "none"]


@dataclass(frozen=True, kw_only=True)
class LossRule:
    """How the losses of all ranks and micro-steps are combined."""

    accumulate: int  # steps of an optimizer step
    world_size: int = 0  # ranks whose gradients are averaged; 0 until it is known
    scaling: LossScaling = "exact"  # see `RankAligner`
    batch: int = 0  # number of this rank's batch among the batches of its process
    batches: int = 1  # batches of a process in a step: one for each virtual rank

    def __post_init__(self) -> None:
        check_choice("loss_scaling", self.scaling, get_args(LossScaling))

    def scale(self, info: StepInfo) -> float:
        """Return the factor for this rank's mean loss."""
        samples = info.local_samples, info.optimizer_samples
        targets = info.local_targets, info.optimizer_targets
        return self.scale_of(samples, targets, is_filler=info.is_filler)

    def scale_of(
        self, samples: tuple[int, int], targets: tuple[int, int], *, is_filler: bool
    ) -> float:
        """Return the factor for this rank's mean loss.

        samples, targets: counts of this rank in the step, and of all ranks in the optimizer step.
        """
        if self.scaling == "none" or is_filler:
            return float(not is_filler) / self.batches
        local, total = targets if self.scaling == "exact" else samples
        return self.world_size * local / total if total else 0.0


def info_of_step(
    settled: SettledRound,
    index: int,
    group: SampleBlock,
    rule: LossRule,
    cost_estimator: GroupCostEstimator,
    **fields: Any,
) -> StepInfo:
    """Return the `StepInfo` of step `index` of a round; `group` is empty for a filler step.

    fields: fields of the `StepInfo` that do not follow from the round.
    """
    micro_step = index % rule.accumulate
    first = index - micro_step
    # Few rows: Python's integers are faster than arrays.
    micro_totals = settled.totals[first : first + rule.accumulate].tolist()
    step_samples, step_targets, step_flags, most_cost, *_ = micro_totals[micro_step]
    samples, targets, flags, _, *task_targets = zip(*micro_totals, strict=True)
    local_samples = len(group)
    local_targets = int(group.targets.sum())
    is_filler = not local_samples
    optimizer_samples = sum(samples)
    optimizer_targets = sum(targets)
    return StepInfo(
        local_samples=local_samples,
        local_targets=local_targets,
        all_samples_this_step=step_samples,
        all_targets=step_targets,
        most_cost=most_cost,
        is_filler=is_filler,
        micro_step=micro_step * rule.batches + rule.batch,
        micro_steps=len(micro_totals) * rule.batches,
        loss_scale=rule.scale_of(
            (local_samples, optimizer_samples),
            (local_targets, optimizer_targets),
            is_filler=is_filler,
        ),
        optimizer_samples=optimizer_samples,
        optimizer_targets=optimizer_targets,
        modalities=cost_estimator.modalities_in(step_flags),
        counted=counted_in(reduce(or_, flags)),
        world_size=rule.world_size,
        batches_per_step=rule.batches,
        task_targets=dict(zip(cost_estimator.tasks, map(sum, task_targets), strict=True)),
        **fields_of_rows(group),
        **fields,
    )


# --- in states ------------------------------------------------------------------------------------


def damaged_state(detail: str) -> StateError:
    """Return the error of a state of a `RankAligner` whose parts do not fit together."""
    return StateError(f"the state of RankAligner is damaged: {detail}. Use an earlier checkpoint.")


def totals_to_bytes(totals: IntArray) -> bytes | None:
    """Return the totals of the steps of a round, 32 bytes a step, and 8 for each task."""
    return int64_state(totals)


def totals_from_bytes(data: bytes | None, tasks: int = 0) -> IntArray:
    """Return the totals that `totals_to_bytes` has written."""
    columns = COLUMNS - 1 + tasks
    integers = integers_of(data, "totals")
    if len(integers) % columns or (integers < 0).any():
        raise damaged_state(f"the totals of its steps are not {columns} counts each")
    return integers.reshape(-1, columns)


def digest_of_totals(totals: IntArray) -> int:
    """Return a hash of the totals of a round, which is equal on all ranks."""
    return zlib.crc32(int64_bytes(totals))


GroupsContent = tuple[list[int], bytes | None]
"""The size of each group, 0 for a filler step; and the ordinals of all samples, 8 bytes each."""


class PlannedOrdinals:
    """The ordinals of planned groups: part of a state."""

    def __init__(self, groups: Sequence[Facts | None]) -> None:
        self._groups = groups

    def to_state(self) -> GroupsContent:
        """Return the ordinals of each group as plain data."""
        ordinals = [group.ordinal for group in self._groups if group is not None]
        sizes = [0 if group is None else len(group) for group in self._groups]
        return sizes, int64_state(np.concatenate(ordinals)) if ordinals else None


def ordinals_of(content: GroupsContent) -> list[IntArray]:
    """Return the ordinals of each group, (n,)."""
    sizes, data = content
    ordinals = integers_of(data, "groups")
    if min(sizes, default=0) < 0 or sum(sizes) != len(ordinals):
        raise damaged_state(f"its groups have {sum(sizes)} samples, but {len(ordinals)} ordinals")
    return np.split(ordinals, np.cumsum(sizes)[:-1]) if sizes else []


@dataclass(kw_only=True)
class AlignerState(EpochState):
    """The state of a `RankAligner`.

    The samples of its groups are in the state of the `WindowBucketer`.
    """

    source: SourceState = field(default_factory=dict)
    round: int = 0  # number of the next round in the epoch
    step: int = 0  # number of the next step in the epoch
    emitted: int = 0  # steps of the settled round that were yielded
    totals: bytes | None = None  # totals of the round's steps; `None` between rounds
    tasks: int = 0  # number of tasks in `totals`
    last: bool = False  # whether this is the last round
    # the `RoundSettings` of the next round
    settings: tuple[int, list[int], int, bool] = field(
        default_factory=lambda: RoundSettings().to_state()
    )
    # the groups of the round's remaining steps, and the groups formed for the next round
    groups: GroupsContent = field(default_factory=lambda: ([], None))
    requested_max_tokens: int = 0  # lower `tokens` that this rank requests of all ranks; 0: none
    filler: int | None = None  # ordinal of the sample that this rank fills steps with
    filler_of_another: bytes | None = None  # the filler, encoded, if another rank has sent it
    # of a source that is no `WindowBucketer`: the samples of its groups, and whether it has ended
    given: StoreContent | None = None
    given_ended: bool = False
    # key, source and reason of each sample for `StepInfo.left_out` of the next step
    left_out: list[tuple[int | None, str, str]] = field(default_factory=list)
    unemitted_samples: int = 0  # samples left out by `uneven="stop"`

    def steps(self) -> IntArray:
        """Return the totals of the steps of the round."""
        totals = totals_from_bytes(self.totals, self.tasks)
        remaining = len(totals) - self.emitted
        if not 0 <= remaining <= len(self.groups[0]) or self.emitted > self.step:
            raise damaged_state(
                f"its round has {len(totals)} steps, of which {self.emitted} were yielded, but "
                f"{len(self.groups[0])} planned groups at step {self.step}"
            )
        return totals

    @property
    def totals_digest(self) -> int:
        """A hash of the round, which is equal on all ranks."""
        return digest_of_totals(self.steps())

    @property
    def is_at_end(self) -> bool:
        """Whether this is after the last step of the epoch."""
        return self.last and self.emitted == len(self.steps())
