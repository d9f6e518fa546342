"""A digest of an item of data, which tells whether it is the one that was there before."""

from __future__ import annotations

import pickle
import zlib
from array import array
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

_MOST_ELEMENTS = 256
_MOST_BYTES = 2048
"""Of what is longer, beginning and end are digested, so that a digest costs microseconds."""
_NUMBERS = {int, float, bool, type(None)}


def content_digest(item: Any) -> int:
    """Return a CRC-32 of an item: equal for equal items, in every process.

    Numbers, strings, bytes, tensors and arrays are digested by value, also in lists, tuples and
    dicts; of what is long, the length, the beginning and the end. Of other objects it is the type.
    """
    return _add(item, 0)


def _add(value: Any, crc: int) -> int:
    kind = type(value)
    if kind is str:
        return _add_bytes(value.encode("utf-8", "surrogatepass"), crc)
    if kind in (int, float, bool, complex) or value is None:
        return zlib.crc32(repr(value).encode(), crc)
    if kind in (bytes, bytearray):
        return _add_bytes(value, zlib.crc32(b"bytes", crc))
    if kind in (list, tuple):
        return _add_elements(value, crc)
    if isinstance(value, Mapping):
        for key, held in value.items():
            crc = _add(held, _add(key, crc))
        return crc
    if isinstance(value, torch.Tensor):
        return _add_tensor(value, crc)
    if isinstance(value, (np.ndarray, np.generic)):
        return _add_array(np.asarray(value), crc)
    if isinstance(value, (list, tuple)):  # a subclass: a NamedTuple, say
        return _add_elements(value, crc)
    return zlib.crc32(kind.__qualname__.encode(), crc)  # its text may hold its address


def _add_bytes(value: bytes | bytearray, crc: int) -> int:
    crc = zlib.crc32(b"%d" % len(value), crc)
    if len(value) <= 2 * _MOST_BYTES:
        return zlib.crc32(value, crc)
    return zlib.crc32(value[-_MOST_BYTES:], zlib.crc32(value[:_MOST_BYTES], crc))


def _add_elements(values: list[Any] | tuple[Any, ...], crc: int) -> int:
    crc = zlib.crc32(b"%d" % len(values), crc)
    if len(values) > 2 * _MOST_ELEMENTS:
        values = [*values[:_MOST_ELEMENTS], *values[-_MOST_ELEMENTS:]]
    try:
        return zlib.crc32(array("q", values), crc)  # most are tokens
    except (TypeError, OverflowError):
        pass
    if {*map(type, values)} <= _NUMBERS:  # all at once: the text of a float takes microseconds
        return zlib.crc32(pickle.dumps([*values], protocol=5), crc)
    for value in values:
        crc = _add(value, crc)
    return crc


def _add_array(value: np.ndarray[Any, Any], crc: int) -> int:
    crc = zlib.crc32(f"{value.dtype} {value.shape}".encode(), crc)
    if value.dtype.hasobject:
        return crc
    row = value.reshape(-1)
    if row.nbytes > 2 * _MOST_BYTES:
        most = _MOST_BYTES // row.itemsize
        crc = zlib.crc32(row[:most].tobytes(), crc)
        row = row[len(row) - most :]
    return zlib.crc32(row.tobytes(), crc)


def _add_tensor(value: torch.Tensor, crc: int) -> int:
    is_dense = value.layout == torch.strided and not (value.is_nested or value.is_quantized)
    if not is_dense or value.device.type == "meta":
        return zlib.crc32(str(value.dtype).encode(), crc)
    crc = zlib.crc32(f"{value.dtype} {tuple(value.shape)}".encode(), crc)
    row = value.detach().resolve_conj().resolve_neg().reshape(-1)
    most = _MOST_BYTES // max(1, row.element_size())
    if len(row) > 2 * most:
        row = torch.cat((row[:most], row[-most:]))
    return zlib.crc32(row.cpu().contiguous().view(torch.uint8).numpy().tobytes(), crc)
