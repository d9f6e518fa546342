"""Files that outlive a kill: written whole or not at all, or appended to by one process."""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import secrets
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from odb_nodes._support.checks import check_type
from odb_nodes._support.processes import deferred_interrupt
from odb_nodes._support.user_warning import warn_user

if sys.platform == "win32":
    fcntl = None
else:
    import fcntl

_SUFFIX = ".part"
_TURN_S = 0.01  # between two looks at a lock
_LOCKED = (errno.EWOULDBLOCK, errno.EACCES)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces `path` when this context ends without an error.

    The new file has the permissions of the old one. Its content and name are on the disk when the
    context ends, and survive a loss of power. After an error, the temporary file is removed, and
    the file at `path` is unchanged. Temporary files of killed processes are removed first. An error
    of writing is an `OSError` whose `filename` is `path`.
    """
    _remove_stale(path)
    file: BinaryIO | None = None
    try:
        with deferred_interrupt():  # No interrupt between making the file and storing it.
            file = _open_temporary(path)
        with file:
            if path.exists():
                os.chmod(file.name, path.stat().st_mode & 0o777)
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, path)
            sync_folder(path.parent)
    except BaseException as error:
        with deferred_interrupt():
            if file is not None:
                Path(file.name).unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None:
            raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
        raise


@contextlib.contextmanager
def taking_turns(path: Path, limit_s: float) -> Iterator[None]:
    """Wait, for at most `limit_s`, until no other process or thread is within this context.

    That saves work and promises nothing: some systems and disks have no locks.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # The folder may be read-only.
            file = stack.enter_context(open(path, "wb"))
            stack.callback(_unlock, file)  # also the copy of a child that is just forked
            deadline_s = time.monotonic() + limit_s
            while not _may_go_on(file) and time.monotonic() < deadline_s:
                time.sleep(_TURN_S)
        yield


def _may_go_on(file: BinaryIO) -> bool:
    """Lock a file, and tell whether it is locked now, or cannot be."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in _LOCKED
    return True


def _unlock(file: BinaryIO | int) -> None:
    if fcntl is not None:
        with contextlib.suppress(OSError):  # a disk without locks
            fcntl.flock(file, fcntl.LOCK_UN)


def folder_with(pattern: str, folder: str | os.PathLike[str]) -> Path:
    """Return the folder with files of this pattern: `folder`, or its only inner one with them."""
    outer = Path(folder)
    inner = sorted({path.parent for path in outer.glob(f"*/{pattern}")})
    if not inner or any(outer.glob(pattern)):
        return outer
    if len(inner) > 1:
        raise ValueError(
            f"`{folder}` must be the folder of one run, but {len(inner)} of its folders have a "
            f"`{pattern}`: {', '.join(f'`{path.name}`' for path in inner)}. Pass one of these."
        )
    return inner[0]


def check_folder(folder: str | os.PathLike[str]) -> Path:
    """Return the path of a folder, which may not exist yet; raise a `ValueError` for a file."""
    check_type("folder", folder, str | os.PathLike)
    path = Path(folder)
    if path.exists() and not path.is_dir():
        raise ValueError(f"`folder` must be a folder, but `{folder}` is a file. Pass another path.")
    return path


def sync_folder(folder: Path) -> None:
    """Write the names in a folder to the disk, if the system can do that."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    with contextlib.suppress(OSError):  # Not every file system can, nor every user.
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _open_temporary(path: Path) -> BinaryIO:
    """Open and lock a new file beside `path`."""
    while True:
        file = open(path.parent / f".{path.name}.{secrets.token_hex(8)}{_SUFFIX}", "x+b")
        # Until it is locked, another save of `path` may take it for a stale one, and remove it.
        if not _try_lock(file, wait=True) or os.fstat(file.fileno()).st_nlink > 0:
            return file
        file.close()


def _remove_stale(path: Path) -> None:
    """Remove the temporary files of `path` that no process writes any more."""
    pattern = f".{glob.escape(path.name)}.*{_SUFFIX}"
    for name in glob.glob(str(Path(glob.escape(str(path.parent))) / pattern)):
        with contextlib.suppress(OSError), open(name, "r+b") as file:
            if _try_lock(file, wait=False):
                os.unlink(name)


def _try_lock(file: BinaryIO, *, wait: bool) -> bool:
    """Lock a file until it is closed or this process dies; tell whether that was possible."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:  # It is being written; or this file system has no locks.
        return False
    return True


_open_files: weakref.WeakSet[LockedFile] = weakref.WeakSet()


class LockedFile:
    """A file that only one process appends to; in a forked child it is closed."""

    def __init__(self, path: Path, advice: str) -> None:
        self.path = path
        self._advice = advice
        self._file: int | None = None
        self._is_warned = False
        _open_files.add(self)

    @property
    def is_open(self) -> bool:
        """Whether this process can write it."""
        return self._file is not None

    def open(self) -> None:
        """Open the file; raise a `RuntimeError` if another object or process has it open."""
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
                f"another process, or another object of this process, writes `{self.path}`. "
                f"{self._advice}"
            ) from None

    def size(self) -> int:
        """Return the bytes of the file."""
        return os.lseek(self._handle, 0, os.SEEK_END)

    def check_exists(self) -> None:
        """Raise an `OSError` if the file was deleted, and close it."""
        status = os.fstat(self._handle)
        if status.st_nlink:
            return
        with contextlib.suppress(OSError):  # some file systems count no links
            if os.path.samestat(status, os.stat(self.path)):
                return
        self.forget()
        raise FileNotFoundError(
            errno.ENOENT, "it was deleted while it was being written", str(self.path)
        )

    def write(self, data: bytes) -> None:
        """Append bytes, or raise an `OSError`; a file that was deleted is closed."""
        self.check_exists()
        if os.write(self._handle, data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    def sync(self) -> None:
        """Wait until all written bytes are on the disk."""
        os.fsync(self._handle)

    def cut(self, size: int) -> None:
        """Truncate the file to `size` bytes."""
        os.ftruncate(self._handle, size)

    def replace(self, offset: int, data: bytes) -> None:
        """Overwrite bytes from `offset` on."""
        with self.path.open("r+b", buffering=0) as file:
            file.seek(offset)
            file.write(data)

    def tail(self, size: int) -> bytes:
        """Return the last `size` bytes of the file, or all of a shorter one."""
        self.check_exists()
        with self.path.open("rb") as file:
            file.seek(max(0, self.size() - size))
            return file.read()

    def warn(self, error: Exception, lost: str) -> None:
        """Warn, once, that the file cannot be written; `lost` says what is missing then."""
        if not self._is_warned:
            self._is_warned = True
            warn_user(f"`{self.path}` cannot be written ({error}). Training goes on; {lost}.")

    def close(self) -> None:
        """Close the file, and release its lock. Idempotent."""
        if self._file is not None:
            _unlock(self._file)  # also the lock of a child just forked
        self.forget()

    def forget(self) -> None:
        """Close the file as a kill does: the lock stays if a forked child has a copy of it."""
        file = getattr(self, "_file", None)
        self._file = None
        if file is not None:
            os.close(file)

    def __del__(self) -> None:
        self.forget()

    @property
    def _handle(self) -> int:
        if self._file is None:
            raise OSError(errno.EBADF, "it is not open", str(self.path))
        return self._file


def _close_in_child() -> None:
    """Close the copies in a forked child, which would keep the locks while it lives."""
    for file in list(_open_files):
        file.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
