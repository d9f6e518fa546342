"""Write a file whole or not at all."""

from __future__ import annotations

import contextlib
import glob
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from odb_nodes._core.signals import deferred_interrupt

if sys.platform == "win32":
    fcntl = None
else:
    import fcntl

_SUFFIX = ".part"


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file beside `path`, which takes its place when this context ends well.

    It is on the disk then, name and all, so that it outlives a loss of power.
    If it does not end well, the temporary file is gone, and what was at `path` before is kept.
    Files that killed processes have left are removed first.

    Args:
        path: a regular file, or none yet, in a folder that exists.

    Yields:
        The file, for writing.

    Raises:
        OSError: the file cannot be written; `filename` is `path`.
    """
    _remove_stale(path)
    file: BinaryIO | None = None
    try:
        with deferred_interrupt():  # No interrupt between making the file and knowing of it.
            file = _open_temporary(path)
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.chmod(file.name, _mode_of(path))
            os.replace(file.name, path)
            sync_folder(path.parent)
    except BaseException as error:
        with deferred_interrupt():
            if file is not None:
                Path(file.name).unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None:
            raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
        raise


def sync_folder(folder: Path) -> None:
    """Have the names in a folder on the disk, where the system can do that."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    with contextlib.suppress(OSError):  # Not every file system can, nor every user.
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _open_temporary(path: Path) -> BinaryIO:
    while True:
        handle, name = tempfile.mkstemp(_SUFFIX, f".{path.name}.", path.parent)
        os.close(handle)
        # Until it is locked, another save of `path` may take it for a stale one, and remove it.
        with contextlib.suppress(FileNotFoundError):
            file = open(name, "r+b")
            _lock(file)
            if os.fstat(file.fileno()).st_nlink > 0:
                return file
            file.close()


def _lock(file: BinaryIO, wait: bool = True) -> bool:
    """Mark a file as being written, until it is closed or this process dies."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:  # It is being written; or this file system has no locks.
        return False
    return True


def _remove_stale(path: Path) -> None:
    """Remove the temporary files of `path` that nobody writes any more."""
    pattern = f".{glob.escape(path.name)}.*{_SUFFIX}"
    for name in glob.glob(str(Path(glob.escape(str(path.parent))) / pattern)):
        with contextlib.suppress(OSError), open(name, "r+b") as file:
            if _lock(file, wait=False):
                os.unlink(name)


def _mode_of(path: Path) -> int:
    """Return the permissions that a file has, or would have if it were made."""
    if path.exists():
        return path.stat().st_mode & 0o777
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
