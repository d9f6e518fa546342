"""`odb-nodes tune`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from odb_nodes.cli import options as cli
from odb_nodes.cli.data import Data, DataOptions, with_data
from odb_nodes.errors import StateError

if TYPE_CHECKING:
    from odb_nodes.memory import MemoryModel

__all__ = ["tune"]

_GIB = 2**30
_KEPT = ("max_samples", "pad_to_multiple_of", "layout", "oversize", "shapes", "row_sizes")
"""Fields of a budget that no model of memory decides."""


@with_data
def tune(
    what: DataOptions,
    ranks: Annotated[int | None, typer.Option(min=1, help="Number of ranks (1).")] = None,
    tokens_per_step: Annotated[
        int | None, typer.Option(min=1, help="Padded tokens of an optimizer step of all ranks.")
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            min=1, help="Most padded tokens of a batch (4 x the longest, or the loader's)."
        ),
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
    if (memory_model is None) != (memory_gib is None) or (memory_model and limit):
        raise ValueError("pass --limit, or --memory-model FILE and --memory-gib N, or none.")
    what.check_outputs(memory_model, log)
    data = Data(what)
    what.check_outputs(memory_model, log, *data.files)
    weights, job, of_loader = data.weights(weight), data.job(), data.loader_budget
    bound = of_loader
    if limit is not None:
        bound = data.budget(tokens=limit)
    if memory_model is not None and memory_gib is not None:
        kept = {name: getattr(of_loader, name) for name in _KEPT} if of_loader else {}
        bound = _model_in(memory_model).budget(int(memory_gib * _GIB), **kept)
    world_size, accumulate = ranks or data.ranks, job.pop("accumulate")
    if tokens_per_step is None and of_loader is not None:
        tokens_per_step = of_loader.tokens * accumulate * world_size
    from odb_nodes.tools.tune import tune as choose

    try:
        tuned = choose(
            data.table(),
            world_size=world_size,
            tokens_per_step=tokens_per_step,
            limit=bound,
            log=log,
            weights=weights,
            **job,
        )
    except UnicodeDecodeError as error:
        raise ValueError(
            f"--log `{log}` is no text: pass the folder of a monitor, or lines of JSON."
        ) from error
    print(tuned, end="")


def _model_in(path: Path) -> MemoryModel:
    from odb_nodes.memory import MemoryModel

    try:
        return MemoryModel.from_json(path.read_text(errors="replace"))
    except StateError as error:
        raise StateError(f"--memory-model `{path}`: {error}") from error
