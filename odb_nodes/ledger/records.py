"""The bytes of a ledger: rows of 16 bytes.

    preamble   `MAGIC`, and the size of the file where the run has ended; 0 where it has not
    record     rows, and after them an end row that says what they are, with their CRC-32

A record is a `HEADER`, the beginning of an attempt; a `NAME`, before the first sample that refers
to it; or a `STEP`, with a row for each of its samples. The rows of headers and names are JSON. The
highest byte of the first four tells an end row from any other: `MARK` is no ASCII, and no name has
so high a number. So what a kill leaves of a record has no end row, and is no record.

Records are numbered through the file, modulo 2**16: one that is removed, doubled or moved is
missed. All integers are little-endian. An attempt numbers its names anew.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from odb_nodes._core.checks import MAX_KEY
from odb_nodes.step_info import StepInfo

MAGIC = b"\x89ODBLE3\n"
VERSION = 3
ROW_BYTES = 16
MARK = 0xFF
HEADER, NAME, STEP = 0xA0, 0x50, 0x04
"""Kinds of records, of which a bit that flips makes no other one."""
FILLER, ENDS_EPOCH = 1, 2
"""Flags that are added to `STEP`."""
NO_KEY = -1
MAX_REPEAT = 2**32 - 1

SAMPLE_ROW = np.dtype([("name", "<u4"), ("repeat", "<u4"), ("key", "<i8")])
END_ROW = np.dtype(
    {
        "names": ["number", "kind", "mark", "epoch", "step", "crc"],
        "formats": ["<u2", "u1", "u1", "<u4", "<u4", "<u4"],
    }
)
"""Of a name, `step` is its number."""
_END = struct.Struct("<HBBII")  # without the CRC
_CHUNK_ROWS = 1 << 16


class Header(NamedTuple):
    """The beginning of an attempt."""

    version: int
    rank: int  # of the process that wrote it
    world_size: int
    batches: int  # virtual ranks that the process hosts: so many records of a step
    epoch: int
    step: int  # its first one
    time_s: float
    lost: int  # records that could not be written, from that step on
    cut_bytes: int  # of a torn record before it


class Name(NamedTuple):
    """What the rows of samples refer to by number."""

    source: str
    reason: str  # why it was left out; "" of what was in a batch
    is_own: bool  # The keys of the source are of this rank alone; unknown before any row of it.


def preamble(size: int = 0) -> bytes:
    """Return the first row of a file; `size` is that of a run that has ended."""
    return MAGIC + size.to_bytes(ROW_BYTES - len(MAGIC), "little")


def last_record(path: Path) -> tuple[int, int]:
    """Return the bytes of a file up to its last whole record, and the number of the next one."""
    size = path.stat().st_size // ROW_BYTES
    rows = np.memmap(path, END_ROW, "r", shape=size) if size else np.empty(0, END_ROW)
    for stop in range(size, 0, -_CHUNK_ROWS):
        first = max(0, stop - _CHUNK_ROWS)
        if len(ends := np.flatnonzero(rows["mark"][first:stop] == MARK)):
            at = first + int(ends[-1])
            return (at + 1) * ROW_BYTES, int(rows["number"][at]) + 1
    return 0, 0


class Encoder:
    """Turns the steps of one attempt into records."""

    def __init__(self, number: int, *, is_shared: bool) -> None:
        self._number = number  # of the next record
        self._is_shared = is_shared
        self._names: dict[Name, int] = {}
        self._own: set[str] = set()
        self._trained: dict[str, int] = {}  # source -> number of its name without a reason

    def header(self, header: Header) -> bytes:
        """Return the record that begins the attempt."""
        return self._text(HEADER, header._asdict())

    def step(self, info: StepInfo) -> bytes:
        """Return the record of a step, after those of the names that it is the first to need."""
        left, samples, names = info.left_out, len(info.keys), list[bytes]()
        if self._is_shared and not info.own_sources <= self._own:
            self._own |= info.own_sources
            self._trained.clear()
        rows = np.zeros(samples + len(left), SAMPLE_ROW)
        numbers, sources = self._trained, dict.fromkeys(info.row_sources)
        for one in sources:
            if one not in numbers:
                numbers[one] = self._name(one, "", names)
        if len(sources) > 1:
            rows["name"][:samples] = [numbers[one] for one in info.row_sources]
        elif sources:
            rows["name"][:samples] = numbers[one]
        keys: Sequence[int | None] = info.keys
        if left:
            keys = (*keys, *(one.key for one in left))
            reasons = [self._name(one.source, one.reason or "skipped", names) for one in left]
            rows["name"][samples:] = reasons
        try:
            rows["key"] = keys
        except (OverflowError, TypeError):  # what is no key of 63 bits counts as none
            rows["key"] = [
                key if key is not None and 0 <= key <= MAX_KEY else NO_KEY for key in keys
            ]
        if any(info.row_repeats):
            if (most := max(info.row_repeats)) > MAX_REPEAT:
                raise ValueError(
                    f"`info.row_repeats` must be at most {MAX_REPEAT:,}, but one is {most:,}: let "
                    "`ItemKey.repeat` count the repeats of an epoch."
                )
            rows["repeat"][:samples] = info.row_repeats
        kind = STEP + FILLER * info.is_filler + ENDS_EPOCH * info.ends_epoch
        record = self._record(kind, rows.tobytes(), info.epoch, info.step)
        return b"".join((*names, record))

    def _name(self, source: str, reason: str, names: list[bytes]) -> int:
        """Return the number of a name; add a record that says so where it is new."""
        name = Name(source, reason, source in self._own)
        number = self._names.get(name)
        if number is None:
            number = self._names[name] = len(self._names)
            names.append(self._text(NAME, name, number))
        return number

    def _text(self, kind: int, value: object, number: int = 0) -> bytes:
        text = json.dumps(value).encode()
        return self._record(kind, text + b" " * (-len(text) % ROW_BYTES), 0, number)

    def _record(self, kind: int, rows: bytes, epoch: int, step: int) -> bytes:
        body = rows + _END.pack(self._number & 0xFFFF, kind, MARK, epoch, step)
        self._number += 1
        return body + zlib.crc32(body).to_bytes(4, "little")
