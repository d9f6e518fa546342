"""Counts with their nouns; tables in Markdown, and in HTML for notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: "1 sample", "2,000 samples"."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def named_ranks(ranks: Iterable[int]) -> str:
    """Return the names of ranks: "rank 1", "ranks 1, 2 and 3"."""
    *head, last = map(str, ranks)
    return f"ranks {', '.join(head)} and {last}" if head else f"rank {last}"


Rows = Sequence[Mapping[str, str]]  # a table: its rows, each title -> cell


class Shown:
    """Base class of results that print, and that a notebook shows, as texts and tables."""

    def parts(self) -> Sequence[str | Rows]:
        """Return the texts and tables, in their order."""
        raise NotImplementedError

    def __str__(self) -> str:
        parts = self.parts()
        return "\n\n".join(
            part if isinstance(part, str) else markdown_table(part) for part in parts
        )

    def _repr_html_(self) -> str:
        return "".join(map(_in_html, self.parts()))


def html_table(rows: Rows) -> str:
    """Return rows as an HTML table, with the keys of the first row as titles; "" without rows."""
    if not rows:
        return ""
    cells = [_cells("th", rows[0]), *(_cells("td", row.values()) for row in rows)]
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in cells)}</table>"


def markdown_table(rows: Rows) -> str:
    """Return rows as a Markdown table with aligned columns, numbers to the right."""
    if not rows:
        return ""
    columns = []
    for title in rows[0]:
        cells = [row[title].replace("|", r"\|") for row in rows]
        width = max(3, *map(len, (title, *cells)))
        is_numeric = any(cells) and all(cell[:1].isdecimal() for cell in cells if cell)
        rule = "-" * (width - 1) + (":" if is_numeric else "-")
        pad = str.rjust if is_numeric else str.ljust
        columns.append([pad(title, width), rule, *(pad(cell, width) for cell in cells)])
    return "\n".join(f"| {' | '.join(line)} |" for line in zip(*columns, strict=True))


def html_text(text: str, tag: str = "p") -> str:
    """Return text as an HTML element; `"pre"` keeps its lines."""
    return f"<{tag}>{escape(text)}</{tag}>"


def _in_html(part: str | Rows) -> str:
    if isinstance(part, str):
        return html_text(part, "pre" if "\n" in part else "p")
    return html_table(part)


def _cells(tag: str, cells: Iterable[str]) -> str:
    return "".join(html_text(cell, tag) for cell in cells)
