"""Arrays of integers."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

IntArray = NDArray[np.int64]

INT64 = np.dtype(np.int64)  # the object that is the dtype of nearly all arrays of int64

_STORED = np.dtype("<i8")


def int64_bytes(integers: ArrayLike) -> bytes:
    """Return integers as little-endian bytes, 8 each."""
    return np.asarray(integers, _STORED).tobytes()


def int64_state(integers: ArrayLike) -> bytes | None:
    """Return integers as bytes for a state; `None` if there are none.

    `torch.load(weights_only=True)` refuses empty bytes.
    """
    return int64_bytes(integers) or None


def int64_array(data: bytes | None) -> IntArray:
    """Return the integers that `int64_bytes` or `int64_state` wrote, (n,), as a new array."""
    return np.frombuffer(data or b"", _STORED).astype(np.int64)
