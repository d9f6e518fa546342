"""Counts with their nouns, and tables and texts for notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape


def counted(number: int, noun: str) -> str:
    """Return a number and what it counts: "1 sample", "2,000 samples"."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def html_table(rows: Sequence[Mapping[str, str]]) -> str:
    """Return rows as a table, with the keys of the first row as titles; "" if there are none."""
    if not rows:
        return ""
    cells = [_cells("th", rows[0]), *(_cells("td", row.values()) for row in rows)]
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in cells)}</table>"


def html_text(text: str, tag: str = "p") -> str:
    """Return text as an element; `"pre"` keeps its lines."""
    return f"<{tag}>{escape(text)}</{tag}>"


def _cells(tag: str, cells: Iterable[str]) -> str:
    return "".join(html_text(cell, tag) for cell in cells)
