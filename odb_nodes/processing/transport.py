"""Carry a chunk of samples between processes as a few flat buffers.

A thousand small arrays cost a thousand allocations, and torch tensors a file descriptor each. So
if the samples of a chunk are dicts with the same keys, each 1-d column travels as one array, and
the samples that arrive are views of it. Everything else is pickled with its buffers out of band
(PEP 574), tensors as numpy arrays. Types are kept: a list, array or tensor arrives as one.

A message is a sequence of parts: `pack` makes a pickle followed by the buffers that it refers to,
in the order in which the pickler meets them, and `unpack` hands them back in that order. On the
socket, the number of parts and their sizes come first, 8 bytes each, so the receiver allocates each
part once and reads straight into it; a size below 0 says that a descriptor of the part follows
(`shared_pages`).

Samples whose data nobody needs here travel as what is known of them: `pack_facts`.
"""

from __future__ import annotations

import io
import mmap
import pickle
import socket
import struct
from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import accumulate, islice
from operator import is_
from typing import Any

import numpy as np
import torch

from odb_nodes._core.codec import from_bytes, tensor_bytes, to_bytes
from odb_nodes.processing.shared_pages import MOST_VECTORS, SHARED_BYTES, PageFile, Pages, advance
from odb_nodes.sample import ItemKey, Sample, Skipped, SourceItem, key_columns, keys_of

__all__ = ["dumps", "mapped", "pack", "pack_facts", "receive", "send", "unpack", "unpack_facts"]

_NUMPY_DTYPES = frozenset(
    torch.from_numpy(np.empty(0, code)).dtype
    for code in ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")
)
_OTHER_DTYPES = frozenset((torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2))
"""Those that numpy lacks, and that large tensors have."""

_JOINED_BYTES = 64 << 10  # of a value, on average
_ITEM = Sample._fields.index("item") - 1  # among the fields after `data`
_SAMPLE_OF = partial(tuple.__new__, Sample)  # `Sample()` is a function in Python


class _Pickler(pickle.Pickler):
    """Pickles CPU tensors as numpy arrays, so that their storage goes out of band."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is torch.Tensor:
            if _is_plain(value):
                return _tensor_of, (value.detach().contiguous().numpy(),)
            if value.dtype in _OTHER_DTYPES and _is_simple(value):
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


def _is_plain(tensor: torch.Tensor) -> bool:
    """Tell whether numpy can hold a tensor without loss."""
    return tensor.dtype in _NUMPY_DTYPES and _is_simple(tensor)


def _is_simple(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is no more than its bytes, its dtype and its shape."""
    simple = tensor.device.type == "cpu" and tensor.layout is torch.strided
    lazy = tensor.is_conj() or tensor.is_neg()
    return simple and not (tensor.requires_grad or lazy)


Part = bytes | bytearray | mmap.mmap | memoryview | PageFile
Keys = Sequence[ItemKey | None]


def pack(items: Sequence[Any], keys: Keys = ()) -> list[memoryview]:
    """Return `items` as the parts of a message, for `unpack`."""
    return _pickled(_to_columns(items, keys))


def dumps(value: Any) -> bytes:
    """Pickle a value, also with tensors of dtypes whose own pickles torch cannot read back.

    Raises:
        Exception: whatever pickling it raised.
    """
    body = io.BytesIO()
    _Pickler(body, protocol=5).dump(value)
    return body.getvalue()


def unpack(parts: Sequence[Pages], keys: Keys = ()) -> list[Any]:
    """Return the items of a message of `pack`, whose parts become their memory."""
    return _from_columns(pickle.loads(parts[0], buffers=parts[1:]), keys)


def pack_facts(items: Sequence[Sample | Skipped], keys: Keys = ()) -> list[memoryview]:
    """Return `items` without the data of the samples, for `unpack_facts`."""
    return _pickled(_to_columns(items, keys, with_data=False))


def unpack_facts(parts: Sequence[Pages], data: Sequence[Any], keys: Keys = ()) -> list[Any]:
    """Return the items of `pack_facts`."""
    return _from_columns(pickle.loads(parts[0], buffers=parts[1:]), keys, data)


def _pickled(content: Any) -> list[memoryview]:
    body = io.BytesIO()
    parts: list[memoryview] = []
    pickler = _Pickler(body, protocol=5, buffer_callback=lambda buffer: parts.append(buffer.raw()))
    pickler.dump(content)
    return [body.getbuffer(), *parts]


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
    large = size_bytes >= _JOINED_BYTES
    buffer = np.empty(size_bytes, np.uint8).data if large else bytearray(size_bytes)
    rest = memoryview(buffer)
    while rest:
        read = connection.recv_into(rest, 0, socket.MSG_WAITALL)
        if read == 0:
            raise EOFError("the other side has closed.")
        rest = rest[read:]
    return buffer


def _to_columns(items: Sequence[Any], keys: Keys = (), *, with_data: bool = True) -> Any:
    kinds = {type(item) for item in items}
    if kinds == {SourceItem}:
        sources, inner = zip(*items, strict=True)
        return "source items", _to_columns(inner), sources
    if kinds == {Sample}:
        data, *facts = zip(*items, strict=True)
        columns = _dicts_to_columns(data) if with_data else None
        made_of = facts[_ITEM]
        if len(made_of) <= len(keys) and all(map(is_, made_of, keys)):
            facts[_ITEM] = ()
            return "samples of keys", columns, facts
        if all(made_of):
            facts[_ITEM] = key_columns(made_of)
            return "known samples", columns, facts
        return "samples", columns, facts
    if not with_data:
        items = [one._replace(data=None) if isinstance(one, Sample) else one for one in items]
    return "items", _dicts_to_columns(items)


def _from_columns(packed: Any, keys: Keys = (), given: Sequence[Any] | None = None) -> list[Any]:
    kind, content, *beside = packed
    if kind == "source items":
        return list(map(SourceItem, beside[0], _from_columns(content)))
    if kind == "items":
        items = _dicts_from_columns(content)
        rows = iter(given or ())
        return [
            one._replace(data=next(rows)) if given and isinstance(one, Sample) else one
            for one in items
        ]
    data = _dicts_from_columns(content) if given is None else given
    facts = beside[0]
    if kind == "samples of keys":
        facts[_ITEM] = keys
    elif kind == "known samples":
        facts[_ITEM] = keys_of(facts[_ITEM])
    return list(map(_SAMPLE_OF, zip(data, *facts, strict=False)))


def _dicts_to_columns(items: Sequence[Any]) -> Any:
    if not items or not all(type(item) is dict for item in items):
        return None, list(items)
    keys = tuple(items[0])
    if not keys or any(tuple(item) != keys for item in items):
        return None, list(items)
    return keys, [_to_column([item[key] for item in items]) for key in keys]


def _dicts_from_columns(packed: Any) -> list[Any]:
    keys, columns = packed
    if keys is None:
        return list(columns)
    rows = zip(*map(_from_column, columns), strict=True)
    return [dict(zip(keys, row, strict=True)) for row in rows]


def _to_column(values: list[Any]) -> Any:
    """Join short 1-d arrays or tensors of the same type and dtype; leave other values as they are.

    Long ones are worth a buffer of their own, which need not be copied into another one first.
    """
    kind, first = type(values[0]), values[0]
    joinable = kind is np.ndarray or (kind is torch.Tensor and _is_plain(first))
    if not joinable or any(
        type(value) is not kind or value.ndim != 1 or value.dtype != first.dtype for value in values
    ):
        return None, values
    if sum(value.nbytes for value in values) > _JOINED_BYTES * len(values):
        return None, values
    if kind is np.ndarray:
        if first.dtype.hasobject:
            return None, values
        return "array", np.concatenate(values), [len(value) for value in values]
    if not all(map(_is_plain, values)):
        return None, values
    return "tensor", torch.cat(values).numpy(), [len(value) for value in values]


def _from_column(packed: Any) -> list[Any]:
    if packed[0] is None:
        return list(packed[1])
    kind, joined, lengths = packed
    stops = list(accumulate(lengths))
    rows = [joined[stop - length : stop] for stop, length in zip(stops, lengths, strict=True)]
    # Not `torch.split`: autograd's views cost four times as much.
    return rows if kind == "array" else list(map(torch.from_numpy, rows))
