"""The files of a `JsonlSource`."""

from __future__ import annotations

import glob
import gzip
import os
import stat
import zlib
from array import array
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from odb_nodes._core.progress import SlowProgress

_INDEXED_BYTES = 1 << 20  # at a time

CUT = (EOFError, gzip.BadGzipFile, zlib.error)
"""What reading a compressed file raises where it is cut or damaged."""


def files_of(path: str | os.PathLike[str]) -> list[Path]:
    """Return the files that a path stands for: itself, those of a folder, or those of a pattern."""
    if Path(path).is_dir():
        found = [file for end in ("*.jsonl", "*.jsonl.gz") for file in Path(path).glob(end)]
    elif glob.has_magic(os.fspath(path)) and not Path(path).exists():
        found = [Path(file) for file in glob.glob(os.fspath(path), recursive=True)]
    else:
        return [Path(path)]
    if lost := sorted(str(file) for file in found if file.is_symlink() and not file.exists()):
        raise FileNotFoundError(
            f"`paths`: {os.fspath(path)!r} has a link to a file that does not exist, {lost[0]}. "
            "Mount its disk, or remove the link."
        )
    found = [file for file in found if file.is_file()]
    if not found:
        raise FileNotFoundError(
            f"`paths` must name files, but {os.fspath(path)!r} has none (of a folder, those that "
            "end in `.jsonl` or `.jsonl.gz` are taken)."
        )
    return sorted(found)


def check_files(paths: list[Path], *, expanded: bool) -> None:
    """Raise a `ValueError` for what is no regular file, or comes twice."""
    for path in paths:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ValueError(f"`paths` must be regular files, but {path} is none.")
    twice = [path for path, count in Counter(map(os.path.realpath, paths)).items() if count > 1]
    if twice and expanded:
        raise ValueError(
            f"`paths` must name each file once, but a folder or pattern has {twice[0]} again."
        )


def is_compressed(path: Path) -> bool:
    """Tell whether a file is decompressed while it is read."""
    return path.suffix == ".gz"


def open_lines(path: Path) -> IO[bytes]:
    """Open a file at its beginning, for the bytes of its text."""
    opened: IO[bytes] = open(path, "rb") if not is_compressed(path) else gzip.open(path)  # type: ignore[assignment]
    return opened


@dataclass(frozen=True)
class LineIndex:
    """Where the records of a file are.

    Attributes:
        starts: at which byte each begins, ascending, (n,) int64.
        blanks: of each blank line, how many records come before it, ascending, (m,) int64.
        size: bytes of the file's text.
    """

    starts: NDArray[np.int64]
    blanks: NDArray[np.int64]
    size: int

    def __len__(self) -> int:
        return len(self.starts)

    def span(self, record: int) -> tuple[int, int]:
        """Return the bytes at which a record begins, and at which the next one does."""
        is_last = record + 1 == len(self.starts)
        return int(self.starts[record]), self.size if is_last else int(self.starts[record + 1])

    def line(self, record: int) -> int:
        """Return the number of the line of a record, from 1."""
        return record + 1 + int(np.searchsorted(self.blanks, record, "right"))

    def record_at(self, offset: int) -> int | None:
        """Return the record that begins at a byte; `None` where none does."""
        record = int(np.searchsorted(self.starts, offset))
        found = record < len(self.starts) and self.starts[record] == offset
        return record if found else None


def index_lines(path: Path) -> LineIndex:
    """Return where the records of a file are: the lines with anything but white space."""
    starts, blanks, offset = array("q"), array("q"), 0
    progress = SlowProgress(f"bytes of {path} read, to find its records", path.stat().st_size)
    try:
        with open_lines(path) as file:
            while lines := file.readlines(_INDEXED_BYTES):
                for line in lines:
                    if line.isspace():
                        blanks.append(len(starts))
                    else:
                        starts.append(offset)
                    offset += len(line)
                progress.update(offset)
    except CUT as error:
        raise ValueError(f"{path} cannot be decompressed: {error}. Put it back whole.") from error
    except MemoryError as error:
        raise ValueError(
            f"{path}, after byte {offset}, has a line that is too long for the memory. A record "
            "must be on a line of its own: is this JSON Lines?"
        ) from error
    return LineIndex(np.frombuffer(starts, np.int64), np.frombuffer(blanks, np.int64), offset)
