"""What attention adds to the cost of a row: a part that grows with the square of its length."""

from __future__ import annotations

from math import isqrt
from typing import TypeVar

from odb_nodes.planning.table import IntArray

Tokens = TypeVar("Tokens", int, IntArray)

ATTENTION_TOKENS = 12_288
"""Length at which attention costs as much as the rest of a layer: 6 x a width of 2048."""


def with_attention(tokens: Tokens, attention_tokens: int | None) -> Tokens:
    """Return what rows cost: their tokens, and what attention adds, rounded down.

    Args:
        tokens: the length of a row, or of several, (n,) int64.
        attention_tokens: the length at which attention costs as much as all else; `None` where it
            costs nothing.
    """
    return tokens if attention_tokens is None else tokens + tokens * tokens // attention_tokens


def longest_within(cost: int, attention_tokens: int | None) -> int:
    """Return the length of the longest row that costs no more than `cost`; 0 where none does.

    Args:
        cost: tokens, and what attention adds.
        attention_tokens: see `with_attention`.
    """
    if attention_tokens is None:
        return cost
    # The largest n with n + n * n // c <= cost, that is n * n + c * n < c * (cost + 1).
    c = attention_tokens
    return (isqrt(c * c + 4 * (c * (cost + 1) - 1)) - c) // 2
