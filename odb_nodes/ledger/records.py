"""The bytes of a ledger: a header for each attempt, then a record for each step.

    header   magic, CRC-32 of what follows, and the fields of `Header`
    record   CRC-32 of what follows, continued from that of the record before; then `HEAD`, then
             columns: keys, numbers of sources, repeats, and for what was left out of reasons
    name     a record too: the text of a source or a reason, before the first that refers to it
    end      the last record of a run that ended by itself. Where another attempt goes on, its kind
             becomes `RESUMED`, in place

Once the end is written, the magic of its attempt becomes `ENDED_MAGIC`, in place: whatever is
then cut from the file, the end goes first, and is missed.

A column is absent where all of it is 0, and as narrow as its largest value allows. All integers are
little-endian. An attempt numbers its names anew.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import NamedTuple

from odb_nodes._core.checks import MAX_KEY
from odb_nodes.sample import LeftOut
from odb_nodes.step_info import StepInfo

MAGIC = b"\x89ODBLED\n"
ENDED_MAGIC = b"\x89ODBLED\r"
VERSION = 1

HEAD = struct.Struct("<IBBIIII")
"""CRC, kind, widths, samples in the step, samples left out, epoch, step. Of a name: CRC, kind, 0,
its number, its bytes, `OWN` or 0, 0. Of an end: CRC, kind, 0, 0, 0, 0, 0; then `_END_MARK`."""

NAME, END, RESUMED, STEP = 1, 2, 3, 4
FILLER, ENDS_EPOCH = 1, 2
"""Flags that are added to `STEP`."""
OWN = 1
"""Flag of the name of a source: its keys are of this rank alone. What is left out before any row of
the source is written without it: it holds for the source, whatever the record, rank or attempt."""
KINDS = frozenset((NAME, END, RESUMED, *range(STEP, STEP + 4)))
_END_MARK = b"\x89ODBEND\n"
"""So that no record of a step, read without its beginning, is taken for an end."""

NO_KEY = -1
NARROW_NO_KEY = 2**32 - 1
KEY_BYTES = (4, 8)
SOURCE_BYTES = (0, 1, 2, 4)
REPEAT_BYTES = (0, 1, 4, 8)
REASON_BYTES = 4
_FORMATS = {1: "B", 2: "H", 4: "I", 8: "q"}


class Widths(NamedTuple):
    """Bytes of one value in each column of a record."""

    key: int
    source: int
    repeat: int

    @classmethod
    def of_code(cls, code: int) -> Widths:
        """Return the widths that a record's byte stands for."""
        return cls(KEY_BYTES[code & 1], SOURCE_BYTES[code >> 1 & 3], REPEAT_BYTES[code >> 3 & 3])

    def code(self) -> int:
        """Return the byte that stands for these widths."""
        places = (
            KEY_BYTES.index(self.key),
            SOURCE_BYTES.index(self.source) << 1,
            REPEAT_BYTES.index(self.repeat) << 3,
        )
        return sum(places)


_ROW_BYTES = [sum(Widths.of_code(code)) for code in range(32)]
NO_RECORD = 1 << 62
"""Size of what is no record."""


class Header(NamedTuple):
    """The beginning of an attempt.

    Attributes:
        version: of the format.
        rank: of the process that wrote it.
        world_size: number of ranks.
        batches: virtual ranks that the process hosts: so many records of a step.
        lost: records before it that could not be written.
        lost_epoch: epoch of the first of them.
        lost_step: its step.
        offset: where in its file it was written.
        time_s: seconds since 1970.
        epoch: of its first step.
        step: its first step.
    """

    version: int
    rank: int
    world_size: int
    batches: int
    lost: int
    lost_epoch: int
    lost_step: int
    offset: int
    time_s: float
    epoch: int
    step: int


_HEADER = struct.Struct("<HIIIIIIQdII")
HEADER_BYTES = len(MAGIC) + 4 + _HEADER.size


def pack_header(header: Header) -> tuple[bytes, int]:
    """Return the bytes of a header, and the CRC that its first record continues."""
    body = _HEADER.pack(*header)
    crc = zlib.crc32(body)
    return MAGIC + crc.to_bytes(4, "little") + body, crc


def unpack_header(data: memoryview, at: int) -> tuple[Header, int] | None:
    """Return the header at a place and its CRC; `None` where there is none, or a damaged one."""
    body = data[at + len(MAGIC) + 4 : at + HEADER_BYTES]
    if data[at : at + len(MAGIC)] not in (MAGIC, ENDED_MAGIC) or len(body) < _HEADER.size:
        return None
    crc = int.from_bytes(data[at + len(MAGIC) : at + len(MAGIC) + 4], "little")
    return (Header(*_HEADER.unpack(body)), crc) if zlib.crc32(body) == crc else None


def record_bytes(kind: int, code: int, samples: int, left_out: int) -> int:
    """Return the size of a record, by the fields of its `HEAD`; more than any where it is none."""
    if kind == NAME:
        return HEAD.size + left_out
    if kind in (END, RESUMED):
        return END_BYTES
    if kind not in KINDS or code >= len(_ROW_BYTES):
        return NO_RECORD
    return HEAD.size + _ROW_BYTES[code] * (samples + left_out) + REASON_BYTES * left_out


END_BYTES = HEAD.size + len(_END_MARK)


def _end(kind: int) -> bytes:
    """Return the end of an attempt, or one that was resumed, without its CRC."""
    return HEAD.pack(0, kind, 0, 0, 0, 0, 0)[4:] + _END_MARK


def resumed(end: bytes) -> bytes | None:
    """Return what the end of an attempt becomes where another goes on; `None` if it is no end."""
    if end[4:] != _end(END):
        return None
    # The CRC of the record before it is not known; in the difference of two CRCs it cancels out.
    crc = int.from_bytes(end[:4], "little") ^ zlib.crc32(_end(END)) ^ zlib.crc32(_end(RESUMED))
    return crc.to_bytes(4, "little") + _end(RESUMED)


class Encoder:
    """Turns the steps of one attempt into records, each chained to the one before."""

    def __init__(self, crc: int, world_size: int) -> None:
        self._crc = crc
        self._world_size = world_size
        self._numbers = {("", 0): 0}
        self._own: set[str] = set()

    def step(self, info: StepInfo) -> bytes:
        """Return the record of a step, after those of the names that it is the first to need."""
        left: tuple[LeftOut, ...] = info.left_out
        keys: Sequence[int | None] = info.keys
        sources: Sequence[str] = info.row_sources
        repeats: Sequence[int] = info.row_repeats
        names: list[bytes] = []
        if left:
            keys = (*keys, *(one.key for one in left))
            sources = (*sources, *(one.source for one in left))
        key_bytes, column = _keys(keys)
        source_bytes = repeat_bytes = 0
        if self._world_size * info.batches_per_step > 1 and info.own_sources:
            self._own |= info.own_sources
        if self._own or any(sources):
            numbers = [self._number(one, OWN * (one in self._own), names) for one in sources]
            source_bytes = _narrowest(max(numbers, default=0), SOURCE_BYTES)
            if source_bytes:
                column += _column(numbers, source_bytes)
        if any(repeats):
            repeats = (*repeats, *[0] * len(left))  # what is left out has none
            repeat_bytes = _narrowest(max(repeats), REPEAT_BYTES)
            column += _column(repeats, repeat_bytes)
        if left:
            reasons = [self._number(one.reason or "skipped", 0, names) for one in left]
            column += _column(reasons, REASON_BYTES)
        record = self._record(
            STEP + FILLER * info.is_filler + ENDS_EPOCH * info.ends_epoch,
            Widths(key_bytes, source_bytes, repeat_bytes).code(),
            len(info.keys),
            len(left),
            info.epoch,
            info.step,
            column,
        )
        return b"".join((*names, record))

    def end(self) -> bytes:
        """Return the record of the end of the attempt."""
        return self._record(END, 0, 0, 0, 0, 0, _END_MARK)

    def _number(self, name: str, own: int, names: list[bytes]) -> int:
        """Return the number of a name; add a record that says so where it is new."""
        number = self._numbers.get((name, own))
        if number is None:
            number = self._numbers[name, own] = len(self._numbers)
            text = name.encode("utf-8", "surrogatepass")
            names.append(self._record(NAME, 0, number, len(text), own, 0, text))
        return number

    def _record(
        self, kind: int, code: int, samples: int, left: int, epoch: int, step: int, columns: bytes
    ) -> bytes:
        body = HEAD.pack(0, kind, code, samples, left, epoch, step)[4:] + columns
        self._crc = zlib.crc32(body, self._crc)
        return self._crc.to_bytes(4, "little") + body


def _keys(keys: Sequence[int | None]) -> tuple[int, bytes]:
    """Return the width of the keys, and their column; what is no key of 63 bits counts as none."""
    known = [key for key in keys if key is not None]
    width = 8 if known and max(known) >= NARROW_NO_KEY else 4
    if len(known) < len(keys):
        missing = NARROW_NO_KEY if width == 4 else NO_KEY
        known = [missing if key is None else key for key in keys]
    try:
        return width, _column(known, width)
    except struct.error:
        return _keys([key if key is not None and 0 <= key <= MAX_KEY else None for key in keys])


def _narrowest(largest: int, choices: tuple[int, ...]) -> int:
    return next(width for width in choices if largest < 1 << (8 * width))


def _column(values: Sequence[int], width: int) -> bytes:
    return struct.pack(f"<{len(values)}{_FORMATS[width]}", *values)
