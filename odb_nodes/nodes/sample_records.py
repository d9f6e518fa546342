"""What a state holds of samples: records, from which a restore makes them again, or themselves."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from types import NoneType
from typing import Any

import numpy as np
import torch

from odb_nodes._core.content import from_bytes, to_bytes
from odb_nodes._core.progress import Bar
from odb_nodes._core.user_warning import warn_user
from odb_nodes.contract.again import ItemsAgain, each_of
from odb_nodes.contract.config import loading
from odb_nodes.errors import SampleError, StateError
from odb_nodes.processing.observation import digest_of
from odb_nodes.sample import ItemKey, Sample, Skipped, data_of, name_of
from odb_nodes.sample_block import (
    DIGEST,
    FACTS,
    ITEM,
    KEY,
    KIND,
    NONE,
    PATCHES,
    REPEAT,
    TARGETS,
    TOKENS,
    IntArray,
    SampleBlock,
    SampleKind,
    code_of,
    kinds_of,
)

logger = logging.getLogger("odb_nodes")

RecordsState = tuple[
    bytes | None, bytes | None, list[tuple[Any, ...]], bytes | None, dict[str, bytes]
]
"""The records of samples, which say all of them but their data: tokens and digest of each, the low
and the high half of 8 bytes; keys of items, `None` where no item has one; each `SampleKind`; the
number of its kind for each sample, where there are several; and columns by name, in the fewest
bytes, where samples have other values than most: repeats (0), targets (one less than tokens),
patches (0), and keys (those of the items). 16 bytes a sample, 8 where items have no keys; 2 more in
a mixture, and 1, 2, 4 or 8 for each such column."""

NO_RECORDS: RecordsState = (None, None, [], None, {})


class Remaking:
    """Samples that a node makes again from their records, and compares with them.

    numbers: their numbers in the epoch, (n,), where they are made again by these.
    """

    def __init__(self, records: SampleBlock, node: str, numbers: IntArray | None = None) -> None:
        self._facts, self._kinds, self._node = records.facts, records.kinds, node
        self._numbers = None if numbers is None else numbers.tolist()
        self._changed: dict[int, str] = {}  # by row, where that is allowed

    def changed_samples(self, ordinals: IntArray) -> dict[int, str]:
        """Return how samples, whose ordinals these are, differ from their records."""
        return {int(ordinals[row]): change for row, change in self._changed.items()}

    def all(self, again: ItemsAgain) -> list[Sample]:
        """Return all samples, neighbours together."""
        order = np.lexsort(self._facts[[ITEM, KIND]]).tolist()
        if order:
            logger.info("making %d samples again to restore a state", len(order))
        made = Bar(each_of(again, order), "samples made again to restore a state", len(order))
        samples = {row: self.checked(row, one) for row, one in zip(order, made, strict=True)}
        return [samples[row] for row in range(len(order))]

    def items(self) -> list[ItemKey]:
        """Return the key of each item; its number in the epoch, where it is made again by that."""
        if self._numbers is not None:
            return [ItemKey("", number, 1) for number in self._numbers]
        rows = zip(self._kinds, *self._facts[[ITEM, REPEAT]].tolist(), strict=True)
        return [
            ItemKey(str(kind.item_source), key, kind.world_size, repeat)
            for kind, key, repeat in rows
        ]

    def checked(self, index: int, sample: Sample | Skipped) -> Sample:
        """Return a sample, once it is known to be what it was."""
        tokens, digest = self._facts[[TOKENS, DIGEST], index].tolist()
        numbers, name = self._numbers, "a sample"
        if numbers is not None:
            name = f"sample {numbers[index]} of the epoch"
        if isinstance(sample, Skipped):
            raise StateError(
                f"{self._node} cannot go on from its state: {name}{name_of(sample)} was good when "
                f"saved, but is skipped now {sample.why} Mend the data, or use an earlier "
                "checkpoint."
            )
        if digest == digest_of(sample):
            return sample
        what = "has other content"
        if tokens != sample.tokens:
            what = f"had {tokens} tokens when saved, but has {sample.tokens}"
        found = f"{name}{name_of(sample)} {what} now"
        order = "The order of the source is not seeded (seed it: no state helps against that), "
        causes = (
            f"{'Either ' if numbers is None else order}processing is not deterministic "
            "(`ParallelProcessor(seed=...)` seeds the global generators and held ones, but none "
            "that a cache, a Python generator or a call makes; for those there is "
            '`state="payload"`), or the data changed.'
        )
        change = (
            f"{self._node} cannot go on from its state: {found}. {causes} If the change is meant, "
            "load with `strict=False`; within a round of steps, which is planned by its samples, "
            "that does not help, but a state that was saved after the last step of an epoch does."
        )
        if not loading().may_differ:
            raise StateError(change)
        if not self._changed:
            warn_user(f"{found}. {causes} Further ones are not named.")
        self._changed[index] = change
        return sample


def to_records(block: SampleBlock, *, is_numbered: bool = False) -> RecordsState:
    """Return the records of samples, whose digests are known, as plain data.

    is_numbered: whether samples need no keys.
    """
    facts = block.facts
    values = {*facts[KIND].tolist()}, unusual(facts), is_numbered
    return records_of(costs_of(facts), facts.__getitem__, *values)


def costs_of(facts: IntArray) -> IntArray:
    """Return tokens and digest of each sample, the low and the high half of 8 bytes, (n,)."""
    costs: IntArray = facts[TOKENS] | facts[DIGEST] << 32
    return costs


def unusual(facts: IntArray) -> set[int]:
    """Return the rows of facts in which some samples have another value than most samples do."""
    usual = _usual(facts)
    rows = {row for name, row in _COLUMNS.items() if (facts[row] != usual[name]).any()}
    if (facts[ITEM] == NONE).any():
        rows.add(ITEM)
    return rows


def records_of(
    costs: IntArray,
    column: Callable[[int], IntArray],
    codes: Collection[int],
    unusual: Collection[int],
    is_numbered: bool = False,
) -> RecordsState:
    """Return the records of samples, which reads only the columns that it needs.

    costs: what `costs_of` has returned; column: row of the facts -> its values, (n,); codes: those
    of all kinds, and unusual: the rows with unusual values, of these samples and maybe others;
    is_numbered: whether samples need no keys.
    """
    if not len(costs):  # Not b"": `torch.load(weights_only=True)` refuses empty bytes.
        return NO_RECORDS
    items = column(ITEM)
    keys: bytes | None = items.tobytes()
    if ITEM in unusual:
        lacks_key = items == NONE
        if lacks_key.any() and not is_numbered:
            raise SampleError(
                "the source can read items by their keys, but `item_key()` returned None for one "
                "that it yielded. Return its `ItemKey`, or define no `read`."
            )
        if lacks_key.all():
            keys = None
    numbers = None
    if len(codes) > 1:
        kinds = column(KIND)
        codes = np.flatnonzero(np.bincount(kinds)).tolist()
        known = [(*kind,) for kind in kinds_of(codes)]
        if len(distinct := sorted({*known}, key=repr)) > 1:
            number_of = np.zeros(max(codes) + 1, np.intp)
            number_of[codes] = [*map(distinct.index, known)]
            numbers = _narrow(number_of[kinds])
    else:
        distinct = [(*kind,) for kind in kinds_of(codes)]
    usual = _usual({row: column(row) for row in (TOKENS, ITEM)}) if unusual else {}
    columns = {}
    for name, row in _COLUMNS.items():
        if row in unusual and ((values := column(row)) != usual[name]).any():
            columns[name] = _narrow(values)
    return costs.tobytes(), keys, distinct, numbers, columns


def from_records(state: RecordsState | None, *, is_numbered: bool = False) -> SampleBlock:
    """Return what is known of the samples of records, without data.

    is_numbered: whether samples need no keys.
    """
    try:
        costs_of, keys_of, kinds_state, numbers_of, columns = state or NO_RECORDS
        costs = np.frombuffer(costs_of or b"", "<u8")
        n = len(costs)
        facts = np.full((FACTS, n), NONE, np.int64)
        facts[TOKENS], facts[DIGEST] = costs & np.uint64(2**32 - 1), costs >> np.uint64(32)
        if keys_of is not None:
            facts[ITEM] = np.frombuffer(keys_of, "<i8")
        numbers = _widened(numbers_of or bytes(n), n)
        kinds = [_kind_of(kind) for kind in kinds_state]
        facts[KIND] = np.array([*map(code_of, kinds)] or [0])[numbers]
        usual = _usual(facts)
        for name, row in _COLUMNS.items():
            facts[row] = _widened(columns[name], n) if name in columns else usual[name]
        lacks_key = facts[ITEM] < (NONE if is_numbered else 0)
        if (facts[[TOKENS, TARGETS, PATCHES, REPEAT]] < 0).any() or lacks_key.any():
            raise ValueError("what is known of samples is not valid.")
        if {*columns} - {*_COLUMNS} or (n and not kinds):
            raise ValueError("it lacks what is known of samples.")
    except (ValueError, TypeError, IndexError) as error:
        raise StateError(f"a state is damaged: {error} Use an earlier checkpoint.") from error
    return SampleBlock(facts, {})


_COLUMNS = {"repeats": REPEAT, "targets": TARGETS, "patches": PATCHES, "keys": KEY}


def _usual(facts: IntArray | Mapping[int, IntArray]) -> dict[str, Any]:
    """Return what most samples have in the columns of records."""
    return {"repeats": 0, "targets": facts[TOKENS] - 1, "patches": 0, "keys": facts[ITEM]}


def _narrow(column: IntArray) -> bytes:
    """Return integers of samples in the fewest bytes."""
    width = 8 if column.min() < 0 else np.min_scalar_type(column.max()).itemsize
    return column.astype(f"<u{width}").tobytes()


def _widened(column: bytes, count: int) -> IntArray:
    """Return the integers of so many samples that `_narrow` has written."""
    width = len(column) // count if count else 1
    if width not in (1, 2, 4, 8) or len(column) != width * count:
        raise ValueError("samples and what is known of them are not of one number.")
    return np.frombuffer(column, f"<u{width}").astype(np.int64)


_NAME = (str, NoneType)  # `None` where items have no keys


def _kind_of(state: Sequence[Any]) -> SampleKind:
    """Return a kind of samples that a state names."""
    kind = SampleKind(*state)
    item_source = type(kind.item_source)
    if [*map(type, kind)] != [str, str, str, item_source, int, int] or item_source not in _NAME:
        raise ValueError(f"{state!r:.80} is no kind of samples.")
    return kind


def among(records: SampleBlock, world_size: int) -> SampleBlock:
    """Return the same records, of items whose numbers so many ranks share."""
    facts, codes = records.facts.copy(), records.facts[KIND].tolist()
    known = dict(zip(found := [*{*codes}], kinds_of(found), strict=True))
    new = {at: code_of(kind._replace(world_size=world_size)) for at, kind in known.items()}
    facts[KIND] = [new[code] for code in codes]
    return SampleBlock(facts, {})


def with_digests(block: SampleBlock) -> SampleBlock:
    """Return a block whose digests are known."""
    lacking = np.flatnonzero(block.facts[DIGEST] == NONE)
    if not len(lacking):
        return block
    digests = block.facts[DIGEST].copy()
    digests[lacking] = [*map(digest_of, block.take(lacking))]
    return block.with_facts(digest=digests)


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
    of_dtype = f" of dtype {value.dtype}" if isinstance(value, np.ndarray) else ""
    raise SampleError(
        f"a state that carries samples cannot hold `{kind.__name__}`{of_dtype}. Return dicts, "
        'lists and tuples of tensors, arrays, numbers and strings, or use `state="replay"`.'
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
