"""`odb-nodes report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from odb_nodes.cli import options as cli

__all__ = ["report"]

_READ = ("*.jsonl", "*.bin")  # of a folder, where a page may well be put, and replaced


def report(
    folders: Annotated[list[str], typer.Argument(help="Folders that a monitor wrote into.")],
    html: Annotated[str | None, typer.Option(help="Page with all pictures to write.")] = None,
    csv: Annotated[str | None, typer.Option(help="File for a row of each record.")] = None,
    json: Annotated[str | None, typer.Option(help="File for all records and summaries.")] = None,
    force: cli.Force = False,
) -> None:
    """Report on training runs, also while they go on: a table, a page, CSV, JSON."""
    read = [file for one in folders for end in _READ for file in Path(one).glob(end)]
    cli.check_outputs({"--html": html, "--csv": csv, "--json": json}, read, force=force)
    from odb_nodes.monitor import report as make_report

    typer.echo(make_report(folders, html=html, csv=csv, json=json))
