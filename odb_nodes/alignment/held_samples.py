"""The samples that an aligner holds, as records in its state."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain, islice
from typing import Any

from torchdata.nodes import BaseNode

from odb_nodes.nodes.sample_records import RecordsState, SampleRecords
from odb_nodes.sample import Sample


class HeldSamples:
    """The records of groups, of which one after the other is let go of.

    Args:
        records: the records of their samples.
        sizes: the samples of each: of the groups of the steps of a round, in their order; of that
            of the next round; and 1 or 0, for the sample to fill with.
    """

    def __init__(self, records: SampleRecords, sizes: Sequence[int]) -> None:
        self._records, self._sizes = records, sizes
        self._starts = [*accumulate(sizes, initial=0)]

    @classmethod
    def of(cls, groups: Sequence[Sequence[Sample]]) -> HeldSamples:
        """Return the records of groups of samples that know their items."""
        return cls(SampleRecords.of([*chain(*groups)], with_items=True), [*map(len, groups)])

    @classmethod
    def from_state(cls, held: RecordsState, sizes: Sequence[int]) -> HeldSamples:
        """Return what `to_state` was called on."""
        return cls(SampleRecords.from_state(held), sizes)

    def after(self, groups: int) -> HeldSamples:
        """Return the records without those of the first `groups`."""
        return HeldSamples(self._records[self._starts[groups] :], self._sizes[groups:])

    def to_state(self) -> tuple[RecordsState, list[int]]:
        """Return `held` and `sizes` of an `AlignerState`."""
        return self._records.to_state(), [*self._sizes]

    def recall(self, source: BaseNode[Any], node: str) -> list[list[Sample]]:
        """Return the groups, whose samples the source makes again.

        Raises:
            StateError: one of them is not what it was.
        """
        samples = iter(self._records.recall(source, node))
        return [[*islice(samples, size)] for size in self._sizes]
