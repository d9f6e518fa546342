"""Read the file of one rank: its records, and where it was changed, damaged or torn."""

from __future__ import annotations

import json
import re
import zlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from odb_nodes._support.arrays import IntArray
from odb_nodes.training.ledger.records import (
    END_ROW,
    ENDS_EPOCH,
    FILLER,
    HEADER,
    MAGIC,
    MARK,
    NAME,
    NO_KEY,
    ROW_BYTES,
    SAMPLE_ROW,
    STEP,
    VERSION,
    Header,
    Name,
)

STEP_DTYPE = np.dtype(
    {
        "names": ["epoch", "step", "rank", "attempt", "flags", "samples", "first_row"],
        "formats": ["i8", "i8", "i4", "i4", "u1", "i4", "i8"],
    }
)
"""A recorded step: `attempt` is an index, `first_row` the row of its first sample in the file."""
Bytes = npt.NDArray[np.uint8]
Steps = npt.NDArray[np.void]
_KIND_BITS = 0xFF ^ (FILLER | ENDS_EPOCH)


class RankFile:
    """The records in the file of one rank, and where it was changed, damaged or torn."""

    def __init__(self, path: Path) -> None:
        match = re.fullmatch(r"rank-([0-9]+)\.ledger", path.name)
        if match is None:
            name = str(path).encode("utf-8", "backslashreplace").decode()
            raise ValueError(
                f"`{name}` must be named as `rank-00000.ledger`, but is not. Rename it, or move it "
                "out of the folder."
            )
        self.path = path
        self.rank = int(match[1])
        self.headers: list[Header] = []  # one for each attempt, in the order of the file
        self.names: list[dict[int, Name]] = []  # number -> name, for each attempt
        self.steps: Steps = np.empty(0, STEP_DTYPE)  # undamaged records
        self.has_ended = False  # The end of the run is recorded, and no attempt follows.
        self.problems: list[str] = []
        self.notes: list[str] = []
        if path.stat().st_size:  # an empty file cannot be mapped
            self._read(np.memmap(path, np.uint8, "r"))

    def _read(self, data: Bytes) -> None:
        start = data[: len(MAGIC)].tobytes()
        if not MAGIC.startswith(start):
            self._problem(
                f"it begins with {start!r}: it is damaged, or not of version {VERSION} of a "
                "ledger, which this library reads"
            )
            return
        size = int.from_bytes(data[len(MAGIC) : ROW_BYTES].tobytes(), "little")
        self.has_ended = size == len(data)
        if size and not self.has_ended:
            error = "missing: it was cut" if size > len(data) else "too many"
            self._problem(f"the run has ended, but {abs(size - len(data)):,} bytes are {error}")
        rows = data[: len(data) // ROW_BYTES * ROW_BYTES].view(END_ROW)
        starts = np.append(1, np.flatnonzero(rows["mark"][1:] == MARK) + 2)
        self._read_records(data, starts, rows[starts[1:] - 1])
        tail = data[int(starts[-1]) * ROW_BYTES :].tobytes()
        if tail and _is_torn(tail, len(self.names[-1]) if self.names else 0):
            text = f"rank {self.rank}: a torn record of {len(tail):,} bytes is ignored."
            self.notes.append(text)
        elif tail:
            self._problem(f"the last {len(tail):,} bytes are damaged")

    def _read_records(self, data: Bytes, starts: IntArray, ends: npt.NDArray[np.void]) -> None:
        """Read all records.

        starts: first row of each record, then the row after the last record.
        ends: end row of each record.
        """
        bounds = (starts * ROW_BYTES).tolist()
        view = data.data
        crcs = [zlib.crc32(view[start : stop - 4]) for start, stop in pairwise(bounds)]
        kinds = ends["kind"]
        is_header = kinds == HEADER
        is_name = kinds == NAME
        is_step = kinds & _KIND_BITS == STEP
        is_whole = (ends["crc"] == np.array(crcs, np.uint32)) & (is_header | is_name | is_step)
        is_next = np.diff(ends["number"], prepend=np.uint16(0xFFFF)) == 1  # modulo 2**16
        is_next[1:] |= ~is_whole[:-1]  # the damage of the record before is a problem already
        attempts = np.cumsum(is_header)  # attempt of each record, from 1 on
        steps = np.flatnonzero(is_step & is_whole)
        is_read = [False]  # for each attempt, from 1 on: whether its header is whole
        damaged_to = 0
        for record in np.flatnonzero(~(is_step & is_whole & is_next)).tolist():
            if is_header[record]:
                is_read.append(bool(is_whole[record]))
            before = steps[: np.searchsorted(steps, record)][-1:]
            where = f"attempt {max(attempts[record], 1)}, at its beginning"
            if len(before) and attempts[before[0]] == attempts[record]:
                where = f"attempt {attempts[record]}, after {_name_of_step(ends[before[0]])}"
            if not is_whole[record]:
                if record >= damaged_to:  # one problem for all damaged records in a row
                    damaged_to = record + int(np.argmax(np.append(is_whole[record:], True)))
                    size = bounds[damaged_to] - bounds[record]
                    self._problem(
                        f"{where}: {size:,} bytes from byte {bounds[record]:,} on are damaged"
                    )
                continue
            if not is_next[record]:
                kind = "a name" if is_name[record] else "the beginning of the attempt"
                kind = f"the record of {_name_of_step(ends[record])}" if is_step[record] else kind
                self._problem(
                    f"{where}: {kind} does not continue the record before it: one of them was "
                    "removed, doubled or moved"
                )
            text = bytes(view[bounds[record] : bounds[record + 1] - ROW_BYTES])
            if is_header[record]:
                self._begin(json.loads(text))
            elif is_name[record] and is_read[-1]:
                self.names[-1][int(ends["step"][record])] = Name(*json.loads(text))
        steps = steps[np.array(is_read)[attempts[steps]]]
        self.steps = np.zeros(len(steps), STEP_DTYPE)
        self.steps["epoch"] = ends["epoch"][steps]
        self.steps["step"] = ends["step"][steps]
        self.steps["attempt"] = (np.cumsum(is_read) - 1)[attempts[steps]]
        self.steps["flags"] = kinds[steps] - STEP
        self.steps["first_row"] = starts[steps]
        self.steps["samples"] = np.diff(starts)[steps] - 1

    def _begin(self, fields: dict[str, Any]) -> None:
        header = Header(**fields)
        self.headers.append(header)
        self.names.append({})
        where = f"attempt {len(self.headers)} (epoch {header.epoch} step {header.step})"
        if header.rank != self.rank:
            self._problem(f"{where} was written by rank {header.rank}: the file was renamed")
        if header.cut_bytes:
            self.notes.append(
                f"rank {self.rank}: {where}: a torn record of {header.cut_bytes:,} bytes before it "
                "was cut off."
            )

    def _problem(self, text: str) -> None:
        self.problems.append(f"rank {self.rank}: {text}.")


def _name_of_step(end: np.void) -> str:
    return f"epoch {end['epoch']} step {end['step']}"


def _is_torn(tail: bytes, names: int) -> bool:
    """Tell whether bytes may be the beginning of a record, or zeros after a loss of power."""
    tail = tail[: len(tail) // ROW_BYTES * ROW_BYTES]
    rows = np.frombuffer(tail, SAMPLE_ROW)
    return tail.isascii() or bool(((rows["name"] < names) & (rows["key"] >= NO_KEY)).all())
