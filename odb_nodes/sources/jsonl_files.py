"""The files of a `JsonlSource`."""

from __future__ import annotations

import glob
import gzip
import os
import stat
import zlib
from collections import Counter
from pathlib import Path
from typing import IO

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


def count_records_of(path: Path) -> int:
    """Return the number of lines with anything but white space."""
    try:
        with open_lines(path) as lines:
            return sum(not line.isspace() for line in lines)
    except CUT as error:
        raise ValueError(f"{path} cannot be decompressed: {error}. Put it back whole.") from error
