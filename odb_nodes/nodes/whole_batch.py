"""The batch of a group, made by the worker that has processed its samples."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torchdata.nodes import BaseNode

from odb_nodes._core.hashing import hash_ints
from odb_nodes.collate.protocol import Collate
from odb_nodes.contract.again import make_again
from odb_nodes.nodes.lazy_samples import LazySamples
from odb_nodes.nodes.seeded_collate import WorkerCollate
from odb_nodes.planning import TokenBudget
from odb_nodes.planning.budget import allowed_rows
from odb_nodes.processing.columns import DataColumns
from odb_nodes.sample import Sample, Skipped, StoredData
from odb_nodes.sample_block import ITEM, NO_SAMPLES, ROW, SampleBlock

Batch = MutableMapping[str, Any]


class WholeBatch(Sequence[Any]):
    """Holds the data of a group's samples as the batch that they make.

    Whoever loads the data of a sample has all of them made again: a group that is split, or whose
    batch is out already, as that of a filler.
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
        return RemadeData(self, row)

    def data(self) -> list[Any]:
        """Return the data of all samples, which are made again once."""
        if self._data is None:
            assert self._records is not None and self._node is not None
            samples = self._records.without_data()
            again = make_again(self._node, [one.item for one in samples if one.item is not None])
            lazy = LazySamples(self._records, again, type(self._node).__name__)
            made = lazy.take(range(self._count))
            self._data = [block.take([at]).data()[0] for block, at in made]
        return self._data

    def made_again_by(self, node: BaseNode[Any], records: SampleBlock) -> None:
        """Have a node make the samples again, should somebody ask for their data."""
        self._node, self._records = node, SampleBlock(records.facts, {})

    def take_batch(self) -> Batch | None:
        """Return the batch, once; `None` where it is out."""
        batch, self._batch = self._batch, None
        return batch


class RemadeData(StoredData):
    """The data of a sample of a `WholeBatch`."""

    __slots__ = ("batch", "row")

    def __init__(self, batch: WholeBatch, row: int) -> None:
        self.batch, self.row = batch, row

    def load(self) -> Any:
        """Return the data: the same object each time."""
        return self.batch.data()[self.row]


def whole_batch_of(group: SampleBlock) -> Batch | None:
    """Return the batch that a worker has made of exactly these samples; `None` without it."""
    if len(group.sources) != 1:
        return None
    (holder,) = group.sources.values()
    if not isinstance(holder, WholeBatch) or len(holder) != len(group):
        return None
    is_in_order = bool((group.facts[ROW] == np.arange(len(group))).all())
    return holder.take_batch() if is_in_order else None


@dataclass(frozen=True)
class MadeGroup:
    """What the samples of a planned group have come to."""

    group: SampleBlock  # those that the budget holds
    later: SampleBlock  # the others, without data, which come later
    skipped: Sequence[Skipped] = ()
    failure: str = ""  # what collating raised here: the trainer's process tries again


class GroupMaker:
    """Makes the batch of the samples of a planned group, as far as the budget holds them.

    collate: makes the batch. `None`: the samples go to the trainer's process.
    """

    def __init__(self, collate: Collate | None) -> None:
        self._collate = None if collate is None else WorkerCollate(collate)
        self.collates = collate is not None

    def __call__(self, results: Sequence[Any], key: int, budget: TokenBudget) -> MadeGroup:
        """Return what the results of processing come to.

        Args:
            results: `Sample`, or `Skipped`, of each item of the group.
            key: what the random numbers of the batches of an epoch are drawn from.
            budget: what the batch may cost, by the lengths that are observed now.
        """
        samples = [one for one in results if isinstance(one, Sample)]
        skipped = [one for one in results if not isinstance(one, Sample)]
        if not samples:
            return MadeGroup(NO_SAMPLES, NO_SAMPLES, skipped)
        fits = fitting(samples, budget)
        kept = [sample for sample, is_in in zip(samples, fits, strict=True) if is_in]
        others = [sample for sample, is_in in zip(samples, fits, strict=True) if not is_in]
        later = SampleBlock.of(others).without_data()
        group, data = SampleBlock.of(kept), [sample.data for sample in kept]
        held: Any = None
        failure = ""
        if self._collate is not None:
            try:
                held = WholeBatch(self._collate(data, batch_key(key, group)), len(kept))
            except Exception as error:
                failure = f"{type(error).__name__}: {error}"
        if held is None:
            held = DataColumns.of(data)
        return MadeGroup(SampleBlock(group.facts, {}).with_data(held), later, skipped, failure)


def batch_key(key: int, group: SampleBlock) -> int:
    """Return what the random numbers of a group's batch are drawn from: its first sample."""
    return hash_ints(key, int(group.facts[ITEM, 0]), len(group))


def fitting(samples: Sequence[Sample], budget: TokenBudget) -> list[bool]:
    """Tell which samples of a group its budget holds: all but the longest, and one at least.

    So one sample that is much longer than was told does not keep the others back.
    """
    tokens = [sample.tokens for sample in samples]
    if _fit(samples, tokens, budget):
        return [True] * len(samples)
    order = sorted(range(len(samples)), key=tokens.__getitem__)

    def is_too_much(count: int) -> bool:
        chosen = order[:count]
        return not _fit([samples[at] for at in chosen], [tokens[at] for at in chosen], budget)

    count = max(1, bisect_left(range(1, len(samples)), True, key=is_too_much))
    if budget.layout == "padded" and budget.shapes is None:
        count = int(allowed_rows(np.array([count]), budget.row_sizes)[0])
    kept = {*order[:count]}
    return [at in kept for at in range(len(samples))]


def _fit(samples: Sequence[Sample], tokens: list[int], budget: TokenBudget) -> bool:
    if budget.max_samples is not None and len(tokens) > budget.max_samples:
        return False
    if budget.max_patches is not None and sum(one.patches for one in samples) > budget.max_patches:
        return False
    if budget.shapes is not None and budget.layout == "padded":
        if len(tokens) > budget.shape(tokens)[0]:  # A shape costs the same, whatever is in it.
            return False
    return budget.cost(tokens) <= budget.tokens
