"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from odb_nodes._core.writable_path import check_is_writable
from odb_nodes.planning.auto_window import parse_window

__all__ = [
    "Accumulate",
    "AttentionTokens",
    "Budget",
    "Data",
    "Field",
    "Layout",
    "Lengths",
    "MaxPatches",
    "MaxSamples",
    "Multiple",
    "Ranks",
    "RoundSize",
    "RowSizes",
    "Samples",
    "SaveLengths",
    "Seed",
    "Shapes",
    "Tokenizer",
    "Weight",
    "Window",
    "Workers",
    "to_write",
    "weights_of",
]


def to_write(path: str | Path | None) -> str | Path | None:
    """Return the path of a file to write, before any work is done for it.

    Raises:
        BadParameter: its folder does not exist, or it is a folder.
    """
    if path is not None:
        try:
            check_is_writable(path)
        except OSError as error:
            raise typer.BadParameter(str(error)) from error
    return path


Data = Annotated[
    str | None,
    typer.Argument(
        help="JSON Lines (a file, folder or pattern), a saved folder of `datasets`, or "
        "module:function that returns a dataset or a loader."
    ),
]
Lengths = Annotated[
    Path | None,
    typer.Option(help="A file of lengths, in place of data.", exists=True, dir_okay=False),
]
Tokenizer = Annotated[
    str | None, typer.Option(help="A tokenizer.json, or the name or folder of a tokenizer.")
]
Field = Annotated[str | None, typer.Option(help="Field to tokenize (messages or text).")]
Samples = Annotated[int | None, typer.Option(min=1, help="Samples to draw (all).")]
Workers = Annotated[int, typer.Option(min=0, help="Worker processes.")]
Seed = Annotated[int, typer.Option(help="Of the order, and of what is drawn.")]
SaveLengths = Annotated[
    str | None, typer.Option(help="File to write the lengths to.", callback=to_write)
]
Ranks = Annotated[list[int], typer.Option(min=1, help="Number of ranks, or several.")]
Window = Annotated[
    list[Any],
    typer.Option(
        parser=parse_window, metavar="SAMPLES", help="Samples that wait, or auto; or several."
    ),
]
RoundSize = Annotated[int, typer.Option(min=1, help="Steps between messages of ranks.")]
Accumulate = Annotated[int, typer.Option(min=1, help="Batches of an optimizer step.")]
Budget = Annotated[int, typer.Option(min=1, help="Padded tokens of a batch.")]
Layout = Annotated[str, typer.Option(help="padded or packed.")]
Shapes = Annotated[int | None, typer.Option(min=1, help="Most shapes of batches (any).")]
AttentionTokens = Annotated[
    int | None, typer.Option(min=1, help="Length at which attention doubles a row's cost.")
]
MaxSamples = Annotated[int | None, typer.Option(min=1, help="Most samples of a batch.")]
MaxPatches = Annotated[int | None, typer.Option(min=1, help="Most image patches of a batch.")]
Multiple = Annotated[
    int, typer.Option("--pad-to-multiple-of", min=1, help="Tokens that widths are a multiple of.")
]
RowSizes = Annotated[str, typer.Option(help="any, even or friendly.")]
Weight = Annotated[
    list[str] | None, typer.Option(metavar="SOURCE=W", help="Weight of a source, once for each.")
]


def weights_of(given: list[str] | None) -> dict[str, float] | None:
    """Return the weights that a command line names, each as `source=weight`.

    Raises:
        ValueError: one is something else.
    """
    weights = {}
    for text in given or ():
        name, equals, weight = text.rpartition("=")
        try:
            weights[name] = float(weight)
        except ValueError:
            equals = ""
        if not equals:
            raise ValueError(f"--weight must be source=number, but is {text!r}.")
    return weights or None
