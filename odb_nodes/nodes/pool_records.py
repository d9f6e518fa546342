"""The records of the samples in a pool, as a state has them, made when they are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import islice, takewhile
from typing import Any, NamedTuple

import numpy as np

from odb_nodes.contract.later import Later
from odb_nodes.nodes.sample_records import SampleRecords
from odb_nodes.planning import RollingPool
from odb_nodes.planning.table import ORDINALS, IntArray
from odb_nodes.sample import Sample


class _Part(NamedTuple):
    """The samples that came between two states, oldest first."""

    ordinals: Sequence[int]
    records: Later[SampleRecords]


class PoolRecords:
    """The records of the samples in a pool.

    What came since the last state is noted as a part. A state refers to the parts that hold its
    samples, and to the table of the pool at that time: neither changes.

    Args:
        pool: the pool.
        with_items: whether its samples know their items.
    """

    def __init__(self, pool: RollingPool[Sample], *, with_items: bool) -> None:
        self._pool, self._with_items = pool, with_items
        self._noted: tuple[tuple[_Part, ...], int] = (), -1  # and the last ordinal in them

    def later(self) -> tuple[Any, Any]:
        """Return `pool` and `waiting` of a `BucketerState`, each a `Later`.

        Raises:
            SampleError: a sample has no item, though it must.
        """
        parts, (ordinals, pulled) = self._note(), (self._pool.table()[ORDINALS], self._pool.pulled)
        return Later(partial(_recipe, parts, ordinals)), Later(partial(_waiting, ordinals, pulled))

    def _note(self) -> tuple[_Part, ...]:
        """Note what came since the last state, forget what is gone, and return the parts."""
        pool, (parts, last) = self._pool, self._noted
        items, oldest = pool.items(), pool.oldest
        gone = sum(1 for _ in takewhile(lambda part: part.ordinals[-1] < oldest, parts))
        new = [*takewhile(last.__lt__, reversed(items))][::-1]
        parts = parts[gone:]
        if new:
            samples = [*islice(reversed(items.values()), len(new))][::-1]
            records = SampleRecords.later(samples, with_items=self._with_items)
            parts, last = (*parts, _Part(new, records)), new[-1]
        self._noted = parts, last  # both or, where this is interrupted, neither
        return parts


def _recipe(parts: Sequence[_Part], ordinals: IntArray) -> Any:
    known = np.array([ordinal for part in parts for ordinal in part.ordinals], np.int64)
    records = SampleRecords.joined([part.records.value() for part in parts])
    return records[np.searchsorted(known, np.sort(ordinals))].to_state()


def _waiting(ordinals: IntArray, pulled: int) -> bytes | None:
    bits = np.zeros(pulled - int(ordinals.min(initial=pulled)), np.uint8)
    bits[pulled - 1 - ordinals] = 1
    return np.packbits(bits).tobytes() or None
