"""The largest budget whose batches fit into memory, from a fit."""

from __future__ import annotations

from collections.abc import Iterable
from math import isqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from odb_nodes._core.checks import MAX_COUNT
from odb_nodes.memory.fitting import Fit
from odb_nodes.planning import TokenBudget

__all__ = ["budget_of", "mean_patch_share"]

FOUND_FIELDS = ("tokens", "attention_tokens")
SMALL_SQUARE = 0.01  # share of the linear part at the widest shape, below which none is declared


def budget_of(
    fit: Fit,
    *,
    usable_bytes: float,
    widths: tuple[int, int],
    patch_share: float,
    **fields: Any,
) -> TokenBudget:
    """Return the largest budget none of whose batches is predicted to take more."""
    _check_fields(fields)
    if fit.token_bytes == fit.square_bytes == 0:
        raise ValueError(
            f"the {fit.points} points do not show how memory grows with the tokens of a batch: add "
            "points of larger batches."
        )
    room_bytes = usable_bytes / (1 + fit.margin) - fit.constant_bytes
    needed_bytes = max(fit.floor_bytes, fit.constant_bytes) * (1 + fit.margin)
    attention_tokens, unit_bytes = _unit_of_cost(fit, *widths)
    if not fit.patch_bytes:
        patch_share = 0.0
    tokens = (1 - patch_share) * room_bytes / unit_bytes
    if needed_bytes > usable_bytes or tokens < 1:
        raise ValueError(
            f"a step without a single token is predicted to take {needed_bytes:,.0f} bytes, but "
            f"only {usable_bytes:,.0f} are usable: use a smaller model or optimizer, shard "
            "them, or raise `limit_bytes` or `threshold`."
        )
    if patch_share:
        patches = patch_share * room_bytes / fit.patch_bytes
        fields.setdefault("max_patches", max(min(int(patches), MAX_COUNT), 1))
    if attention_tokens is not None:
        fields["attention_tokens"] = attention_tokens
    return TokenBudget(min(int(tokens), MAX_COUNT), **fields)


def _check_fields(names: Iterable[str]) -> None:
    for name in names:
        if name in FOUND_FIELDS:
            raise TypeError(
                f"`{name}` is what the model finds, from its points and `limit_bytes`. Leave it "
                "out, or change it in the budget: `dataclasses.replace(budget, ...)`."
            )
        if name not in TokenBudget.__dataclass_fields__:
            raise TypeError(f"`{name}` is neither an argument of `budget` nor of `TokenBudget`.")


def mean_patch_share(fit: Fit, shapes: NDArray[np.float64]) -> float:
    """Return the share of patches in what shapes that have some take beyond the constant part."""
    rows, widths, patches = shapes[shapes[:, 2] > 0].T
    patch_bytes = fit.patch_bytes * patches
    token_bytes = rows * widths * (fit.token_bytes + fit.square_bytes * widths)
    return float((patch_bytes / (patch_bytes + token_bytes)).mean()) if len(patches) else 0.0


def _unit_of_cost(fit: Fit, narrowest: int, widest: int) -> tuple[int | None, float]:
    """Return `attention_tokens`, and the bytes that a unit of cost under it takes at most.

    A row of L tokens costs L + L*L // attention_tokens, in integers. What is rounded off is largest
    in proportion where L is a little below the root of `attention_tokens`.
    """
    linear, square = fit.token_bytes, fit.square_bytes
    if square * widest <= SMALL_SQUARE * linear:
        return None, linear + square * widest
    attention_tokens = max(min(int(linear / square), MAX_COUNT), 1)
    last = max(2 * isqrt(attention_tokens), widest)
    lengths = np.arange(narrowest, last + 1, dtype=np.int64)
    costs = lengths + lengths * lengths // attention_tokens
    return attention_tokens, float(
        max(
            ((linear * lengths + square * lengths * lengths) / costs).max(),
            square * attention_tokens,
        )
    )
