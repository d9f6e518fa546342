"""Quality: the held-out loss after as many samples, tokens, optimizer steps and CPU seconds."""

from __future__ import annotations

import statistics

import numpy as np

from comparing.common import Options, Row, Table, Tables
from comparing.tasks import CONTENDERS
from comparing.training import TURNS, Epoch, trained

AXES = {"samples": "samples", "real_tokens": "real tokens", "steps": "steps", "cpu_s": "CPU s"}


def tables(options: Options) -> Tables:
    """Yield a table for each task that was trained on one rank."""
    epochs = trained(options)
    for name in dict.fromkeys(name for name, ranks, _ in TURNS if ranks == 1):
        chosen = epochs.of(name, 1)
        every = [epoch for seeds in chosen.values() for epoch in seeds.values()]
        if not every:
            continue
        points = {
            axis: min(epoch[axis] for epoch in every)
            / (2 if axis in ("samples", "real_tokens") else 1)
            for axis in AXES
        }
        yield Table(
            f"Quality: {name}",
            "Held-out loss in nats per token: mean, in brackets least and greatest over the seeds. "
            "Steps and CPU seconds are the fewest that a contender took for an epoch, samples and "
            f"tokens half an epoch; losses between {len(every[0]['curve'])} measurements of an "
            "epoch are interpolated.",
            [
                row_of(contender, [*chosen[contender].values()], points)
                for contender in CONTENDERS
                if contender in chosen
            ],
        )


def row_of(contender: str, epochs: list[Epoch], points: dict[str, float]) -> Row:
    """Return the row of a contender."""
    row = {"": contender, "seeds": f"{len(epochs)}"}
    row["epoch"] = range_of([epoch["loss"] for epoch in epochs])
    for axis, unit in AXES.items():
        column = f"{points[axis]:,.0f} {unit}"
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
