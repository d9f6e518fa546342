"""Groups that a node of the user has formed, taken as they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from torchdata.nodes import BaseNode

from odb_nodes.contract.graph import remaining_samples
from odb_nodes.contract.node import call_member, can_restore
from odb_nodes.errors import StateError
from odb_nodes.nodes.lazy_samples import lazily_again
from odb_nodes.nodes.sample_records import Remaking, decode_sample, from_records
from odb_nodes.nodes.sample_store import (
    HeldSamples,
    SampleStore,
    StoreContent,
    facts_of,
    from_bits,
)
from odb_nodes.nodes.window_bucketer import Restored
from odb_nodes.planning.facts import Facts
from odb_nodes.planning.group_planner import GivenGroups
from odb_nodes.planning.table import IntArray
from odb_nodes.sample import LeftOut, Sample
from odb_nodes.sample_block import SampleBlock

_NONE_POOLED = np.empty(0, dtype=np.int64)


class GroupReader:
    """Reads groups from any node: to a `RankAligner`, what a `WindowBucketer` is otherwise."""

    def __init__(self, node: BaseNode[Any]) -> None:
        self._node = node
        self.planner = GivenGroups()
        self.store = SampleStore()
        self.restored = Restored()
        """What the last restore has found."""
        self._left_out: list[LeftOut] = []

    def fill(self) -> None:
        """Read the next group."""
        try:
            group: Any = next(self._node)
        except StopIteration:
            self.planner.end()
            return
        if isinstance(group, list) and group and all(isinstance(one, Sample) for one in group):
            group = SampleBlock.of(group)
        if not isinstance(group, SampleBlock) or not group:
            kind = "an empty list" if group == [] else f"`{type(group).__name__}`"
            raise TypeError(
                "`source` of RankAligner must yield groups, `list[Sample]`, but yielded "
                f"{kind} instead. Put a `WindowBucketer` before it."
            )
        first = self.store.next_ordinal
        ordinals = np.arange(first, first + len(group))
        self.store.add(ordinals, group)
        self.planner.give(facts_of(group, ordinals))

    def facts_of(self, ordinals: IntArray) -> Facts:
        """Return what planning knows of samples that are held."""
        return facts_of(self.store.look(ordinals), ordinals)

    def content(self) -> Any:
        """Return the samples of the groups that are held, for a state."""
        if can_restore(self._node):
            return self.store.state(_NONE_POOLED)
        return HeldSamples(self.store, _NONE_POOLED, {})

    def restore(self, content: StoreContent) -> None:
        """Make the samples of a state again; the node stands after them."""
        *_, records_state, payload = content
        ordinals, _ = from_bits(content)
        samples: Sequence[Sample]
        if payload is not None:
            samples = [*map(decode_sample, payload)]
        else:
            records = from_records(records_state)
            remaking = Remaking(records, "RankAligner")
            lazy = lazily_again(records, self._node, "RankAligner")
            samples = remaking.all(self._node) if lazy is None else lazy
            self.restored = Restored(len(samples), remaking.changed_samples(ordinals))
        if len(samples) != len(ordinals):
            raise StateError("the groups of RankAligner are damaged. Use an earlier checkpoint.")
        self.store.add(ordinals, SampleBlock.of(samples))

    def take_left_out(self) -> list[LeftOut]:
        """Return the samples that were left out since the last call."""
        taken, self._left_out = self._left_out, []
        return [*(call_member(self._node, "take_left_out") or ()), *taken]

    def leave_out(self, samples: Iterable[LeftOut]) -> None:
        """Have `take_left_out` return these, too."""
        self._left_out += samples

    def end_early(self, samples: Facts) -> None:
        """End the epoch before its last sample; leave out these."""
        left = self.store.look(samples.ordinal).without_data()
        self.leave_out([LeftOut(sample.key, sample.source, "unemitted") for sample in left])
        self.store.drop(samples.ordinal)
        self.planner.end()

    @property
    def remaining_samples(self) -> int:
        """Samples that are known to be left below."""
        return remaining_samples(self._node)
