"""Memory between processes without a copy through a socket: anonymous files of memory.

The sender writes buffers into a file that has no name (`memfd_create`), and sends its descriptor.
Who wants the pages maps them, so they live as long as what is made of them, and nothing is left of
a process that was killed. Mappings are private: what one process writes into a sample, no other
sees, a forked child included.

The first write to new pages costs several times what one to old pages does. So a worker writes its
files again (`FilePool`) when a `Lease` says that nobody reads them any more.
"""

from __future__ import annotations

import errno
import mmap
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, count, islice
from operator import attrgetter
from typing import Any

from odb_nodes.processing.limits import open_files_limit

__all__ = [
    "CAN_SHARE",
    "MOST_VECTORS",
    "NO_FILE",
    "SHARED_BYTES",
    "FilePool",
    "Lease",
    "PageFile",
    "Pages",
    "advance",
    "join_parts",
    "size_of",
    "split_parts",
]

Pages = bytearray | memoryview | mmap.mmap

SHARED_BYTES = 2 << 20
"""Buffers from this size on are sent so: smaller ones are faster through the socket."""

CAN_SHARE = hasattr(os, "memfd_create") and hasattr(socket, "send_fds")
"""Whether this system has such files, and can hand them to other processes."""

NO_FILE = -1
"""In place of a file's number: there is none."""

_ALIGNED_BYTES = 64  # a cache line, and what vector instructions may want
_MOST_SPARE = 2  # times the size of what is written: other pages of a file are given back
_MOST_FREE = 8  # files of a worker that wait to be written again
MOST_VECTORS = 512  # buffers of one call; the system allows 1024
_RETRY_S = 0.001
_BYTE = b"\0"  # that a descriptor travels with


class PageFile:
    """An anonymous file of memory, whose descriptor is closed with this object."""

    __slots__ = ("_file", "lease", "size_bytes")

    def __init__(self, file: int, size_bytes: int, lease: Any = None) -> None:
        self._file, self.size_bytes, self.lease = file, size_bytes, lease

    @classmethod
    def of(cls, parts: Sequence[bytes | memoryview]) -> PageFile | None:
        """Return a file that holds buffers one after the other; `None` where there can be none.

        Half of the descriptors are left free: one that is sent to a process without any is lost.
        """
        if not CAN_SHARE:
            return None
        try:
            file = os.memfd_create("odb_nodes", os.MFD_CLOEXEC)
        except OSError:  # too many are open, or the system forbids it
            return None
        pages = cls(file, 0)
        return pages if not pages.is_one_of_many and pages.write(parts) else None

    def write(self, parts: Sequence[bytes | memoryview]) -> bool:
        """Make buffers its content, one after the other; tell whether there was memory for it."""
        self.size_bytes = size_of(parts)
        try:
            if self.capacity_bytes > _MOST_SPARE * self.size_bytes:
                os.ftruncate(self._file, self.size_bytes)
            _write(self._file, parts)
        except OSError:
            return False
        return True

    @classmethod
    def receive(cls, connection: socket.socket, size_bytes: int) -> PageFile:
        """Return the file whose descriptor is next on a connection."""
        flags = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
        data, files, _, _ = socket.recv_fds(connection, 1, 1, flags)
        if not data:
            raise EOFError("the other side has closed.")
        if not files:
            raise OSError("a descriptor could not be received: too many are open (`ulimit -n`).")
        return cls(files[0], size_bytes)

    @property
    def is_one_of_many(self) -> bool:
        """Whether half of the descriptors that a process may have are in use, or more."""
        return 2 * self._file >= open_files_limit()  # The lowest free number is given out.

    @property
    def capacity_bytes(self) -> int:
        """How much of it has pages."""
        return os.fstat(self._file).st_size

    def __len__(self) -> int:
        return self.size_bytes

    def __del__(self) -> None:
        os.close(self._file)

    def send(self, connection: socket.socket) -> None:
        """Send the descriptor; blocks while too many are on their way."""
        while True:
            try:
                socket.send_fds(connection, [_BYTE], [self._file])
                return
            except OSError as error:  # One process may have as many on their way as open.
                if error.errno != errno.ETOOMANYREFS:
                    raise
                time.sleep(_RETRY_S)

    def pages(self) -> Pages:
        """Return its memory: a mapping, which has a descriptor, too; a copy where those are few."""
        if self.is_one_of_many:
            return self._read()
        try:
            mapping = _Mapping(self._file, self.size_bytes, mmap.MAP_PRIVATE)
        except OSError:  # too many mappings
            return self._read()
        mapping.lease = self.lease
        return mapping

    def _read(self) -> bytearray:
        with _naming_bytes(self.size_bytes):
            buffer = bytearray(self.size_bytes)
        rest, at = memoryview(buffer), 0
        while rest:
            count = os.preadv(self._file, [rest], at)
            rest, at = rest[count:], at + count
        return buffer


class _Mapping(mmap.mmap):
    lease: Any


class _Forks:
    """Counts the forks of this process."""

    def __init__(self) -> None:
        self.count = 0
        if hasattr(os, "register_at_fork"):
            # Twice, since another thread may make a lease after the first of both, or end one
            # before the second: the child has its pages all the same.
            os.register_at_fork(before=self._note, after_in_parent=self._note)

    def _note(self) -> None:
        self.count += 1


class Lease:
    """Gives a file back when nobody reads it any more."""

    __slots__ = ("_forks", "_give_back", "_number")
    _process = _Forks()  # here, since a module loses its names at exit before its objects

    def __init__(self, number: int, give_back: Callable[[int], None]) -> None:
        self._number, self._give_back, self._forks = number, give_back, self._process.count

    def retire(self) -> None:
        """Have the file not written again."""
        self._forks = -1

    def __del__(self) -> None:
        may_be_written = self._forks == self._process.count
        self._give_back(self._number if may_be_written else ~self._number)


class FilePool:
    """The files of a worker, which are written again when they have come back."""

    def __init__(self) -> None:
        self._numbers = count()
        self._lent: dict[int, PageFile] = {}
        self._free: list[PageFile] = []

    def join(self, parts: Sequence[memoryview], least_bytes: int) -> tuple[PageFile | bytes, int]:
        """Return parts as one, for `split_parts`, and the number of the file.

        That is `NO_FILE` for bytes: below `least_bytes`, and where there can be no file.
        """
        joined = _aligned(parts)
        size_bytes = size_of(joined)
        if size_bytes < least_bytes:
            return _join(joined), NO_FILE
        fits = [file for file in self._free if size_bytes <= file.capacity_bytes]
        file = min(fits, key=_capacity_of) if fits else None
        if file is not None:
            self._free.remove(file)
            file = file if file.write(joined) else None
        file = file or PageFile.of(joined)
        if file is None:
            return _join(joined), NO_FILE
        number = next(self._numbers)
        self._lent[number] = file
        return file, number

    def take_back(self, numbers: Iterable[int]) -> None:
        """Take files back that nobody reads any more, as a `Lease` gives them."""
        for number in numbers:
            if number < 0:
                del self._lent[~number]
            else:
                self._free.append(self._lent.pop(number))
        if len(self._free) > _MOST_FREE:
            del self._free[:-_MOST_FREE]


def join_parts(parts: Sequence[memoryview]) -> bytes:
    """Return parts as one, for `split_parts`."""
    return _join(_aligned(parts))


def _join(parts: Sequence[bytes | memoryview]) -> bytes:
    with _naming_bytes(size_of(parts)):
        return b"".join(parts)


@contextmanager
def _naming_bytes(size_bytes: int) -> Iterator[None]:
    """Say in a `MemoryError`, which Python raises without a text, what there is no memory for."""
    try:
        yield
    except MemoryError:
        raise MemoryError(
            f"there are no {size_bytes} bytes of memory for samples or a batch on the way between "
            "a worker and the trainer. Lower `in_flight_bytes` or `chunk_size` of `WorkerOptions`, "
            "or `prefetch`."
        ) from None


def _aligned(parts: Sequence[memoryview]) -> list[bytes | memoryview]:
    """Return a table of parts, and the parts, each filled up to a multiple of `_ALIGNED_BYTES`."""
    sizes = [len(parts), *map(_size_of, parts)]
    table = b"".join(size.to_bytes(8, "little") for size in sizes)
    joined: list[bytes | memoryview] = [table]
    for part in parts:
        joined += (bytes(-_size_of(joined[-1]) % _ALIGNED_BYTES), part)
    return joined


def split_parts(joined: PageFile | Pages) -> list[memoryview]:
    """Return the parts that were joined, writable, in memory of this process."""
    whole = memoryview(joined.pages() if isinstance(joined, PageFile) else joined)
    count = int.from_bytes(whole[:8], "little")
    sizes = whole[: 8 * (1 + count)].cast("q").tolist()[1:]
    steps = [size + -size % _ALIGNED_BYTES for size in (8 * (1 + count), *sizes)]
    starts = [*accumulate(steps)]
    return [whole[start : start + size] for start, size in zip(starts, sizes, strict=False)]


def size_of(parts: Iterable[bytes | memoryview]) -> int:
    """Return how many bytes parts have."""
    return sum(map(_size_of, parts))


_capacity_of = attrgetter("capacity_bytes")


def _size_of(part: bytes | memoryview) -> int:
    return part.nbytes if isinstance(part, memoryview) else len(part)


def _write(file: int, parts: Sequence[bytes | memoryview]) -> None:
    waiting = deque(memoryview(part) for part in parts if _size_of(part))
    at = 0
    while waiting:
        written = os.pwritev(file, [*islice(waiting, MOST_VECTORS)], at)
        at += written
        advance(waiting, written)


def advance(waiting: deque[memoryview], size_bytes: int) -> None:
    """Drop so many bytes from the front of the buffers that wait, none of them empty."""
    while waiting and size_bytes >= waiting[0].nbytes:
        size_bytes -= waiting.popleft().nbytes
    if size_bytes:
        waiting[0] = waiting[0][size_bytes:]
