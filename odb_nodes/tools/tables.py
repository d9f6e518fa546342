"""Rows as a table of text."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["markdown_table"]


def markdown_table(rows: Sequence[dict[str, str]]) -> str:
    """Return rows as a table in markdown, with the keys of the first row as titles."""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
