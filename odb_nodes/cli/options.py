"""Options that several commands have."""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from odb_nodes.planning.auto_window import parse_window
from odb_nodes.planning.options import JobOptions
from odb_nodes.tools.command_line import check_is_writable

__all__ = [
    "BUDGET_TOKENS",
    "Accumulate",
    "AttentionTokens",
    "Budget",
    "Data",
    "Field",
    "Force",
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
    "check_outputs",
    "weights_of",
]

BUDGET_TOKENS = 16_384


def _window(text: str) -> Any:
    """Return a window, or say what is wrong: before click 8.2, only a `BadParameter` is told."""
    try:
        return parse_window(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def check_outputs(
    outputs: Mapping[str, str | Path | None], inputs: Sequence[str | Path | None], *, force: bool
) -> None:
    """Check the files that a command writes, before any work is done for them."""
    taken: list[str | Path] = []
    for one in inputs:
        if one is not None:
            taken += [one] if Path(one).exists() else glob.glob(str(one), recursive=True)
    for option, path in outputs.items():
        if path is not None:
            try:
                check_is_writable(path, taken, force=force)
            except OSError as error:
                raise typer.BadParameter(str(error), param_hint=f"'{option}'") from error
            taken.append(path)


Data = Annotated[
    str | None,
    typer.Argument(
        help="JSON Lines (a file, folder or pattern), a saved folder of `datasets`, or "
        "module:function that returns a dataset, or a loader, whose options are then the defaults."
    ),
]
Lengths = Annotated[
    Path | None,
    typer.Option(help="A file of lengths, in place of data.", exists=True, dir_okay=False),
]
Tokenizer = Annotated[
    str | None,
    typer.Option(
        help="The name or folder of a tokenizer, or a tokenizer.json, which has no chat template."
    ),
]
Field = Annotated[str | None, typer.Option(help="Field to tokenize (messages or text).")]
Samples = Annotated[int | None, typer.Option(min=1, help="Samples to draw (all).")]
Workers = Annotated[int, typer.Option(min=0, help="Worker processes.")]
Seed = Annotated[int | None, typer.Option(help="Of the order, and of what is drawn (0).")]
SaveLengths = Annotated[str | None, typer.Option(help="File to write the lengths to.")]
Force = Annotated[bool, typer.Option("--force", help="Replace files that exist.")]
Ranks = Annotated[list[int] | None, typer.Option(min=1, help="Number of ranks, or several (1).")]
Window = Annotated[
    list[Any] | None,
    typer.Option(
        parser=_window,
        metavar="SAMPLES",
        help="Samples that wait, or auto; or several (auto).",
    ),
]
RoundSize = Annotated[
    int | None,
    typer.Option(min=1, help=f"Steps between messages of ranks ({JobOptions.round_size})."),
]
Accumulate = Annotated[int | None, typer.Option(min=1, help="Batches of an optimizer step (1).")]
Budget = Annotated[
    int | None, typer.Option(min=1, help=f"Padded tokens of a batch ({BUDGET_TOKENS}).")
]
Layout = Annotated[str | None, typer.Option(help="padded or packed (padded).")]
Shapes = Annotated[int | None, typer.Option(min=1, help="Most shapes of batches (any).")]
AttentionTokens = Annotated[
    int | None, typer.Option(min=1, help="Length at which attention doubles a row's cost.")
]
MaxSamples = Annotated[int | None, typer.Option(min=1, help="Most samples of a batch.")]
MaxPatches = Annotated[int | None, typer.Option(min=1, help="Most image patches of a batch.")]
Multiple = Annotated[
    int | None,
    typer.Option("--pad-to-multiple-of", min=1, help="Tokens that widths are a multiple of (1)."),
]
RowSizes = Annotated[str | None, typer.Option(help="any, even or friendly (any).")]
Weight = Annotated[
    list[str] | None, typer.Option(metavar="SOURCE=W", help="Weight of a source, once for each.")
]


def weights_of(given: list[str] | None) -> dict[str, float] | None:
    """Return the weights that a command line names, each as `source=weight`."""
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
