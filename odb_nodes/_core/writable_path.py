"""Whether a file can be written, before the work whose result it is to hold."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

__all__ = ["check_is_writable"]

AnyPath = str | os.PathLike[str]


def check_is_writable(path: AnyPath, inputs: Iterable[AnyPath] = (), *, force: bool) -> None:
    """Raise an `OSError` unless writing `path` loses nothing.

    It must not exist yet, in a folder that does. With `force` it may be a file, but no input, by
    whatever name.

    Args:
        path: the file to write.
        inputs: files and folders that are read, and other files that are written. Whatever is in
            such a folder counts as read.
        force: whether to replace a file that exists.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder `{path.parent}`: make that folder first.")
    if path.is_dir():
        raise IsADirectoryError(f"`{path}` is a folder: name a file in it.")
    if any(_is_of(path, Path(one)) for one in inputs):
        raise FileExistsError(
            f"`{path}` is also read, or written twice: name another file, outside the folders that "
            "are read."
        )
    if path.is_file() and not force:
        raise FileExistsError(f"`{path}` exists: name another file, or pass --force to replace it.")


def _is_of(path: Path, other: Path) -> bool:
    """Tell whether a path is an input or, where that is a folder, a file in it."""
    if not (path.exists() and other.exists()):
        return path.resolve() == other.resolve()
    if not other.is_dir():
        return path.samefile(other)  # a hard link, too
    named = path.parent.resolve() / path.name  # in the folder, if only as a link to elsewhere
    if other.resolve() in (*path.resolve().parents, *named.parents):
        return True
    return any(one.exists() and path.samefile(one) for one in other.iterdir())
