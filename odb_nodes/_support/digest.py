"""A digest of an item, which is equal for equal items in every process."""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from zlib_ng.zlib_ng import crc32

from odb_nodes._support.arrays import INT64, array_of_ints
from odb_nodes._support.content import tensor_bytes

_INT64_ROW = b"%d %%d" % INT64.num
_FEW = 40  # up to so many numbers, `array` is faster than `array_of_ints`
_NUMBERS = {int, float, bool, type(None)}


def content_digest(item: Any, start: int = 0) -> int:
    """Return a CRC-32 of an item that continues `start`: equal for equal items in every process.

    Plain numbers and strings, bytes, tensors and arrays are digested by value, also in lists,
    tuples and dicts: arrays at 30 GB/s from the cache, lists at 20 to 40 ns a number. Other
    objects, such as members of an enum, are digested by their type. Which of nested dicts holds a
    key is not part of the digest.
    """
    kind = type(item)
    if isinstance(item, dict):
        return _add_fields(item, start)
    if isinstance(item, (np.ndarray, np.generic)):
        return _add_array(np.asarray(item), start)
    if kind is str:
        return _add_bytes(item.encode("utf-8", "surrogatepass"), start)
    if kind in (int, float, bool, complex) or item is None:
        return crc32(repr(item).encode(), start)
    if kind in (bytes, bytearray):
        return _add_bytes(item, crc32(b"bytes", start))
    if isinstance(item, (list, tuple)):
        return _add_elements(item, start)
    if isinstance(item, torch.Tensor):
        return _add_tensor(item, start)
    if isinstance(item, Mapping):
        return _add_fields(item, start)
    return crc32(kind.__qualname__.encode(), start)  # its text may hold its address


def _add_fields(value: Mapping[Any, Any], crc: int) -> int:
    for key, field in value.items():
        crc = crc32(key.encode(), crc) if type(key) is str else content_digest(key, crc)
        crc = _add_array(field, crc) if type(field) is np.ndarray else content_digest(field, crc)
    return crc


def _add_bytes(value: bytes | bytearray, crc: int) -> int:
    return crc32(value, crc32(b"%d" % len(value), crc))


def _add_elements(values: list[Any] | tuple[Any, ...], crc: int) -> int:
    crc = crc32(b"%d" % len(values), crc)
    if len(values) > _FEW and type(values) is list:
        if (ints := array_of_ints(values)) is not None:
            return crc32(ints.data, crc)
    try:
        return crc32(array("q", values), crc)  # most are tokens
    except (TypeError, OverflowError):
        pass
    if {*map(type, values)} <= _NUMBERS:  # all at once: the text of a float takes microseconds
        return crc32(pickle.dumps([*values], protocol=5), crc)
    for value in values:
        crc = content_digest(value, crc)
    return crc


def _add_array(value: np.ndarray[Any, Any], crc: int) -> int:
    kind = value.dtype
    if kind is INT64 and value.ndim == 1 and value.flags.c_contiguous:  # most are tokens
        return crc32(value.data, crc32(_INT64_ROW % len(value), crc))
    if kind.isbuiltin == 1 and not kind.hasobject:
        is_row = value.ndim == 1  # as most are; the text of a shape takes longer
        form = b"%d %d" % (kind.num, len(value)) if is_row else b"%d %a" % (kind.num, value.shape)
        crc = crc32(form, crc)
        return crc32(value.data if value.flags.c_contiguous else value.tobytes(), crc)
    crc = crc32(f"{kind.str} {value.shape}".encode(), crc)
    return crc if kind.hasobject else crc32(value.tobytes(), crc)


def _add_tensor(value: torch.Tensor, crc: int) -> int:
    try:
        return _add_array(value.numpy(force=True), crc)
    except (RuntimeError, TypeError):  # a dtype that numpy lacks
        pass
    crc = crc32(str(value.dtype).encode(), crc)
    is_dense = value.layout == torch.strided and not (value.is_nested or value.is_quantized)
    if not is_dense or value.device.type == "meta":
        return crc
    crc = crc32(repr(tuple(value.shape)).encode(), crc)
    return _add_array(tensor_bytes(value), crc)
