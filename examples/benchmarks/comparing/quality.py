"""Quality: the held-out loss after as many samples, tokens, optimizer steps and CPU seconds."""

from __future__ import annotations

import statistics

import numpy as np

from comparing.common import Options, Row, Table, Tables
from comparing.tasks import CONTENDERS
from comparing.training import TURNS, Epoch, trained

# The column of a table, what its losses have in common, and at which share of the shortest epoch.
POINTS = (
    ("half the samples", "samples", 0.5),
    ("half the tokens", "real_tokens", 0.5),
    ("equal steps", "steps", 1.0),
    ("equal CPU s", "cpu_s", 1.0),
)


def tables(options: Options) -> Tables:
    """Yield a table for each task that was trained on one rank."""
    epochs = trained(options)
    for name in dict.fromkeys(name for name, ranks, _ in TURNS if ranks == 1):
        chosen = epochs.of(name, 1)
        every = [epoch for seeds in chosen.values() for epoch in seeds.values()]
        if not every:
            continue
        points = {axis: share * min(epoch[axis] for epoch in every) for _, axis, share in POINTS}
        yield Table(
            f"Quality: {name}",
            "Held-out loss in nats per token: mean, in brackets least and greatest of the seeds; "
            "after the epoch, half its samples, half its tokens, and what the shortest epoch "
            f"takes: {points['steps']:,.0f} steps, {points['cpu_s']:,.0f} CPU seconds. Losses "
            f"between {len(every[0]['curve'])} measurements of an epoch are interpolated.",
            [
                row_of(contender, [*chosen[contender].values()], points)
                for contender in CONTENDERS
                if contender in chosen
            ],
        )


def row_of(contender: str, epochs: list[Epoch], points: dict[str, float]) -> Row:
    """Return the row of a contender."""
    row = {
        "": contender,
        "seeds": f"{len(epochs)}",
        "steps": f"{statistics.fmean(epoch['steps'] for epoch in epochs):,.0f}",
        "epoch": range_of([epoch["loss"] for epoch in epochs]),
    }
    for column, axis, _ in POINTS:
        row[column] = range_of([loss_after(epoch, axis, points[axis]) for epoch in epochs])
    return row


def loss_after(epoch: Epoch, axis: str, point: float) -> float:
    """Return the held-out loss at a point of an epoch."""
    curve = epoch["curve"]
    return float(np.interp(point, [of[axis] for of in curve], [of["loss"] for of in curve]))


def range_of(losses: list[float]) -> str:
    """Return the mean of losses and, of several, their range."""
    mean = f"{statistics.fmean(losses):.3f}"
    return mean if len(losses) == 1 else f"{mean} ({min(losses):.3f} to {max(losses):.3f})"
