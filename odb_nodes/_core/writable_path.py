"""Whether a file can be written, before the work whose result it is to hold."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

__all__ = ["check_is_writable"]

AnyPath = str | os.PathLike[str]

_READ = {".arrow", ".gz", ".jsonl", ".ledger", ".pt"}
"""Suffixes of files that are read of a folder."""


def check_is_writable(path: AnyPath, inputs: Iterable[AnyPath] = (), *, force: bool) -> None:
    """Raise an `OSError` unless writing `path` loses nothing.

    It must not exist yet, in a folder that does. With `force` it may be a file, but no input, by
    whatever name.

    Args:
        path: the file to write.
        inputs: files and folders that are read, and other files that are written.
        force: whether to replace a file that exists.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder `{path.parent}`: make that folder first.")
    if path.is_dir():
        raise IsADirectoryError(f"`{path}` is a folder: name a file in it.")
    if any(_is_of(path, Path(one)) for one in inputs):
        raise FileExistsError(f"`{path}` is also read, or written twice: name another file.")
    if path.is_file() and not force:
        raise FileExistsError(f"`{path}` exists: name another file, or pass --force to replace it.")


def _is_of(path: Path, other: Path) -> bool:
    """Tell whether a path is an input or, of a folder, a file that may be."""
    if other.is_dir():
        inside = path.exists() and other.resolve() in path.resolve().parents
        return inside and path.suffix in _READ
    if path.exists() and other.exists():
        return path.samefile(other)  # a hard link, too
    return path.resolve() == other.resolve()
