"""`odb-nodes simulate`."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from odb_nodes.cli import options as cli
from odb_nodes.cli.data import DataOptions, read_table, with_data
from odb_nodes.cli.tables import print_rows
from odb_nodes.planning import SimulationOptions, TokenBudget, Uneven
from odb_nodes.planning.auto_window import shown
from odb_nodes.planning.budget import Layout
from odb_nodes.planning.row_sizes import RowSizes
from odb_nodes.tools.length_table import LengthTable
from odb_nodes.tools.simulate import lognormal_lengths
from odb_nodes.tools.table_epoch import TableEpoch
from odb_nodes.tools.timeline import Timeline

__all__ = ["simulate"]


@with_data
def simulate(
    what: DataOptions,
    cv: Annotated[
        float | None,
        typer.Option(min=0, help="Lognormal lengths of this variation, in place of data."),
    ] = None,
    ranks: cli.Ranks = [1],  # noqa: B006  typer reads it
    window: cli.Window = [SimulationOptions.window],  # noqa: B006
    budget: cli.Budget = 16_384,
    round_size: cli.RoundSize = SimulationOptions.round_size,
    accumulate: cli.Accumulate = 1,
    uneven: Annotated[str, typer.Option(help="fill, join or stop.")] = "fill",
    layout: cli.Layout = "padded",
    shapes: cli.Shapes = None,
    attention_tokens: cli.AttentionTokens = None,
    max_samples: cli.MaxSamples = None,
    max_patches: cli.MaxPatches = None,
    pad_to_multiple_of: cli.Multiple = 1,
    row_sizes: cli.RowSizes = "any",
    weight: cli.Weight = None,
    shuffle: Annotated[bool, typer.Option(help="Whether the data is shuffled.")] = True,
    timeline: Annotated[
        str | None,
        typer.Option(
            help="Draw each rank's cost, step by step, of the last ranks and window: "
            "a file for SVG, - for text.",
            callback=cli.to_write,
        ),
    ] = None,
) -> None:
    """Plan the first epoch on any number of ranks, without a model or a GPU."""
    tokens = TokenBudget(
        budget,
        max_samples=max_samples,
        max_patches=max_patches,
        pad_to_multiple_of=pad_to_multiple_of,
        layout=cast(Layout, layout),
        shapes=shapes,
        attention_tokens=attention_tokens,
        row_sizes=cast(RowSizes, row_sizes),
    )
    weights = cli.weights_of(weight)
    table = read_table(what) if cv is None else _lognormal(cv, what)
    print(table)
    epoch = TableEpoch(table=table, shuffle=shuffle, weights=weights)
    rows: list[dict[str, Any]] = []
    for world_size, one_window in product(ranks, window):
        job = SimulationOptions(
            world_size=world_size,
            budget=tokens,
            window=one_window,
            round_size=round_size,
            accumulate=accumulate,
            uneven=cast(Uneven, uneven),
            seed=what.seed,
        )
        run = {"ranks": str(world_size), "window": shown(one_window, epoch.window(job))}
        rows.append(run | epoch.report(job).as_row())
    print_rows(rows)
    if timeline is not None:
        drawn = Timeline.of(epoch.steps(job), tokens, epoch.window(job))
        if timeline == "-":
            print(f"\n{drawn}")
        else:
            Path(timeline).write_text(drawn.to_svg())


def _lognormal(cv: float, what: DataOptions) -> LengthTable:
    if what != DataOptions(samples=what.samples, seed=what.seed):
        raise ValueError(
            "--cv makes lengths in place of data: leave out the data, --lengths, --tokenizer, "
            "--field, --workers and --save-lengths."
        )
    lengths = lognormal_lengths(what.samples or 40_000, cv=cv, seed=what.seed)
    return LengthTable.of(lengths, distribution=f"lognormal, CV {cv}")
