"""The log of train_lm.py, and what it shows: a table and a picture.

    log = Log(folder, "dynamic")
    log.add_step(batches, loss)
    log.add(held_out_loss=5.2)
    print(table(folder, token_budget=4096))

This is a module for the example beside it, not a script.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

COLORS = {"fixed": "#d1603d", "dynamic": "#1f6f8b"}
MEAN_OF_STEPS = 6  # the bold line of the loss is a mean over so many


class Step(NamedTuple):
    """One optimizer step."""

    batches: list[list[int]]  # rows, width, and tokens without the padding
    loss: float  # mean over the supervised tokens, nats
    seconds: float  # from the start of the part
    cpu_s: float  # of this process, without its workers

    @property
    def result(self) -> tuple[list[list[int]], float]:
        """What must be the same in a repetition."""
        return self.batches, self.loss

    @property
    def samples(self) -> int:
        """The samples of all batches."""
        return sum(rows for rows, _, _ in self.batches)


class Log:
    """A file with a line of JSON per step. What was added outlives the process.

    Args:
        folder: an existing folder for the logs of several parts.
        part: the name of the part, and of its file without `.jsonl`.
    """

    def __init__(self, folder: Path, part: str) -> None:
        self._path = folder / f"{part}.jsonl"
        self._path.write_text("")
        self._start = (time.perf_counter(), time.process_time())

    def add_step(self, batches: list[dict[str, Any]], loss: float) -> None:
        """Add an optimizer step."""
        sizes = [
            [*batch["input_ids"].shape, int(batch["attention_mask"].sum())] for batch in batches
        ]
        seconds, cpu_s = time.perf_counter() - self._start[0], time.process_time() - self._start[1]
        self.add(batches=sizes, loss=loss, seconds=seconds, cpu_s=cpu_s)

    def add(self, **facts: Any) -> None:
        """Add facts beside the steps; the table needs `held_out_loss`."""
        with self._path.open("a") as file:
            file.write(json.dumps(facts) + "\n")


def read_log(folder: Path, part: str) -> tuple[list[Step], dict[str, Any]]:
    """Return the steps of a part, finished or killed, and the facts in its log."""
    steps, facts = [], {}
    for line in (folder / f"{part}.jsonl").read_text().splitlines():
        entry = json.loads(line)
        if "loss" in entry:
            steps.append(Step(**entry))
        else:
            facts.update(entry)
    return steps, facts


def figures(folder: Path, part: str, token_budget: int) -> dict[str, str]:
    """Return the column of a part in the table."""
    steps, facts = read_log(folder, part)
    rows, widths, tokens = np.array([batch for step in steps for batch in step.batches]).T
    padded = rows * widths
    return {
        "samples": f"{rows.sum():,}",
        "optimizer steps": f"{len(steps):,}",
        "batches": f"{len(padded):,}",
        "largest batch, padded tokens": f"{padded.max():,}",
        "fill: real tokens / budget": f"{tokens.mean() / token_budget:.3f}",
        "padding share": f"{1 - tokens.sum() / padded.sum():.3f}",
        "seconds": f"{steps[-1].seconds:.1f}",
        "CPU seconds": f"{steps[-1].cpu_s:.1f}",
        "real tokens / CPU second": f"{tokens.sum() / steps[-1].cpu_s:,.0f}",
        "held-out loss, nats / token": f"{facts['held_out_loss']:.3f}",
    }


def table(folder: Path, token_budget: int) -> str:
    """Return the comparison of fixed and dynamic batches as text."""
    parts = [figures(folder, part, token_budget) for part in COLORS]
    rows = [("", *COLORS), *((label, *(part[label] for part in parts)) for label in parts[0])]
    return "\n".join(f"{label:30}" + "".join(f"{cell:>10}" for cell in row) for label, *row in rows)


def plot(path: Path, token_budget: int, max_tokens: int) -> None:
    """Draw loss, shapes and fill of the batches from the logs beside `path`.

    Args:
        path: the picture, a PNG.
        token_budget: most padded tokens of a batch.
        max_tokens: most tokens of a sample.
    """
    figure = Figure(figsize=(10.5, 3.6), layout="constrained")
    loss, shape, fill = figure.subplots(1, 3)
    widths = np.geomspace(16, max_tokens)
    shape.loglog(widths, token_budget / widths, color="0.5", linewidth=1, label="token budget")
    bins = np.linspace(0, token_budget, 17)
    for part, color in COLORS.items():
        steps, _ = read_log(path.parent, part)
        samples, widths, tokens = np.array([batch for step in steps for batch in step.batches]).T
        shape.plot(widths, samples, "o", color=color, markersize=4, alpha=0.5, label=part)
        weights = np.full(len(tokens), 100 / len(tokens))
        fill.hist(tokens, bins.tolist(), weights=weights, color=color, alpha=0.6, label=part)
        # Not over seconds: these vary with the machine, and with what else runs on it.
        computed = np.cumsum([sum(rows * width for rows, width, _ in s.batches) for s in steps])
        losses, recent = [step.loss for step in steps], min(MEAN_OF_STEPS, len(steps))
        loss.plot(computed / 1000, losses, color=color, alpha=0.3, linewidth=1)
        mean = np.convolve(losses, np.full(recent, 1 / recent), "valid")
        label = f"{part}, mean of {recent} steps"
        loss.plot(computed[recent - 1 :] / 1000, mean, color=color, label=label)
    loss.set(
        title="Training loss over one epoch",
        xlabel="tokens computed, with padding (thousands)",
        ylabel="loss (nats per token)",
    )
    shape.set(title="Shape of each batch", xlabel="width (tokens)", ylabel="rows (samples)")
    fill.set(
        title="Content of a batch",
        xlabel="real tokens in the batch",
        ylabel="share of batches (%)",
    )
    for axis in (shape.xaxis, shape.yaxis, fill.xaxis):
        axis.set_major_formatter("{x:,.0f}")
    for axes in (loss, shape, fill):
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize="small")
    figure.savefig(path, dpi=125)
