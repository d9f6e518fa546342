"""`odb-nodes profile`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from odb_nodes.cli import options as cli
from odb_nodes.cli.data import Data, DataOptions, with_data

__all__ = ["profile"]


@with_data
def profile(
    what: DataOptions,
    ranks: cli.Ranks = None,
    window: cli.Window = None,
    budget: cli.Budget = None,
    accumulate: cli.Accumulate = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Samples of a fixed batch (what the budget holds).")
    ] = None,
    layout: cli.Layout = None,
    max_samples: cli.MaxSamples = None,
    max_patches: cli.MaxPatches = None,
    pad_to_multiple_of: cli.Multiple = None,
    weight: cli.Weight = None,
    json: Annotated[Path | None, typer.Option(help="File for the profile as JSON.")] = None,
    html: Annotated[Path | None, typer.Option(help="File for the profile as a page.")] = None,
) -> None:
    """Show the lengths of a dataset, and compare ways to make batches of it."""
    what.check_outputs(json=json, html=html)
    data = Data(what)
    what.check_outputs(*data.files, json=json, html=html)
    tokens = data.budget(
        tokens=budget,
        layout=layout,
        max_samples=max_samples,
        max_patches=max_patches,
        pad_to_multiple_of=pad_to_multiple_of,
    )
    job, weights = data.job(accumulate=accumulate), data.weights(weight)
    one_window = job.pop("window")
    from odb_nodes.tools.profile import profile as make_profile

    made = make_profile(
        data.table(),
        budget=tokens,
        world_sizes=ranks or [data.ranks],
        windows=window or [one_window],
        batch_size=batch_size,
        weights=weights,
        **job,
    )
    print(made)
    for path, text in ((json, made.to_json), (html, made.to_html)):
        if path is not None:
            path.write_text(text())
