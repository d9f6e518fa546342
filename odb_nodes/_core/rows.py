"""Values per token in a list, an array or a tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from odb_nodes.errors import SampleError


def is_mapping(value: Any) -> bool:
    """Tell whether a value is a mapping; of a dict at once, which most samples are."""
    return type(value) is dict or isinstance(value, Mapping)


def flatten_row(name: str, values: Any) -> Any:
    """Return `values`, (L,) or (1, L), as something of length L."""
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
    if not nested:
        return values
    if len(values) != 1:
        raise SampleError(f"`{name}` must have shape (L,) or (1, L), but holds {len(values)} rows.")
    return values[0]
