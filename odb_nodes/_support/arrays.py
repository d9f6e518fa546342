"""Arrays of integers."""

import marshal
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

IntArray = NDArray[np.int64]

INT64 = np.dtype(np.int64)  # the object that is the dtype of nearly all arrays of int64

_STORED = np.dtype("<i8")
_INT32 = np.dtype("<i4")
_TAG, _TAG_BYTES = b"i", 5  # tag and size, tag included, of a 32-bit int in marshal's format


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


def array_of_ints(values: list[Any]) -> IntArray | None:
    """Return a list of 32-bit ints as an array, twice as fast as numpy; `None` for other lists.

    `marshal` writes all ints with a tag of their type at once; `np.asarray` reads each twice.
    """
    if not values or type(values[0]) is not int:
        return None
    try:
        written = marshal.dumps(values, 2)  # a tag and the length, then the ints
    except ValueError:
        return None
    count = len(values)
    # Each fifth byte is the tag of a value, as long as all earlier values are 32-bit ints.
    if written[_TAG_BYTES::_TAG_BYTES] != _TAG * count:
        return None
    ints: NDArray[np.int32] = np.ndarray(count, _INT32, written, _TAG_BYTES + 1, (_TAG_BYTES,))
    return ints.astype(INT64)
