"""The samples of a pool: facts in columns that are written once, and what holds their data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from odb_nodes.nodes.sample_records import NO_RECORDS, RecordsState, encode_sample, to_records
from odb_nodes.planning import RollingPool
from odb_nodes.planning.table import ORDINALS
from odb_nodes.processing.observation import digest_of
from odb_nodes.sample_block import DATA, DIGEST, FACTS, NONE, IntArray, SampleBlock, new_number

PoolContent = tuple[bytes | None, RecordsState | None, list[bytes] | None]
"""A bit for each of the samples last pulled, the last one first: whether it is pooled; the records
of these samples, or the samples, encoded, oldest first."""


class PooledTable:
    """What is known of the samples of a pool, and their data, by ordinal.

    The facts of a sample are written once, behind those of all before it, so a state may refer to
    them. Their digests are noted beside the facts: a sample is the same whether there is a state or
    not. Where the chunks that hold data have three times as many samples as are pooled, those are
    cut down of which at most a third is.
    """

    def __init__(self, pool: RollingPool) -> None:
        self._pool = pool
        self._facts: IntArray = np.empty((FACTS + 1, 0), np.int64)  # and a row of `_NOTED`
        self._first = self._stop = 0  # the ordinals that it has facts of
        self._sources: dict[int, Any] = {}  # what holds data
        self._left: dict[int, int] = {}  # samples of each that are pooled
        self._rows = 0  # samples that these hold, also of those that are gone

    def add(self, ordinals: IntArray, block: SampleBlock) -> None:
        """Put samples into the table, younger ones than all before."""
        if not len(block):
            return
        first, stop = int(ordinals[0]), int(ordinals[-1]) + 1
        self._make_room(first, stop)
        is_dense = stop - first == len(ordinals)
        at = slice(first - self._first, stop - self._first) if is_dense else ordinals - self._first
        sources = _moved(own := block.facts.copy(), block.sources)
        self._facts[:FACTS, at], self._facts[_NOTED, at] = own, own[DIGEST]
        numbers, left = own[DATA].tolist(), self._left
        for number in {*numbers}:
            if number not in left:
                self._sources[number], left[number] = sources[number], 0
                self._rows += _rows_of(sources[number])
            left[number] += numbers.count(number)
        if self._rows > _SPARSE * max(len(self._pool), _LEAST_ROWS):
            self._compact(newest=numbers[-1])

    def take(self, ordinals: IntArray) -> SampleBlock:
        """Return samples that have left the pool, in ascending order of their ordinals."""
        facts, sources = self._facts_of(ordinals - self._first), dict[int, Any]()
        for number in facts[DATA].tolist():
            sources[number] = self._sources[number]
            self._left[number] -= 1
        block = SampleBlock(facts, _moved(facts, sources, clear=True))
        for number in sources:
            if not self._left[number]:
                self._forget(number)
        return block

    def all(self) -> SampleBlock:
        """Return the samples of the pool, oldest first."""
        ordinals = np.sort(self._pool.table()[ORDINALS])
        facts = self._facts_of(ordinals - self._first)
        return SampleBlock(facts, _moved(facts, {**self._sources}))

    def state(self) -> PooledRecords:
        """Return the records of the pool as it is now, which a state may keep."""
        pool, facts = self._pool, self._facts[:, : self._stop - self._first]
        ordinals = pool.table()[ORDINALS]
        if (facts[_NOTED] == NONE).any():
            lacking = ordinals[facts[_NOTED, ordinals - self._first] == NONE] - self._first
            block = SampleBlock(self._facts_of(lacking), self._sources)
            facts[_NOTED, lacking] = [*map(digest_of, block)]
        return PooledRecords(facts, self._first, ordinals, pool.pulled)

    def _facts_of(self, at: IntArray) -> IntArray:
        return self._facts[:FACTS].take(at, axis=1)

    def _make_room(self, first: int, stop: int) -> None:
        """Have a place for the facts of further ordinals; forget those of samples that are gone."""
        if stop - self._first > len(self._facts[0]):
            oldest = min(self._pool.oldest, first)
            known = self._facts[:, oldest - self._first : self._stop - self._first]
            self._facts = np.empty((FACTS + 1, 2 * (stop - oldest) + _LEAST_ROWS), np.int64)
            self._facts[:, : len(known[0])] = known
            self._first = oldest
        at = max(0, self._stop - self._first)
        self._facts[_NOTED, at : stop - self._first] = 0  # of those left out
        self._stop = stop

    def _forget(self, number: int) -> None:
        self._rows -= _rows_of(self._sources.pop(number))
        del self._left[number]

    def _compact(self, newest: int) -> None:
        at = self._pool.table()[ORDINALS] - self._first
        numbers = self._facts[DATA].take(at)
        for number, left in [*self._left.items()]:
            data = self._sources[number]
            # Of the newest, further samples may be on their way.
            if number == newest or _SPARSE * left > _rows_of(data):
                continue
            own = at[numbers == number]
            block = SampleBlock(self._facts_of(own), {number: data}).alone()
            self._facts[DATA:FACTS, own] = block.facts[DATA:]
            self._forget(number)
            ((number, data),) = block.sources.items()
            self._sources[number], self._left[number] = data, left
            self._rows += left


def _rows_of(data: Any) -> int:
    """Return how many samples' data are held together, and could be cut down."""
    return len(data) if hasattr(data, "kept") else 0


def _moved(facts: IntArray, sources: Mapping[int, Any], clear: bool = False) -> Mapping[int, Any]:
    """Put the data of samples that are in lists into one of their own, and return where all are.

    A list of the table has each sample once, so it can be cleared of one that leaves.
    """
    if list not in {*map(type, sources.values())}:
        return sources
    moved, number = list[Any](), new_number()
    for at, (old, row) in enumerate(zip(*facts[DATA:FACTS].tolist(), strict=True)):
        if type(data := sources[old]) is list:
            facts[DATA, at], facts[DATA + 1, at] = number, len(moved)
            moved.append(data[row])
            if clear:
                data[row] = None
    held = {old: data for old, data in sources.items() if type(data) is not list}
    return {**held, number: moved}


_LEAST_ROWS = 32  # below, nothing is cut down
_SPARSE = 3
_NOTED = FACTS  # the row of the digests of records


class PooledRecords:
    """The records of the samples that were in a pool at one time: part of a state."""

    def __init__(self, facts: IntArray, first: int, ordinals: IntArray, pulled: int) -> None:
        self._facts, self._first = facts, first
        self._ordinals, self._pulled = ordinals, pulled
        self._state: PoolContent | None = None

    def to_state(self) -> PoolContent:
        """Return which of the samples last pulled were pooled, and their records."""
        if self._state is None:  # All batches of a step of virtual ranks have this one.
            self._state = self._encoded() if len(self._ordinals) else (None, NO_RECORDS, None)
        return self._state

    def _encoded(self) -> PoolContent:
        pooled = np.zeros(self._pulled - self._first, dtype=bool)
        pooled[self._ordinals - self._first] = True
        facts = self._facts.take(np.flatnonzero(pooled), axis=1)
        facts[DIGEST] = facts[_NOTED]
        return to_bits(pooled), to_records(SampleBlock(facts, {})), None


class PooledSamples:
    """The samples that were in a pool at one time, as a part of a state."""

    def __init__(
        self, ordinals: IntArray, samples: SampleBlock, encoded: dict[int, bytes], pulled: int
    ) -> None:
        self._ordinals, self._samples = ordinals.tolist(), samples
        self._encoded, self._pulled = encoded, pulled

    def to_state(self) -> PoolContent:
        """Return which of the samples last pulled were pooled, and the samples."""
        known = self._encoded
        pairs = zip(self._ordinals, self._samples, strict=True)
        encoded = {at: known.get(at) or encode_sample(one) for at, one in pairs}
        for at in [at for at in known if at not in encoded]:
            del known[at]
        known.update(encoded)
        first = next(iter(encoded), self._pulled)
        pooled = np.zeros(self._pulled - first, dtype=bool)
        pooled[np.array([*encoded], dtype=np.int64) - first] = True
        return to_bits(pooled), None, [*encoded.values()]


def to_bits(pooled: npt.NDArray[np.bool_]) -> bytes | None:
    """Return a bit for each sample, the last one first: whether it is pooled."""
    # Of a view with a negative stride it would take ten times as long.
    return np.packbits(pooled[::-1].copy()).tobytes().rstrip(b"\0") or None


def from_bits(bits: bytes | None, pulled: int) -> list[int]:
    """Return the ordinals of the samples whose bit is set, ascending."""
    pooled = np.flatnonzero(np.unpackbits(np.frombuffer(bits or b"", np.uint8)))
    ordinals: list[int] = (pulled - 1 - pooled[::-1]).tolist()
    return ordinals
