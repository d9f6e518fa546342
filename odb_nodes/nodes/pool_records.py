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
        pooled = np.sort(self._pool.table()[ORDINALS])
        last = self._ordinals[-1] if len(self._ordinals) else -1
        new = len(pooled) - int(np.searchsorted(pooled, last, side="right"))
        samples = [*islice(reversed(self._pool.items().values()), new)][::-1]
        is_left = np.isin(self._ordinals, pooled, assume_unique=True)
        self._records = SampleRecords.of(
            samples, with_items=self._with_items, before=self._records[is_left]
        )
        self._ordinals = pooled
        return self._records.to_state(), self._bits()

    def _bits(self) -> bytes | None:
        if not len(self._ordinals):
            return None
        back = self._pool.pulled - 1 - self._ordinals
        bits = np.zeros(int(back[0]) + 1, np.uint8)
        bits[back] = 1
        return np.packbits(bits).tobytes()
