"""Values as bytes that `torch.load(weights_only=True)` reads; copies of values."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def to_bytes(value: Any) -> bytes:
    """Return a value as bytes that `from_bytes` can read."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def from_bytes(data: bytes) -> Any:
    """Return the value from the bytes of `to_bytes`; raise any error if they are damaged."""
    return torch.load(io.BytesIO(data), weights_only=True)


_NUMPY_DTYPES = frozenset(
    torch.from_numpy(np.empty(0, code)).dtype
    for code in ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")
)


def is_plain_tensor(tensor: torch.Tensor) -> bool:
    """Tell whether numpy can hold a tensor without loss."""
    return tensor.dtype in _NUMPY_DTYPES and is_simple_tensor(tensor)


def is_simple_tensor(tensor: torch.Tensor) -> bool:
    """Tell whether bytes, dtype and shape describe a tensor completely."""
    simple = tensor.device.type == "cpu" and tensor.layout is torch.strided
    lazy = tensor.is_conj() or tensor.is_neg()
    return simple and not (tensor.requires_grad or lazy)


def tensor_bytes(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return the bytes of a dense tensor, (N,) uint8: a view if it is contiguous on the CPU."""
    row = tensor.detach().cpu().contiguous().flatten()
    # A row of at most one number may have any stride, which `view` refuses.
    return row.as_strided(row.shape, (1,)).view(torch.uint8).numpy()


def is_readable(value: Any) -> bool:
    """Tell whether `from_bytes` can read the bytes of a value."""
    try:
        from_bytes(to_bytes(value))
    except Exception:  # torch and pickle raise errors of many types
        return False
    return True


def explain_unreadable(value: Any, name: str = "state_dict()") -> str:
    """Return an error text: which part of the value `name` is not readable, and the remedy."""
    return (
        f"{_unreadable(value, name)}, which `torch.load(weights_only=True)` refuses. Save plain "
        "Python data and tensors: `int(n)` or `n.item()` in place of a scalar of numpy, "
        "`torch.from_numpy(a)` in place of an array, None in place of empty bytes."
    )


def _unreadable(value: Any, place: str) -> str:
    pairs: Any = value.items() if isinstance(value, Mapping) else ()
    if isinstance(value, (list, tuple)):
        pairs = enumerate(value)
    for key, element in pairs:
        if not is_readable(key):
            return f"`{place}` has a key {key!r:.80} of type `{_type_of(key)}`"
        if not is_readable(element):
            return _unreadable(element, f"{place}[{key!r}]")
    return f"`{place}` is a `{_type_of(value)}`"


def _type_of(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def copied(value: Any) -> Any:
    """Return a value whose dicts, lists, tuples, arrays and tensors are copies."""
    if type(value) is dict:
        return {key: copied(element) for key, element in value.items()}
    if type(value) is list:
        return [*map(copied, value)]
    if isinstance(value, tuple):
        return tuple.__new__(type(value), map(copied, value))
    if isinstance(value, np.ndarray):
        return value.copy()
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
