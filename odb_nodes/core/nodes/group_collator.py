"""Node: turns groups of samples into batches."""

from __future__ import annotations

import threading
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torchdata.nodes import BaseNode

from odb_nodes._compat.torch import PinnedMemory
from odb_nodes._support.checks import check_bool, check_callable, check_count, check_integer
from odb_nodes._support.hashing import hash_ints
from odb_nodes._support.processes import resolve_rank
from odb_nodes._support.user_warning import warn_user
from odb_nodes.core.collate.for_budget import collate_for
from odb_nodes.core.collate.protocol import Collate, block_collate, collate_group, new_tensor
from odb_nodes.core.collate.token_rows import block_data
from odb_nodes.core.contract import EpochNode, EpochState, SourceState
from odb_nodes.core.contract.graph import budget_below, walk
from odb_nodes.core.contract.node import call_member, check_node
from odb_nodes.core.nodes.batch_checks import BatchChecks
from odb_nodes.core.nodes.planned_groups import PlannedGroups
from odb_nodes.core.nodes.seeded_collate import DeferredBatch, SeededCollate
from odb_nodes.core.nodes.whole_batch import whole_batch_of
from odb_nodes.core.sample import Sample, data_of, name_of
from odb_nodes.core.sample_block import SampleBlock, names_of, naming_samples
from odb_nodes.core.step_info import STEP_INFO_KEY, AlignedGroup, Batch, StepInfo, group_of
from odb_nodes.errors import SampleError, StateError


@dataclass(kw_only=True)
class CollatorState(EpochState):
    """The state of a `GroupCollator`."""

    source: SourceState
    step: int = 0  # steps of the epoch that are done
    samples: int = 0  # samples of this rank in these steps


class GroupCollator(EpochNode[Batch, CollatorState]):
    """Yields a batch for each group, with its `StepInfo` inside: take it with `pop_step_info`.

    A group whose collation raises is kept, and collated again by the next call.

    A `collate_fn` of your own may draw random numbers. Before each batch, the global generators of
    Python, numpy and torch (CPU), and the generators that the function holds, are seeded from
    (seed, rank, epoch, step), or over `PlannedGroups` from (seed, epoch, first sample of the
    group); afterwards they are restored. While the thread of a `ReadAhead` collates, the trainer
    may draw at the same time. So the first batch of each `iter`, for which the trainer waits, shows
    whether the function draws from the global generators; if so, `ReadAhead` collates on the
    trainer's thread. A function that draws for only some batches must have an attribute
    `draws_random_numbers = True`.

    The node warns once of each: a batch that exceeds the budget; samples that are padded already;
    labels made by `collate_fn` although `loss_scale` has counted tokens or samples; samples counted
    by a `label` that may not be the target of the loss; an optimizer step whose labels are all
    -100.

    State: the state of the source, the epoch, and the number of the step.

    Args:
        source: node that yields groups: a `RankAligner`, or on a single rank a `WindowBucketer`.
        collate_fn: the samples' data, `list[Any]` -> batch, a dict or another mutable mapping.
            Default: `PaddingCollate` or `PackedCollate`, for the budget of the `WindowBucketer`
            below. A method `collate_step(samples, info)` of the function is called instead, with
            the `StepInfo`, whose `row_tasks` name the tasks of the samples even in a filler step.
        seed: seed of the random numbers of `collate_fn`.
        rank: this rank. Default: from torch.distributed, or `RANK`.
        pin_memory: whether tensors are in pinned memory, where CUDA is available. The collate
            functions for text write into pinned memory; other tensors are copied.

    Raises:
        ValueError: `collate_fn` is a `PaddingCollate` or `PackedCollate` for another budget.
    """

    STATE = CollatorState
    retries_errors = True

    def __init__(
        self,
        source: BaseNode[SampleBlock] | BaseNode[list[Sample]] | BaseNode[AlignedGroup],
        collate_fn: Collate | None = None,
        seed: int = 0,
        rank: int | None = None,
        *,
        pin_memory: bool = False,
    ) -> None:
        super().__init__()
        check_node("source", source)
        check_callable("collate_fn", collate_fn)
        is_pinned = check_bool("pin_memory", pin_memory) and torch.cuda.is_available()
        self._pinned = PinnedMemory() if is_pinned else None
        self.source = source
        self._budget = budget_below(source)
        self._collate = collate_for(self._budget, collate_fn)
        self._collate_block = block_collate(self._collate)
        self._checks = BatchChecks(self._budget)
        self._seed = check_integer("seed", seed)
        self._rank = resolve_rank(None, None)[0] if rank is None else check_count("rank", rank, 0)
        self._seeded = SeededCollate(self._collate)
        self._read_ahead = False
        self._thread = threading.get_ident()  # the trainer's thread, which has reset this node
        self._is_first = True  # whether there was no batch since the reset
        self.step = self.samples = 0
        self._group: tuple[SampleBlock, StepInfo] | None = None  # the group being collated
        self._kept: dict[tuple[int, int], list[Sample]] | None = None  # by epoch and step
        planned = (node for node in walk(source) if isinstance(node, PlannedGroups))
        self._planned = next(planned, None)
        self._has_warned = False  # whether it has warned that a worker could not make a batch

    def trust_labels(self) -> None:
        """Do not warn of weights: the trainer counts the labels of each batch itself."""
        self._checks.trust_labels()

    def expect_read_ahead(self) -> None:
        """Yield a `DeferredBatch` for what must be collated on the trainer's thread."""
        self._read_ahead = True

    def keep_samples(self, keep: bool = True) -> None:
        """Keep the samples of each further batch until `take_samples`; `False`: no longer."""
        self._kept = (self._kept or {}) if keep else None

    def take_samples(self, info: StepInfo) -> list[Sample]:
        """Return the samples of the batch of a step, which are kept no longer."""
        kept = self._kept or {}
        if (samples := kept.pop((info.epoch, info.step), None)) is None:
            raise StateError(
                f"the samples of step {info.step} of epoch {info.epoch} are not kept: the loader "
                "was reset since, or other code takes batches from it, too."
            )
        return samples

    def prepare_reset(self) -> None:
        """Note the thread of the trainer, and forget groups, samples and generators."""
        self._thread = threading.get_ident()
        self._is_first = True
        self._seeded.held.forget()  # The function may have other generators now.
        if self._kept:
            self._kept.clear()
        self._group = None

    def next(self) -> Batch:
        """Return the next batch; after `expect_read_ahead` maybe a `DeferredBatch` in its place.

        Raises:
            SampleError: `collate_fn` raised; names the step and the samples. Ctrl-C and
                out-of-memory errors are raised unchanged.
            TypeError: `collate_fn` did not return a mutable mapping, or the source did not yield a
                group.
        """
        if self._group is None:
            self._group = self.take_group()
        group, info = self._group
        batch: Any = self._batch(group, info)
        if self._kept is not None:
            self._kept[info.epoch, info.step] = [*group]
        self.samples += info.local_samples
        self.step += 1
        self._group = None
        self._is_first = False
        return batch  # type: ignore[no-any-return]

    def take_group(self) -> tuple[SampleBlock, StepInfo]:
        """Return the next group of the source, of which no batch is made here."""
        return self._aligned(next(self.source))

    def info_of(self, group: Sequence[Sample], step: int) -> StepInfo:
        """Return the `StepInfo` of a step that is not shared with other ranks."""
        tokens = SampleBlock.of(group).lengths
        cost = 0 if self._budget is None else self._budget.cost(tokens)
        return replace(StepInfo.of_one_rank(group, step), most_cost=cost)

    def collate(self, group: Sequence[Sample], info: StepInfo, part: int = 0) -> Batch:
        """Return the batch of a group again, as it was made for the step in `info`.

        part: number of a part of the group; each part draws different random numbers.
        """
        block = SampleBlock.of(group)
        make_batch = partial(self._collate_group, block, info)
        if self._seeded.draws_nothing:
            return make_batch()
        if self._planned is not None:
            key = self._planned.batch_key(block)
            key = hash_ints(key, part) if part else key
        else:
            step = info.step // info.batches_per_step
            place = (step, part) if part else (step,)
            key = hash_ints(self._seed, self._rank, info.epoch, *place)
        return self._seeded.call(make_batch, key)

    def fingerprint(self) -> dict[str, Any]:
        """Return what decides batches: padding, and the seed if `collate_fn` may draw."""
        draws = "draws nothing" if self._seeded.draws_nothing else f"may draw, seed {self._seed}"
        multiple = getattr(self._collate, "sample_multiple", 1)
        return {"collate_fn": draws} | ({} if multiple == 1 else {"sample_multiple": multiple})

    def save(self) -> CollatorState:
        """Return the state of the source, and the number of the step.

        Raises:
            StateError: collating raised. The source is behind the group, which a state would lose;
                the `Loader` then uses the previous state.
        """
        if self._group is not None:
            raise StateError(
                f"there is no state after `collate_fn` failed at step {self.step}: its group "
                "would be lost. Load the last state saved before."
            )
        return super().save()

    def _aligned(self, item: Any) -> tuple[SampleBlock, StepInfo]:
        samples, info = item if isinstance(item, AlignedGroup) else (item, None)
        group = group_of("GroupCollator", samples)
        if info is None:
            left_out = call_member(self.source, "take_left_out") or ()
            info = replace(
                self.info_of(group, self.step),
                epoch=self._epochs.epoch,
                left_out=tuple(left_out),
            )
        return group, info

    def _batch(self, group: SampleBlock, info: StepInfo) -> Batch | DeferredBatch:
        if (batch := whole_batch_of(group)) is not None:
            return self._complete(batch, group, info)
        if self._seeded.draws_nothing:
            return self._collate_group(group, info)
        if self._planned is not None:  # the seed that a worker would use
            key = self._planned.batch_key(group)
        else:
            key = hash_ints(self._seed, self._rank, self._epochs.shuffle_key, self.step)
        make_batch = partial(self._collate_group, group, info)
        if not self._read_ahead:
            # On a thread of torchdata, the trainer may be drawing from the global generators.
            if threading.get_ident() == self._thread:
                return self._seeded.call(make_batch, key)
            return self._seeded.call_ahead(make_batch, key)
        if self._is_first:  # The trainer waits for this batch.
            return self._seeded.call(make_batch, key, find_out=self._seeded.draws is not True)
        if self._seeded.draws is not False:
            find_out = self._seeded.draws is None
            return DeferredBatch(
                partial(self._seeded.call, make_batch, key, find_out=find_out), info
            )
        return self._seeded.call_ahead(make_batch, key)

    def _collate_group(self, group: SampleBlock, info: StepInfo) -> Batch:
        batch = self._collated(group, info)
        failure = None if self._planned is None else self._planned.take_failure(group)
        if failure:
            self._warn_of_worker(failure)
        return self._complete(batch, group, info)

    def _warn_of_worker(self, failure: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warn_user(
                f"a worker could not make a batch ({failure}), but then the trainer's process "
                "could. Let `collate_fn` use neither a device nor "
                '`get_worker_info` of torch; or pass `collate_in="main"`.'
            )

    def _collated(self, group: SampleBlock, info: StepInfo) -> Batch:
        place = f" at step {info.step} of epoch {info.epoch}"
        remedy = "To leave a sample out, name its key in `exclude`"
        with naming_samples("collate_fn", group, f"{place}. {remedy}"):
            try:
                if self._collate_block is not None:
                    new = new_tensor if self._pinned is None else self._pinned.new
                    return self._collate_block(group, new)
                return collate_group(self._collate, block_data(group), _with_tasks(info, group))
            except SampleError as error:
                where = _name_of(group, error.index) or names_of(group) + place
                raise SampleError(f"{where}: {error} {remedy}.", error.index) from error

    def _complete(self, batch: Batch, group: SampleBlock, info: StepInfo) -> Batch:
        if not isinstance(batch, MutableMapping):
            raise TypeError(
                "`collate_fn` must return a dict or another mutable mapping, which also carries "
                f"the `StepInfo`, but returned `{type(batch).__name__}` at step {info.step} "
                f"of epoch {info.epoch} instead, for {names_of(group)}."
            )
        self._checks.check(group, batch, info)
        if self._pinned is not None:
            batch = self._pinned.pin(batch)
        batch[STEP_INFO_KEY] = self._with_tokens(group, batch, info)
        return batch

    def _with_tokens(
        self, group: SampleBlock, batch: Mapping[str, Any], info: StepInfo
    ) -> StepInfo:
        padded = 0
        if isinstance(ids := batch.get("input_ids"), torch.Tensor):
            padded = ids.numel()
        if self._budget is not None:  # `observe` may count more than `input_ids` holds.
            padded = max(padded, self._budget.padded_tokens(group.lengths))
        real = 0 if info.is_filler else sum(group.real_lengths)
        return info.with_counts(local_tokens=real, local_padded_tokens=padded)


def _with_tasks(info: StepInfo, group: SampleBlock) -> StepInfo:
    """Return the `StepInfo` for a collate function: it names the tasks even of a filler step.

    These rows count for no task, but a model with several heads must route them to a head.
    """
    if info.row_tasks:
        return info
    return replace(info, row_tasks=tuple(kind.task_name for kind in group.kinds))


def _name_of(group: SampleBlock, index: int | None) -> str:
    """Return source, key and `id` of a sample of a group; "" if it has none of these."""
    if index is None or not 0 <= index < len(group):
        return ""
    sample = group[index]
    name = name_of(sample)
    data = data_of(sample)
    if isinstance(data, Mapping) and "id" in data:
        name += f", `id` {data['id']!r:.100}"
    return f"a sample{name}" if name else ""
