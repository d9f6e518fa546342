"""The samples that a rank has pulled and not yielded: facts by ordinal, and data."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from odb_nodes._support.arrays import IntArray
from odb_nodes.core.nodes.lazy_samples import LazySamples, want, with_data_made
from odb_nodes.core.nodes.sample_records import (
    RecordsState,
    costs_of,
    encode_sample,
    records_of,
    unusual,
    with_digests,
)
from odb_nodes.core.planning.facts import ColumnsByOrdinal, Facts
from odb_nodes.core.sample_block import (
    DATA,
    DIGEST,
    FACTS,
    KIND,
    NONE,
    ROW,
    SampleBlock,
    kinds_of,
    new_number,
)
from odb_nodes.errors import SampleError, StateError

StoreContent = tuple[int, bytes | None, bytes | None, RecordsState | None, list[bytes] | None]
"""The samples of a store in a state, a tuple of

- the ordinal of the oldest sample;
- for each ordinal from the oldest on a bit: whether the sample is stored;
- a second bit: whether the sample is in the pool; `None` if all stored samples are;
- the records of the stored samples, oldest first, or `None`;
- or else the stored samples, encoded, oldest first."""


class SampleStore:
    """Samples by ordinal, from when they are pulled until they are yielded.

    The facts of a sample are written once, behind the facts of earlier samples, so that a state
    may refer to them. The digests that records need are written to row `_COSTS` below the facts.
    Once the holders of data have three times as many samples as the store, each holder of which the
    store needs a third or less is cut down.
    """

    def __init__(self) -> None:
        self._facts = ColumnsByOrdinal(FACTS + 1)  # The last row is `_COSTS`.
        self._is_stored = np.zeros(0, dtype=bool)  # by ordinal, from `_facts.first` on
        self._count = 0
        self._holders = _DataHolders()
        self._lacks_digests = False  # whether a sample lacks its digest
        # codes of kinds, and rows of facts, of all samples so far: see `records_of`
        self._codes = self._unusual = frozenset[int]()
        self._filler: tuple[int, bool] | None = None  # its ordinal; whether a step has used it

    def __len__(self) -> int:
        return self._count

    def __contains__(self, ordinal: int) -> bool:
        index = ordinal - self._facts.first
        return 0 <= index < len(self._is_stored) and bool(self._is_stored[index])

    @property
    def may_lack_data(self) -> bool:
        """Whether a sample may have lazy data, as after a restore."""
        return self._holders.lazy > 0

    @property
    def next_ordinal(self) -> int:
        """A number above the ordinals of all samples so far."""
        return self._facts.stop

    def oldest(self, default: int) -> int:
        """Return the ordinal of the oldest sample, or `default` if the store is empty."""
        return self._facts.first + int(self._is_stored.argmax()) if self._count else default

    def ordinals(self) -> IntArray:
        """Return the ordinals of all samples, ascending, (n,)."""
        return np.flatnonzero(self._is_stored) + self._facts.first

    def add(self, ordinals: IntArray, block: SampleBlock) -> None:
        """Add samples, with ordinals above the ordinals of all samples so far."""
        if not len(block):
            return
        columns = np.empty((FACTS + 1, len(block)), np.int64)
        columns[:FACTS] = block.facts
        columns[_COSTS] = costs_of(block.facts)
        holders = _moved(columns, block.holders)
        first = self._facts.first
        self._facts.put(ordinals, columns, self.oldest(int(ordinals[0])))
        if self._facts.first != first or self._facts.capacity > len(self._is_stored):
            is_stored = self._is_stored[max(0, self._facts.first - first) :]
            self._is_stored = np.zeros(self._facts.capacity, dtype=bool)
            self._is_stored[: len(is_stored)] = is_stored[: self._facts.capacity]
        self._is_stored[ordinals - self._facts.first] = True
        self._count += len(block)
        self._lacks_digests |= bool((block.facts[DIGEST] == NONE).any())
        self._codes |= {*block.facts[KIND].tolist()}
        self._unusual |= unusual(block.facts)
        numbers = columns[DATA].tolist()
        self._holders.hold(numbers, holders)
        if self._holders.rows > _SPARSE * max(self._count, _LEAST_ROWS):
            self._compact(newest=numbers[-1])

    def look(self, ordinals: IntArray) -> SampleBlock:
        """Return samples, which stay in the store. `take` removes the data of the result.

        `copied` returns samples that keep their data.
        """
        facts = self._facts.take(ordinals)[:FACTS]
        return SampleBlock(facts, self._holders.of(facts[DATA].tolist()))

    def copied(self, ordinals: IntArray) -> SampleBlock:
        """Return samples, which stay in the store. The result keeps its data."""
        block = self.look(ordinals)
        return SampleBlock(block.facts, _moved(block.facts, block.holders))

    def want(self, groups: Iterable[IntArray]) -> None:
        """Queue the lazy data of groups, in this order."""
        if self.may_lack_data:
            want(map(self.look, groups))

    def make(self, ordinals: IntArray) -> None:
        """Make the data of samples, if it is lazy.

        Raises:
            StateError: a sample differs from its record in the state.
            SampleError, WorkerError: a sample cannot be made.
        """
        if not self.may_lack_data:
            return
        block = self.look(ordinals)
        made = with_data_made(block)
        if made is block:
            return
        columns = ordinals - self._facts.first
        lazy_numbers = self._facts.table[DATA].take(columns).tolist()
        self._facts.table[DATA:FACTS, columns] = made.facts[DATA:]
        self._holders.hold(made.facts[DATA].tolist(), made.holders)
        self._holders.release(lazy_numbers)

    def take(self, ordinals: IntArray) -> SampleBlock:
        """Remove samples and return them."""
        if self._filler is not None and self._filler[0] in ordinals:  # The filler stays.
            self._filler = self._filler[0], True
            block = self.copied(ordinals)
            self._drop(ordinals[ordinals != self._filler[0]])
            return block
        facts = self._facts.take(ordinals)[:FACTS]
        numbers = facts[DATA].tolist()
        block = SampleBlock(facts, _moved(facts, self._holders.of(numbers), clear=True))
        self._forget(ordinals, numbers)
        return block

    def drop(self, ordinals: IntArray) -> None:
        """Remove samples."""
        if self._filler is not None and self._filler[0] in ordinals:
            self._filler = None
        self._drop(ordinals)

    def keep_filler(self, ordinal: int | None, *, is_out: bool = False) -> None:
        """Keep a sample after `take`, until the next call; `None`: keep no sample.

        is_out: whether a step has used the sample.
        """
        previous = self._filler
        self._filler = None if ordinal is None else (ordinal, is_out)
        if previous is not None and previous[1]:
            if previous[0] == ordinal:
                self._filler = previous
            else:
                self._drop(np.array([previous[0]]))

    @property
    def filler(self) -> int | None:
        """The ordinal of the sample that is kept."""
        return None if self._filler is None else self._filler[0]

    def state(self, pooled: IntArray, *, is_numbered: bool = False) -> StoredRecords:
        """Return the records of all samples, as part of a state.

        pooled: ordinals of the samples in the pool, (n,), which must not change.
        is_numbered: whether samples are made again by ordinal, so that they need no keys.
        """
        table, first, stop = self._facts.table, self._facts.first, self._facts.stop
        if self._lacks_digests:
            columns = np.flatnonzero(self._is_stored)
            lacking = columns[table[_COSTS, columns] >> 32 == NONE]
            block = self.look(lacking + first)
            table[_COSTS, lacking] = costs_of(with_digests(block).facts)
            self._lacks_digests = False
        start = self.oldest(default=stop)
        span = slice(start - first, stop - first)
        is_stored = self._is_stored[span].copy()
        return StoredRecords(
            table[:, span], start, is_stored, pooled, self._codes, self._unusual, is_numbered
        )

    def _drop(self, ordinals: IntArray) -> None:
        self._forget(ordinals, self._facts.take(ordinals)[DATA].tolist())

    def _forget(self, ordinals: IntArray, numbers: list[int]) -> None:
        self._is_stored[ordinals - self._facts.first] = False
        self._count -= len(ordinals)
        self._holders.release(numbers)

    def _compact(self, newest: int) -> None:
        """Cut holders down to the samples of the store."""
        table = self._facts.table
        stored = np.flatnonzero(self._is_stored)
        numbers = table[DATA].take(stored)
        for number in self._holders.sparse():
            if number == newest:  # More samples of this holder may come.
                continue
            columns = stored[numbers == number]
            block = SampleBlock(table[:FACTS, columns], self._holders.of([number])).alone()
            table[DATA:FACTS, columns] = block.facts[DATA:]
            self._holders.hold(block.facts[DATA].tolist(), block.holders)
            self._holders.release([number] * len(columns))


class _DataHolders:
    """The holders of data, by number, each with a count of its samples in the store."""

    def __init__(self) -> None:
        self._by_number: dict[int, Any] = {}
        self._samples: dict[int, int] = {}
        self.rows = 0
        """Samples in holders that can be cut down, including samples no longer in the store."""
        self.lazy = 0
        """Number of `LazySamples` among the holders."""

    def of(self, numbers: Iterable[int]) -> dict[int, Any]:
        """Return the holders that have these numbers."""
        return {number: self._by_number[number] for number in {*numbers}}

    def hold(self, numbers: list[int], holders: Mapping[int, Any]) -> None:
        """Count samples, each by the number of its holder, and keep the holders."""
        for number in {*numbers}:
            if number not in self._samples:
                self._by_number[number] = holders[number]
                self._samples[number] = 0
                self._count(holders[number], 1)
            self._samples[number] += numbers.count(number)

    def release(self, numbers: list[int]) -> None:
        """Uncount samples, each by the number of its holder, and drop holders without samples."""
        for number in numbers:
            self._samples[number] -= 1
        for number in {*numbers}:
            if not self._samples[number]:
                self._count(self._by_number.pop(number), -1)
                del self._samples[number]

    def sparse(self) -> list[int]:
        """Return the numbers of holders that have far more data than the store needs."""
        return [
            number
            for number, samples in self._samples.items()
            if _SPARSE * samples <= _rows_of(self._by_number[number])
        ]

    def _count(self, holder: Any, sign: int) -> None:
        self.rows += sign * _rows_of(holder)
        self.lazy += sign * isinstance(holder, LazySamples)


def facts_of(block: SampleBlock, ordinals: IntArray, task: npt.ArrayLike = 0) -> Facts:
    """Return the facts of samples for planning."""
    codes = block.facts[KIND]
    are_alike = not len(codes) or bool((codes == codes[0]).all())
    kinds = kinds_of((codes[:1] if are_alike else codes).tolist())
    sharers = [kind.world_size for kind in kinds]
    return Facts(
        ordinal=ordinals,
        tokens=block.tokens,
        targets=block.targets,
        patches=block.patches,
        task=task,
        sharers=sharers if sharers else 0,
    )


def _rows_of(data: Any) -> int:
    """Return how many samples a holder has that can be cut down; 0 for other holders."""
    return len(data) if hasattr(data, "take_rows") else 0


def _moved(
    facts: IntArray, old_holders: Mapping[int, Any], clear: bool = False
) -> Mapping[int, Any]:
    """Move data of samples from lists to a new list. Changes `facts`, and returns the holders.

    clear: whether to clear the rows of the old lists, which the store alone refers to.
    """
    if list not in {*map(type, old_holders.values())}:
        return old_holders
    moved: list[Any] = []
    number = new_number()
    places = zip(facts[DATA].tolist(), facts[ROW].tolist(), strict=True)
    for column, (old_number, row) in enumerate(places):
        data = old_holders[old_number]
        if type(data) is list:
            facts[DATA, column] = number
            facts[ROW, column] = len(moved)
            moved.append(data[row])
            if clear:
                data[row] = None
    holders = {old: data for old, data in old_holders.items() if type(data) is not list}
    return {**holders, number: moved}


_LEAST_ROWS = 32  # with fewer rows, no holder is cut down
_SPARSE = 3  # a holder is sparse if it has so many times the rows that the store needs
_COSTS = FACTS  # the row with the result of `costs_of`


class StoredRecords:
    """The records of the samples that were in the store when this was made: part of a state."""

    def __init__(
        self,
        table: IntArray,
        first: int,
        is_stored: npt.NDArray[np.bool_],
        pooled: IntArray,
        codes: Collection[int],
        unusual: Collection[int],
        is_numbered: bool,
    ) -> None:
        self._table = table
        self._first = first
        self._is_stored = is_stored
        self._pooled = pooled
        self._codes = codes
        self._unusual = unusual
        self._is_numbered = is_numbered
        self._state: StoreContent | None = None

    def to_state(self) -> StoreContent:
        """Return the records as plain data."""
        if self._state is None:  # All batches of a step of virtual ranks share this object.
            columns = np.flatnonzero(self._is_stored)

            def column(row: int) -> IntArray:
                values: IntArray = self._table[row].take(columns)
                return values

            records = records_of(
                column(_COSTS), column, self._codes, self._unusual, self._is_numbered
            )
            is_stored = self._is_stored[: int(columns[-1]) + 1] if len(columns) else self._is_stored
            bits = bits_of(self._first, is_stored, self._pooled, len(columns))
            self._state = *bits, records, None
        return self._state


class StoredSamples:
    """The samples that were in the store when this was made, encoded: part of a state."""

    def __init__(self, store: SampleStore, pooled: IntArray, encoded: dict[int, bytes]) -> None:
        self._ordinals = store.ordinals()
        self._pooled = pooled
        self._samples = store.copied(self._ordinals)
        self._encoded = encoded  # cache of encoded samples by ordinal, shared by all states

    def to_state(self) -> StoreContent:
        """Return the encoded samples as plain data."""
        cache = self._encoded
        samples = zip(self._ordinals.tolist(), self._samples, strict=True)
        try:
            encoded = {
                ordinal: cache.get(ordinal) or encode_sample(sample) for ordinal, sample in samples
            }
        except SampleError as error:
            raise SampleError(f'{error} Or use `state="replay"`.') from None
        for ordinal in [*cache]:
            if ordinal not in encoded:
                del cache[ordinal]
        cache.update(encoded)
        return *to_bits(self._ordinals, self._pooled), None, [*encoded.values()]


def to_bits(stored: IntArray, pooled: IntArray) -> tuple[int, bytes | None, bytes | None]:
    """Return the first three fields of a `StoreContent`, of ascending ordinals."""
    first = int(stored[0]) if len(stored) else 0
    stop = int(stored[-1]) + 1 if len(stored) else 0
    is_stored = np.zeros(stop - first, dtype=bool)
    is_stored[stored - first] = True
    return bits_of(first, is_stored, pooled, len(stored))


def bits_of(
    first: int, is_stored: npt.NDArray[np.bool_], pooled: IntArray, count: int
) -> tuple[int, bytes | None, bytes | None]:
    """Return the first three fields of a `StoreContent` of `count` samples.

    is_stored: whether each sample is stored, by ordinal from `first` on.
    """
    if not count:
        return 0, None, None  # Not b"": `torch.load(weights_only=True)` refuses empty bytes.
    bits = np.packbits(is_stored).tobytes()
    if len(pooled) == count:
        return first, bits, None
    is_pooled = np.zeros(len(is_stored), dtype=bool)
    is_pooled[pooled - first] = True
    return first, bits, np.packbits(is_pooled).tobytes()


def from_bits(content: StoreContent) -> tuple[IntArray, IntArray]:
    """Return the ordinals of the stored samples, ascending, and of the samples in the pool."""
    first, bits, pooled, *_ = content
    if first < 0:
        raise StateError("the pool of a state is damaged. Use an earlier checkpoint.")
    is_stored = np.unpackbits(np.frombuffer(bits or b"", np.uint8))
    stored = np.flatnonzero(is_stored) + first
    if pooled is None:
        return stored, stored
    is_pooled = np.unpackbits(np.frombuffer(pooled, np.uint8))
    if len(is_pooled) != len(is_stored) or (is_pooled > is_stored).any():
        raise StateError("the pool of a state is damaged. Use an earlier checkpoint.")
    return stored, np.flatnonzero(is_pooled) + first
