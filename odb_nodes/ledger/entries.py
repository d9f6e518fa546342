"""The samples of an epoch as columns, and a digest of what each rank had at each step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from odb_nodes.ledger.history import Block, Stretch
from odb_nodes.ledger.rank_records import RankRecords
from odb_nodes.ledger.records import (
    FILLER,
    HEAD,
    NARROW_NO_KEY,
    NO_KEY,
    OWN,
    REASON_BYTES,
    STEP,
    Widths,
)

Ints = npt.NDArray[np.int64]
TRAINED = 0
_CHUNK_RECORDS = 1 << 15
DIGEST_BYTES = 32


@dataclass(kw_only=True)
class Names:
    """Numbers of sources and reasons that are the same in all files.

    Attributes:
        own: names of the sources that each rank has for itself.
        sources: (name, rank whose keys it has, or -1 for those of all ranks) -> number.
        reasons: text -> number; "" is `TRAINED`.
    """

    own: set[str]
    sources: dict[tuple[str, int], int] = field(default_factory=dict)
    reasons: dict[str, int] = field(default_factory=lambda: {"": TRAINED})

    @classmethod
    def of(cls, ranks: Sequence[RankRecords]) -> Names:
        """Return no numbers yet, and which sources any rank is known to have for itself."""
        attempts = [attempt for one in ranks for attempt in one.attempts]
        named = [name for attempt in attempts for name in attempt.names.values()]
        return cls(own={text for text, flags in named if flags & OWN})


@dataclass(kw_only=True)
class Entries:
    """The samples of one epoch, in the order of ranks, attempts and steps.

    Attributes:
        names: what the numbers stand for.
        keys: `NO_KEY` where there is none, (n,) int64.
        sources: numbers, (n,) int32.
        fates: `TRAINED`, or the number of a reason, (n,) int32.
        repeats: (n,) int32, or int64 where need be; `None` where all are 0.
        ends: number of samples up to the end of each record, (records,) int64.
        ranks: rank of each record, (records,) int32.
        steps: its step, (records,) int64.
        digests: digest of each record, in the same order.
        leaves: digest of each step over all ranks, (steps, DIGEST_BYTES) uint8.
        filler: number of records without a sample of their own.
    """

    names: Names
    keys: Ints
    sources: npt.NDArray[np.int32]
    fates: npt.NDArray[np.int32]
    repeats: npt.NDArray[np.int32] | Ints | None
    ends: Ints
    ranks: npt.NDArray[np.int32]
    steps: Ints
    digests: list[bytes]
    leaves: npt.NDArray[np.uint8]
    filler: int


def entries_of(stretches: Sequence[Stretch], names: Names) -> Entries:
    """Return the samples of an epoch."""
    chunks = list(_chunks(stretches))
    heads = [block.attempt.heads[block.indices] for block in chunks]
    counts = [(head["samples"] + head["left_out"]).astype(np.int64) for head in heads]
    ends = np.cumsum(np.concatenate(counts))
    size = int(ends[-1])
    entries = Entries(
        names=names,
        keys=np.empty(size, np.int64),
        sources=np.zeros(size, np.int32),
        fates=np.zeros(size, np.int32),
        repeats=None,
        ends=ends,
        ranks=np.repeat([block.of.rank for block in chunks], list(map(len, heads))).astype("i4"),
        steps=np.concatenate([block.steps for block in chunks]),
        digests=[],
        leaves=np.empty((0, DIGEST_BYTES), np.uint8),
        filler=sum(int((head["kind"] - STEP & FILLER > 0).sum()) for head in heads),
    )
    at = 0
    for block, head, count in zip(chunks, heads, counts, strict=True):
        stop = at + int(count.sum())
        _decode(entries, slice(at, stop), block, head, count)
        entries.digests += _digests(entries, slice(at, stop), head, count)
        at = stop
    entries.leaves = _leaves(entries)
    for records in {id(block.of): block.of for block in chunks}.values():
        records.forget_pages()
    return entries


def _chunks(stretches: Sequence[Stretch]) -> Iterator[Block]:
    """Yield blocks of a bounded number of records."""
    for stretch in stretches:
        for _, blocks in sorted(stretch.blocks.items()):
            for block in blocks:
                for at in range(0, len(block.indices), _CHUNK_RECORDS):
                    indices = block.indices[at : at + _CHUNK_RECORDS]
                    yield Block(of=block.of, attempt=block.attempt, indices=indices)


def _decode(
    entries: Entries, place: slice, block: Block, heads: npt.NDArray[np.void], counts: Ints
) -> None:
    """Fill in the columns of a block."""
    offsets = block.attempt.offsets[block.indices] + HEAD.size
    sources, reasons = _numbers(entries.names, block)
    for code in np.unique(heads["code"]).tolist():
        chosen = heads["code"] == code
        mine = np.repeat(chosen, counts)
        at, rows = offsets[chosen], counts[chosen]
        widths = Widths.of_code(code)
        column, at = _column(block, at, rows, widths.key)
        if widths.key < 8:
            column[column == NARROW_NO_KEY] = NO_KEY
        entries.keys[place][mine] = column
        column, at = _column(block, at, rows, widths.source)
        entries.sources[place][mine] = sources[np.minimum(column, len(sources) - 1)]
        column, at = _column(block, at, rows, widths.repeat)
        if widths.repeat:
            if entries.repeats is None:
                entries.repeats = np.zeros(len(entries.keys), np.int32)
            if column.max(initial=0) > np.iinfo(entries.repeats.dtype).max:
                entries.repeats = entries.repeats.astype(np.int64)
            entries.repeats[place][mine] = column
        left = heads["left_out"][chosen].astype(np.int64)
        if left.any():
            column, _ = _column(block, at, left, REASON_BYTES)
            within = np.arange(rows.sum()) - np.repeat(np.cumsum(rows) - rows, rows)
            is_left = within >= np.repeat(rows - left, rows)
            fates = np.zeros(len(within), np.int32)
            fates[is_left] = reasons[np.minimum(column, len(reasons) - 1)]
            entries.fates[place][mine] = fates


def _column(block: Block, starts: Ints, rows: Ints, width: int) -> tuple[Ints, Ints]:
    """Return the values of a column of some records, and where the next column begins."""
    if not width:
        return np.zeros(int(rows.sum()), np.int64), starts
    stops = starts + rows * width
    data = block.attempt.data
    parts = [data[a:b] for a, b in zip(starts.tolist(), stops.tolist(), strict=True)]
    kind = "<i8" if width == 8 else f"<u{width}"
    return np.frombuffer(b"".join(parts), kind).astype(np.int64), stops


def _numbers(names: Names, block: Block) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Return what the numbers of an attempt are over all files; the last is of unknown ones."""
    own = block.attempt.names
    sources, reasons = [], []
    for number in range(max(own) + 2):
        text, _ = own.get(number, (f"name {number}, which is damaged", 0))
        key = (text, block.of.rank if text in names.own else -1)
        sources.append(names.sources.setdefault(key, len(names.sources)))
        reasons.append(names.reasons.setdefault(text, len(names.reasons)))
    return np.array(sources, np.int32), np.array(reasons, np.int32)


def _digests(
    entries: Entries, place: slice, heads: npt.NDArray[np.void], counts: Ints
) -> Iterator[bytes]:
    """Yield a digest of each record: its samples with source, key, repeat and fate, in order."""
    names = entries.names
    sources = np.array([_digest_of_name(name) for name, _ in names.sources], np.int64)
    reasons = np.array([_digest_of_name(text) for text in names.reasons], np.int64)
    table = np.zeros((place.stop - place.start, 4), "<i8")
    table[:, 0] = sources[entries.sources[place]]
    table[:, 1] = entries.keys[place]
    if entries.repeats is not None:
        table[:, 2] = entries.repeats[place]
    table[:, 3] = reasons[entries.fates[place]]
    data = memoryview(table.tobytes())
    stops = (np.cumsum(counts) * 32).tolist()
    filler = (heads["kind"] - STEP & FILLER).tolist()
    for (start, stop), fills in zip(pairwise([0, *stops]), filler, strict=True):
        digest = blake2b(b"\1" if fills else b"\0", digest_size=DIGEST_BYTES)
        digest.update(data[start:stop])
        yield digest.digest()


def _digest_of_name(name: str) -> int:
    data = blake2b(name.encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(data, "little", signed=True)


def _leaves(entries: Entries) -> npt.NDArray[np.uint8]:
    """Return the leaf of each step: a digest of its number and of what every rank had."""
    digests = entries.digests
    rows = np.zeros(
        len(digests), [("step", "<u4"), ("rank", "<u4"), ("digest", f"V{DIGEST_BYTES}")]
    )
    rows["step"], rows["rank"] = entries.steps, entries.ranks
    rows["digest"] = np.frombuffer(b"".join(digests), f"V{DIGEST_BYTES}")
    rows = rows[np.lexsort((entries.ranks, entries.steps))]
    cuts = np.flatnonzero(np.diff(rows["step"])) + 1
    data = memoryview(rows.tobytes())
    stops = (np.array([0, *cuts, len(rows)]) * rows.itemsize).tolist()
    leaves = [
        blake2b(b"\0" + data[start:stop], digest_size=DIGEST_BYTES).digest()
        for start, stop in pairwise(stops)
    ]
    return np.frombuffer(b"".join(leaves), np.uint8).reshape(-1, DIGEST_BYTES)


def merkle_root(leaves: npt.NDArray[np.uint8]) -> bytes:
    """Return the root of the tree over some leaves, as in RFC 6962 but with BLAKE2b.

    Args:
        leaves: (n, DIGEST_BYTES) uint8.
    """
    level = [row.tobytes() for row in leaves]
    while len(level) > 1:
        pairs = zip(level[::2], level[1::2], strict=False)
        above = [blake2b(b"\1" + a + b, digest_size=DIGEST_BYTES).digest() for a, b in pairs]
        level = above + level[len(above) * 2 :]
    return level[0] if level else b""
