"""Carry values between processes, through a socket, or in memory that both processes map.

`pack` pickles a value with its buffers out of band (PEP 574), tensors as numpy arrays: as torch
pickles them, each takes a file descriptor. A message is a sequence of such parts. On the socket,
their number and their sizes come first, 8 bytes each, so the receiver allocates each part once and
reads straight into it; below 0, the descriptor of a `PageFile` follows.

A `PageFile` is a file of memory without a name (`memfd_create`). Its pages live as long as somebody
has it open or mapped, so nothing is left of a process that was killed. The first use of new pages
costs several times what the copy into them does: a worker writes its files again (`FilePool`) once
a `Lease` says that nobody reads them any more, and the trainer keeps them mapped (`SharedFiles`).
"""

from __future__ import annotations

import ctypes
import errno
import io
import math
import mmap
import os
import pickle
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, count, islice
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch

from odb_nodes._core.content import (
    from_bytes,
    is_plain_tensor,
    is_simple_tensor,
    tensor_bytes,
    to_bytes,
)

Pages = bytearray | memoryview | mmap.mmap

SHARED_BYTES = 2 << 20
"""Buffers from this size on are sent as files, since each needs a file of its own."""

CAN_SHARE = hasattr(os, "memfd_create") and hasattr(socket, "send_fds")
"""Whether this system has such files, and can hand them to other processes."""

NO_FILE = -1  # in place of a file's number: there is none

_OTHER_DTYPES = frozenset((torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2))
"""Those that numpy lacks, and that large tensors have."""

_UNZEROED_BYTES = 64 << 10  # of a buffer: a bytearray is filled by zeros first
_ALIGNED_BYTES = 64  # a cache line, and what vector instructions may want
_MOST_SPARE = 2  # times the size of what is written: other pages of a file are given back
_MOST_FREE_BYTES = 64 << 20  # of a worker's files that wait to be written again
_MOST_MAPPED = 64  # files of a worker that the trainer keeps mapped: each has two descriptors
_MOST_VECTORS = 512  # buffers of one call; the system allows 1024
_RETRY_S = 0.001
_BYTE = b"\0"  # that a descriptor travels with


# --- values as parts of a message -----------------------------------------------------------------


class _Pickler(pickle.Pickler):
    """Pickles CPU tensors as numpy arrays, so that their storage goes out of band."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is torch.Tensor:
            if is_plain_tensor(value):
                return _tensor_of, (value.detach().contiguous().numpy(),)
            if value.dtype in _OTHER_DTYPES and is_simple_tensor(value):
                return _tensor_of_bytes, (tensor_bytes(value), value.dtype, value.shape)
            # A copy, since `torch.save` writes the whole storage that a view is of.
            copy = value.detach().clone().requires_grad_(value.requires_grad)
            return from_bytes, (to_bytes(copy),)
        if type(value) is np.ndarray and not value.flags.writeable:
            return value.copy().__reduce_ex__(5)  # arrives writable, as all others
        return NotImplemented


def _tensor_of(array: np.ndarray[Any, Any]) -> torch.Tensor:
    # Pickle looks for the module of a function of torch in all that are imported.
    return torch.from_numpy(array)


def _tensor_of_bytes(
    raw: np.ndarray[Any, Any], dtype: torch.dtype, shape: torch.Size
) -> torch.Tensor:
    return torch.from_numpy(raw).view(dtype).view(shape)


def pack(value: Any) -> list[memoryview]:
    """Return a value as the parts of a message, for `unpack`."""
    body = io.BytesIO()
    parts: list[memoryview] = []
    pickler = _Pickler(body, protocol=5, buffer_callback=lambda buffer: parts.append(buffer.raw()))
    pickler.dump(value)
    return [body.getbuffer(), *parts]


def dumps(value: Any) -> bytes:
    """Pickle a value, also with tensors of dtypes whose own pickles torch cannot read back."""
    body = io.BytesIO()
    _Pickler(body, protocol=5).dump(value)
    return body.getvalue()


def unpack(parts: Sequence[Pages]) -> Any:
    """Return the value of a message of `pack`, whose parts become its memory."""
    return pickle.loads(parts[0], buffers=parts[1:])


def join_parts(parts: Sequence[memoryview]) -> bytes:
    """Return parts as one, for `split_parts`."""
    return _join(_aligned(parts))


def split_parts(joined: PageFile | Pages) -> list[memoryview]:
    """Return the parts that were joined, writable, in memory of this process."""
    whole = memoryview(joined.pages() if isinstance(joined, PageFile) else joined)
    number = int.from_bytes(whole[:8], "little")
    sizes = whole[: 8 * (1 + number)].cast("q").tolist()[1:]
    steps = [size + -size % _ALIGNED_BYTES for size in (8 * (1 + number), *sizes)]
    starts = [*accumulate(steps)]
    return [whole[start : start + size] for start, size in zip(starts, sizes, strict=False)]


def size_of(parts: Iterable[bytes | memoryview]) -> int:
    """Return how many bytes parts have."""
    return sum(map(len, parts))


def _aligned(parts: Sequence[memoryview]) -> list[bytes | memoryview]:
    """Return a table of parts, and the parts, each filled up to a multiple of `_ALIGNED_BYTES`."""
    sizes = [len(parts), *map(len, parts)]
    joined: list[bytes | memoryview] = [struct.pack(f"<{len(sizes)}q", *sizes)]
    for part in parts:
        joined += (bytes(-len(joined[-1]) % _ALIGNED_BYTES), part)
    return joined


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


# --- the socket -----------------------------------------------------------------------------------


def encode(parts: Sequence[Part]) -> list[memoryview | PageFile]:
    """Return what goes through a socket for a message."""
    sent = [_shared(part) for part in parts]
    sizes = [-part.size_bytes if isinstance(part, PageFile) else part.nbytes for part in sent]
    head = memoryview(struct.pack(f"<{1 + len(sizes)}q", len(sizes), *sizes))
    return [head, *(part for part in sent if isinstance(part, PageFile) or part.nbytes)]


def send(connection: socket.socket, parts: Sequence[Part]) -> None:
    """Write a message; blocks while the other side has no room for it."""
    write(connection, deque(encode(parts)))


def write(connection: socket.socket, waiting: deque[Any], flags: int = 0) -> bool:
    """Write what waits, and take it out; tell whether all is written, which `flags` may prevent."""
    while waiting:
        if isinstance(waiting[0], PageFile):
            if flags:
                return False
            waiting[0].send(connection)
            waiting.popleft()
        elif hasattr(connection, "sendmsg"):
            vectors = []
            for part in islice(waiting, _MOST_VECTORS):
                if isinstance(part, PageFile):
                    break
                vectors.append(part)
            try:
                _advance(waiting, connection.sendmsg(vectors, [], flags))
            except BlockingIOError:
                return False
        elif flags:  # on Windows
            return False
        else:
            connection.sendall(waiting.popleft())
    return True


def receive(connection: socket.socket) -> list[Pages | PageFile]:
    """Read a message; each part has writable memory of its own."""
    (number,) = struct.unpack("<q", _read(connection, 8))
    sizes = struct.unpack(f"<{number}q", _read(connection, 8 * number))
    return [
        _read(connection, size) if size >= 0 else PageFile.receive(connection, -size)
        for size in sizes
    ]


def mapped(part: Pages | PageFile) -> Pages:
    """Return a part of a message as memory."""
    return part.pages() if isinstance(part, PageFile) else part


def _shared(part: Part) -> memoryview | PageFile:
    if isinstance(part, PageFile):
        return part
    view = memoryview(part)
    return view if view.nbytes < SHARED_BYTES else PageFile.of([view]) or view


def _read(connection: socket.socket, size_bytes: int) -> Pages:
    large = size_bytes >= _UNZEROED_BYTES
    buffer = np.empty(size_bytes, np.uint8).data if large else bytearray(size_bytes)
    rest = memoryview(buffer)
    while rest:
        read = connection.recv_into(rest, 0, socket.MSG_WAITALL)
        if read == 0:
            raise EOFError("the other side has closed.")
        rest = rest[read:]
    return buffer


def _advance(waiting: deque[Any], size_bytes: int) -> None:
    """Drop so many bytes from the front of the buffers that wait, none of them empty."""
    while waiting and size_bytes and size_bytes >= waiting[0].nbytes:
        size_bytes -= waiting.popleft().nbytes
    if size_bytes:
        waiting[0] = waiting[0][size_bytes:]


# --- files of memory ------------------------------------------------------------------------------


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
        waiting, at = deque(memoryview(part) for part in parts if part), 0
        try:
            if self.capacity_bytes > _MOST_SPARE * self.size_bytes:
                os.ftruncate(self._file, self.size_bytes)
            while waiting:
                written = os.pwritev(self._file, [*islice(waiting, _MOST_VECTORS)], at)
                at += written
                _advance(waiting, written)
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
        return 2 * self._file >= _open_files_limit()  # The lowest free number is given out.

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
        """Return its memory: a mapping, which has a descriptor, too; a copy where those are few.

        What this process writes there, no other sees.
        """
        mapping = self._map(self.size_bytes, mmap.MAP_PRIVATE)
        return self.copied() if mapping is None else mapping

    def shared_pages(self) -> _Mapping | None:
        """Return a mapping that shows what is written to the file later on; `None` for none."""
        mapping = self._map(self.capacity_bytes, mmap.MAP_SHARED)
        if mapping is not None:
            mapping.file = self
        return mapping

    def make_private(self, address: int, size_bytes: int) -> None:
        """Map the file over a mapping, so that nobody else sees what is written there."""
        call = ctypes.CDLL(None).mmap
        call.restype, call.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t]
        call.argtypes += [ctypes.c_int] * 3 + [ctypes.c_long]
        access = mmap.PROT_READ | mmap.PROT_WRITE
        call(address, size_bytes, access, mmap.MAP_PRIVATE | _MAP_FIXED, self._file, 0)

    def _map(self, size_bytes: int, flags: int) -> _Mapping | None:
        if self.is_one_of_many:
            return None
        try:
            mapping = _Mapping(self._file, size_bytes, flags)
        except OSError:  # too many mappings
            return None
        mapping.lease = self.lease
        return mapping

    def copied(self) -> bytearray:
        """Return a copy of its content, which has no descriptor."""
        with _naming_bytes(self.size_bytes):
            buffer = bytearray(self.size_bytes)
        rest, at = memoryview(buffer), 0
        while rest:
            number = os.preadv(self._file, [rest], at)
            rest, at = rest[number:], at + number
        return buffer


Part = bytes | bytearray | mmap.mmap | memoryview | PageFile


class _Mapping(mmap.mmap):
    lease: Any
    file: PageFile


_MAP_FIXED = 0x10  # of Linux, which alone has such files
_lent: WeakValueDictionary[int, Lease] = WeakValueDictionary()  # of shared mappings, by id


class _Forks:
    """Counts the forks of this process."""

    def __init__(self) -> None:
        self.count = 0
        if hasattr(os, "register_at_fork"):
            # Twice, since another thread may make a lease after the first of both, or end one
            # before the second: the child has its pages all the same.
            os.register_at_fork(
                before=self._note, after_in_parent=self._share, after_in_child=_make_all_private
            )

    def _note(self) -> None:
        self.count += 1

    def _share(self) -> None:
        _make_all_private()  # The child still has the pages, and would see what is written here.
        self._note()


def _make_all_private() -> None:
    """Have the memory that is lent seen by this process alone."""
    for lease in [reference() for reference in _lent.valuerefs()]:
        if lease is None:
            continue
        mapping = lease.mapping
        mapping.file.make_private(np.frombuffer(mapping, np.uint8).ctypes.data, len(mapping))


class Lease:
    """Gives a file back when nobody reads it any more."""

    __slots__ = ("__weakref__", "_forks", "_give_back", "_number", "mapping")
    mapping: _Mapping  # if it is of one that is shared
    _process = _Forks()  # here, since a module loses its names at exit before its objects

    def __init__(self, number: int, give_back: Callable[[int], None]) -> None:
        self._number, self._give_back, self._forks = number, give_back, self._process.count

    def retire(self) -> None:
        """Have the file not written again."""
        self._forks = -1

    def __del__(self) -> None:
        may_be_written = self._forks == self._process.count
        self._give_back(self._number if may_be_written else ~self._number)


class _Leased(np.ndarray[Any, Any]):
    """Bytes of a shared mapping, and the lease that ends with the last view of them."""

    lease: Lease


class SharedFiles:
    """The files of one worker that the trainer keeps mapped, by their numbers."""

    def __init__(self, give_back: Callable[[int], None]) -> None:
        self._mappings: dict[int, _Mapping] = {}
        self._to_worker = give_back

    def open(self, number: int, file: PageFile | None, size_bytes: int) -> Pages:
        """Return what the worker has written into a file, which is sent where it is new.

        The file is given back once the last view of the memory is gone.
        """
        lease = Lease(number, self.give_back)
        if file is not None:
            many = len(self._mappings) >= _MOST_MAPPED
            if many or (mapping := file.shared_pages()) is None:
                lease.retire()
                return file.copied()
            self._mappings[number] = mapping
        lease.mapping = self._mappings[number]
        _lent[id(lease)] = lease
        leased = np.frombuffer(lease.mapping, np.uint8, size_bytes).view(_Leased)
        leased.lease = lease
        return leased.data

    def give_back(self, number: int) -> None:
        """Take a file back that nobody reads any more, as a `Lease` gives it."""
        if number < 0:
            self.drop([~number])
        self._to_worker(number)

    def drop(self, numbers: Iterable[int]) -> None:
        """Forget files that are not written again."""
        for number in numbers:
            self._mappings.pop(number, None)

    def close(self) -> None:
        """Forget all files. Memory that is in use stays."""
        self._mappings.clear()


class FilePool:
    """The files of a worker, which are written again when they have come back."""

    def __init__(self) -> None:
        self._numbers = count()
        self._lent: dict[int, PageFile] = {}
        self._free: dict[int, PageFile] = {}
        self._mapped: set[int] = set()  # by the trainer, in full
        self._gone: list[int] = []

    def join(self, parts: Sequence[memoryview], least_bytes: int) -> tuple[PageFile | bytes, int]:
        """Return parts as one, for `split_parts`, and the number of the file.

        That is `NO_FILE` for bytes: below `least_bytes`, and where there can be no file.
        """
        joined = _aligned(parts)
        size_bytes = size_of(joined)
        if size_bytes < least_bytes:
            return _join(joined), NO_FILE
        fits = [one for one in self._free.items() if size_bytes <= one[1].capacity_bytes]
        if fits:
            number, file = min(fits, key=lambda one: one[1].capacity_bytes)
            del self._free[number]
            if file.write(joined):
                self._lent[number] = file
                return file, number
            self._forget(number)
        if (new := PageFile.of(joined)) is None:
            return _join(joined), NO_FILE
        self._lent[number := next(self._numbers)] = new
        return new, number

    def is_known(self, number: int) -> bool:
        """Tell whether the trainer has a file mapped, as it will have from now on."""
        is_known = number in self._mapped
        self._mapped.add(number)
        return is_known

    def take_back(self, numbers: Iterable[int]) -> None:
        """Take files back that nobody reads any more, as a `Lease` gives them."""
        for number in numbers:
            if number < 0:
                del self._lent[~number]
                self._mapped.discard(~number)
            else:
                self._free[number] = self._lent.pop(number)
        # At least two are kept, however large: a worker writes one while another is on its way.
        free = self._free
        while len(free) > 2 and sum(one.capacity_bytes for one in free.values()) > _MOST_FREE_BYTES:
            oldest = next(iter(free))
            del free[oldest]
            self._forget(oldest)

    def _forget(self, number: int) -> None:
        if number in self._mapped:
            self._mapped.remove(number)
            self._gone.append(number)

    def gone(self) -> list[int]:
        """Return the numbers of files that the trainer need not map any more; each once."""
        gone, self._gone = self._gone, []
        return gone


def _open_files_limit() -> float:
    """Return how many files this process may have open, where the system tells."""
    if sys.platform == "win32":
        return math.inf
    import resource

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return math.inf if limit == resource.RLIM_INFINITY else limit
