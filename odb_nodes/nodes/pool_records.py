"""The records of the samples in a pool, as a state has them, made when they are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import islice, takewhile
from typing import Any, NamedTuple

import numpy as np

from odb_nodes.contract.later import Later
from odb_nodes.nodes.sample_records import RecordsState, SampleRecords
from odb_nodes.planning import RollingPool
from odb_nodes.planning.table import ORDINALS, IntArray
from odb_nodes.sample import Sample


class _Part(NamedTuple):
    """Samples that were pooled, oldest first.

    Attributes:
        last: the ordinal of the last of them.
        ordinals: the ordinals of all of them, ascending.
        records: their records.
    """

    last: int
    ordinals: Sequence[int] | IntArray
    records: Later[SampleRecords]


class _Pooled:
    """The pooled samples of a state.

    Args:
        parts: the parts that hold them.
        ordinals: their ordinals, in any order, (n,) int64.
        made: receives what is made, as one part in place of those.
    """

    def __init__(self, parts: Sequence[_Part], ordinals: IntArray, made: list[_Part]) -> None:
        self._parts, self._ordinals, self._made = parts, ordinals, made

    def recipe(self) -> RecordsState:
        """Return `pool` of a `BucketerState`."""
        ordinals = np.sort(self._ordinals)
        if not len(ordinals):
            return SampleRecords.of([], with_items=True).to_state()
        known = np.concatenate([part.ordinals for part in self._parts])
        joined = SampleRecords.joined([part.records.value() for part in self._parts])
        records = joined[np.searchsorted(known, ordinals)]
        # One item, replaced at once: another thread may be reading it.
        self._made[:] = [_Part(self._parts[-1].last, ordinals, Later(lambda: records))]
        return records.to_state()


class PoolRecords:
    """The records of the samples in a pool.

    What came since the last state is noted as a part. A state refers to the parts that hold its
    samples, and to the table of the pool at that time: neither changes. What was made of them for
    one state serves the next.

    Args:
        pool: the pool.
        with_items: whether its samples know their items.
    """

    def __init__(self, pool: RollingPool[Sample], *, with_items: bool) -> None:
        self._pool, self._with_items = pool, with_items
        self._parts: tuple[_Part, ...] = ()
        self._made: list[_Part] = []  # of the last state that was asked for

    def later(self) -> tuple[Any, Any]:
        """Return `pool` and `waiting` of a `BucketerState`, each a `Later`.

        Raises:
            SampleError: a sample has no item, though it must.
        """
        self._note()
        ordinals, pulled = self._pool.table()[ORDINALS], self._pool.pulled
        pooled = _Pooled(self._parts, ordinals, self._made)
        return Later(pooled.recipe), Later(partial(_waiting, ordinals, pulled))

    def _note(self) -> None:
        """Note what came since the last state, and forget what is gone."""
        items, oldest = self._pool.items(), self._pool.oldest
        last = self._parts[-1].last if self._parts else -1
        new = [*takewhile(last.__lt__, reversed(items))][::-1]
        parts = [part for part in self._parts if part.last >= oldest]
        for made in self._made[-1:]:
            if parts and made.last >= parts[0].last:  # else it is of an earlier state than those
                parts = [made, *(part for part in parts if part.last > made.last)]
        if new:
            samples = [*islice(reversed(items.values()), len(new))][::-1]
            records = SampleRecords.later(samples, with_items=self._with_items)
            parts.append(_Part(new[-1], new, records))
        self._parts = (*parts,)  # at once: this may be interrupted


def _waiting(ordinals: IntArray, pulled: int) -> bytes | None:
    bits = np.zeros(pulled - int(ordinals.min(initial=pulled)), np.uint8)
    bits[pulled - 1 - ordinals] = 1
    return np.packbits(bits).tobytes() or None
