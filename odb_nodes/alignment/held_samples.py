"""The samples of planned groups, as a state of an aligner has them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice

from torchdata.nodes import BaseNode

from odb_nodes.contract.config import allow_mismatch
from odb_nodes.errors import StateError
from odb_nodes.nodes.sample_records import RecordsState, SampleRecords, decode_sample, encode_sample
from odb_nodes.sample import Sample

HeldContent = tuple[list[int], RecordsState | None, list[bytes] | None]
"""The samples of each group, and their records, or the samples, encoded."""


class HeldSamples:
    """Groups of samples, of which one after the other is let go of."""

    def __init__(
        self, samples: Sequence[Sample] | SampleRecords, sizes: Sequence[int], gone: int = 0
    ) -> None:
        self._samples, self._sizes, self._gone = samples, sizes, gone

    @classmethod
    def of(cls, groups: Sequence[Sequence[Sample]], *, as_records: bool) -> HeldSamples:
        """Return groups of samples, as records or as themselves."""
        samples = [*chain(*groups)]
        held = SampleRecords.of(samples) if as_records else samples
        return cls(held, [*map(len, groups)])

    def after(self, groups: int) -> HeldSamples:
        """Return the groups without the first ones."""
        gone = self._gone + sum(self._sizes[:groups])
        return HeldSamples(self._samples, self._sizes[groups:], gone)

    def to_state(self) -> HeldContent:
        """Return the groups as plain data."""
        rest = self._samples[self._gone :]
        if isinstance(rest, SampleRecords):
            return [*self._sizes], rest.to_state(), None
        return [*self._sizes], None, [*map(encode_sample, rest)]


def groups_again(
    held: HeldContent, source: BaseNode[list[Sample]], node: str, *, may_differ: bool
) -> tuple[list[list[Sample]], int]:
    """Return the groups of a state, and how many of their samples were made again."""
    sizes, records_state, payload = held
    made = 0
    if payload is not None:
        samples = [*map(decode_sample, payload)]
    else:
        records = SampleRecords.from_state(records_state or (None, None, [], None, None))
        made = len(records)
        if not may_differ:
            with allow_mismatch(False):
                samples = records.restore(source, node)
        else:
            samples = records.restore(source, node)
    if len(samples) != sum(sizes):
        raise StateError(f"the groups of {node} are damaged. Use an earlier checkpoint.")
    rest = iter(samples)
    return [[*islice(rest, size)] for size in sizes], made
