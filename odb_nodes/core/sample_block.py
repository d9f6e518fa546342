"""Samples as a table: a column of facts for each sample, and a reference to its data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from operator import sub
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt

from odb_nodes._support.arrays import IntArray
from odb_nodes._support.checks import MAX_KEY, check_count
from odb_nodes._support.text import counted
from odb_nodes.core.sample import ItemKey, Sample, name_of
from odb_nodes.errors import SampleError

TOKENS, TARGETS, PATCHES, KIND, KEY, ITEM, REPEAT, DIGEST, ORDINAL, DATA, ROW = range(11)
"""The rows of `SampleBlock.facts`: fields of a `Sample` as integers. `KIND` is the code of its
`SampleKind`; `ITEM` and `REPEAT` are of its `ItemKey`; `DATA` is the number of the holder of its
data, and `ROW` its row in the holder. From `KEY` to `ORDINAL`, -1 is `None`."""
FACTS = 11
NONE = -1
_MOST_NAMES = 16  # samples named in an error

_SAMPLE_OF = partial(tuple.__new__, Sample)  # `Sample()` is a function in Python
_KEY_OF = partial(tuple.__new__, ItemKey)


class SampleKind(NamedTuple):
    """Fields that many samples share; `item_source` is `None` where they have no `ItemKey`."""

    source: str
    counted: str
    task: str
    item_source: str | None
    world_size: int
    padding: int = 0

    @property
    def task_name(self) -> str:
        """See `Sample.task_name`."""
        return self.task or self.source


class _Kinds:
    """Numbers the kinds of this process, without a lock, which a fork might inherit."""

    def __init__(self) -> None:
        self._codes: dict[tuple[Any, ...], int] = {}
        self._next = count()
        self.by_code: dict[int, SampleKind] = {}

    def __getitem__(self, kind: tuple[Any, ...]) -> int:
        code = self._codes.get(kind)
        if code is None:
            code = next(self._next)
            self.by_code[code] = SampleKind(*kind)
            code = self._codes.setdefault(kind, code)
        return code


_KINDS = _Kinds()


def kinds_of(codes: Iterable[int]) -> list[SampleKind]:
    """Return the kinds that have these codes."""
    return [*map(_KINDS.by_code.__getitem__, codes)]


def code_of(kind: SampleKind) -> int:
    """Return the code of a kind, which is valid in this process only."""
    return _KINDS[kind]


class SampleBlock(Sequence[Sample]):
    """Samples of a chunk, a pool or a group. It is immutable.

    `Sample` objects are created on first access.

    Args:
        facts: the facts of each sample, (11, n) int64; `TOKENS` to `ROW` name the rows.
        holders: the holders of the data of samples, each a sequence, by the number in row `DATA`.
    """

    __slots__ = ("_lengths", "_samples", "facts", "holders")

    def __init__(self, facts: IntArray, holders: Mapping[int, Any]) -> None:
        self.facts, self.holders = facts, holders
        self._samples: list[Sample] | None = None
        self._lengths: list[int] | None = None

    @classmethod
    def of(cls, samples: Sequence[Sample], data: Sequence[Any] | None = None) -> SampleBlock:
        """Return samples as a block.

        Args:
            samples: the samples.
            data: holder of their data, in their order. Default: the samples themselves.

        Raises:
            SampleError: a count or key of a sample is no integer of 63 bits.
        """
        if isinstance(samples, SampleBlock):
            return samples
        facts = np.empty((FACTS, len(samples)), np.int64)
        table = np.array([_row_of(sample) for sample in samples]).reshape(-1, DATA)
        if len(samples) and table.dtype != np.int64:
            for sample in samples:
                check_fits(sample)
        facts[:DATA] = table.T
        if data is not None:
            return cls(facts, {}).with_data(data)
        block = cls(facts, {}).with_data([sample.data for sample in samples])
        block._samples = [*samples]
        return block

    @classmethod
    def joined(cls, blocks: Sequence[SampleBlock]) -> SampleBlock:
        """Return the samples of all blocks, in their order."""
        if len(blocks) == 1:
            return blocks[0]
        if not blocks:
            return NO_SAMPLES
        facts = np.concatenate([block.facts for block in blocks], axis=1)
        holders: dict[int, Any] = {}
        for block in blocks:
            holders.update(block.holders)
        joined = cls(facts, holders)
        if any(block.has_objects for block in blocks):
            joined._samples = [sample for block in blocks for sample in block]
        return joined

    def __reduce__(self) -> Any:
        facts = self.facts.copy()
        codes = np.unique(facts[KIND])
        facts[KIND] = np.searchsorted(codes, facts[KIND])
        numbers = [*self.holders]
        if len(numbers) > 1:
            numbers = np.unique(facts[DATA]).tolist()
            facts[DATA] = np.searchsorted(numbers, facts[DATA])
        else:
            facts[DATA] = 0
        holders = [self.holders[number] for number in numbers]
        return _block_of, (facts, kinds_of(codes.tolist()), holders)

    def __len__(self) -> int:
        return len(self.facts[0])

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> SampleBlock: ...
    def __getitem__(self, index: int | slice) -> Sample | SampleBlock:
        if isinstance(index, slice):
            samples = None if self._samples is None else self._samples[index]
            return self._part(self.facts[:, index], samples)
        return self.samples()[index]

    def __iter__(self) -> Iterator[Sample]:
        return iter(self.samples())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self.samples() == [*other]

    __hash__ = None  # type: ignore[assignment]

    def __add__(self, other: Sequence[Sample]) -> list[Sample]:
        return [*self, *other]

    def __radd__(self, other: Sequence[Sample]) -> list[Sample]:
        return [*other, *self]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.samples()})"

    @property
    def tokens(self) -> IntArray:
        """Length of each sample, (n,)."""
        return self._row(TOKENS)

    @property
    def lengths(self) -> list[int]:
        """The tokens as a list, which is created once."""
        if self._lengths is None:
            self._lengths = self.facts[TOKENS].tolist()
        return self._lengths

    @property
    def targets(self) -> IntArray:
        """Supervised tokens of each sample, (n,)."""
        return self._row(TARGETS)

    @property
    def patches(self) -> IntArray:
        """Image patches of each sample, (n,)."""
        return self._row(PATCHES)

    @property
    def kinds(self) -> list[SampleKind]:
        """The kind of each sample."""
        return kinds_of(self.facts[KIND].tolist())

    @property
    def real_lengths(self) -> list[int]:
        """Length of each sample without its `Sample.padding`."""
        padding = [kind.padding for kind in self.kinds]
        return [*map(sub, self.lengths, padding)] if any(padding) else self.lengths

    def _row(self, row: int) -> IntArray:
        values: IntArray = self.facts[row]
        return values

    def take(self, indices: npt.NDArray[Any] | Sequence[int]) -> SampleBlock:
        """Return the samples at these indices, in their order."""
        columns = np.asarray(indices, np.int64)
        samples = None
        if self._samples is not None:
            samples = [self._samples[index] for index in columns.tolist()]
        return self._part(self.facts.take(columns, axis=1), samples)

    def _part(self, facts: IntArray, samples: list[Sample] | None) -> SampleBlock:
        """Return a part of the samples, with only the holders of their data."""
        holders = self.holders
        if len(holders) > 1:
            holders = {number: holders[number] for number in {*facts[DATA].tolist()}}
        block = SampleBlock(facts, holders)
        block._samples = samples
        return block

    @property
    def has_objects(self) -> bool:
        """Whether `Sample` objects were created, whose data the caller may have changed."""
        return bool(self._samples)  # `NO_SAMPLES` has an empty list.

    def alone(self) -> SampleBlock:
        """Return these samples, with holders that are cut down to their data if possible."""
        facts = self.facts.copy()
        holders: dict[int, Any] = {}
        for number in {*facts[DATA].tolist()}:
            columns = np.flatnonzero(facts[DATA] == number)
            holder = self.holders[number]
            part = kept_rows(holder, facts[ROW, columns])
            if part is None:
                holders[number] = holder
            else:
                new = new_number()
                facts[DATA, columns] = new
                facts[ROW, columns] = np.arange(len(columns))
                holders[new] = part
        block = SampleBlock(facts, holders)
        block._samples = self._samples
        return block

    def with_facts(self, **rows: npt.ArrayLike) -> SampleBlock:
        """Return these samples with other facts: `digest=` or `ordinal=`, (n,) each."""
        facts = self.facts.copy()
        for name, values in rows.items():
            facts[_ROWS[name]] = values
        return SampleBlock(facts, self.holders)

    def with_data(self, data: Any) -> SampleBlock:
        """Return these samples with `data` as the holder of their data."""
        facts = self.facts.copy()
        number = new_number()
        facts[DATA] = number
        facts[ROW] = np.arange(len(self))
        return SampleBlock(facts, {number: data})

    def without_data(self) -> SampleBlock:
        """Return these samples with `None` as their data."""
        return self.with_data([None] * len(self))

    def places(self) -> Iterator[tuple[int, int]]:
        """Yield for each sample the number of the holder of its data, and its row there."""
        return zip(self.facts[DATA].tolist(), self.facts[ROW].tolist(), strict=True)

    def data(self) -> list[Any]:
        """Return the data of each sample."""
        if self._samples is not None:
            return [sample.data for sample in self._samples]
        holders = self.holders
        return [holders[number][row] for number, row in self.places()]

    def samples(self) -> list[Sample]:
        """Return the samples: the same objects each time."""
        if self._samples is None:
            self._samples = [*map(_sample_of, self.data(), *self.facts[:DATA].tolist())]
        return self._samples


def kept_rows(data: Any, rows: IntArray) -> Any:
    """Return a holder of only these rows of `data`; `None` if `data` cannot be cut down."""
    if isinstance(data, list):
        return [data[row] for row in rows.tolist()]
    return data.take_rows(rows) if hasattr(data, "take_rows") else None


_numbers = count()


def new_number() -> int:
    """Return a new number for a holder of data, which is valid in this process only."""
    return next(_numbers)


NO_SAMPLES = SampleBlock(np.empty((FACTS, 0), np.int64), {})

_ROWS = {"digest": DIGEST, "ordinal": ORDINAL}


def _block_of(facts: IntArray, kinds: Sequence[SampleKind], holders: Sequence[Any]) -> SampleBlock:
    """Return a block that was pickled, with the codes and numbers of this process."""
    codes = [_KINDS[kind] for kind in kinds]
    numbers = [new_number() for _ in holders]
    for row, values in (KIND, codes), (DATA, numbers):
        if values:  # A block may have no holders.
            facts[row] = np.array(values, np.int64)[facts[row]] if len(values) > 1 else values[0]
    return SampleBlock(facts, dict(zip(numbers, holders, strict=True)))


def names_of(samples: Sequence[Sample]) -> str:
    """Return the size of a group, and source and key of its first samples, for errors."""
    shown = "".join(map(name_of, samples[:_MOST_NAMES]))
    return counted(len(samples), "sample") + shown + " ..." * (len(samples) > _MOST_NAMES)


@contextmanager
def naming_samples(function: str, samples: Sequence[Sample], where: str = "") -> Iterator[None]:
    """Raise an error of a user's function as a `SampleError` that names function and samples.

    Out-of-memory errors pass unchanged: guards recognise them by type.
    """
    try:
        yield
    except Exception as error:
        is_memory = isinstance(error, MemoryError) or "OutOfMemory" in type(error).__name__
        if isinstance(error, SampleError) or is_memory or "out of memory" in str(error):
            raise
        raised = f"{type(error).__name__}: {error}".rstrip(": .")
        raise SampleError(
            f"`{function}` raised {raised}. It was given {names_of(samples)}{where}."
        ) from error


def check_fits(sample: Sample) -> None:
    """Raise a `SampleError` unless all numbers of a sample are integers of 63 bits."""
    _, tokens, targets, patches, _, _, key, *_ = sample
    if type(tokens) is type(targets) is type(patches) is int and key is None:
        if 0 <= min(tokens, targets, patches) and max(tokens, targets, patches) <= MAX_KEY:
            return
    for name in ("tokens", "targets", "patches", "key", "digest", "ordinal"):
        value = getattr(sample, name)
        try:
            if value is not None:
                check_count(name, value, 0, MAX_KEY)
        except (TypeError, ValueError) as error:
            raise SampleError(f"a `Sample`{name_of(sample)} is not valid: {error}") from error


def _row_of(sample: Sample) -> tuple[Any, ...]:
    _, tokens, targets, patches, source, counted, key, item, digest, task, ordinal, padding = sample
    item_source, number, world_size, repeat = (None, NONE, 0, 0) if item is None else item
    if key is None:
        key = NONE
    elif key == NONE:  # It stands for no key, so it is no valid key: an array rejects `None`.
        key = None
    return (
        tokens,
        targets,
        patches,
        _KINDS[source, counted, task, item_source, world_size, padding],
        key,
        number,
        repeat,
        NONE if digest is None else digest,
        NONE if ordinal is None else ordinal,
    )


def _sample_of(
    data: Any,
    tokens: int,
    targets: int,
    patches: int,
    code: int,
    key: int,
    item: int,
    repeat: int,
    digest: int,
    ordinal: int,
) -> Sample:
    source, counted, task, item_source, world_size, padding = _KINDS.by_code[code]
    return _SAMPLE_OF(
        (
            data,
            tokens,
            targets,
            patches,
            source,
            counted,
            None if key == NONE else key,
            None if item == NONE else _KEY_OF((item_source, item, world_size, repeat)),
            None if digest == NONE else digest,
            task,
            None if ordinal == NONE else ordinal,
            padding,
        )
    )


class ItemKeys(Sequence["ItemKey | None"]):
    """Keys of items, in columns. It is immutable.

    Args:
        numbers: `ItemKey.key` of each item, -1 for an item without a key, (n,) int64.
        repeats: `ItemKey.repeat` of each item, (n,) int64.
        codes: index in `origins` of each item, (n,) int64.
        origins: pairs of source and world size.
    """

    __slots__ = ("codes", "numbers", "origins", "repeats")

    def __init__(
        self,
        numbers: IntArray,
        repeats: IntArray,
        codes: IntArray,
        origins: Sequence[tuple[str, int]],
    ) -> None:
        self.numbers, self.repeats, self.codes, self.origins = numbers, repeats, codes, origins

    @classmethod
    def of(cls, keys: Sequence[ItemKey | None]) -> ItemKeys:
        """Return keys as columns."""
        if isinstance(keys, ItemKeys):
            return keys
        origins: dict[tuple[str, int], int] = {}
        rows = [
            (NONE, 0, 0)
            if key is None
            else (key[1], key[3], origins.setdefault((key[0], key[2]), len(origins)))
            for key in keys
        ]
        numbers, repeats, codes = np.array(rows, dtype=np.int64).reshape(-1, 3).T.copy()
        return cls(numbers, repeats, codes, [*origins] or [("", 1)])

    @classmethod
    def joined(cls, parts: Sequence[Sequence[ItemKey | None]]) -> ItemKeys:
        """Return the keys of all parts, in their order."""
        if len(parts) == 1:
            return cls.of(parts[0])
        columns = [part for part in parts if isinstance(part, ItemKeys)]
        has_all = len(columns) == len(parts)
        if columns and has_all and all(part.origins == columns[0].origins for part in columns):
            return cls(
                np.concatenate([part.numbers for part in columns]),
                np.concatenate([part.repeats for part in columns]),
                np.concatenate([part.codes for part in columns]),
                columns[0].origins,
            )
        return cls.of([key for part in parts for key in part])

    def __reduce__(self) -> Any:
        return ItemKeys, (self.numbers, self.repeats, self.codes, [*self.origins])

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, index: int) -> ItemKey | None: ...
    @overload
    def __getitem__(self, index: slice) -> ItemKeys: ...
    def __getitem__(self, index: int | slice) -> ItemKey | ItemKeys | None:
        if isinstance(index, slice):
            rows = self.numbers[index], self.repeats[index], self.codes[index]
            return ItemKeys(*rows, self.origins)
        number, repeat = int(self.numbers[index]), int(self.repeats[index])
        source, world_size = self.origins[int(self.codes[index])]
        return None if number == NONE else ItemKey(source, number, world_size, repeat)

    def __iter__(self) -> Iterator[ItemKey | None]:
        origins = self.origins
        columns = self.numbers.tolist(), self.codes.tolist(), self.repeats.tolist()
        for number, code, repeat in zip(*columns, strict=True):
            source, world_size = origins[code]
            yield None if number == NONE else _KEY_OF((source, number, world_size, repeat))

    @property
    def are_known(self) -> bool:
        """Whether each item has a key."""
        return bool((self.numbers >= 0).all())
