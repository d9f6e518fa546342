"""Items and states: as bytes, their digests and differences, and rows of values per token."""

from __future__ import annotations

import io
import marshal
import pickle
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from zlib_ng.zlib_ng import crc32

from odb_nodes.errors import SampleError


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


# --- rows -----------------------------------------------------------------------------------------


INT64 = np.dtype(np.int64)  # the object that is the dtype of nearly all arrays of int64

_TAG, _TAG_BYTES = b"i", 5  # tag and size, tag included, of a 32-bit int in marshal's format
_INT32 = np.dtype("<i4")


def is_mapping(value: Any) -> bool:
    """Tell whether a value is a mapping; fast for a dict."""
    return type(value) is dict or isinstance(value, Mapping)


def flatten_row(name: str, values: Any) -> Any:
    """Return `values`, (L,) or (1, L), as a list, array or tensor of length L."""
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
        if isinstance(values, str) or is_mapping(values):
            raise TypeError
        first = values[0] if len(values) else 0
        is_row = hasattr(first, "__len__") and type(first) is not str
        nested = is_row and getattr(first, "ndim", 1) > 0  # a 0-d tensor is a number
    except TypeError:
        raise SampleError(
            f"`{name}` must be a list, an array or a tensor, but is {values!r:.200} instead. "
            'Convert it in processing, as by `tokenizer(text)["input_ids"]`, or return '
            "`Skipped(reason, text)` from it to leave the sample out."
        ) from None
    if nested and len(values) != 1:
        raise SampleError(f"`{name}` must have shape (L,) or (1, L), but holds {len(values)} rows.")
    return values[0] if nested else values


def array_of_ints(values: list[Any]) -> np.ndarray[Any, Any] | None:
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
    ints: np.ndarray[Any, Any] = np.ndarray(count, _INT32, written, _TAG_BYTES + 1, (_TAG_BYTES,))
    return ints.astype(np.int_)


# --- digests --------------------------------------------------------------------------------------


_INT64_ROW = b"%d %%d" % INT64.num
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


# --- differences ----------------------------------------------------------------------------------


_ARRAYS = (torch.Tensor, np.ndarray)
_DENSE = {torch.strided}


def difference(expected: Any, actual: Any) -> str | None:
    """Return where and how `actual` differs from `expected`, or None; NaN equals NaN."""
    if expected is actual:
        return None
    if any(isinstance(expected, kind) and isinstance(actual, kind) for kind in _ARRAYS):
        if expected.dtype != actual.dtype or expected.shape != actual.shape:
            return (
                f" is {tuple(actual.shape)} {actual.dtype} instead of "
                f"{tuple(expected.shape)} {expected.dtype}"
            )
        if isinstance(expected, torch.Tensor) and {expected.layout, actual.layout} != _DENSE:
            return difference(expected.to_dense(), actual.to_dense())
        if isinstance(expected, torch.Tensor) and torch.equal(expected, actual):
            return None
        both_nan = (expected != expected) & (actual != actual)
        places = torch.as_tensor((expected != actual) & ~both_nan)
        if not places.any():
            return None
        # `nonzero` of all places would take more memory than both tensors.
        first = int(places.view(torch.uint8).argmax())
        place = tuple(map(int, np.unravel_index(first, places.shape)))
        return f"[{place}] is {actual[place]} instead of {expected[place]}"
    pairs: Iterable[tuple[Any, Any, Any]]
    if isinstance(expected, Mapping) and isinstance(actual, Mapping):
        if expected.keys() != actual.keys():
            names = [", ".join(sorted(map(repr, keys))) for keys in (actual, expected)]
            return f" has keys [{names[0]}] instead of [{names[1]}]"
        pairs = ((key, expected[key], actual[key]) for key in expected)
    elif (
        isinstance(expected, Sequence)
        and not isinstance(expected, (str, bytes))
        and type(actual) is type(expected)
    ):
        if len(expected) != len(actual):
            return f" has {len(actual)} elements instead of {len(expected)}"
        pairs = zip(range(len(expected)), expected, actual, strict=True)
    else:
        same = type(expected) is type(actual) and bool(
            expected == actual or (expected != expected and actual != actual)  # NaN
        )
        return None if same else f" is {actual!r:.500} instead of {expected!r:.500}"
    for key, expected_value, actual_value in pairs:
        if differs := difference(expected_value, actual_value):
            return f"[{key!r}]{differs}"
    return None
