"""Carry a chunk of samples between processes as a few flat buffers.

Everything is pickled with its buffers out of band (PEP 574), tensors as numpy arrays: as torch
pickles them, each takes a file descriptor. Types are kept.

A message is a sequence of parts: `pack` makes a pickle followed by the buffers that it refers to,
in the order in which the pickler meets them, and `unpack` hands them back in that order. On the
socket, the number of parts and their sizes come first, 8 bytes each, so the receiver allocates each
part once and reads straight into it; a size below 0 says that a descriptor of the part follows
(`shared_pages`).
"""

from __future__ import annotations

import io
import mmap
import pickle
import socket
import struct
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch

from odb_nodes._core.content import (
    from_bytes,
    is_plain_tensor,
    is_simple_tensor,
    tensor_bytes,
    to_bytes,
)
from odb_nodes.processing.shared_pages import MOST_VECTORS, SHARED_BYTES, PageFile, Pages, advance

__all__ = ["dumps", "mapped", "pack", "receive", "send", "unpack"]

_OTHER_DTYPES = frozenset((torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2))
"""Those that numpy lacks, and that large tensors have."""

_LARGE_BYTES = 64 << 10  # of a part


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


Part = bytes | bytearray | mmap.mmap | memoryview | PageFile


def pack(value: Any) -> list[memoryview]:
    """Return a value as the parts of a message, for `unpack`."""
    body = io.BytesIO()
    parts: list[memoryview] = []
    pickler = _Pickler(body, protocol=5, buffer_callback=lambda buffer: parts.append(buffer.raw()))
    pickler.dump(value)
    return [body.getbuffer(), *parts]


def dumps(value: Any) -> bytes:
    """Pickle a value, also with tensors of dtypes whose own pickles torch cannot read back.

    Raises:
        Exception: whatever pickling it raised.
    """
    body = io.BytesIO()
    _Pickler(body, protocol=5).dump(value)
    return body.getvalue()


def unpack(parts: Sequence[Pages]) -> Any:
    """Return the value of a message of `pack`, whose parts become its memory."""
    return pickle.loads(parts[0], buffers=parts[1:])


def send(connection: socket.socket, parts: Sequence[Part]) -> None:
    """Write a message; blocks while the other side has no room for it."""
    sent = [_shared(part) for part in parts]
    sizes = [-part.size_bytes if isinstance(part, PageFile) else part.nbytes for part in sent]
    waiting = [memoryview(struct.pack(f"<{1 + len(sizes)}q", len(sizes), *sizes))]
    for part in sent:
        if isinstance(part, PageFile):
            _send_all(connection, waiting)
            part.send(connection)
            waiting = []
        elif part.nbytes:
            waiting.append(part)
    _send_all(connection, waiting)


def _send_all(connection: socket.socket, buffers: list[memoryview]) -> None:
    """Write buffers, as many as the system takes in one call."""
    if not hasattr(connection, "sendmsg"):  # on Windows
        for buffer in buffers:
            connection.sendall(buffer)
        return
    waiting = deque(buffers)
    while waiting:
        advance(waiting, connection.sendmsg([*islice(waiting, MOST_VECTORS)]))


def _shared(part: Part) -> memoryview | PageFile:
    if isinstance(part, PageFile):
        return part
    view = memoryview(part)
    return view if view.nbytes < SHARED_BYTES else PageFile.of([view]) or view


def receive(connection: socket.socket) -> list[Pages | PageFile]:
    """Read a message.

    Each part has writable memory of its own, so a large array that outlives its chunk keeps only
    itself alive. A joined column lives as long as any sample of it.
    """
    (count,) = struct.unpack("<q", _read(connection, 8))
    sizes = struct.unpack(f"<{count}q", _read(connection, 8 * count))
    return [
        _read(connection, size) if size >= 0 else PageFile.receive(connection, -size)
        for size in sizes
    ]


def mapped(part: Pages | PageFile) -> Pages:
    """Return a part of a message as memory."""
    return part.pages() if isinstance(part, PageFile) else part


def _read(connection: socket.socket, size_bytes: int) -> Pages:
    # A bytearray is filled by zeros first.
    large = size_bytes >= _LARGE_BYTES
    buffer = np.empty(size_bytes, np.uint8).data if large else bytearray(size_bytes)
    rest = memoryview(buffer)
    while rest:
        read = connection.recv_into(rest, 0, socket.MSG_WAITALL)
        if read == 0:
            raise EOFError("the other side has closed.")
        rest = rest[read:]
    return buffer
