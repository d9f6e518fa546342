"""Values per token of a sample: one row of numbers, as a list, an array or a tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from odb_nodes.errors import SampleError


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
