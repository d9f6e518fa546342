"""The samples that an aligner holds, as records in its state."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain, islice
from typing import Any

from torchdata.nodes import BaseNode

from odb_nodes.alignment.aligner_state import AlignerState
from odb_nodes.contract.later import Later
from odb_nodes.nodes.sample_records import NO_RECORDS, RecordsState, SampleRecords
from odb_nodes.sample import LeftOut, Sample


class HeldSamples:
    """The records of groups, of which one after the other is let go of.

    Args:
        records: the records of their samples.
        sizes: the samples of each: of the groups of the steps of a round, in their order; of that
            of the next round; and 1 or 0, for the sample to fill with.
        left_out_ahead: samples that were left out, and come with the next round.
        gone: samples at the beginning of the records that are not held any more.
    """

    def __init__(
        self,
        records: Later[SampleRecords],
        sizes: Sequence[int],
        left_out_ahead: Sequence[LeftOut],
        gone: int = 0,
    ) -> None:
        self._records, self._sizes, self._left_out_ahead = records, sizes, left_out_ahead
        self._gone = gone

    @classmethod
    def of(
        cls, groups: Sequence[Sequence[Sample]], left_out_ahead: Sequence[LeftOut]
    ) -> HeldSamples:
        """Return the records of groups of samples that know their items."""
        records = SampleRecords.later([*chain(*groups)], with_items=True)
        return cls(records, [*map(len, groups)], [*left_out_ahead])

    @classmethod
    def from_state(cls, at: AlignerState) -> HeldSamples:
        """Return what a state holds."""
        left_out_ahead = [LeftOut(*one) for one in at.left_out_ahead]
        records = SampleRecords.from_state(at.held or NO_RECORDS)
        return cls(Later(lambda: records), at.sizes, left_out_ahead)

    def after(self, groups: int) -> HeldSamples:
        """Return the records without those of the first `groups`."""
        gone = self._gone + sum(self._sizes[:groups])
        return HeldSamples(self._records, self._sizes[groups:], self._left_out_ahead, gone)

    def put_into(self, at: AlignerState) -> None:
        """Let a state hold them, as a `Later`."""
        held: Any = Later(partial(_rest, self._records, self._gone))
        at.held, at.sizes = held, [*self._sizes]
        at.left_out_ahead = [(*one,) for one in self._left_out_ahead]

    def recall(self, source: BaseNode[Any], node: str) -> list[list[Sample]]:
        """Return the groups, whose samples the source makes again.

        Raises:
            StateError: one of them is not what it was.
        """
        samples = iter(self._records.value()[self._gone :].recall(source, node))
        return [[*islice(samples, size)] for size in self._sizes]


def _rest(records: Later[SampleRecords], gone: int) -> RecordsState:
    return records.value()[gone:].to_state()
