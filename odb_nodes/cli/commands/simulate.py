"""`odb-nodes simulate`."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from odb_nodes.cli import options as cli
from odb_nodes.cli.data import Data, DataOptions, with_data
from odb_nodes.planning import SimulationOptions
from odb_nodes.planning.auto_window import shown

if TYPE_CHECKING:
    from odb_nodes.tools.length_table import LengthTable

__all__ = ["simulate"]


@with_data
def simulate(
    what: DataOptions,
    cv: Annotated[
        float | None,
        typer.Option(min=0, help="Lognormal lengths of this variation, in place of data."),
    ] = None,
    ranks: cli.Ranks = None,
    window: cli.Window = None,
    budget: cli.Budget = None,
    round_size: cli.RoundSize = None,
    accumulate: cli.Accumulate = None,
    uneven: Annotated[str | None, typer.Option(help="fill or stop (fill).")] = None,
    layout: cli.Layout = None,
    shapes: cli.Shapes = None,
    attention_tokens: cli.AttentionTokens = None,
    max_samples: cli.MaxSamples = None,
    max_patches: cli.MaxPatches = None,
    pad_to_multiple_of: cli.Multiple = None,
    row_sizes: cli.RowSizes = None,
    weight: cli.Weight = None,
    shuffle: Annotated[
        bool | None, typer.Option("--shuffle/--no-shuffle", help="Whether the data is shuffled.")
    ] = None,
    timeline: Annotated[
        str | None,
        typer.Option(
            help="Draw each rank's cost, step by step, of the last ranks and window: "
            "a file for SVG, - for text."
        ),
    ] = None,
) -> None:
    """Plan the first epoch on any number of ranks, without a model or a GPU."""
    drawn_to = None if timeline == "-" else timeline
    what.check_outputs(timeline=drawn_to)
    data = Data(what, None if cv is None else _lognormal(cv, what))
    what.check_outputs(*data.files, timeline=drawn_to)
    tokens = data.budget(
        tokens=budget,
        max_samples=max_samples,
        max_patches=max_patches,
        pad_to_multiple_of=pad_to_multiple_of,
        layout=layout,
        shapes=shapes,
        attention_tokens=attention_tokens,
        row_sizes=row_sizes,
    )
    options = data.job(round_size=round_size, accumulate=accumulate, uneven=uneven)
    weights = data.weights(weight)
    jobs = [
        SimulationOptions(
            world_size=world_size, budget=tokens, **(options | {"window": one_window})
        )
        for world_size, one_window in product(ranks or [data.ranks], window or [options["window"]])
    ]
    from odb_nodes.tools.table_epoch import TableEpoch
    from odb_nodes.tools.tables import markdown_table
    from odb_nodes.tools.timeline import Timeline

    table = data.table()
    print(table)
    shuffle = data.shuffles if shuffle is None else shuffle
    epoch = TableEpoch(table=table, shuffle=shuffle, weights=weights)
    rows: list[dict[str, Any]] = []
    for job in jobs:
        run = {"ranks": str(job.world_size), "window": shown(job.window, epoch.window(job))}
        rows.append(run | epoch.report(job).as_row())
    print(markdown_table(rows))
    if timeline is not None:
        drawn = Timeline.of(epoch.steps(job), tokens, epoch.window(job))
        if timeline == "-":
            print(f"\n{drawn}")
        else:
            Path(timeline).write_text(drawn.to_svg())


def _lognormal(cv: float, what: DataOptions) -> LengthTable:
    if what != DataOptions(samples=what.samples, seed=what.seed, force=what.force):
        raise ValueError(
            "--cv makes lengths in place of data: leave out the data, --lengths, --tokenizer, "
            "--field, --workers and --save-lengths."
        )
    from odb_nodes.tools.length_table import LengthTable
    from odb_nodes.tools.simulate import lognormal_lengths

    lengths = lognormal_lengths(what.samples or 40_000, cv=cv, seed=what.seed or 0)
    return LengthTable.of(lengths, distribution=f"lognormal, CV {cv}")
