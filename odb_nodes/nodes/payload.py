"""Samples as plain data, for states that carry them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from odb_nodes._core.codec import from_bytes, to_bytes
from odb_nodes.errors import SampleError, StateError
from odb_nodes.sample import ItemKey, Sample, data_of

_SCALARS = (int, str, float, bool, type(None))


def encode_sample(sample: Sample) -> bytes:
    """Return a sample as bytes that `decode_sample` can read, and no code can hide in.

    Raises:
        SampleError: it holds something else than dicts, lists and tuples of tensors, arrays,
            numbers and strings.
    """
    item: Any = sample.item
    if item is not None:
        # Pickle repeats an equal string that is another object, as workers may have made it.
        source = sample.source if item.source == sample.source else item.source
        item = (source, *item[1:])
    return to_bytes((_encode(data_of(sample)), *sample._replace(item=item)[1:]))


def decode_sample(encoded: bytes) -> Sample:
    """Return the sample that `encode_sample` was given.

    Raises:
        StateError: `encoded` is damaged.
    """
    try:
        data, *costs = from_bytes(encoded)
        sample = Sample(_decode(data), *costs)
        return sample if sample.item is None else sample._replace(item=ItemKey(*sample.item))
    except Exception as error:  # of any kind: torch reads whatever the bytes say
        raise StateError(
            f"a saved sample of {len(encoded)} bytes is damaged ({type(error).__name__}). Use an "
            "earlier checkpoint."
        ) from error


def _encode(value: Any) -> Any:
    kind = type(value)
    if kind in _SCALARS:
        return ("is", value)
    if kind in (torch.Tensor, torch.nn.Parameter):  # `torch.load` refuses other subclasses
        return ("tensor", value.detach().clone())  # and not the storage that it is a view of
    if kind is bytes:
        return ("bytes", _to_tensor(value))
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return ("array", value.dtype.str, value.shape, _to_tensor(value.tobytes()))
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return ("scalar", value.dtype.str, _to_tensor(value.tobytes()))
    if kind is dict:
        return ("dict", [(_encode(key), _encode(item)) for key, item in value.items()])
    if kind in (list, tuple):
        return (kind.__name__, [_encode(item) for item in value])
    raise SampleError(
        f"a state that carries samples cannot hold `{kind.__name__}`. Return dicts, lists and "
        'tuples of tensors, arrays, numbers and strings, or use `state="replay"`.'
    )


def _decode(encoded: tuple[Any, ...]) -> Any:
    kind, *content = encoded
    if kind == "is":
        return content[0]
    if kind == "tensor":
        return content[0]
    if kind == "array":
        dtype, shape, data = content
        return np.frombuffer(data.numpy().tobytes(), dtype).reshape(shape).copy()
    if kind == "scalar":
        return np.frombuffer(content[1].numpy().tobytes(), content[0])[0]
    if kind == "bytes":
        return content[0].numpy().tobytes()
    if kind == "dict":
        return {_decode(key): _decode(item) for key, item in content[0]}
    items = [_decode(item) for item in content[0]]
    return items if kind == "list" else tuple(items)


def _to_tensor(data: bytes) -> torch.Tensor:
    # `torch.load(weights_only=True)` refuses empty bytes, and torch lacks some of numpy's dtypes.
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy())
