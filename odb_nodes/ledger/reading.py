"""Read the file of one rank: its attempts, its steps, and where it was torn or changed."""

from __future__ import annotations

import json
import os
import re
import zlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from odb_nodes.ledger.records import (
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
"""A step that is recorded: `attempt` is an index, `first_row` where its samples are in the file."""
Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]
Steps = npt.NDArray[np.void]
_KIND_BITS = 0xFF ^ (FILLER | ENDS_EPOCH)


def rank_files(folder: str | os.PathLike[str]) -> list[RankFile]:
    """Return the files of a ledger, in the order of the ranks."""
    if os.path.isfile(folder):
        raise ValueError(f"`folder` must be a folder, but `{folder}` is a file.")
    paths = sorted(Path(folder).glob("rank-*.ledger"))
    if not paths:
        missing = "no file `rank-00000.ledger`" if os.path.isdir(folder) else "no such folder"
        raise FileNotFoundError(
            f"`{folder}` has no ledger: there is {missing}. Give the folder of a `Ledger`."
        )
    return [RankFile(path) for path in paths]


class RankFile:
    """What the file of one rank says.

    Attributes:
        headers: of its attempts, in the order in which they were written.
        names: number -> name, of each attempt.
        steps: that are recorded and whole, of `STEP_DTYPE`.
        has_ended: whether the run has ended, and nobody has gone on.
        problems: where it was changed or damaged.
        notes: where a record was torn by the end of the process that wrote it.
    """

    def __init__(self, path: Path) -> None:
        match = re.fullmatch(r"rank-([0-9]+)\.ledger", path.name)
        if match is None:
            name = str(path).encode("utf-8", "backslashreplace").decode()
            raise ValueError(
                f"`{name}` must be named as `rank-00000.ledger`, but is not. Rename it, or move it "
                "out of the folder."
            )
        self.path, self.rank = path, int(match[1])
        self.headers: list[Header] = []
        self.names: list[dict[int, Name]] = []
        self.steps: Steps = np.empty(0, STEP_DTYPE)
        self.has_ended = False
        self.problems: list[str] = []
        self.notes: list[str] = []
        if path.stat().st_size:  # what is empty cannot be mapped
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
            what = "missing: it was cut" if size > len(data) else "too many"
            self._problem(f"the run has ended, but {abs(size - len(data)):,} bytes are {what}")
        rows = data[: len(data) // ROW_BYTES * ROW_BYTES].view(END_ROW)
        starts = np.append(1, np.flatnonzero(rows["mark"][1:] == MARK) + 2)
        self._read_records(data, starts, rows[starts[1:] - 1])
        if rest := data[int(starts[-1]) * ROW_BYTES :].tobytes():
            if _is_torn(rest, len(self.names[-1]) if self.names else 0):
                text = f"rank {self.rank}: a torn record of {len(rest):,} bytes is ignored."
                self.notes.append(text)
            else:
                self._problem(f"the last {len(rest):,} bytes are damaged")

    def _read_records(self, data: Bytes, starts: Ints, ends: npt.NDArray[np.void]) -> None:
        """Read records, by the first rows of each and of what follows, and their end rows."""
        bounds, view = (starts * ROW_BYTES).tolist(), data.data
        crcs = [zlib.crc32(view[a : b - 4]) for a, b in pairwise(bounds)]
        kinds = ends["kind"]
        is_header, is_name, is_step = kinds == HEADER, kinds == NAME, kinds & _KIND_BITS == STEP
        is_whole = (ends["crc"] == np.array(crcs, np.uint32)) & (is_header | is_name | is_step)
        is_next = np.diff(ends["number"], prepend=np.uint16(0xFFFF)) == 1  # modulo 2**16
        is_next[1:] |= ~is_whole[:-1]  # what is damaged is said on its own
        attempts, steps = np.cumsum(is_header), np.flatnonzero(is_step & is_whole)
        is_read = [False]  # of each attempt, from 1: not where its header is damaged
        damaged_to = 0
        for at in np.flatnonzero(~(is_step & is_whole & is_next)).tolist():
            if is_header[at]:
                is_read.append(bool(is_whole[at]))
            before = steps[: np.searchsorted(steps, at)][-1:]
            where = f"attempt {max(attempts[at], 1)}, at its beginning"
            if len(before) and attempts[before[0]] == attempts[at]:
                where = f"attempt {attempts[at]}, after {_place(ends[before[0]])}"
            if not is_whole[at]:
                if at >= damaged_to:  # with all that follow it
                    damaged_to = at + int(np.argmax(np.append(is_whole[at:], True)))
                    size = bounds[damaged_to] - bounds[at]
                    self._problem(
                        f"{where}: {size:,} bytes from byte {bounds[at]:,} on are damaged"
                    )
                continue
            if not is_next[at]:
                what = "a name" if is_name[at] else "the beginning of the attempt"
                what = f"the record of {_place(ends[at])}" if is_step[at] else what
                self._problem(
                    f"{where}: {what} does not continue the record before it: one of them was "
                    "removed, doubled or moved"
                )
            text = bytes(view[bounds[at] : bounds[at + 1] - ROW_BYTES])
            if is_header[at]:
                self._begin(json.loads(text))
            elif is_name[at] and is_read[-1]:
                self.names[-1][int(ends["step"][at])] = Name(*json.loads(text))
        steps = steps[np.array(is_read)[attempts[steps]]]
        self.steps = np.zeros(len(steps), STEP_DTYPE)
        self.steps["epoch"], self.steps["step"] = ends["epoch"][steps], ends["step"][steps]
        self.steps["attempt"] = (np.cumsum(is_read) - 1)[attempts[steps]]
        self.steps["flags"] = kinds[steps] - STEP
        self.steps["first_row"], self.steps["samples"] = starts[steps], np.diff(starts)[steps] - 1

    def _begin(self, fields: dict[str, Any]) -> None:
        if fields["version"] != VERSION:
            raise ValueError(
                f"`{self.path}` is of version {fields['version']} of a ledger, but this library "
                f"reads version {VERSION}. Use the library that wrote it."
            )
        header = Header(**fields)
        self.headers.append(header)
        self.names.append({})
        where = f"attempt {len(self.headers)} ({place_of(header.epoch, header.step)})"
        if header.rank != self.rank:
            self._problem(f"{where} was written by rank {header.rank}: the file was renamed")
        if header.cut_bytes:
            self.notes.append(
                f"rank {self.rank}: {where}: a torn record of {header.cut_bytes:,} bytes before it "
                "was cut off."
            )

    def _problem(self, text: str) -> None:
        self.problems.append(f"rank {self.rank}: {text}.")


def place_of(epoch: int, step: int) -> str:
    """Return epoch and step as text."""
    return f"epoch {epoch} step {step}"


def _place(end: np.void) -> str:
    return place_of(int(end["epoch"]), int(end["step"]))


def _is_torn(rest: bytes, names: int) -> bool:
    """Tell whether bytes can be the beginning of a record, or zeros after a loss of power."""
    rest = rest[: len(rest) // ROW_BYTES * ROW_BYTES]
    rows = np.frombuffer(rest, SAMPLE_ROW)
    return rest.isascii() or bool(((rows["name"] < names) & (rows["key"] >= NO_KEY)).all())
