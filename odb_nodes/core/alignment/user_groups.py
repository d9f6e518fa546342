"""Groups formed by a node of the user."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from torchdata.nodes import BaseNode

from odb_nodes._support.arrays import IntArray
from odb_nodes.core.alignment.aligned_round import damaged_state
from odb_nodes.core.contract.graph import walk
from odb_nodes.core.contract.node import call_member, can_restore
from odb_nodes.core.nodes.exclusions import LeftOutSamples
from odb_nodes.core.nodes.lazy_samples import Restored, samples_again
from odb_nodes.core.nodes.sample_records import decode_sample, from_records
from odb_nodes.core.nodes.sample_store import (
    SampleStore,
    StoreContent,
    StoredSamples,
    facts_of,
    from_bits,
)
from odb_nodes.core.planning.facts import Facts
from odb_nodes.core.planning.group_planner import UserGroups
from odb_nodes.core.sample import LeftOut
from odb_nodes.core.sample_block import SampleBlock
from odb_nodes.core.step_info import group_of

_NONE_POOLED = np.empty(0, dtype=np.int64)  # no ordinal: there is no pool here


class GroupReader(LeftOutSamples):
    """Reads groups from any node. A `RankAligner` uses this as it uses a `WindowBucketer`."""

    def __init__(self, node: BaseNode[Any]) -> None:
        super().__init__()
        self._node = node
        self.planner = UserGroups(partial(call_member, node, "lower_tokens"))
        self.store = SampleStore()
        self.restored = Restored()
        """Result of the last restore."""

    def fill(self) -> None:
        """Read the next group."""
        try:
            group = group_of("RankAligner", next(self._node))
        except StopIteration:
            self.planner.end()
            return
        if not len(group):
            raise TypeError(
                "`source` of RankAligner must yield groups of samples, but yielded an empty group."
            )
        first = self.store.next_ordinal
        ordinals = np.arange(first, first + len(group))
        self.store.add(ordinals, group)
        self.planner.give(facts_of(group, ordinals))

    def facts_of(self, ordinals: IntArray) -> Facts:
        """Return the facts of samples in the store, for planning."""
        return facts_of(self.store.look(ordinals), ordinals)

    def content(self) -> Any:
        """Return the samples of the store, for a state."""
        if can_restore(self._node):
            return self.store.state(_NONE_POOLED)
        return StoredSamples(self.store, _NONE_POOLED, {})

    def restore(self, content: StoreContent) -> None:
        """Make the samples of a state again. The node was reset to its position after them."""
        *_, records_state, payload = content
        ordinals, _ = from_bits(content)
        records = from_records(records_state)
        count = len(records if payload is None else payload)
        if len(ordinals) != count:
            raise damaged_state(f"it has {count} samples, but {len(ordinals)} ordinals")
        if payload is None:
            samples, self.restored = samples_again(records, self._node, ordinals, "RankAligner")
        else:
            samples = SampleBlock.of([*map(decode_sample, payload)])
        self.store.add(ordinals, samples)

    def take_left_out(self) -> list[LeftOut]:
        """Return the samples that were left out since the last call."""
        return [*(call_member(self._node, "take_left_out") or ()), *super().take_left_out()]

    def end_early(self, samples: Facts) -> None:
        """End the epoch before its last sample; leave out `samples`."""
        self.leave_unemitted(self.store, samples.ordinal)
        call_member(self._node, "end_early")
        self.planner.end()

    @property
    def plans_anew(self) -> bool:
        """Whether the node can take samples back and form new groups of them."""
        return hasattr(self._node, "put_back")

    def put_back(self, samples: Facts) -> None:
        """Have the node form new groups of samples."""
        call_member(self._node, "put_back", self.store.take(samples.ordinal))
        self.planner.go_on()

    @property
    def remaining_samples(self) -> int:
        """Remaining samples, as far as the nodes below know their number."""
        return sum(getattr(node, "remaining_samples", 0) for node in walk(self._node))
