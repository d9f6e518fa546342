"""Data of users as bytes without code, for states."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch

from odb_nodes._support.content import from_bytes, to_bytes
from odb_nodes.errors import SampleError, StateError

_SCALARS = (int, str, float, bool, type(None))


def encode(value: Any) -> bytes:
    """Return a value as bytes that `decode` can read.

    Raises:
        SampleError: it is, or holds, something that is no plain data.
    """
    return to_bytes(to_plain(value))


def decode(data: bytes) -> Any:
    """Return the value that `encode` was given, as a new object."""
    try:
        return from_plain(from_bytes(data))
    except Exception as error:  # torch reads arbitrary bytes here, and raises errors of many types
        raise StateError(
            f"saved data of {len(data)} bytes is damaged ({type(error).__name__}). Use an earlier "
            "checkpoint."
        ) from error


def interned(value: Any) -> Any:
    """Return a value; of equal strings, the same object."""
    # Pickle writes an equal string again if it is another object, which would change the bytes.
    return sys.intern(value) if type(value) is str else value


def to_plain(value: Any) -> Any:
    """Return a value of which `torch.load(weights_only=True)` reads every part.

    Raises:
        SampleError: it is, or holds, something that is no plain data.
    """
    kind = type(value)
    if kind in _SCALARS:
        return ("is", interned(value))
    if kind in (torch.Tensor, torch.nn.Parameter):  # `torch.load` refuses other subclasses
        return ("tensor", value.detach().clone())  # without the rest of its storage
    if kind is bytes:
        return ("bytes", _to_tensor(value))
    is_masked = isinstance(value, np.ma.MaskedArray)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf" and not is_masked:
        return ("array", sys.intern(value.dtype.str), value.shape, _to_tensor(value.tobytes()))
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return ("scalar", sys.intern(value.dtype.str), _to_tensor(value.tobytes()))
    if kind is dict:
        return ("dict", [(to_plain(key), to_plain(item)) for key, item in value.items()])
    if kind in (list, tuple):
        return (kind.__name__, [to_plain(item) for item in value])
    of_dtype = f" of dtype {value.dtype}" if isinstance(value, np.ndarray) else ""
    raise SampleError(
        f"a state that carries samples cannot hold `{kind.__name__}`{of_dtype}. Return dicts, "
        "lists and tuples of tensors, arrays, numbers and strings."
    )


def from_plain(encoded: tuple[Any, ...]) -> Any:
    """Return the value that `to_plain` was given."""
    kind, *content = encoded
    if kind in ("is", "tensor"):
        return content[0]
    if kind == "array":
        dtype, shape, data = content
        return np.frombuffer(data.numpy().tobytes(), dtype).reshape(shape).copy()
    if kind == "scalar":
        return np.frombuffer(content[1].numpy().tobytes(), content[0])[0]
    if kind == "bytes":
        return content[0].numpy().tobytes()
    if kind == "dict":
        return {from_plain(key): from_plain(item) for key, item in content[0]}
    items = [from_plain(item) for item in content[0]]
    return items if kind == "list" else tuple(items)


def _to_tensor(data: bytes) -> torch.Tensor:
    # `torch.load(weights_only=True)` refuses empty bytes, and torch lacks some of numpy's dtypes.
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy())
