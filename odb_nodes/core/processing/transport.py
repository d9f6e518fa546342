"""Send values to another process: through a socket, or in memory that both processes map.

`pack` pickles a value with its buffers out of band (PEP 574). Tensors travel as numpy arrays, since
torch's pickles need a file descriptor for each tensor. A message is a sequence of parts: the pickle
and its buffers. On the socket, the number of parts and their sizes come first, 8 bytes each, so the
receiver allocates the memory of each part once. A negative size announces the descriptor of a
`PageFile`.

A `PageFile` is an anonymous file in memory (`memfd_create`), which the receiver maps. Its pages
live as long as a process has the file open or mapped, so a killed process leaves nothing behind.
"""

from __future__ import annotations

import errno
import io
import mmap
import os
import pickle
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice, takewhile
from typing import Any

import numpy as np
import torch

from odb_nodes._support.content import (
    from_bytes,
    is_plain_tensor,
    is_simple_tensor,
    tensor_bytes,
    to_bytes,
)

Pages = bytearray | memoryview | mmap.mmap

SHARED_BYTES = 2 << 20
"""Buffers of this size or more are sent as files. To copy a smaller buffer costs less."""

CAN_SHARE = hasattr(os, "memfd_create") and hasattr(socket, "send_fds")
"""Whether this system has anonymous files, and can send them to other processes."""

_OTHER_DTYPES = frozenset((torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2))
"""Dtypes that numpy lacks."""

_UNZEROED_BYTES = 64 << 10  # from this size on, a numpy array is cheaper than a zeroed bytearray
_MOST_VECTORS = 512  # buffers per system call, which allows 1024
_RETRY_S = 0.001
_BYTE = b"\0"  # A descriptor cannot be sent without data.


# --- values as parts of a message -----------------------------------------------------------------


class _Pickler(pickle.Pickler):
    """Pickles CPU tensors as numpy arrays, so that their storage goes out of band."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is torch.Tensor:
            if is_plain_tensor(value):
                return _tensor_of, (value.detach().contiguous().numpy(),)
            if value.dtype in _OTHER_DTYPES and is_simple_tensor(value):
                return _tensor_of_bytes, (tensor_bytes(value), value.dtype, value.shape)
            # A copy, since `torch.save` would write the whole storage behind a view.
            copy = value.detach().clone().requires_grad_(value.requires_grad)
            return from_bytes, (to_bytes(copy),)
        if type(value) is np.ndarray and not value.flags.writeable:
            return value.copy().__reduce_ex__(5)  # so that it arrives writable
        return NotImplemented


def _tensor_of(array: np.ndarray[Any, Any]) -> torch.Tensor:
    # Pickled as `torch.from_numpy` itself, pickle would search all imported modules for it.
    return torch.from_numpy(array)


def _tensor_of_bytes(
    raw: np.ndarray[Any, Any], dtype: torch.dtype, shape: torch.Size
) -> torch.Tensor:
    return torch.from_numpy(raw).view(dtype).view(shape)


def pack(value: Any) -> list[memoryview]:
    """Return a value as the parts of a message; `unpack` is the inverse."""
    body = io.BytesIO()
    parts: list[memoryview] = []
    pickler = _Pickler(body, protocol=5, buffer_callback=lambda buffer: parts.append(buffer.raw()))
    pickler.dump(value)
    return [body.getbuffer(), *parts]


def dumps(value: Any) -> bytes:
    """Pickle a value in one piece, with tensors even of dtypes that torch cannot unpickle."""
    body = io.BytesIO()
    _Pickler(body, protocol=5).dump(value)
    return body.getvalue()


def unpack(parts: Sequence[Pages]) -> Any:
    """Return the value of a message of `pack`. Its arrays use the memory of the parts."""
    return pickle.loads(parts[0], buffers=parts[1:])


# --- the socket -----------------------------------------------------------------------------------


def encode(parts: Sequence[Part]) -> list[memoryview | PageFile]:
    """Return the buffers and files to write to a socket for a message."""
    sent = [_shared(part) for part in parts]
    sizes = [-part.size_bytes if isinstance(part, PageFile) else part.nbytes for part in sent]
    head = memoryview(struct.pack(f"<{1 + len(sizes)}q", len(sizes), *sizes))
    return [head, *(part for part in sent if isinstance(part, PageFile) or part.nbytes)]


def send(connection: socket.socket, parts: Sequence[Part]) -> None:
    """Write a message; blocks while the other side has no room for it."""
    write(connection, deque(encode(parts)))


def write(connection: socket.socket, waiting: deque[Any], flags: int = 0) -> bool:
    """Write the waiting buffers, and remove them; `False` if `flags` forbid to wait for room."""
    while waiting:
        if isinstance(waiting[0], PageFile):
            if flags:
                return False
            waiting[0].send(connection)
            waiting.popleft()
        elif hasattr(connection, "sendmsg"):
            first = islice(waiting, _MOST_VECTORS)
            buffers = takewhile(lambda part: not isinstance(part, PageFile), first)
            try:
                _advance(waiting, connection.sendmsg([*buffers], [], flags))
            except BlockingIOError:
                return False
        elif flags:  # on Windows
            return False
        else:
            connection.sendall(waiting.popleft())
    return True


def receive(connection: socket.socket) -> list[Pages | PageFile]:
    """Read a message. Each part has separate, writable memory."""
    (count,) = struct.unpack("<q", _read(connection, 8))
    sizes = struct.unpack(f"<{count}q", _read(connection, 8 * count))
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
    return view if view.nbytes < SHARED_BYTES else PageFile.of(view) or view


def _read(connection: socket.socket, size_bytes: int) -> Pages:
    large = size_bytes >= _UNZEROED_BYTES
    buffer = np.empty(size_bytes, np.uint8).data if large else bytearray(size_bytes)
    unread = memoryview(buffer)
    while unread:
        read = connection.recv_into(unread, 0, socket.MSG_WAITALL)
        if read == 0:
            raise EOFError("the other side has closed.")
        unread = unread[read:]
    return buffer


def _advance(waiting: deque[Any], size_bytes: int) -> None:
    """Drop `size_bytes` from the front of the waiting buffers, none of which is empty."""
    while waiting and size_bytes and size_bytes >= waiting[0].nbytes:
        size_bytes -= waiting.popleft().nbytes
    if size_bytes:
        waiting[0] = waiting[0][size_bytes:]


# --- files of memory ------------------------------------------------------------------------------


class PageFile:
    """An anonymous file of memory, whose descriptor is closed with this object."""

    __slots__ = ("_file", "size_bytes")

    def __init__(self, file: int, size_bytes: int) -> None:
        self._file, self.size_bytes = file, size_bytes

    @classmethod
    def of(cls, content: bytes | memoryview) -> PageFile | None:
        """Return a file with this content; `None` if the system cannot provide a file.

        Half of the descriptors stay free, because a process without a free descriptor loses the
        descriptors that other processes send.
        """
        if not CAN_SHARE:
            return None
        try:
            file = os.memfd_create("odb_nodes", os.MFD_CLOEXEC)
        except OSError:  # too many are open, or the system forbids it
            return None
        pages = cls(file, len(content))
        if _are_scarce(file):
            return None
        offset = 0
        with memoryview(content) as unwritten, suppress(OSError):  # no memory
            while offset < len(unwritten):
                offset += os.pwrite(file, unwritten[offset:], offset)
        return pages if offset == len(content) else None

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

    def __del__(self) -> None:
        os.close(self._file)

    def send(self, connection: socket.socket) -> None:
        """Send the descriptor; blocks while too many are in transit."""
        while True:
            try:
                socket.send_fds(connection, [_BYTE], [self._file])
                return
            except OSError as error:  # Descriptors in transit count as open files.
                if error.errno != errno.ETOOMANYREFS:
                    raise
                time.sleep(_RETRY_S)

    def pages(self) -> Pages:
        """Return the memory as a private mapping, or as a copy if descriptors are scarce.

        A mapping keeps a descriptor open. Other processes do not see writes to it.
        """
        if not _are_scarce(self._file):
            with suppress(OSError):  # too many mappings
                return mmap.mmap(self._file, self.size_bytes, mmap.MAP_PRIVATE)
        try:
            buffer = bytearray(self.size_bytes)
        except MemoryError:  # without a text
            raise MemoryError(
                f"there are no {self.size_bytes} bytes of memory for samples or a batch on the way "
                "between a worker and the trainer. Lower `in_flight_bytes` or `chunk_size` of "
                "`WorkerOptions`, or `prefetch`."
            ) from None
        offset = 0
        while offset < self.size_bytes:
            offset += os.preadv(self._file, [memoryview(buffer)[offset:]], offset)
        return buffer


Part = bytes | bytearray | mmap.mmap | memoryview | PageFile


def _are_scarce(file: int) -> bool:
    """Return whether at least half of the descriptors of this process are in use; `file` is new."""
    if sys.platform == "win32":
        return False
    import resource

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    # The system assigns the lowest free number.
    return limit != resource.RLIM_INFINITY and 2 * file >= limit
