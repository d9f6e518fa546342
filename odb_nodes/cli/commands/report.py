"""`odb-nodes report`."""

from __future__ import annotations

from typing import Annotated

import typer

from odb_nodes.cli import options as cli
from odb_nodes.monitor import report as make_report

__all__ = ["report"]


def report(
    folders: Annotated[list[str], typer.Argument(help="Folders that a monitor wrote into.")],
    html: Annotated[
        str | None, typer.Option(help="Page with all pictures to write.", callback=cli.to_write)
    ] = None,
    csv: Annotated[
        str | None, typer.Option(help="File for a row of each record.", callback=cli.to_write)
    ] = None,
    json: Annotated[
        str | None,
        typer.Option(help="File for all records and summaries.", callback=cli.to_write),
    ] = None,
) -> None:
    """Report on training runs, also while they go on: a table, a page, CSV, JSON."""
    typer.echo(make_report(folders, html=html, csv=csv, json=json))
