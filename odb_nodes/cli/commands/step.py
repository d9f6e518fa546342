"""`odb-nodes step`."""

from __future__ import annotations

from typing import Annotated

import torch
import typer

from odb_nodes._core.named_function import load_function
from odb_nodes.cli import options as cli
from odb_nodes.tools.steps import remake_from_checkpoint, remake_from_ledger

__all__ = ["step"]


def step(
    make_loader: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FUNCTION", help="Makes the loader of a rank for a `process_group`."
        ),
    ],
    ledger: Annotated[
        str | None, typer.Option(help="The folder of a ledger; with --step, and --epoch.")
    ] = None,
    checkpoint: Annotated[
        str | None, typer.Option(help="The folder of a checkpoint; the step that follows it.")
    ] = None,
    epoch: Annotated[int, typer.Option(min=0, help="Number of the epoch.")] = 0,
    step: Annotated[int | None, typer.Option(min=0, help="Number of the step in it.")] = None,
    further: Annotated[int, typer.Option(min=0, help="Steps after that of a checkpoint.")] = 0,
    out: Annotated[
        str | None,
        typer.Option(
            help="File for the steps of all ranks, by `torch.save`.", callback=cli.in_folder
        ),
    ] = None,
) -> None:
    """Make a step of a run again, of all its ranks: its samples, and its batches."""
    if (ledger is None) == (checkpoint is None):
        raise ValueError("pass --ledger FOLDER and --step N, or --checkpoint FOLDER.")
    if ledger is not None and step is None:
        raise ValueError("--ledger needs --step.")
    make = load_function(make_loader)
    if checkpoint is not None:
        remade = remake_from_checkpoint(make, checkpoint, further=further)
    else:
        assert ledger is not None and step is not None
        remade = remake_from_ledger(make, ledger, epoch=epoch, step=step)
    print(*remade, sep="\n")
    if out is not None:
        torch.save([one.as_dict() for one in remade], out)
