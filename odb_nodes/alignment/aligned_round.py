"""The steps of one round as one rank sees them, and the samples that a state holds of them."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import reduce
from itertools import islice
from operator import or_
from typing import Any, Literal, get_args

import numpy as np
from torchdata.nodes import BaseNode

from odb_nodes._core.checks import check_choice
from odb_nodes.contract.config import loading_with
from odb_nodes.errors import StateError
from odb_nodes.nodes.sample_records import (
    RecordsState,
    Remaking,
    decode_sample,
    encode_sample,
    from_records,
    to_records,
    with_digests,
)
from odb_nodes.planning.group_costs import GroupCostEstimator, counted_in
from odb_nodes.planning.rounds import FILLER, RoundPlan
from odb_nodes.planning.table import IntArray
from odb_nodes.sample_block import NO_SAMPLES, SampleBlock
from odb_nodes.step_info import AlignedGroup, StepInfo, facts_of_rows

LossScaling = Literal["exact", "approx", "none"]
_COLUMNS = 5  # before those of tasks


@dataclass(frozen=True, kw_only=True)
class LossRule:
    """How the losses of all ranks and micro-steps become one."""

    world_size: int  # ranks whose gradients are averaged
    accumulate: int  # steps of an optimizer step
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


class AlignedRound:
    """The steps of one round, and this rank's groups for them."""

    def __init__(self, table: IntArray | None = None, tasks: int = 0) -> None:
        # A row for each step: the index of this rank's group or `FILLER`, and the samples, targets,
        # flags, highest cost, and targets of each task of all ranks, (steps, 5 + tasks) int64.
        empty = np.empty((0, _COLUMNS + tasks), dtype=np.int64)
        self._table = empty if table is None else table
        self._groups: list[SampleBlock] = []
        self.filler: SampleBlock | None = None
        """The sample of the steps that this rank has no group for."""

    @classmethod
    def of(cls, plan: RoundPlan, rank: int) -> AlignedRound:
        """Return the steps of a plan as `rank` sees them."""
        return cls(np.column_stack((plan.groups[rank], plan.totals)))

    @classmethod
    def from_bytes(cls, data: bytes | None, tasks: int = 0) -> AlignedRound:
        """Return the round that `to_bytes` was called on, without its groups."""
        integers = np.frombuffer(data or b"", "<i8").astype(np.int64)
        if len(integers) % (_COLUMNS + tasks):
            raise StateError("the plan of a round is damaged. Use an earlier checkpoint.")
        table = integers.reshape(-1, _COLUMNS + tasks)
        if (table[:, 0] < FILLER).any() or (table[:, 1:] < 0).any():
            raise StateError("the plan of a round is damaged. Use an earlier checkpoint.")
        return cls(table)

    def to_bytes(self) -> bytes | None:
        """Return the round without its groups, 40 bytes a step, and 8 for each task."""
        # Not b"": `torch.load(weights_only=True)` refuses empty bytes.
        return self._table.astype("<i8").tobytes() or None

    def digest(self) -> int:
        """Return a number that is the same on all ranks of the same round."""
        return zlib.crc32(self._table[:, 1:].astype("<i8").tobytes())

    def __len__(self) -> int:
        return len(self._table)

    def fill(self, groups: list[SampleBlock], filler: SampleBlock | None) -> None:
        """Give the groups that the steps refer to, and a sample for those that refer to none."""
        self._groups, self.filler = groups, filler

    def groups(self) -> list[SampleBlock]:
        """Return the group of each step, in the order of the steps; an empty one for a filler."""
        return [NO_SAMPLES if at == FILLER else self._groups[at] for at in self._table[:, 0]]

    def fill_rest(
        self,
        emitted: int,
        groups: list[SampleBlock],
        filler: SampleBlock | None,
    ) -> None:
        """Give the groups of the steps after the first `emitted`, as `groups` has returned them."""
        rest = self._table[emitted:, 0].tolist()
        lacks_filler = filler is None and FILLER in rest
        if lacks_filler or [at != FILLER for at in rest] != [*map(bool, groups)]:
            raise StateError("the groups of a round are damaged. Use an earlier checkpoint.")
        needed = int(self._table[:, 0].max(initial=FILLER)) + 1
        self._groups, self.filler = [NO_SAMPLES] * needed, filler
        for at, group in zip(rest, groups, strict=True):
            if group:
                self._groups[at] = group

    def cut(self, steps: int) -> list[SampleBlock]:
        """End after so many steps, and return the groups of the further ones."""
        gone = self.groups()[steps:]
        self._table = self._table[:steps]
        return gone

    def take(
        self, index: int, rule: LossRule, measure: GroupCostEstimator, **facts: Any
    ) -> AlignedGroup:
        """Return the group of a step, once."""
        micro_step = index % rule.accumulate
        # Few rows: Python's integers are faster than arrays.
        first = index - micro_step
        together = self._table[first : first + rule.accumulate].tolist()
        group_index, samples, targets, flags, most_cost, *_ = together[micro_step]
        _, all_samples, all_targets, all_flags, _, *of_tasks = zip(*together, strict=True)
        is_filler = group_index == FILLER
        if is_filler:
            group = NO_SAMPLES if self.filler is None else self.filler
        else:
            group, self._groups[group_index] = self._groups[group_index], NO_SAMPLES
        own = NO_SAMPLES if is_filler else group
        of_own = len(own), int(own.targets.sum())
        of_step = sum(all_samples), sum(all_targets)
        info = StepInfo(
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
            **facts_of_rows(own),
            **facts,
        )
        return AlignedGroup(group, info)


HeldContent = tuple[list[int], RecordsState | None, list[bytes] | None]
"""The samples of each group, and their records, or the samples, encoded."""


class HeldSamples:
    """The samples of planned groups, for states: as records, or as themselves."""

    def __init__(self, sizes: list[int], samples: SampleBlock, *, as_records: bool) -> None:
        self._sizes, self._samples, self._as_records = sizes, samples, as_records

    @classmethod
    def of(cls, groups: Sequence[SampleBlock], *, as_records: bool) -> HeldSamples:
        """Return the samples of groups."""
        sizes = [*map(len, groups)]
        if as_records:  # A state that is kept shall not keep their data.
            groups = [SampleBlock(with_digests(group).facts, {}) for group in groups]
        return cls(sizes, SampleBlock.joined(groups), as_records=as_records)

    def after(self, groups: int) -> HeldSamples:
        """Return those without the first groups."""
        rest = self._samples[sum(self._sizes[:groups]) :]
        return HeldSamples(self._sizes[groups:], rest, as_records=self._as_records)

    def to_state(self) -> HeldContent:
        """Return the samples of each group as plain data."""
        if self._as_records:
            return self._sizes, to_records(self._samples), None
        return self._sizes, None, [*map(encode_sample, self._samples)]


def groups_again(
    held: HeldContent, source: BaseNode[Any], node: str, *, may_differ: bool
) -> tuple[list[SampleBlock], int]:
    """Return the groups of a state, and how many of their samples were made again."""
    sizes, records_state, payload = held
    made = 0
    if payload is not None:
        samples = [*map(decode_sample, payload)]
    else:
        records = from_records(records_state)
        made = len(records)
        with nullcontext() if may_differ else loading_with(may_differ=False):
            samples = Remaking(records, node).all(source)
    if len(samples) != sum(sizes):
        raise StateError(f"the groups of {node} are damaged. Use an earlier checkpoint.")
    rest = iter(samples)
    return [SampleBlock.of([*islice(rest, size)]) for size in sizes], made
