"""Rows as a table on the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from odb_nodes.tools.tables import markdown_table

__all__ = ["print_rows"]


def print_rows(rows: Sequence[dict[str, str]]) -> None:
    """Print rows with the keys of the first as titles; in markdown where nobody looks.

    Args:
        rows: title -> cell.
    """
    console = Console()
    if not console.is_terminal:
        print(markdown_table(rows))
        return
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*row.values())
    console.print(table)
