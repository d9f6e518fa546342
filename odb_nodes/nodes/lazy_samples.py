"""Samples of a restored state: all is known of them but their data, which are made when needed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from odb_nodes.contract.again import ItemsAgain, make_again
from odb_nodes.contract.config import loading
from odb_nodes.contract.node import can_restore
from odb_nodes.errors import StateError
from odb_nodes.nodes.sample_records import Remaking
from odb_nodes.sample import Sample, name_of
from odb_nodes.sample_block import DATA, DIGEST, FACTS, KIND, ROW, IntArray, SampleBlock


class LazySamples(Sequence[Any]):
    """The data of samples, made when somebody asks for them, and compared with their records.

    numbers: see `Remaking`.
    """

    def __init__(
        self, records: SampleBlock, again: ItemsAgain, node: str, numbers: IntArray | None = None
    ) -> None:
        self._facts, self._again, self._node = records.facts, again, node
        self._remaking = Remaking(records, node, numbers)

    def __len__(self) -> int:
        return len(self._facts[0])

    def __getitem__(self, row: Any) -> Any:
        ((block, at),) = self.take([row])
        return block.take([at]).data()[0]

    def want(self, rows: IntArray) -> None:
        """Have these made after those that were wanted before, and before all others."""
        self._again.want(rows.tolist())

    def take(self, rows: Sequence[int]) -> list[tuple[SampleBlock, int]]:
        """Return for each row a block with its data, and its place there.

        Raises:
            StateError: a sample is not what it was when the state was saved.
        """
        found = self._again.take(rows)
        others: list[Sample] = []  # without columns, or with a digest that is not known yet
        places: list[tuple[SampleBlock | None, int]] = []
        for row, (run, at) in zip(rows, found, strict=True):
            digest = self._facts[DIGEST, row]
            if isinstance(run, SampleBlock) and run.facts[DIGEST, at] == digest:
                places.append((run, at))
            else:
                places.append((None, len(others)))
                others.append(self._remaking.checked(row, run[at]))
        rest = SampleBlock.of(others)
        taken = [(rest if block is None else block, at) for block, at in places]
        for row, (block, at) in zip(rows, taken, strict=True):
            if not np.array_equal(block.facts[:KIND, at], self._facts[:KIND, row]):
                raise StateError(
                    f"{self._node} cannot go on: what the state says of a sample"
                    f"{name_of(block[at])} is damaged. Use an earlier checkpoint."
                )
        return taken


class Restored(NamedTuple):
    """What a restore of samples has found."""

    samples: int = 0  # that are made again, at once or later
    changed: Mapping[int, str] = {}  # how samples differ, by ordinal, where that is allowed
    # whether keys are excluded, or limits lower, that the state does not know of
    keys_changed: bool = False
    limits_changed: bool = False


def samples_again(
    records: SampleBlock,
    source: Any,
    ordinals: IntArray,
    node: str,
    *,
    is_numbered: bool = False,
) -> tuple[SampleBlock, Restored]:
    """Return the samples of records, which the source makes again: now, or when they are needed.

    source: a node, or `NumberedItems`.
    ordinals: those of the samples, (n,).
    is_numbered: whether these are made again by their ordinals, in place of keys.
    """
    now = loading()
    if len(records) and is_numbered == can_restore(source):
        lacks, reads = ("no keys", "reads items by their keys now")
        if not is_numbered:
            lacks, reads = ("keys", "cannot read items by their keys any more")
        raise StateError(
            f"{node} cannot go on from its state, which has {lacks} of its samples: the source "
            f"{reads}. Build the graph as it was."
        )
    numbers = ordinals if is_numbered else None
    remaking = Remaking(records, node, numbers)
    again = make_again(source, remaking.items())
    if now.may_differ or now.makes_all or again.are_made:
        samples = SampleBlock.of(remaking.all(again))
        restored = Restored(len(records), remaking.changed_samples(ordinals))
    else:
        samples = records.with_data(LazySamples(records, again, node, numbers))
        restored = Restored(len(records))
    return samples.with_facts(ordinal=ordinals) if is_numbered else samples, restored


def want(blocks: Iterable[SampleBlock]) -> None:
    """Have the data of samples made in this order, before those of others."""
    for block in blocks:
        for number, data in block.sources.items():
            if isinstance(data, LazySamples):
                data.want(block.facts[ROW, block.facts[DATA] == number])


def with_data_made(block: SampleBlock) -> SampleBlock:
    """Return samples with their data.

    Raises:
        StateError: a sample is not what it was when the state was saved.
        SampleError, WorkerError: a sample cannot be made.
    """
    lazy = {at: data for at, data in block.sources.items() if isinstance(data, LazySamples)}
    if not lazy or block.is_made:
        return block
    facts, sources = block.facts.copy(), {**block.sources}
    for number, data in lazy.items():
        columns = np.flatnonzero(block.facts[DATA] == number)
        found = data.take(block.facts[ROW, columns].tolist())
        for column, (made, at) in zip(columns, found, strict=True):
            facts[DATA:FACTS, column] = made.facts[DATA:FACTS, at]
            held_by = int(made.facts[DATA, at])
            sources[held_by] = made.sources[held_by]
        del sources[number]
    return SampleBlock(facts, sources)
