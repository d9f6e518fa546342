"""Whether what two ranks have saved is the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def alike(one: Any, other: Any) -> bool:
    """Tell whether two values are equal, also where they hold tensors, or numbers that are none."""
    if one is other:
        return True
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and (torch.equal(one, other) or _equal_but_nan(one, other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and type(one) is type(other):
        return len(one) == len(other) and all(map(alike, one, other))
    return type(one) is type(other) and bool(one == other or (one != one and other != other))


def _equal_but_nan(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or not one.is_floating_point():
        return False
    return bool(((one == other) | (one.isnan() & other.isnan())).all())
