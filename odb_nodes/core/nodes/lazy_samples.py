"""Samples of a restored state, whose data is made when it is needed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from odb_nodes._support.arrays import IntArray
from odb_nodes.core.contract.again import ItemsAgain, make_again
from odb_nodes.core.contract.config import loading
from odb_nodes.core.contract.node import can_restore
from odb_nodes.core.nodes.sample_records import RecordCheck
from odb_nodes.core.sample import Sample, name_of
from odb_nodes.core.sample_block import DATA, DIGEST, FACTS, KIND, ROW, SampleBlock
from odb_nodes.errors import StateError


class LazySamples(Sequence[Any]):
    """The data of samples, made on access and compared with their records.

    numbers: see `RecordCheck`.
    """

    def __init__(
        self,
        records: SampleBlock,
        items_again: ItemsAgain,
        node: str,
        numbers: IntArray | None = None,
    ) -> None:
        self._facts = records.facts
        self._items_again = items_again
        self._node = node
        self._record_check = RecordCheck(records, node, numbers)

    def __len__(self) -> int:
        return len(self._facts[0])

    def __getitem__(self, row: Any) -> Any:
        ((block, index),) = self.take([row])
        return block.take([index]).data()[0]

    def want(self, rows: IntArray) -> None:
        """Queue the samples of these rows: see `ItemsAgain.want`."""
        self._items_again.want(rows.tolist())

    def take(self, rows: Sequence[int]) -> list[tuple[SampleBlock, int]]:
        """Return for each row a block with the sample's data, and the sample's index in the block.

        Raises:
            StateError: a sample differs from its record.
        """
        to_check: list[Sample] = []  # samples without columns, or without this digest
        places: list[tuple[SampleBlock | None, int]] = []
        for row, (run, index) in zip(rows, self._items_again.take(rows), strict=True):
            digest = self._facts[DIGEST, row]
            if isinstance(run, SampleBlock) and run.facts[DIGEST, index] == digest:
                places.append((run, index))
            else:
                places.append((None, len(to_check)))
                to_check.append(self._record_check.checked(row, run[index]))
        checked = SampleBlock.of(to_check)
        samples = [(checked if block is None else block, index) for block, index in places]
        for row, (block, index) in zip(rows, samples, strict=True):
            if not np.array_equal(block.facts[:KIND, index], self._facts[:KIND, row]):
                raise StateError(
                    f"{self._node} cannot resume: the record of a sample{name_of(block[index])} in "
                    "the state is damaged. Use an earlier checkpoint."
                )
        return samples


class Restored(NamedTuple):
    """Result of restoring samples."""

    samples: int = 0  # samples that are made again, at once or later
    changed: Mapping[int, str] = {}  # differences by ordinal, under `strict=False`
    keys_changed: bool = False  # whether `exclude` has keys that the state does not
    limits_changed: bool = False  # whether the budget has lower limits than the state


def samples_again(
    records: SampleBlock,
    source: Any,
    ordinals: IntArray,
    node: str,
    *,
    is_numbered: bool = False,
) -> tuple[SampleBlock, Restored]:
    """Return samples that the source makes again from records: at once, or when they are needed.

    source: a node, or `NumberedItems`.
    ordinals: the ordinals of the samples, (n,).
    is_numbered: whether the source makes the samples by ordinal instead of by key.
    """
    if len(records) and is_numbered == can_restore(source):
        content, change = "no keys", "reads items by their keys now"
        if not is_numbered:
            content, change = "keys", "cannot read items by their keys any more"
        raise StateError(
            f"{node} cannot resume from its state, which has {content} of its samples: the source "
            f"{change}. Build the graph as it was."
        )
    numbers = ordinals if is_numbered else None
    record_check = RecordCheck(records, node, numbers)
    items_again = make_again(source, record_check.items())
    options = loading()
    if options.may_differ or options.makes_all or items_again.are_made:
        samples = SampleBlock.of(record_check.all(items_again))
        restored = Restored(len(records), record_check.changed_samples(ordinals))
    else:
        samples = records.with_data(LazySamples(records, items_again, node, numbers))
        restored = Restored(len(records))
    return samples.with_facts(ordinal=ordinals) if is_numbered else samples, restored


def want(blocks: Iterable[SampleBlock]) -> None:
    """Queue the lazy data of samples, in this order."""
    for block in blocks:
        for number, data in block.holders.items():
            if isinstance(data, LazySamples):
                data.want(block.facts[ROW, block.facts[DATA] == number])


def with_data_made(block: SampleBlock) -> SampleBlock:
    """Return samples with their data, made now if it is lazy.

    Raises:
        StateError: a sample differs from its record.
        SampleError, WorkerError: a sample cannot be made.
    """
    lazy = {number: data for number, data in block.holders.items() if isinstance(data, LazySamples)}
    if not lazy or block.has_objects:
        return block
    facts = block.facts.copy()
    holders = dict(block.holders)
    for number, data in lazy.items():
        columns = np.flatnonzero(block.facts[DATA] == number)
        samples = data.take(block.facts[ROW, columns].tolist())
        for column, (source_block, index) in zip(columns, samples, strict=True):
            facts[DATA:FACTS, column] = source_block.facts[DATA:FACTS, index]
            holder = int(source_block.facts[DATA, index])
            holders[holder] = source_block.holders[holder]
        del holders[number]
    return SampleBlock(facts, holders)
