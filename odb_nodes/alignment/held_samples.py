"""The samples that an aligner holds, as records in its state."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain, islice
from typing import Any

from torchdata.nodes import BaseNode

from odb_nodes.alignment.aligner_state import AlignerState
from odb_nodes.nodes.sample_records import NO_RECORDS, SampleRecords
from odb_nodes.sample import LeftOut, Sample


class HeldSamples:
    """The records of groups, of which one after the other is let go of.

    Args:
        records: the records of their samples.
        sizes: the samples of each: of the groups of the steps of a round, in their order; of that
            of the next round; and 1 or 0, for the sample to fill with.
        left_out_ahead: samples that were left out, and come with the next round.
    """

    def __init__(
        self, records: SampleRecords, sizes: Sequence[int], left_out_ahead: Sequence[LeftOut]
    ) -> None:
        self._records, self._sizes, self._left_out_ahead = records, sizes, left_out_ahead
        self._starts = [*accumulate(sizes, initial=0)]

    @classmethod
    def of(
        cls, groups: Sequence[Sequence[Sample]], left_out_ahead: Sequence[LeftOut]
    ) -> HeldSamples:
        """Return the records of groups of samples that know their items."""
        records = SampleRecords.of([*chain(*groups)], with_items=True)
        return cls(records, [*map(len, groups)], [*left_out_ahead])

    @classmethod
    def from_state(cls, at: AlignerState) -> HeldSamples:
        """Return what a state holds."""
        left_out_ahead = [LeftOut(*one) for one in at.left_out_ahead]
        return cls(SampleRecords.from_state(at.held or NO_RECORDS), at.sizes, left_out_ahead)

    def after(self, groups: int) -> HeldSamples:
        """Return the records without those of the first `groups`."""
        records, sizes = self._records[self._starts[groups] :], self._sizes[groups:]
        return HeldSamples(records, sizes, self._left_out_ahead)

    def put_into(self, at: AlignerState) -> None:
        """Let a state hold them."""
        at.held, at.sizes = self._records.to_state(), [*self._sizes]
        at.left_out_ahead = [(*one,) for one in self._left_out_ahead]

    def recall(self, source: BaseNode[Any], node: str) -> list[list[Sample]]:
        """Return the groups, whose samples the source makes again.

        Raises:
            StateError: one of them is not what it was.
        """
        samples = iter(self._records.recall(source, node))
        return [[*islice(samples, size)] for size in self._sizes]
