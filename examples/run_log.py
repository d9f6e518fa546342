"""The log of a training run: written step by step, and shown as a table and as a picture.

    log = RunLog(folder, "dynamic")
    log.add_step(Step(...))
    log.add(held_out_loss=5.2)
    print(table(folder, ["fixed", "dynamic"]))

This is a module for the examples beside it, not a script.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

MEAN_OF_STEPS = 6  # what the bold line of the loss is a mean of


@dataclass(frozen=True, kw_only=True)
class Step:
    """One optimizer step, as the log of a run tells it."""

    ids: list[int]
    batches: list[tuple[int, int, int]]  # rows, width, and tokens without the padding
    loss: float  # mean over the supervised tokens
    seconds: float  # from the start of the run to the end of the step


class RunLog:
    """A file with a line of JSON per step, emptied first.

    What was added outlives the process, however that ends.

    Args:
        folder: an existing folder for the logs of several runs.
        name: of the run, and of its file without `.jsonl`.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._path = folder / f"{name}.jsonl"
        self._path.write_text("")

    def add_step(self, step: Step) -> None:
        """Add a step."""
        self.add(**asdict(step))

    def add(self, **facts: Any) -> None:
        """Add what is to be known of the run beside its steps; figures need `held_out_loss`."""
        with self._path.open("a") as file:
            file.write(json.dumps(facts) + "\n")


def read_log(folder: Path, name: str) -> tuple[list[Step], dict[str, Any]]:
    """Return the steps of a run, finished or killed, and what else its log says."""
    steps, facts = [], {}
    for line in (folder / f"{name}.jsonl").read_text().splitlines():
        entry = json.loads(line)
        if "ids" in entry:
            steps.append(Step(**entry))
        else:
            facts.update(entry)
    return steps, facts


def compare(expected: list[Step], actual: list[Step], *, exact: bool, name: str = "resume") -> str:
    """Return what a resume kept: the groups, and if it must be `exact`, the losses to the last bit.

    Raises:
        SystemExit: if it kept less.
    """
    if [step.ids for step in expected] != [step.ids for step in actual]:
        raise SystemExit(f"{name}: the groups are not those of the uninterrupted run.")
    difference = max(abs(a.loss - b.loss) for a, b in zip(expected, actual, strict=True))
    if difference and exact:
        raise SystemExit(f"{name}: the groups are the same, but losses differ by {difference}.")
    if difference:
        return f"groups equal those of the uninterrupted run, losses differ by {difference:.1e}"
    return "groups and losses equal those of the uninterrupted run to the last bit"


def figures(folder: Path, name: str, token_budget: int) -> dict[str, str]:
    """Return what the table says of a run."""
    steps, facts = read_log(folder, name)
    rows, widths, tokens = np.array([batch for step in steps for batch in step.batches]).T
    padded = rows * widths
    samples = sum(len(step.ids) for step in steps)
    seconds = steps[-1].seconds
    return {
        "samples": f"{samples:,}",
        "optimizer steps": f"{len(steps):,}",
        "batches": f"{len(padded):,}",
        "largest batch, padded tokens": f"{padded.max():,}",
        "fill: real tokens / budget": f"{tokens.mean() / token_budget:.1%}",
        "padding": f"{1 - tokens.sum() / padded.sum():.1%}",
        "seconds": f"{seconds:.1f}",
        "samples/s": f"{samples / seconds:,.1f}",
        "real tokens/s": f"{tokens.sum() / seconds:,.0f}",
        "held-out loss, nats/token": f"{facts['held_out_loss']:.3f}",
    }


def table(folder: Path, names: Iterable[str], token_budget: int) -> str:
    """Return the comparison of these runs, whose batches had one budget, as text."""
    runs = {name: figures(folder, name, token_budget) for name in names}
    labels = next(iter(runs.values()))
    rows = [("", *runs), *((label, *(run[label] for run in runs.values())) for label in labels)]
    return "\n".join(f"{label:30}" + "".join(f"{cell:>10}" for cell in row) for label, *row in rows)


def plot(path: Path, colors: dict[str, str], *, token_budget: int, max_tokens: int) -> None:
    """Draw loss, shapes and fill of the batches of the runs whose logs are beside `path`.

    Args:
        path: of the picture.
        colors: of the runs, by their names.
        token_budget: most padded tokens of a batch.
        max_tokens: most tokens of a sample.
    """
    figure = Figure(figsize=(13, 4), layout="constrained")
    loss, shape, fill = figure.subplots(1, 3)
    widths = np.geomspace(16, max_tokens)
    shape.loglog(widths, token_budget / widths, color="0.5", linewidth=1, label="token budget")
    bins = np.linspace(0, token_budget, 17).tolist()
    for name, color in colors.items():
        steps, _ = read_log(path.parent, name)
        samples, widths, tokens = np.array([batch for step in steps for batch in step.batches]).T
        plot_loss(loss, name, steps, color)
        shape.plot(widths, samples, "o", color=color, markersize=4, alpha=0.5, label=name)
        fill.hist(tokens, bins, density=True, color=color, alpha=0.6, label=name)
    loss.set(title="Training loss", xlabel="seconds", ylabel="nats per token")
    shape.set(title="Shapes of batches", xlabel="width, tokens", ylabel="samples")
    fill.set(title="Real tokens in a batch", xlabel="tokens", ylabel="share of batches", yticks=[])
    shape.xaxis.set_major_formatter("{x:,.0f}")
    shape.yaxis.set_major_formatter("{x:,.0f}")
    for axes in (loss, shape, fill):
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def plot_loss(axes: Axes, name: str, steps: list[Step], color: str) -> None:
    """Draw the loss of every step, and its mean over the recent ones."""
    seconds, losses = np.array([(step.seconds, step.loss) for step in steps]).T
    axes.plot(seconds, losses, color=color, alpha=0.3, linewidth=1)
    recent = min(MEAN_OF_STEPS, len(steps))
    mean = np.convolve(losses, np.full(recent, 1 / recent), "valid")
    axes.plot(seconds[recent - 1 :], mean, color=color, label=f"{name}, mean of {recent} steps")
