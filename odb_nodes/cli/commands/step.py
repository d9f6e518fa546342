"""`odb-nodes step`: `python -m odb_nodes.tools.steps`, which needs no extra."""

from __future__ import annotations

import typer

from odb_nodes.tools.steps import main

__all__ = ["step"]


def step(context: typer.Context) -> None:
    """Make a step of a run again, of all its ranks: its samples, and its batches."""
    raise typer.Exit(main(context.args, prog=context.command_path))
