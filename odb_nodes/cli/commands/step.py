"""`odb-nodes step`: `python -m odb_nodes.tools.steps`, which needs no extra."""

from __future__ import annotations

import typer

from odb_nodes.tools.step_arguments import parse_arguments

__all__ = ["step"]


def step(context: typer.Context) -> None:
    """Make a step of a run again, of all its ranks: its samples, and its batches."""
    parse_arguments(context.args, context.command_path)  # the help, and errors, before torch
    from odb_nodes.tools.steps import main

    raise typer.Exit(main(context.args, prog=context.command_path))
