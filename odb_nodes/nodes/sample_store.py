"""The samples that a rank has pulled and not given out: facts by ordinal, and their data."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from odb_nodes.errors import StateError
from odb_nodes.nodes.lazy_samples import LazySamples, want, with_data_made
from odb_nodes.nodes.sample_records import (
    RecordsState,
    costs_of,
    encode_sample,
    records_of,
    unusual,
    with_digests,
)
from odb_nodes.planning.facts import ColumnsByOrdinal, Facts
from odb_nodes.sample_block import (
    DATA,
    DIGEST,
    FACTS,
    KIND,
    NONE,
    IntArray,
    SampleBlock,
    kinds_of,
    new_number,
)

StoreContent = tuple[int, bytes | None, bytes | None, RecordsState | None, list[bytes] | None]
"""The ordinal of the oldest sample; a bit for it and each that was pulled after it: whether it is
held; another one: whether it waits in the pool, `None` where all that are held do; and the records
of these samples, or the samples, encoded, oldest first."""


class SampleStore:
    """Samples by their ordinals, from when they are pulled until they are given out.

    The facts of a sample are written once, behind those of all before it, so a state may refer to
    them. What its record holds of costs is noted beside the facts: a sample is the same whether
    there is a state or not. Where the chunks that hold data have three times as many samples as are
    held, those are cut down of which at most a third is.
    """

    def __init__(self) -> None:
        self._facts = ColumnsByOrdinal(FACTS + 1)  # and a row of `_COSTS`
        self._is_held = np.zeros(0, dtype=bool)  # by ordinal, from `_facts.first` on
        self._count = 0
        self._holders = _DataHolders()
        self._lacks_digests = False  # of some of them
        self._codes = self._unusual = frozenset[int]()  # of all samples so far: see `records_of`
        self._filler: tuple[int, bool] | None = None  # its ordinal, and whether a step has had it

    def __len__(self) -> int:
        return self._count

    def __contains__(self, ordinal: int) -> bool:
        at = ordinal - self._facts.first
        return 0 <= at < len(self._is_held) and bool(self._is_held[at])

    @property
    def may_lack_data(self) -> bool:
        """Whether data may be still to be made, as after a restore."""
        return self._holders.lazy > 0

    @property
    def next_ordinal(self) -> int:
        """A number that is greater than those of all samples so far."""
        return self._facts.stop

    def oldest(self, otherwise: int) -> int:
        """Return the ordinal of the oldest sample, or another number where there is none."""
        return self._facts.first + int(self._is_held.argmax()) if self._count else otherwise

    def ordinals(self) -> IntArray:
        """Return the ordinals of all samples, ascending, (n,)."""
        return np.flatnonzero(self._is_held) + self._facts.first

    def add(self, ordinals: IntArray, block: SampleBlock) -> None:
        """Put samples in, younger ones than all before."""
        if not len(block):
            return
        columns = np.empty((FACTS + 1, len(block)), np.int64)
        columns[:FACTS], columns[_COSTS] = block.facts, costs_of(block.facts)
        sources = _moved(columns, block.sources)
        first = self._facts.first
        self._facts.put(ordinals, columns, self.oldest(int(ordinals[0])))
        if self._facts.first != first or self._facts.capacity > len(self._is_held):
            held = self._is_held[max(0, self._facts.first - first) :]
            self._is_held = np.zeros(self._facts.capacity, dtype=bool)
            self._is_held[: len(held)] = held[: self._facts.capacity]
        self._is_held[ordinals - self._facts.first] = True
        self._count += len(block)
        self._lacks_digests |= bool((block.facts[DIGEST] == NONE).any())
        self._codes |= {*block.facts[KIND].tolist()}
        self._unusual |= unusual(block.facts)
        self._holders.hold(numbers := columns[DATA].tolist(), sources)
        if self._holders.rows > _SPARSE * max(self._count, _LEAST_ROWS):
            self._compact(newest=numbers[-1])

    def look(self, ordinals: IntArray) -> SampleBlock:
        """Return samples, which stay. The result loses its data as they are taken."""
        facts = self._facts.take(ordinals)[:FACTS]
        return SampleBlock(facts, self._holders.of(facts[DATA].tolist()))

    def copied(self, ordinals: IntArray) -> SampleBlock:
        """Return samples, which stay in the store as well as in the result."""
        block = self.look(ordinals)
        return SampleBlock(block.facts, _moved(block.facts, block.sources))

    def want(self, groups: Iterable[IntArray]) -> None:
        """Have the data of samples made in this order, before those of others."""
        if self.may_lack_data:
            want(map(self.look, groups))

    def make(self, ordinals: IntArray) -> None:
        """Have the data of samples, where these are still to be made again.

        Raises:
            StateError: a sample is not what it was when the state was saved.
            SampleError, WorkerError: a sample cannot be made.
        """
        if not self.may_lack_data:
            return
        block = self.look(ordinals)
        if (made := with_data_made(block)) is block:
            return
        table, at = self._facts.table, ordinals - self._facts.first
        before = table[DATA].take(at).tolist()
        table[DATA:FACTS, at] = made.facts[DATA:]
        self._holders.hold(made.facts[DATA].tolist(), made.sources)
        self._holders.release(before)

    def take(self, ordinals: IntArray) -> SampleBlock:
        """Return samples, which leave."""
        if self._filler is not None and self._filler[0] in ordinals:  # It may be needed again.
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
        """Let go of samples that are given to nobody."""
        if self._filler is not None and self._filler[0] in ordinals:
            self._filler = None
        self._drop(ordinals)

    def keep_filler(self, ordinal: int | None, *, is_out: bool = False) -> None:
        """Keep a sample after it was given out, until there is another such sample.

        is_out: whether it was given out already.
        """
        before, self._filler = self._filler, None if ordinal is None else (ordinal, is_out)
        if before is not None and before[1]:
            if before[0] == ordinal:
                self._filler = before
            else:
                self._drop(np.array([before[0]]))

    @property
    def filler(self) -> int | None:
        """The ordinal of the sample that is kept."""
        return None if self._filler is None else self._filler[0]

    def state(self, pooled: IntArray, *, is_numbered: bool = False) -> HeldRecords:
        """Return the records of all samples, which a state may keep.

        pooled: ordinals of those that wait in the pool, (n,), which must not change; is_numbered:
        whether samples are made again by their ordinals, so that they need no keys.
        """
        table, first, stop = self._facts.table, self._facts.first, self._facts.stop
        if self._lacks_digests:
            at = np.flatnonzero(self._is_held)
            lacking = at[table[_COSTS, at] >> 32 == NONE]
            block = self.look(lacking + first)
            table[_COSTS, lacking] = costs_of(with_digests(block).facts)
            self._lacks_digests = False
        start = self.oldest(otherwise=stop)
        held = slice(start - first, stop - first)
        is_held = self._is_held[held].copy()
        values = self._codes, self._unusual, is_numbered
        return HeldRecords(table[:, held], start, is_held, pooled, *values)

    def _drop(self, ordinals: IntArray) -> None:
        self._forget(ordinals, self._facts.take(ordinals)[DATA].tolist())

    def _forget(self, ordinals: IntArray, numbers: list[int]) -> None:
        self._is_held[ordinals - self._facts.first] = False
        self._count -= len(ordinals)
        self._holders.release(numbers)

    def _compact(self, newest: int) -> None:
        at, table = np.flatnonzero(self._is_held), self._facts.table
        numbers = table[DATA].take(at)
        for number in self._holders.sparse():
            if number == newest:  # Of it, further samples may be on their way.
                continue
            own = at[numbers == number]
            block = SampleBlock(table[:FACTS, own], self._holders.of([number])).alone()
            table[DATA:FACTS, own] = block.facts[DATA:]
            self._holders.hold(block.facts[DATA].tolist(), block.sources)
            self._holders.release([number] * len(own))


class _DataHolders:
    """What holds the data of samples, by number, and of how many."""

    def __init__(self) -> None:
        self._by_number: dict[int, Any] = {}
        self._left: dict[int, int] = {}  # samples of each that are held
        self.rows = 0
        """Samples whose data can be cut down, also of those that are gone."""
        self.lazy = 0
        """Holders that make data when they are asked for them."""

    def of(self, numbers: Iterable[int]) -> dict[int, Any]:
        """Return what holds the data of samples, whose numbers these are."""
        return {number: self._by_number[number] for number in {*numbers}}

    def hold(self, numbers: list[int], holders: Mapping[int, Any]) -> None:
        """Take up what holds the data of samples, a number for each."""
        for number in {*numbers}:
            if number not in self._left:
                self._by_number[number], self._left[number] = holders[number], 0
                self._count(holders[number], 1)
            self._left[number] += numbers.count(number)

    def release(self, numbers: list[int]) -> None:
        """Let go of samples, a number for each, and of what holds the data of no other."""
        for number in numbers:
            self._left[number] -= 1
        for number in {*numbers}:
            if not self._left[number]:
                self._count(self._by_number.pop(number), -1)
                del self._left[number]

    def sparse(self) -> list[int]:
        """Return the numbers of what holds far more data than is needed."""
        return [
            number
            for number, left in self._left.items()
            if _SPARSE * left <= _rows_of(self._by_number[number])
        ]

    def _count(self, holder: Any, sign: int) -> None:
        self.rows += sign * _rows_of(holder)
        self.lazy += sign * isinstance(holder, LazySamples)


def facts_of(block: SampleBlock, ordinals: IntArray, task: npt.ArrayLike = 0) -> Facts:
    """Return what planning knows of samples."""
    kinds = block.facts[KIND]
    is_one = not len(kinds) or bool((kinds == kinds[0]).all())
    sharers = [
        kind.world_size for kind in kinds_of(kinds[:1].tolist() if is_one else kinds.tolist())
    ]
    return Facts(
        ordinal=ordinals,
        tokens=block.tokens,
        targets=block.targets,
        patches=block.patches,
        task=task,
        sharers=sharers if sharers else 0,
    )


def _rows_of(data: Any) -> int:
    """Return how many samples' data are held together, and could be cut down."""
    return len(data) if hasattr(data, "kept") else 0


def _moved(facts: IntArray, sources: Mapping[int, Any], clear: bool = False) -> Mapping[int, Any]:
    """Put the data of samples that are in lists into one of their own, and return where all are.

    A list of the store has each sample once, so it can be cleared of one that leaves.
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
_COSTS = FACTS  # the row of what records hold of costs


class HeldRecords:
    """The records of the samples that were held at one time: part of a state."""

    def __init__(
        self,
        table: IntArray,
        first: int,
        is_held: npt.NDArray[np.bool_],
        pooled: IntArray,
        codes: Collection[int],
        unusual: Collection[int],
        is_numbered: bool,
    ) -> None:
        self._table, self._first, self._is_held, self._pooled = table, first, is_held, pooled
        self._codes, self._unusual, self._is_numbered = codes, unusual, is_numbered
        self._state: StoreContent | None = None

    def to_state(self) -> StoreContent:
        """Return which samples were held, and their records."""
        if self._state is None:  # All batches of a step of virtual ranks have this one.
            at = np.flatnonzero(self._is_held)

            def column(row: int) -> IntArray:
                values: IntArray = self._table[row].take(at)
                return values

            values = self._codes, self._unusual, self._is_numbered
            records = records_of(column(_COSTS), column, *values)
            is_held = self._is_held[: int(at[-1]) + 1] if len(at) else self._is_held
            bits = bits_of(self._first, is_held, self._pooled, len(at))
            self._state = *bits, records, None
        return self._state


class HeldSamples:
    """The samples that were held at one time, encoded: part of a state."""

    def __init__(self, store: SampleStore, pooled: IntArray, encoded: dict[int, bytes]) -> None:
        self._ordinals, self._pooled = store.ordinals(), pooled
        self._samples, self._encoded = store.copied(self._ordinals), encoded

    def to_state(self) -> StoreContent:
        """Return which samples were held, and the samples."""
        known, numbers = self._encoded, self._ordinals.tolist()
        pairs = zip(numbers, self._samples, strict=True)
        encoded = {at: known.get(at) or encode_sample(one) for at, one in pairs}
        for at in [at for at in known if at not in encoded]:
            del known[at]
        known.update(encoded)
        return *to_bits(self._ordinals, self._pooled), None, [*encoded.values()]


def to_bits(held: IntArray, pooled: IntArray) -> tuple[int, bytes | None, bytes | None]:
    """Return the first of the ordinals of samples, ascending, and the bits of a `StoreContent`."""
    first, stop = (int(held[0]), int(held[-1]) + 1) if len(held) else (0, 0)
    is_held = np.zeros(stop - first, dtype=bool)
    is_held[held - first] = True
    return bits_of(first, is_held, pooled, len(held))


def bits_of(
    first: int, is_held: npt.NDArray[np.bool_], pooled: IntArray, count: int
) -> tuple[int, bytes | None, bytes | None]:
    """Return the bits of `count` samples, by ordinal from that of the oldest, `first`, on."""
    if not count:
        return 0, None, None  # Not b"": `torch.load(weights_only=True)` refuses empty bytes.
    bits = np.packbits(is_held).tobytes()
    if len(pooled) == count:
        return first, bits, None
    waits = np.zeros(len(is_held), dtype=bool)
    waits[pooled - first] = True
    return first, bits, np.packbits(waits).tobytes()


def from_bits(content: StoreContent) -> tuple[IntArray, IntArray]:
    """Return the ordinals of the samples that were held, ascending, and of those in the pool."""
    first, bits, pooled, *_ = content
    if first < 0:
        raise StateError("the pool of a state is damaged. Use an earlier checkpoint.")
    is_held = np.unpackbits(np.frombuffer(bits or b"", np.uint8))
    held = np.flatnonzero(is_held) + first
    if pooled is None:
        return held, held
    is_pooled = np.unpackbits(np.frombuffer(pooled, np.uint8))
    if len(is_pooled) != len(is_held) or (is_pooled > is_held).any():
        raise StateError("the pool of a state is damaged. Use an earlier checkpoint.")
    return held, np.flatnonzero(is_pooled) + first
