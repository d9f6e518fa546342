"""The records of the samples in a pool, kept up to date from state to state."""

from __future__ import annotations

from itertools import islice

import numpy as np

from odb_nodes.nodes.sample_records import RecordsState, SampleRecords
from odb_nodes.planning import RollingPool
from odb_nodes.planning.table import ORDINALS
from odb_nodes.sample import Sample


class PoolRecords:
    """The records of the samples in a pool. Only those that came since the last state are new.

    Args:
        pool: the pool.
        with_items: whether its samples know their items.
    """

    def __init__(self, pool: RollingPool[Sample], *, with_items: bool) -> None:
        self._pool, self._with_items = pool, with_items
        none = SampleRecords.of([], with_items=with_items)
        self._kept = none, np.empty(0, np.int64)  # of the last state, and their ordinals, ascending

    def to_state(self) -> tuple[RecordsState, bytes | None]:
        """Return `pool` and `waiting` of a `BucketerState`."""
        pool, (known, before) = self._pool, self._kept
        back = pool.pulled - 1 - pool.table()[ORDINALS]
        oldest = min([pool.oldest, *before[:1].tolist()])
        bits = np.zeros(pool.pulled - oldest, np.uint8)
        bits[back] = 1
        ordinals = pool.pulled - 1 - np.flatnonzero(bits)[::-1]
        new = len(back) - int(np.searchsorted(ordinals, before[-1:].max(initial=-1), "right"))
        samples = [*islice(reversed(pool.items().values()), new)][::-1]
        left = known[bits[pool.pulled - 1 - before].astype(bool)]
        records = SampleRecords.of(samples, with_items=self._with_items, before=left)
        packed = np.packbits(bits[: pool.pulled - pool.oldest]).tobytes()
        self._kept = records, ordinals  # both or, where this is interrupted, neither
        return records.to_state(), packed or None
