"""What a state holds of samples that a restore makes again: a table that never changes."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torchdata.nodes import BaseNode

from odb_nodes._core.content import from_bytes, to_bytes
from odb_nodes._core.progress import Bar
from odb_nodes._core.user_warning import warn_user
from odb_nodes.contract.config import loading
from odb_nodes.contract.node import restore_items
from odb_nodes.errors import SampleError, StateError
from odb_nodes.planning import RollingPool
from odb_nodes.planning.table import ORDINALS
from odb_nodes.processing.observation import digest_of
from odb_nodes.sample import ItemKey, Sample, Skipped, data_of, name_of
from odb_nodes.sample_block import (
    DATA,
    DIGEST,
    FACTS,
    ITEM,
    KIND,
    NONE,
    ORDINAL,
    REPEAT,
    TOKENS,
    IntArray,
    SampleBlock,
    kinds_of,
    new_number,
)

logger = logging.getLogger("odb_nodes")

RecordsState = tuple[bytes | None, bytes | None, list[tuple[str, int]], bytes | None, bytes | None]
"""`SampleRecords` as plain data: tokens and digests; keys; source and world size of each origin;
the number of its origin for each sample, where there are several; repeats, where some are not 0, in
the fewest bytes. 16 bytes a sample; 2 more in a mixture, and 1, 2, 4 or 8 for repeats."""

PoolContent = tuple[bytes | None, RecordsState | None, list[bytes] | None]
"""A bit for each of the samples last pulled, the last one first: whether it is pooled; the records
of these samples, or the samples, encoded, oldest first."""

NO_RECORDS: RecordsState = (None, None, [], None, None)

NUMBERED = ("", 0)
"""The origin of samples without keys: they are numbered in the order in which a rank reads them."""

T = TypeVar("T")


def with_progress(samples: Iterable[T], total: int) -> Iterator[T]:
    """Yield what is made again for a restore, and show how far it is."""
    if total:
        logger.info("making %d samples again to restore a state", total)
        yield from Bar(samples, "samples made again to restore a state", total)


class SampleRecords:
    """Length and digest of samples, and the items that they were made of.

    Args:
        costs: tokens and digest of each sample, the low and the high half of (n,) uint64.
        keys: key of the item of each, (n,) int64.
        repeats: its `ItemKey.repeat`, (n,) int64.
        numbers: the number of its origin, (n,) uint16.
        origins: source and world size of the items.
    """

    def __init__(
        self,
        costs: npt.NDArray[np.uint64],
        keys: npt.NDArray[np.int64],
        repeats: npt.NDArray[np.int64],
        numbers: npt.NDArray[np.uint16],
        origins: list[tuple[str, int]],
    ) -> None:
        self._costs, self.keys, self._repeats, self._numbers = costs, keys, repeats, numbers
        self.origins = origins
        self._warned = False

    @classmethod
    def of(cls, block: SampleBlock) -> SampleRecords:
        """Return the records of samples, whose digests are known."""
        facts = block.facts
        costs = facts[TOKENS].astype("<u8") | facts[DIGEST].astype("<u8") << np.uint64(32)
        if not len(block) or facts[ORDINAL, 0] != NONE:
            none = np.zeros(len(block), np.int64)
            return cls(costs, facts[ORDINAL], none, none.astype("<u2"), [NUMBERED])
        if (facts[ITEM] == NONE).any():
            raise SampleError(
                "the source can read items by their keys, but `item_key()` returned None for one "
                "that it yielded. Return its `ItemKey`, or define no `read`."
            )
        codes = facts[KIND]
        known, kinds = codes[:1], np.zeros(len(codes), np.intp)
        if (codes != codes[0]).any():
            known, kinds = np.unique(codes, return_inverse=True)
        found = [(str(kind.item_source), kind.world_size) for kind in kinds_of(known.tolist())]
        origins = sorted({*found})
        numbers = np.array([*map(origins.index, found)], "<u2")[kinds]
        return cls(costs, facts[ITEM], facts[REPEAT], numbers, origins)

    def __len__(self) -> int:
        return len(self._costs)

    def take(self, indices: npt.NDArray[np.intp]) -> SampleRecords:
        """Return those at some indices: in a third of the time that a mask takes."""
        rest = self._repeats.take(indices), self._numbers.take(indices), self.origins
        return SampleRecords(self._costs.take(indices), self.keys.take(indices), *rest)

    def __getitem__(self, which: slice) -> SampleRecords:
        rest = self._repeats[which], self._numbers[which], self.origins
        return SampleRecords(self._costs[which], self.keys[which], *rest)

    def to_state(self) -> RecordsState:
        """Return the records as plain data."""
        if not len(self):  # Not b"": `torch.load(weights_only=True)` refuses empty bytes.
            return NO_RECORDS
        costs, keys = self._costs.tobytes(), self.keys.tobytes()
        narrow = np.min_scalar_type(self._repeats.max())
        repeats = self._repeats.astype(narrow).tobytes() if self._repeats.any() else None
        if len(self.origins) == 1:
            return costs, keys, [*self.origins], None, repeats
        used = sorted({*map(self.origins.__getitem__, np.unique(self._numbers).tolist())})
        renumbered = [used.index(one) if one in used else 0 for one in self.origins]
        numbers = np.array(renumbered, "<u2")[self._numbers]
        return costs, keys, used, numbers.tobytes() if len(used) > 1 else None, repeats

    @classmethod
    def from_state(cls, state: RecordsState) -> SampleRecords:
        """Return what `to_state` was called on."""
        try:
            costs, origins = np.frombuffer(state[0] or b"", "<u8"), state[2]
            n = len(costs)
            keys = np.frombuffer(state[1] or b"", "<i8")
            width = len(state[4] or b"") // n if n else 0
            narrow = f"<u{width}" if width in (1, 2, 4) else "<i8"
            repeats = np.frombuffer(state[4] or bytes(8 * n), narrow).astype("<i8")
            numbers = np.frombuffer(state[3] or bytes(2 * n), "<u2")
            if not len(keys) == len(repeats) == len(numbers) == n:
                raise ValueError("samples and their keys are not of one number.")
            if (keys < 0).any() or (repeats < 0).any() or (numbers >= max(1, len(origins))).any():
                raise ValueError("keys of samples are not valid.")
        except ValueError as error:
            raise StateError(f"a state is damaged: {error} Use an earlier checkpoint.") from error
        return cls(costs, keys, repeats, numbers, origins)

    @classmethod
    def joined(cls, parts: Sequence[SampleRecords]) -> SampleRecords:
        """Return the records of all parts, in their order."""
        parts = [part for part in parts if len(part)]
        if len(parts) == 1:
            return parts[0]
        if not parts:
            return cls.from_state(NO_RECORDS)
        origins = sorted({origin for part in parts for origin in part.origins})
        numbers = [
            part._numbers
            if part.origins == origins
            else np.array([*map(origins.index, part.origins)], "<u2")[part._numbers]
            for part in parts
        ]
        return cls(
            np.concatenate([part._costs for part in parts]),
            np.concatenate([part.keys for part in parts]),
            np.concatenate([part._repeats for part in parts]),
            np.concatenate(numbers),
            origins,
        )

    def among(self, world_size: int) -> SampleRecords:
        """Return the same records, of items whose numbers so many ranks share."""
        origins = [(source, world_size) for source, _ in self.origins]
        return SampleRecords(self._costs, self.keys, self._repeats, self._numbers, origins)

    @property
    def are_numbered(self) -> bool:
        """Whether the samples have numbers in place of keys."""
        return NUMBERED in self.origins

    @property
    def tokens(self) -> npt.NDArray[np.int64]:
        """Length of each sample, (n,)."""
        return (self._costs & np.uint64(2**32 - 1)).astype(np.int64)

    def items(self) -> list[ItemKey]:
        """Return the items of the samples."""
        columns = (self.keys.tolist(), self._numbers.tolist(), self._repeats.tolist())
        of = self.origins
        return [ItemKey(of[at][0], key, of[at][1], n) for key, at, n in zip(*columns, strict=True)]

    def restore(self, source: BaseNode[Any], node: str) -> list[Sample]:
        """Return the samples, which the source makes again."""
        again = with_progress(restore_items(source, self.items()), len(self))
        return [self.checked(index, sample, node) for index, sample in enumerate(again)]

    def checked(self, index: int, sample: Sample | Skipped, node: str) -> Sample:
        """Return a sample, once it is known to be what it was."""
        name = f"sample {self.keys[index]} of the epoch" if self.are_numbered else "a sample"
        if isinstance(sample, Skipped):
            raise StateError(
                f"{node} cannot be restored: {name}{name_of(sample)} was good when saved, but is "
                f"skipped now {sample.why} Mend the data, or use an earlier checkpoint."
            )
        digest, tokens = divmod(int(self._costs[index]), 2**32)
        if digest == digest_of(sample):
            return sample
        what = "has other content"
        if tokens != sample.tokens:
            what = f"had {tokens} tokens when saved, but has {sample.tokens}"
        found = f"{name}{name_of(sample)} {what} now"
        order = "The order of the source is not seeded (seed it: no state helps against that), "
        causes = (
            f"{order if self.are_numbered else 'Either '}processing is not deterministic "
            "(`ParallelProcessor(seed=...)` seeds the global generators; for others there is "
            '`state="payload"`), or the data changed.'
        )
        if not loading().may_differ:
            raise StateError(
                f"{node} cannot be restored: {found}. {causes} If the change is meant, load with "
                "`strict=False`; within a round of steps, which is planned by its samples, that "
                "does not help, but a state that was saved after the last step of an epoch does."
            )
        if not self._warned:
            warn_user(f"{found}. {causes} Further ones are not named.")
        self._warned = True
        return sample


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
        self._facts[:FACTS, at], self._facts[_NOTED, at] = block.facts, block.facts[DIGEST]
        sources = _moved(own := block.facts.copy(), block.sources)
        self._facts[DATA:FACTS, at] = own[DATA:]
        numbers, left = own[DATA].tolist(), self._left
        for number in {*numbers}:
            if number not in left:
                self._sources[number], left[number] = sources[number], 0
                self._rows += _rows_of(sources[number])
        for number in numbers:
            left[number] += 1
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
    if not any(type(data) is list for data in sources.values()):
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


def with_digests(block: SampleBlock) -> SampleBlock:
    """Return a block whose digests are known."""
    if not (block.facts[DIGEST] == NONE).any():
        return block
    return block.with_facts(digest=[*map(digest_of, block)])


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
        at = np.flatnonzero(pooled)
        facts = np.empty((FACTS, len(at)), np.int64)
        for row in (TOKENS, KIND, ITEM, REPEAT, ORDINAL):  # all that a record is made of
            facts[row] = self._facts[row].take(at)
        facts[DIGEST] = self._facts[_NOTED].take(at)
        return to_bits(pooled), SampleRecords.of(SampleBlock(facts, {})).to_state(), None


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


_SCALARS = (int, str, float, bool, type(None))


def encode_sample(sample: Sample) -> bytes:
    """Return a sample as bytes that `decode_sample` can read, and no code can hide in."""
    item: Any = sample.item and tuple(map(_interned, sample.item))
    _, *costs = sample._replace(item=item)
    return to_bytes((_encode(data_of(sample)), *map(_interned, costs)))


def decode_sample(encoded: bytes) -> Sample:
    """Return the sample that `encode_sample` was given."""
    try:
        data, *costs = from_bytes(encoded)
        sample = Sample(_decode(data), *costs)
        return sample if sample.item is None else sample._replace(item=ItemKey(*sample.item))
    except Exception as error:  # of any kind: torch reads whatever the bytes say
        raise StateError(
            f"a saved sample of {len(encoded)} bytes is damaged ({type(error).__name__}). Use an "
            "earlier checkpoint."
        ) from error


def _interned(value: Any) -> Any:
    # Pickle repeats an equal string that is another object: the bytes would not be the same.
    return sys.intern(value) if type(value) is str else value


def _encode(value: Any) -> Any:
    kind = type(value)
    if kind in _SCALARS:
        return ("is", _interned(value))
    if kind in (torch.Tensor, torch.nn.Parameter):  # `torch.load` refuses other subclasses
        return ("tensor", value.detach().clone())  # and not the storage that it is a view of
    if kind is bytes:
        return ("bytes", _to_tensor(value))
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return ("array", sys.intern(value.dtype.str), value.shape, _to_tensor(value.tobytes()))
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return ("scalar", sys.intern(value.dtype.str), _to_tensor(value.tobytes()))
    if kind is dict:
        return ("dict", [(_encode(key), _encode(item)) for key, item in value.items()])
    if kind in (list, tuple):
        return (kind.__name__, [_encode(item) for item in value])
    raise SampleError(
        f"a state that carries samples cannot hold `{kind.__name__}`. Return dicts, lists and "
        'tuples of tensors, arrays, numbers and strings, or use `state="replay"`.'
    )


def _decode(encoded: tuple[Any, ...]) -> Any:
    kind, *content = encoded
    if kind == "is":
        return content[0]
    if kind == "tensor":
        return content[0]
    if kind == "array":
        dtype, shape, data = content
        return np.frombuffer(data.numpy().tobytes(), dtype).reshape(shape).copy()
    if kind == "scalar":
        return np.frombuffer(content[1].numpy().tobytes(), content[0])[0]
    if kind == "bytes":
        return content[0].numpy().tobytes()
    if kind == "dict":
        return {_decode(key): _decode(item) for key, item in content[0]}
    items = [_decode(item) for item in content[0]]
    return items if kind == "list" else tuple(items)


def _to_tensor(data: bytes) -> torch.Tensor:
    # `torch.load(weights_only=True)` refuses empty bytes, and torch lacks some of numpy's dtypes.
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy())
