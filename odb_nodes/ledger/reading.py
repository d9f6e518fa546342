"""Read the files of a ledger: their attempts, their steps, and where they were torn or changed."""

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
    [
        *[("epoch", np.int64), ("step", np.int64), ("rank", np.int32), ("attempt", np.int32)],
        *[("flags", np.uint8), ("samples", np.int32), ("first_row", np.int64)],
    ]
)
"""A step that is recorded: `attempt` is an index, `first_row` where its samples are in the file."""
Ints = npt.NDArray[np.int64]
_KIND = 0xFF ^ (FILLER | ENDS_EPOCH)


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
        path: where it is.
        rank: whose file it is, by its name.
        headers: of its attempts, in the order in which they were written.
        names: number -> name, of each attempt.
        steps: that are recorded whole, by attempt, (n,) of `STEP_DTYPE`.
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
        self.steps = np.empty(0, STEP_DTYPE)
        self.has_ended = False
        self.problems: list[str] = []
        self.notes: list[str] = []
        if path.stat().st_size:  # what is empty cannot be mapped
            self._read(np.memmap(path, np.uint8, "r"))

    def _read(self, data: npt.NDArray[np.uint8]) -> None:
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
        stops = np.flatnonzero(rows["mark"][1:] == MARK) + 2
        starts = np.append(1, stops)
        self._read_records(data, rows[stops - 1], starts)
        if len(rest := data[int(starts[-1]) * ROW_BYTES :].tobytes()):
            if _is_torn(rest, len(self.names[-1]) if self.names else 0):
                text = f"rank {self.rank}: a torn record of {len(rest):,} bytes is ignored."
                self.notes.append(text)
            else:
                self._problem(f"the last {len(rest):,} bytes are damaged")

    def _read_records(
        self, data: npt.NDArray[np.uint8], ends: npt.NDArray[np.void], starts: Ints
    ) -> None:
        """Read records, given their end rows, and the first rows of each and of what follows."""
        bounds, view = (starts * ROW_BYTES).tolist(), data.data
        crcs = [zlib.crc32(view[a : b - 4]) for a, b in pairwise(bounds)]
        kinds, numbers = ends["kind"], ends["number"].astype(np.int64)
        is_header, is_step = kinds == HEADER, kinds & _KIND == STEP
        is_whole = (ends["crc"] == np.array(crcs, np.uint32)) & (
            is_header | is_step | (kinds == NAME)
        )
        is_next = np.diff(numbers, prepend=-1) % (1 << 16) == 1
        is_next[1:] |= ~is_whole[:-1]  # what is damaged is said on its own
        is_step &= is_whole
        attempts = np.cumsum(is_header)  # from 1
        step_indices = np.flatnonzero(is_step)
        is_readable = [False]  # by attempt
        damaged_until = 0
        for at in np.flatnonzero(~(is_step & is_next)).tolist():
            before = np.searchsorted(step_indices, at) - 1
            where = f"attempt {max(attempts[at], 1)}, at its beginning"
            if before >= 0 and attempts[last := step_indices[before]] == attempts[at]:
                where = f"attempt {attempts[at]}, after {place(*_place(ends[last]))}"
            if is_header[at]:
                is_readable.append(bool(is_whole[at]))
            if not is_whole[at]:
                if at >= damaged_until:  # with all that follow it
                    whole = np.flatnonzero(is_whole[at:])
                    damaged_until = at + int(whole[0]) if len(whole) else len(ends)
                    a, b = bounds[at], bounds[damaged_until]
                    self._problem(f"{where}: {b - a:,} bytes from byte {a:,} on are damaged")
                continue
            if not is_next[at]:
                what = "a name" if kinds[at] == NAME else "the beginning of the attempt"
                if is_step[at]:
                    what = f"the record of {place(*_place(ends[at]))}"
                self._problem(
                    f"{where}: {what} does not continue the record before it: one of them was "
                    "removed, doubled or moved"
                )
            text = bytes(view[bounds[at] : bounds[at + 1] - ROW_BYTES])
            if is_header[at]:
                self._begin(json.loads(text))
            elif kinds[at] == NAME and is_readable[-1]:
                self.names[-1][int(ends["step"][at])] = Name(*json.loads(text))
        readable = np.array(is_readable)
        chosen = step_indices[readable[attempts[step_indices]]]
        self.steps = np.zeros(len(chosen), STEP_DTYPE)
        self.steps["epoch"], self.steps["step"] = ends["epoch"][chosen], ends["step"][chosen]
        self.steps["attempt"] = (np.cumsum(readable) - 1)[attempts[chosen]]
        self.steps["flags"] = kinds[chosen] - STEP
        self.steps["first_row"] = starts[chosen]
        self.steps["samples"] = np.diff(starts)[chosen] - 1

    def _begin(self, fields: dict[str, Any]) -> None:
        if fields["version"] != VERSION:
            raise ValueError(
                f"`{self.path}` is of version {fields['version']} of a ledger, but this library "
                f"reads version {VERSION}. Use the library that wrote it."
            )
        header = Header(**fields)
        self.headers.append(header)
        self.names.append({})
        where = f"attempt {len(self.headers)} ({place(header.epoch, header.step)})"
        if header.rank != self.rank:
            self._problem(f"{where} was written by rank {header.rank}: the file was renamed")
        if header.cut_bytes:
            self.notes.append(
                f"rank {self.rank}: {where}: a torn record of {header.cut_bytes:,} bytes before it "
                "was cut off."
            )

    def _problem(self, text: str) -> None:
        self.problems.append(f"rank {self.rank}: {text}.")


def place(epoch: int, step: int) -> str:
    """Return epoch and step as text."""
    return f"epoch {epoch} step {step}"


def _place(row: np.void) -> tuple[int, int]:
    return int(row["epoch"]), int(row["step"])


def _is_torn(rest: bytes, names: int) -> bool:
    """Tell whether bytes can be the beginning of a record, or zeros after a loss of power."""
    rest = rest[: len(rest) // ROW_BYTES * ROW_BYTES]
    rows = np.frombuffer(rest, SAMPLE_ROW)
    return rest.isascii() or bool(((rows["name"] < names) & (rows["key"] >= NO_KEY)).all())
