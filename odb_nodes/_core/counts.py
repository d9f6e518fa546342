"""Counts with their nouns."""

from __future__ import annotations

__all__ = ["counted"]


def counted(number: int, noun: str) -> str:
    """Return a number and what it counts: "1 sample", "2,000 samples"."""
    return f"{number:,} {noun}{'s' * (number != 1)}"
