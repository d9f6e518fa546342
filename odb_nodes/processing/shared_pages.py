"""Large buffers between processes without a copy through the socket: anonymous files of memory.

The sender writes a buffer into a file of its own that has no name (`memfd_create`), and sends its
descriptor. The receiver maps the pages and closes the descriptor, so they live as long as what is
made of them, and nothing is left of a process that was killed. The mapping is private: what one
process writes into a sample, no other sees, a forked child included.
"""

from __future__ import annotations

import mmap
import os
import socket

__all__ = ["SHARED_BYTES", "Pages", "receive_pages", "send_pages", "share"]

Pages = bytearray | mmap.mmap

SHARED_BYTES = 2 << 20
"""Buffers from this size on are sent so: smaller ones are faster through the socket."""

_CAN_SHARE = hasattr(os, "memfd_create") and hasattr(socket, "send_fds")
_BYTE = b"\0"  # that a descriptor travels with


def share(part: memoryview) -> int | None:
    """Return the descriptor of a file that holds a buffer; `None` where there can be none."""
    if not _CAN_SHARE or part.nbytes < SHARED_BYTES:
        return None
    try:
        file = os.memfd_create("odb_nodes", os.MFD_CLOEXEC)
    except OSError:  # too many are open, or the system forbids it
        return None
    try:
        rest = part
        while rest.nbytes:
            rest = rest[os.write(file, rest) :]
    except OSError:  # no memory for the file
        os.close(file)
        return None
    return file


def send_pages(connection: socket.socket, file: int) -> None:
    """Send the descriptor of a file, and close it here."""
    try:
        socket.send_fds(connection, [_BYTE], [file])
    finally:
        os.close(file)


def receive_pages(connection: socket.socket, size_bytes: int) -> Pages:
    """Return the memory of a file whose descriptor is next.

    Raises:
        EOFError: the other side has closed the connection, or has died.
        OSError: the descriptor could not be taken: too many are open.
    """
    data, files, _, _ = socket.recv_fds(connection, 1, 1)
    if not data:
        raise EOFError("the other side has closed.")
    if not files:
        raise OSError("a descriptor could not be received: too many are open (`ulimit -n`).")
    try:
        return mmap.mmap(files[0], size_bytes, mmap.MAP_PRIVATE)
    except OSError:  # too many mappings
        return _read(files[0], size_bytes)
    finally:
        os.close(files[0])


def _read(file: int, size_bytes: int) -> bytearray:
    buffer = bytearray(size_bytes)
    rest, at = memoryview(buffer), 0
    while rest:
        count = os.preadv(file, [rest], at)
        rest, at = rest[count:], at + count
    return buffer
