"""`odb-nodes tune`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from odb_nodes.cli import options as cli
from odb_nodes.cli.data import DataOptions, read_table, with_data
from odb_nodes.cli.tables import print_rows
from odb_nodes.errors import StateError
from odb_nodes.memory import MemoryModel
from odb_nodes.tools.tune import tune as choose

__all__ = ["tune"]

_GIB = 2**30


@with_data
def tune(
    what: DataOptions,
    ranks: Annotated[int, typer.Option(min=1, help="Number of ranks.")] = 1,
    tokens_per_step: Annotated[
        int | None, typer.Option(min=1, help="Padded tokens of an optimizer step of all ranks.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Most padded tokens of a batch (4 x the longest).")
    ] = None,
    memory_model: Annotated[
        Path | None,
        typer.Option(
            help="A `MemoryModel` as JSON, in place of --limit.", exists=True, dir_okay=False
        ),
    ] = None,
    memory_gib: Annotated[
        float | None, typer.Option(min=0, help="Memory of a device, with --memory-model.")
    ] = None,
    log: Annotated[
        Path | None,
        typer.Option(help="Folder of a monitor, whose times are fitted to.", exists=True),
    ] = None,
    weight: cli.Weight = None,
) -> None:
    """Propose budget, window, accumulation and rounds for a dataset, with code to paste."""
    weights = cli.weights_of(weight)
    bound: int | tuple[MemoryModel, int] | None = limit
    if (memory_model is None) != (memory_gib is None) or (memory_model and limit):
        raise ValueError("pass --limit, or --memory-model FILE and --memory-gib N, or none.")
    if memory_model is not None and memory_gib is not None:
        bound = _model_in(memory_model), int(memory_gib * _GIB)
    table = read_table(what)
    try:
        tuned = choose(
            table,
            world_size=ranks,
            tokens_per_step=tokens_per_step,
            limit=bound,
            log=log,
            weights=weights,
            seed=what.seed,
        )
    except UnicodeDecodeError as error:
        raise ValueError(
            f"--log `{log}` is no text: pass the folder of a monitor, or lines of JSON."
        ) from error
    print(tuned.about)
    print_rows(tuned.rows())
    print(f"\n{tuned.why}\n\n{tuned.code()}", end="")


def _model_in(path: Path) -> MemoryModel:
    try:
        return MemoryModel.from_json(path.read_text(errors="replace"))
    except StateError as error:
        raise StateError(f"--memory-model `{path}`: {error}") from error
