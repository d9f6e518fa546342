"""Rows as a table of text."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["markdown_table"]


def markdown_table(rows: Sequence[dict[str, str]]) -> str:
    """Return rows as a table in markdown whose columns are aligned, numbers to the right."""
    columns = []
    for title in rows[0]:
        cells = [row[title] for row in rows]
        width = max(3, *map(len, (title, *cells)))
        is_numeric = any(cells) and all(cell[:1].isdecimal() for cell in cells if cell)
        rule = "-" * (width - 1) + (":" if is_numeric else "-")
        pad = str.rjust if is_numeric else str.ljust
        columns.append([pad(title, width), rule, *(pad(cell, width) for cell in cells)])
    return "\n".join(f"| {' | '.join(line)} |" for line in zip(*columns, strict=True))
