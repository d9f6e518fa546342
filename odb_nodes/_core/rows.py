"""Values per token in a list, an array or a tensor."""

from __future__ import annotations

import marshal
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from odb_nodes.errors import SampleError

INT64 = np.dtype(np.int64)
"""The one object that nearly all arrays of int64 have as their dtype."""

_TAG, _TAG_BYTES = b"i", 5  # of an int of 32 bits in marshal's format, tag included
_INT32 = np.dtype("<i4")


def is_mapping(value: Any) -> bool:
    """Tell whether a value is a mapping; of a dict at once, which most samples are."""
    return type(value) is dict or isinstance(value, Mapping)


def flatten_row(name: str, values: Any) -> Any:
    """Return `values`, (L,) or (1, L), as something of length L."""
    if type(values) is list and values and type(values[0]) is int:  # as most lists are
        return values
    if isinstance(values, (np.ndarray, torch.Tensor)):
        if values.ndim == 1:
            return values
        if values.ndim == 2 and values.shape[0] == 1:
            return values[0]
        raise SampleError(
            f"`{name}` must have shape (L,) or (1, L), but has {tuple(values.shape)} instead."
        )
    try:
        if isinstance(values, str):
            raise TypeError
        nested = len(values) > 0 and hasattr(values[0], "__len__") and type(values[0]) is not str
    except TypeError:
        raise SampleError(
            f"`{name}` must be a list, an array or a tensor, but is {values!r} instead."
        ) from None
    if nested and len(values) != 1:
        raise SampleError(f"`{name}` must have shape (L,) or (1, L), but holds {len(values)} rows.")
    return values[0] if nested else values


def array_of_ints(values: list[Any]) -> np.ndarray[Any, Any] | None:
    """Return a list of ints as `np.asarray` does, in half the time; `None` of anything else.

    `marshal` writes ints of 32 bits with their types at once; `np.asarray` looks at each twice.
    """
    if not values or type(values[0]) is not int:
        return None
    try:
        written = marshal.dumps(values, 2)  # a tag and the length, then the ints
    except ValueError:
        return None
    count = len(values)
    # What stands at each fifth byte is the tag of a value if all values before it are such ints.
    if written[_TAG_BYTES::_TAG_BYTES] != _TAG * count:
        return None
    ints: np.ndarray[Any, Any] = np.ndarray(count, _INT32, written, _TAG_BYTES + 1, (_TAG_BYTES,))
    return ints.astype(np.int_)
