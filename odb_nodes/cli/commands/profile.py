"""`odb-nodes profile`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast

import typer

from odb_nodes.cli import options as cli
from odb_nodes.cli.data import DataOptions, read_table, with_data
from odb_nodes.cli.tables import print_rows
from odb_nodes.planning import SimulationOptions, TokenBudget
from odb_nodes.planning.budget import Layout
from odb_nodes.tools.profile import profile as make_profile

__all__ = ["profile"]


@with_data
def profile(
    what: DataOptions,
    ranks: cli.Ranks = [1],  # noqa: B006  typer reads it
    window: cli.Window = [SimulationOptions.window],  # noqa: B006
    budget: cli.Budget = 16_384,
    accumulate: cli.Accumulate = 1,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Samples of a fixed batch (what the budget holds).")
    ] = None,
    layout: cli.Layout = "padded",
    max_samples: cli.MaxSamples = None,
    max_patches: cli.MaxPatches = None,
    pad_to_multiple_of: cli.Multiple = 1,
    weight: cli.Weight = None,
    json: Annotated[
        Path | None, typer.Option(help="File for the profile as JSON.", callback=cli.to_write)
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="File for the profile as a page.", callback=cli.to_write)
    ] = None,
) -> None:
    """Show the lengths of a dataset, and compare ways to make batches of it."""
    tokens = TokenBudget(
        budget,
        max_samples=max_samples,
        max_patches=max_patches,
        pad_to_multiple_of=pad_to_multiple_of,
        layout=cast(Layout, layout),
    )
    weights = cli.weights_of(weight)
    made = make_profile(
        read_table(what),
        budget=tokens,
        world_sizes=ranks,
        windows=window,
        accumulate=accumulate,
        batch_size=batch_size,
        weights=weights,
        seed=what.seed,
    )
    print(made.about)
    print_rows([one.as_row() for one in made.lengths])
    print(f"\n{made.heading}")
    print_rows([one.as_row() for one in made.comparisons])
    for path, text in ((json, made.to_json), (html, made.to_html)):
        if path is not None:
            path.write_text(text())
