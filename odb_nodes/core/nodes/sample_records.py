"""Samples in states: as records, from which a restore makes them again, or encoded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from types import NoneType
from typing import Any

import numpy as np

from odb_nodes._support.arrays import IntArray, int64_array, int64_bytes
from odb_nodes._support.content import from_bytes, to_bytes
from odb_nodes._support.encoding import from_plain, interned, to_plain
from odb_nodes._support.progress import Bar
from odb_nodes._support.user_warning import warn_user
from odb_nodes.core.contract.again import ItemsAgain, each_of
from odb_nodes.core.contract.config import loading
from odb_nodes.core.processing.observation import digest_of_sample
from odb_nodes.core.sample import ItemKey, Sample, Skipped, data_of, name_of
from odb_nodes.core.sample_block import (
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
    SampleBlock,
    SampleKind,
    code_of,
    kinds_of,
)
from odb_nodes.errors import SampleError, StateError

logger = logging.getLogger("odb_nodes")

RecordsState = tuple[
    bytes | None, bytes | None, list[tuple[Any, ...]], bytes | None, dict[str, bytes]
]
"""The records of samples, which are all facts of the samples without their data: a tuple of

- the tokens and digest of each sample, in the low and the high half of 8 bytes;
- the keys of items, `None` where no item has a key;
- the distinct `SampleKind`s;
- for each sample the number of its kind, if there are several kinds;
- columns by name, in the fewest bytes, where a sample differs from the usual value: repeats (0),
  targets (one less than tokens), patches (0), and keys (the keys of the items).

A sample takes 16 bytes, or 8 where items have no keys; 2 more in a mixture; and 1, 2, 4 or 8 more
for each of these columns."""

NO_RECORDS: RecordsState = (None, None, [], None, {})


class RecordCheck:
    """Makes samples again, and compares them with their records.

    numbers: numbers of the samples in the epoch, (n,), if the node makes them again by number.
    """

    def __init__(self, records: SampleBlock, node: str, numbers: IntArray | None = None) -> None:
        self._facts = records.facts
        self._kinds = records.kinds
        self._node = node
        self._numbers = None if numbers is None else numbers.tolist()
        self._changes: dict[int, str] = {}  # by row, under `strict=False`

    def changed_samples(self, ordinals: IntArray) -> dict[int, str]:
        """Return the differences from the records, by ordinal of the sample."""
        return {int(ordinals[row]): change for row, change in self._changes.items()}

    def all(self, items_again: ItemsAgain) -> list[Sample]:
        """Make all samples, in the order of their keys; return them in the order of the records."""
        order = np.lexsort(self._facts[[ITEM, KIND]]).tolist()
        if order:
            logger.info("making %d samples again to restore a state", len(order))
        items = each_of(items_again, order)
        with_bar = Bar(items, "samples made again to restore a state", len(order))
        samples = {
            row: self.checked(row, sample) for row, sample in zip(order, with_bar, strict=True)
        }
        return [samples[row] for row in range(len(order))]

    def items(self) -> list[ItemKey]:
        """Return the key of each item, or its number in the epoch where samples are numbered."""
        if self._numbers is not None:
            return [ItemKey("", number, 1) for number in self._numbers]
        rows = zip(self._kinds, *self._facts[[ITEM, REPEAT]].tolist(), strict=True)
        return [
            ItemKey(str(kind.item_source), key, kind.world_size, repeat)
            for kind, key, repeat in rows
        ]

    def checked(self, row: int, sample: Sample | Skipped) -> Sample:
        """Return a sample that was made again, compared with its record."""
        tokens, digest = self._facts[[TOKENS, DIGEST], row].tolist()
        name = "a sample"
        if self._numbers is not None:
            name = f"sample {self._numbers[row]} of the epoch"
        name += name_of(sample)
        if isinstance(sample, Skipped):
            raise StateError(
                f"{self._node} cannot resume from its state: {name} was good when saved, but is "
                f"skipped now {sample.why} Repair the data, or use an earlier checkpoint."
            )
        if digest == digest_of_sample(sample):
            return sample
        difference = f"{name} has other content now"
        if tokens != sample.tokens:
            difference = f"{name} had {tokens} tokens when saved, but has {sample.tokens} now"
        order = "The order of the source is not seeded (seed it: no state helps against that), "
        causes = (
            f"{'Either ' if self._numbers is None else order}processing (`process_fn`) "
            "is not deterministic (`ODBDataLoader` and `ParallelProcessor(seed=...)` seed the "
            "global generators, and generators that functions hold, but not generators that a "
            'cache, a Python generator or a call makes: use `state="payload"` for these), or the '
            "data changed."
        )
        change = (
            f"{self._node} cannot resume from its state: {difference}. {causes} If the change is "
            "meant, load with `strict=False`; within a round of steps, which was planned for these "
            "samples, load a state that was saved after the last step of an epoch instead."
        )
        if not loading().may_differ:
            raise StateError(change)
        if not self._changes:
            warn_user(f"{difference}. {causes} Further changed samples are not named.")
        self._changes[row] = change
        return sample


def to_records(block: SampleBlock, *, is_numbered: bool = False) -> RecordsState:
    """Return the records of samples that have digests, as plain data.

    is_numbered: whether samples need no keys.
    """
    facts = block.facts
    codes = {*facts[KIND].tolist()}
    return records_of(costs_of(facts), facts.__getitem__, codes, unusual(facts), is_numbered)


def costs_of(facts: IntArray) -> IntArray:
    """Return tokens and digest of each sample, the low and the high half of 8 bytes, (n,)."""
    costs: IntArray = facts[TOKENS] | facts[DIGEST] << 32
    return costs


def unusual(facts: IntArray) -> set[int]:
    """Return the rows of facts in which a sample differs from the usual value."""
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
    """Return the records of samples, reading only the columns that are needed.

    costs: the result of `costs_of`; column: returns the values of a row of the facts, (n,); codes,
    unusual: the codes of kinds, and the rows of facts with unusual values, that may occur;
    is_numbered: whether samples need no keys.
    """
    if not len(costs):  # Not b"": `torch.load(weights_only=True)` refuses empty bytes.
        return NO_RECORDS
    items = column(ITEM)
    keys: bytes | None = int64_bytes(items)
    if ITEM in unusual:
        lacks_key = items == NONE
        if lacks_key.any() and not is_numbered:
            raise SampleError(
                "the source can read items by their keys, but `item_key()` returned None for an "
                "item that it yielded. Return its `ItemKey`, or define no `read`."
            )
        if lacks_key.all():
            keys = None
    numbers = None
    if len(codes) > 1:
        kinds = column(KIND)
        codes = np.flatnonzero(np.bincount(kinds)).tolist()
        kind_of_code = [tuple(kind) for kind in kinds_of(codes)]
        distinct = sorted({*kind_of_code}, key=repr)
        if len(distinct) > 1:
            number_of = np.zeros(max(codes) + 1, np.intp)
            number_of[codes] = [*map(distinct.index, kind_of_code)]
            numbers = _narrow(number_of[kinds])
    else:
        distinct = [tuple(kind) for kind in kinds_of(codes)]
    usual = _usual({row: column(row) for row in (TOKENS, ITEM)}) if unusual else {}
    columns = {}
    for name, row in _COLUMNS.items():
        if row in unusual:
            values = column(row)
            if (values != usual[name]).any():
                columns[name] = _narrow(values)
    return costs.tobytes(), keys, distinct, numbers, columns


def from_records(state: RecordsState | None, *, is_numbered: bool = False) -> SampleBlock:
    """Return a block of the facts in records, without data.

    is_numbered: whether samples need no keys.
    """
    try:
        costs_bytes, key_bytes, kinds_state, number_bytes, columns = state or NO_RECORDS
        costs = np.frombuffer(costs_bytes or b"", "<u8")
        n = len(costs)
        facts = np.full((FACTS, n), NONE, np.int64)
        facts[TOKENS] = costs & np.uint64(2**32 - 1)
        facts[DIGEST] = costs >> np.uint64(32)
        if key_bytes is not None:
            facts[ITEM] = int64_array(key_bytes)
        numbers = _widened(number_bytes or bytes(n), n)
        kinds = [_kind_of(kind) for kind in kinds_state]
        facts[KIND] = np.array([*map(code_of, kinds)] or [0])[numbers]
        usual = _usual(facts)
        for name, row in _COLUMNS.items():
            facts[row] = _widened(columns[name], n) if name in columns else usual[name]
        lacks_key = facts[ITEM] < (NONE if is_numbered else 0)
        if (facts[[TOKENS, TARGETS, PATCHES, REPEAT]] < 0).any() or lacks_key.any():
            raise ValueError("the records of samples are not valid.")
        if {*columns} - {*_COLUMNS} or (n and not kinds):
            raise ValueError("the records of samples are incomplete.")
    except (ValueError, TypeError, IndexError) as error:
        raise StateError(f"a state is damaged: {error} Use an earlier checkpoint.") from error
    return SampleBlock(facts, {})


_COLUMNS = {"repeats": REPEAT, "targets": TARGETS, "patches": PATCHES, "keys": KEY}


def _usual(facts: IntArray | Mapping[int, IntArray]) -> dict[str, Any]:
    """Return the usual value of each column of `RecordsState`."""
    return {"repeats": 0, "targets": facts[TOKENS] - 1, "patches": 0, "keys": facts[ITEM]}


def _narrow(column: IntArray) -> bytes:
    """Return integers in the fewest bytes."""
    width = 8 if column.min() < 0 else np.min_scalar_type(column.max()).itemsize
    return column.astype(f"<u{width}").tobytes()


def _widened(column: bytes, count: int) -> IntArray:
    """Return the `count` integers that `_narrow` has written."""
    width = len(column) // count if count else 1
    if width not in (1, 2, 4, 8) or len(column) != width * count:
        raise ValueError("the columns of records differ in length.")
    return np.frombuffer(column, f"<u{width}").astype(np.int64)


_NAME = (str, NoneType)  # `None` where items have no keys


def _kind_of(state: Sequence[Any]) -> SampleKind:
    kind = SampleKind(*state)
    item_source = type(kind.item_source)
    if [*map(type, kind)] != [str, str, str, item_source, int, int] or item_source not in _NAME:
        raise ValueError(f"{state!r:.80} is no kind of samples.")
    return kind


def among(records: SampleBlock, world_size: int) -> SampleBlock:
    """Return the records with another number of ranks that share the keys."""
    facts = records.facts.copy()
    codes = [*{*facts[KIND].tolist()}]
    kinds = kinds_of(codes)
    new_code = {
        code: code_of(kind._replace(world_size=world_size))
        for code, kind in zip(codes, kinds, strict=True)
    }
    facts[KIND] = [new_code[code] for code in facts[KIND].tolist()]
    return SampleBlock(facts, {})


def with_digests(block: SampleBlock) -> SampleBlock:
    """Return a block in which each sample has a digest."""
    lacking = np.flatnonzero(block.facts[DIGEST] == NONE)
    if not len(lacking):
        return block
    digests = block.facts[DIGEST].copy()
    digests[lacking] = [*map(digest_of_sample, block.take(lacking))]
    return block.with_facts(digest=digests)


def encode_sample(sample: Sample) -> bytes:
    """Return a sample as bytes for `decode_sample`, which contain no code."""
    item: Any = sample.item and tuple(map(interned, sample.item))
    _, *costs = sample._replace(item=item)
    return to_bytes((to_plain(data_of(sample)), *map(interned, costs)))


def decode_sample(encoded: bytes) -> Sample:
    """Return the sample that `encode_sample` has encoded."""
    try:
        data, *costs = from_bytes(encoded)
        sample = Sample(from_plain(data), *costs)
        return sample if sample.item is None else sample._replace(item=ItemKey(*sample.item))
    except Exception as error:  # Of any type: torch reads arbitrary bytes here.
        raise StateError(
            f"a saved sample of {len(encoded)} bytes is damaged ({type(error).__name__}). Use an "
            "earlier checkpoint."
        ) from error
