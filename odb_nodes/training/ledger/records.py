"""The bytes of a ledger: rows of 16 bytes.

    preamble   `MAGIC`, then the size of the file once the run has ended, and 0 until then
    record     rows, then an end row with the kind of the record and a CRC-32

A record is a `HEADER`, which begins an attempt; a `NAME`, written before the first sample that
refers to it; or a `STEP`, with a row for each of its samples. The rows of headers and names are
JSON. The highest byte of the first four tells an end row from any other row: `MARK` is not ASCII,
and numbers of names stay below it. A record that a kill cuts short has no end row and is ignored.

Records are numbered through the file, modulo 2**16: a reader notices a record that was removed,
doubled or moved. All integers are little-endian. Each attempt numbers its names from 0.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from odb_nodes._support.checks import MAX_KEY
from odb_nodes.core.step_info import StepInfo

VERSION = 4
MAGIC = b"\x89ODBLE%c\n" % (ord("0") + VERSION)  # 8 bytes for every version
ROW_BYTES = 16
MARK = 0xFF
HEADER, NAME, STEP = 0xA0, 0x50, 0x04
"""Kinds of records. A flipped bit turns no kind into another one."""
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
"""In the end row of a `NAME`, `step` is the number of the name."""
_END = struct.Struct("<HBBII")  # without the CRC
_CHUNK_ROWS = 1 << 16


class Header(NamedTuple):
    """The beginning of an attempt."""

    rank: int  # the process that wrote the attempt
    world_size: int  # number of processes
    virtual_ranks: int  # of the process; each has a record of every step
    epoch: int
    step: int  # first step of the attempt
    time_s: float
    lost: int  # records from `step` on that could not be written
    cut_bytes: int  # size of the torn record that was cut off before the attempt


class Name(NamedTuple):
    """A source and a fate, which rows of samples refer to by number."""

    source: str
    reason: str  # why the sample was left out; "" if it was in a batch
    is_per_rank: bool  # Each rank has its own samples under the keys of the source.


def preamble(size: int = 0) -> bytes:
    """Return the first row of a file: `size` is its size once the run has ended, else 0."""
    return MAGIC + size.to_bytes(ROW_BYTES - len(MAGIC), "little")


def last_record(path: Path) -> tuple[int, int]:
    """Return the size of a file up to its last whole record, and the next record's number."""
    size = path.stat().st_size // ROW_BYTES
    rows = np.memmap(path, END_ROW, "r", shape=size) if size else np.empty(0, END_ROW)
    for stop in range(size, 0, -_CHUNK_ROWS):
        first = max(0, stop - _CHUNK_ROWS)
        ends = np.flatnonzero(rows["mark"][first:stop] == MARK)
        if len(ends):
            last = first + int(ends[-1])
            return (last + 1) * ROW_BYTES, int(rows["number"][last]) + 1
    return 0, 0


class Encoder:
    """Turns the steps of one attempt into records."""

    def __init__(self, number: int, *, is_shared: bool) -> None:
        self._number = number  # number of the next record
        self._is_shared = is_shared
        self._names: dict[Name, int] = {}
        self._per_rank: set[str] = set()  # sources
        self._trained: dict[str, int] = {}  # source -> number of its name without a reason

    def header(self, header: Header) -> bytes:
        """Return the record that begins the attempt."""
        return self._text(HEADER, header._asdict())

    def step(self, info: StepInfo) -> bytes:
        """Return the record of a step, after records of the names that it is the first to use."""
        name_records = list[bytes]()
        samples = len(info.keys)
        left_out = info.left_out
        if self._is_shared and not info.per_rank_sources <= self._per_rank:
            self._per_rank |= info.per_rank_sources
            self._trained.clear()
        rows = np.zeros(samples + len(left_out), SAMPLE_ROW)
        numbers = self._trained
        sources = dict.fromkeys(info.row_sources)
        for source in sources:
            if source not in numbers:
                numbers[source] = self._name(source, "", name_records)
        if len(sources) > 1:
            rows["name"][:samples] = [numbers[source] for source in info.row_sources]
        elif sources:
            rows["name"][:samples] = numbers[source]
        keys: Sequence[int | None] = info.keys
        if left_out:
            keys = (*keys, *(sample.key for sample in left_out))
            rows["name"][samples:] = [
                self._name(sample.source, sample.reason or "skipped", name_records)
                for sample in left_out
            ]
        try:
            rows["key"] = keys
        except (OverflowError, TypeError):  # None, or more than 63 bits: not a key
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
        return b"".join((*name_records, record))

    def _name(self, source: str, reason: str, name_records: list[bytes]) -> int:
        """Return the number of a name; if it is new, add its record to `name_records`."""
        name = Name(source, reason, source in self._per_rank)
        number = self._names.get(name)
        if number is None:
            number = self._names[name] = len(self._names)
            name_records.append(self._text(NAME, name, number))
        return number

    def _text(self, kind: int, value: object, number: int = 0) -> bytes:
        text = json.dumps(value).encode()
        return self._record(kind, text + b" " * (-len(text) % ROW_BYTES), 0, number)

    def _record(self, kind: int, rows: bytes, epoch: int, step: int) -> bytes:
        body = rows + _END.pack(self._number & 0xFFFF, kind, MARK, epoch, step)
        self._number += 1
        return body + zlib.crc32(body).to_bytes(4, "little")
