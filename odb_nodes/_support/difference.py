"""Where two values differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

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
        differs: Any = (expected != actual) & ~both_nan
        if isinstance(differs, np.bool_):  # of arrays without dimensions
            differs = np.asarray(differs)  # torch 2.6 warns of scalars of numpy 1
        places = torch.as_tensor(differs)
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
