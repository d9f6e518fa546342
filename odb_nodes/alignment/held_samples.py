"""The samples of planned groups, as a state of an aligner has them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import islice
from typing import Any

from torchdata.nodes import BaseNode

from odb_nodes.contract.config import loading_with
from odb_nodes.errors import StateError
from odb_nodes.nodes.sample_records import (
    NO_RECORDS,
    RecordsState,
    SampleRecords,
    decode_sample,
    encode_sample,
    with_digests,
)
from odb_nodes.sample_block import SampleBlock

HeldContent = tuple[list[int], RecordsState | None, list[bytes] | None]
"""The samples of each group, and their records, or the samples, encoded."""


class HeldSamples:
    """Groups of samples, of which one after the other is let go of."""

    def __init__(self, groups: Sequence[SampleBlock], *, as_records: bool) -> None:
        self._groups, self._as_records = groups, as_records
        self._first = 0  # of those that are held
        self._records: list[
            SampleRecords
        ] = []  # of all groups, made once for the states of a round

    @classmethod
    def of(cls, groups: Sequence[SampleBlock], *, as_records: bool) -> HeldSamples:
        """Return groups of samples, as records or as themselves."""
        if as_records:  # A state that is kept shall not keep their data.
            groups = [SampleBlock(with_digests(group).facts, {}) for group in groups]
        return cls(groups, as_records=as_records)

    def after(self, groups: int) -> HeldSamples:
        """Return the groups without the first ones."""
        held = copy.copy(self)
        held._first += groups
        if not self._as_records:  # What is let go of is not kept.
            held._groups, held._first = self._groups[groups:], 0
        return held

    def to_state(self) -> HeldContent:
        """Return the groups as plain data."""
        sizes = [*map(len, self._groups[self._first :])]
        if not self._as_records:
            return sizes, None, [*map(encode_sample, SampleBlock.joined(self._groups))]
        if not self._records:
            self._records.append(SampleRecords.of(SampleBlock.joined(self._groups)))
        records = self._records[0]
        return sizes, records[len(records) - sum(sizes) :].to_state(), None


def groups_again(
    held: HeldContent, source: BaseNode[Any], node: str, *, may_differ: bool
) -> tuple[list[SampleBlock], int]:
    """Return the groups of a state, and how many of their samples were made again."""
    sizes, records_state, payload = held
    made = 0
    if payload is not None:
        samples = [*map(decode_sample, payload)]
    else:
        records = SampleRecords.from_state(records_state or NO_RECORDS)
        made = len(records)
        if not may_differ:
            with loading_with(may_differ=False):
                samples = records.restore(source, node)
        else:
            samples = records.restore(source, node)
    if len(samples) != sum(sizes):
        raise StateError(f"the groups of {node} are damaged. Use an earlier checkpoint.")
    rest = iter(samples)
    return [SampleBlock.of([*islice(rest, size)]) for size in sizes], made
