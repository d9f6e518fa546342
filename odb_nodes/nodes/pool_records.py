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
        self._records = SampleRecords.of([], with_items=with_items)
        self._ordinals = np.empty(0, np.int64)  # of these, ascending

    def to_state(self) -> tuple[RecordsState, bytes | None]:
        """Return `pool` and `waiting` of a `BucketerState`."""
        pool, before = self._pool, self._ordinals
        back = pool.pulled - 1 - pool.table()[ORDINALS]
        oldest = min([pool.oldest, *before[:1].tolist()])
        bits = np.zeros(pool.pulled - oldest, np.uint8)
        bits[back] = 1
        waiting = np.flatnonzero(bits)[::-1]
        self._ordinals = pool.pulled - 1 - waiting
        new = len(back) - int(np.searchsorted(self._ordinals, before[-1:].max(initial=-1), "right"))
        samples = [*islice(reversed(pool.items().values()), new)][::-1]
        left = self._records[bits[pool.pulled - 1 - before].astype(bool)]
        self._records = SampleRecords.of(samples, with_items=self._with_items, before=left)
        packed = np.packbits(bits[: pool.pulled - pool.oldest]).tobytes()
        return self._records.to_state(), packed or None
