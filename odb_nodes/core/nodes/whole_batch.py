"""The batch of a group, made by the worker that processed its samples."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torchdata.nodes import BaseNode

from odb_nodes._support.hashing import hash_ints
from odb_nodes.core.collate.protocol import Collate
from odb_nodes.core.contract.again import make_again
from odb_nodes.core.nodes.lazy_samples import LazySamples
from odb_nodes.core.nodes.seeded_collate import WorkerCollate
from odb_nodes.core.planning import TokenBudget
from odb_nodes.core.planning.budget import allowed_rows
from odb_nodes.core.processing.columns import DataColumns
from odb_nodes.core.sample import LazyData, Sample, Skipped
from odb_nodes.core.sample_block import ITEM, NO_SAMPLES, ROW, SampleBlock
from odb_nodes.core.step_info import Batch


class WholeBatch(Sequence[Any]):
    """Holds the data of a group's samples as their batch.

    If the data of a sample is loaded, all samples are made again. This happens if a group is split,
    or if its batch was taken before, as for a filler.
    """

    def __init__(self, batch: Batch, samples: int) -> None:
        self._batch: Batch | None = batch
        self._count = samples
        self._records: SampleBlock | None = None
        self._node: BaseNode[Any] | None = None
        self._data: list[Any] | None = None

    def __reduce__(self) -> Any:
        return WholeBatch, (self._batch, self._count)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, row: Any) -> Any:
        return WholeBatchData(self, row)

    def data(self) -> list[Any]:
        """Return the data of all samples, which are made again once."""
        if self._data is None:
            assert self._records is not None and self._node is not None
            samples = self._records.without_data()
            items = [sample.item for sample in samples if sample.item is not None]
            items_again = make_again(self._node, items)
            lazy = LazySamples(self._records, items_again, type(self._node).__name__)
            blocks = lazy.take(range(self._count))
            self._data = [block.take([index]).data()[0] for block, index in blocks]
        return self._data

    def made_again_by(self, node: BaseNode[Any], records: SampleBlock) -> None:
        """Set the node that makes the samples again if their data is loaded."""
        self._node = node
        self._records = SampleBlock(records.facts, {})

    def take_batch(self) -> Batch | None:
        """Return the batch at the first call, and `None` afterwards."""
        batch = self._batch
        self._batch = None
        return batch


class WholeBatchData(LazyData):
    """The data of a sample of a `WholeBatch`."""

    __slots__ = ("batch", "row")

    def __init__(self, batch: WholeBatch, row: int) -> None:
        self.batch, self.row = batch, row

    def load(self) -> Any:
        """Return the data: the same object each time."""
        return self.batch.data()[self.row]


def whole_batch_of(group: SampleBlock) -> Batch | None:
    """Return the batch that a worker has made of exactly these samples, or `None`."""
    if len(group.holders) != 1:
        return None
    (holder,) = group.holders.values()
    if not isinstance(holder, WholeBatch) or len(holder) != len(group):
        return None
    is_in_order = bool((group.facts[ROW] == np.arange(len(group))).all())
    return holder.take_batch() if is_in_order else None


@dataclass(frozen=True)
class MadeGroup:
    """The processed samples of a planned group."""

    group: SampleBlock  # samples that fit into the budget
    later: SampleBlock  # samples that do not fit, without data, which come later
    skipped: Sequence[Skipped] = ()
    failure: str = ""  # error of collating in the worker: the trainer's process tries again


class GroupMaker:
    """Makes the batch of a planned group from the samples that fit into the budget.

    collate: `None` sends the samples to the trainer's process, which makes the batch.
    """

    def __init__(self, collate: Collate | None) -> None:
        self._collate = None if collate is None else WorkerCollate(collate)
        self.collates = collate is not None

    def __call__(self, results: Sequence[Any], key: int, budget: TokenBudget) -> MadeGroup:
        """Return the group of the results of processing.

        key: seed of the batches of the epoch; budget: limits the observed lengths.
        """
        samples = [result for result in results if isinstance(result, Sample)]
        skipped = [result for result in results if not isinstance(result, Sample)]
        if not samples:
            return MadeGroup(NO_SAMPLES, NO_SAMPLES, skipped)
        fits = fitting(samples, budget)
        kept = [sample for sample, is_kept in zip(samples, fits, strict=True) if is_kept]
        moved = [sample for sample, is_kept in zip(samples, fits, strict=True) if not is_kept]
        later = SampleBlock.of(moved).without_data()
        group = SampleBlock.of(kept)
        data = [sample.data for sample in kept]
        holder: Any = None
        failure = ""
        if self._collate is not None:
            try:
                holder = WholeBatch(self._collate(data, batch_key(key, group)), len(kept))
            except Exception as error:
                failure = f"{type(error).__name__}: {error}"
        if holder is None:
            holder = DataColumns.of(data)
        return MadeGroup(SampleBlock(group.facts, {}).with_data(holder), later, skipped, failure)


def batch_key(key: int, group: SampleBlock) -> int:
    """Return the seed of a group's batch: a hash of its first sample and its size."""
    return hash_ints(key, int(group.facts[ITEM, 0]), len(group))


def fitting(samples: Sequence[Sample], budget: TokenBudget) -> list[bool]:
    """Return which samples of a group fit into its budget: the shortest, and at least 1.

    So only samples that are longer than planned leave the group.
    """
    if _fit(samples, budget):
        return [True] * len(samples)
    order = sorted(range(len(samples)), key=lambda index: samples[index].tokens)

    def is_too_much(count: int) -> bool:
        return not _fit([samples[index] for index in order[:count]], budget)

    count = max(1, bisect_left(range(1, len(samples)), True, key=is_too_much))
    if budget.layout == "padded" and budget.shapes is None:
        count = int(allowed_rows(np.array([count]), budget.row_sizes)[0])
    kept = {*order[:count]}
    return [index in kept for index in range(len(samples))]


def _fit(samples: Sequence[Sample], budget: TokenBudget) -> bool:
    tokens = [sample.tokens for sample in samples]
    patches = sum(sample.patches for sample in samples)
    if budget.max_samples is not None and len(samples) > budget.max_samples:
        return False
    if budget.max_patches is not None and patches > budget.max_patches:
        return False
    if budget.shapes is not None and budget.layout == "padded":
        if len(samples) > budget.shape(tokens)[0]:  # All batches of a shape cost the same.
            return False
    return budget.cost(tokens) <= budget.tokens
