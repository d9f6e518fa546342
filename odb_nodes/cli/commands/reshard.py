"""`odb-nodes reshard`: the states of N ranks, made into those of M ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["reshard"]


def reshard(
    folder: Annotated[Path, typer.Argument(help="Folder of a checkpoint, with a file per rank.")],
    ranks: Annotated[int, typer.Option(min=1, help="Number of ranks from now on.")],
    out: Annotated[Path, typer.Option(help="Folder to write into.")],
) -> None:
    """Make the states of a checkpoint those of another number of ranks."""
    from odb_nodes.tools.reshard import reshard_folder

    files = reshard_folder(folder, ranks, out)
    typer.echo(f"{len(files)} states are in {out}: {files[0].name} and so on.")
