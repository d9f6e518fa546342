"""A file that one process appends to, so that what was written outlives a kill."""

from __future__ import annotations

import errno
import os
import sys
import weakref
from contextlib import suppress
from pathlib import Path

from odb_nodes._core.user_warning import warn_user

if sys.platform == "win32":
    fcntl = None
else:
    import fcntl

_LOCKED = (errno.EWOULDBLOCK, errno.EACCES)
_all: weakref.WeakSet[LockedFile] = weakref.WeakSet()


class LockedFile:
    """A file that no other process appends to while it is open. A forked child does not have it.

    Args:
        path: of the file; it and its folder are made when it is opened.
        advice: what to do where another process has it, for the error.
    """

    def __init__(self, path: Path, advice: str) -> None:
        self.path = path
        self._advice = advice
        self._file: int | None = None
        self._is_warned = False
        _all.add(self)

    @property
    def is_open(self) -> bool:
        """Whether it can be written."""
        return self._file is not None

    def open(self) -> None:
        """Open the file; nothing happens where it is open.

        Raises:
            OSError: it cannot be made.
            RuntimeError: another process, or another object of this one, has it open.
        """
        if self._file is not None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        if fcntl is None:
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _LOCKED:
                return  # a disk without locks
            self.forget()
            raise RuntimeError(
                f"another process, or another object of this one, writes `{self.path}`. "
                f"{self._advice}"
            ) from None

    def size(self) -> int:
        """Return the bytes of the file."""
        return os.lseek(self._handle, 0, os.SEEK_END)

    def write(self, data: bytes) -> None:
        """Append bytes.

        Raises:
            OSError: the disk is full, or fails; some of the bytes may have been written. Or the
                file was deleted: then it is closed, and `open` makes a new one.
        """
        self._check_exists()
        if os.write(self._handle, data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    def sync(self) -> None:
        """Wait until the disk has all that was written.

        Raises:
            OSError: it cannot.
        """
        os.fsync(self._handle)

    def tail(self, size: int) -> bytes:
        """Return the last `size` bytes of the file, or all of a shorter one.

        Raises:
            OSError: the file was deleted, as in `write`.
        """
        self._check_exists()
        with self.path.open("rb") as file:
            file.seek(max(0, self.size() - size))
            return file.read()

    def replace(self, at: int, data: bytes) -> None:
        """Write bytes over others, in place."""
        with self.path.open("r+b", buffering=0) as file:
            file.seek(at)
            file.write(data)

    def warn(self, error: Exception, lost: str) -> None:
        """Warn, once, that the file cannot be written, and of what is lost by that."""
        if not self._is_warned:
            self._is_warned = True
            warn_user(f"`{self.path}` cannot be written ({error}). Training goes on; {lost}.")

    def close(self) -> None:
        """Let go of the file, and of its lock. Idempotent."""
        if self._file is not None and fcntl is not None:
            with suppress(OSError):  # a disk without locks
                fcntl.flock(self._file, fcntl.LOCK_UN)  # also that of a child just forked
        self.forget()

    def forget(self) -> None:
        """Close the file as a kill does: a copy that a forked child has keeps the lock."""
        file, self._file = getattr(self, "_file", None), None
        if file is not None:
            os.close(file)

    def __del__(self) -> None:
        self.forget()

    def _check_exists(self) -> None:
        found = os.fstat(self._handle)
        if found.st_nlink:
            return
        with suppress(OSError):  # some file systems count no links
            if os.path.samestat(found, os.stat(self.path)):
                return
        self.forget()
        raise FileNotFoundError(
            errno.ENOENT, "it was deleted while it was being written", str(self.path)
        )

    @property
    def _handle(self) -> int:
        if self._file is None:
            raise OSError(errno.EBADF, "it is not open", str(self.path))
        return self._file


def _close_in_child() -> None:
    """Close the copies that a forked child has: they would hold the locks as long as it lives."""
    for file in list(_all):
        file.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
