"""The sample that a rank fills steps with if it has fewer groups than other ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from odb_nodes.core.alignment.aligned_round import AlignerState, damaged_state
from odb_nodes.core.alignment.peers import Exchanges, Message
from odb_nodes.core.alignment.user_groups import GroupReader
from odb_nodes.core.nodes import WindowBucketer
from odb_nodes.core.nodes.lazy_samples import with_data_made
from odb_nodes.core.nodes.sample_records import decode_sample, encode_sample
from odb_nodes.core.planning.facts import Facts
from odb_nodes.core.planning.group_costs import best_filler
from odb_nodes.core.planning.rounds import CostReport
from odb_nodes.core.sample_block import SampleBlock
from odb_nodes.errors import SampleError


class Filler:
    """Keeps a sample to fill steps with: of this rank, or sent by another rank.

    reader: has the samples of this rank in its store.
    """

    def __init__(self, reader: WindowBucketer | GroupReader) -> None:
        self._reader = reader
        self.block: SampleBlock | None = None
        """The sample, a block of length 1; `None` if there is none."""
        self.encoded: bytes | None = None
        """The sample as another rank has sent it; `None` for a sample of this rank."""

    def choose(self, groups: Sequence[Facts]) -> None:
        """Fill steps with a sample of these groups from now on."""
        ordinals = Facts.joined(groups).ordinal
        self.keep(int(ordinals[best_filler(self._reader.store.look(ordinals))]))

    def keep(self, ordinal: int | None, *, is_out: bool = False) -> None:
        """Fill steps with a sample of this rank from now on; `None`: with no sample.

        is_out: whether a step has used the sample.
        """
        store = self._reader.store
        store.keep_filler(ordinal, is_out=is_out)
        self.encoded = None
        self.block = None if ordinal is None else store.look(np.array([ordinal])).alone()

    def restore(self, state: AlignerState, groups: Sequence[Facts], *, is_needed: bool) -> None:
        """Keep the sample of a state; `groups`: the groups of the state."""
        reader = self._reader
        if state.filler_of_another is not None:
            self._use_encoded(state.filler_of_another)
        elif state.filler is not None and state.filler in reader.store:
            is_pooled = isinstance(reader, WindowBucketer) and (
                state.filler in reader.planner.pool.ordinals()
            )
            is_planned = any(state.filler in group.ordinal for group in groups)
            self.keep(state.filler, is_out=not (is_pooled or is_planned))
        elif is_needed and not reader.restored.keys_changed:
            raise damaged_state("a step has no group, and there is no sample to fill it with")

    def make_data(self) -> None:
        """Make the data of the sample if it is lazy, as after a restore."""
        if self.block is not None:
            self.block = with_data_made(self.block)

    def share(self, reports: Sequence[CostReport], rank: int, where: str) -> Exchanges[None]:
        """Send ranks that never had a sample the filler of another rank."""
        donors = [donor for donor, report in enumerate(reports) if report.groups]
        if not donors or all(report.has_filler for report in reports):
            return
        data = b""
        if rank == donors[0] and self.block is not None:
            # The ordinal is valid on this rank only.
            sample = self.block[0]._replace(ordinal=None)
            try:
                data = encode_sample(sample)
            except SampleError as error:
                raise SampleError(f"a sample is sent to a rank without samples: {error}") from error
        encoded: Sequence[bytes] = yield Message(data, where)
        if not reports[rank].has_filler:
            self._use_encoded(encoded[donors[0]])

    def _use_encoded(self, encoded: bytes) -> None:
        self.block = SampleBlock.of([decode_sample(encoded)])
        self.encoded = encoded
