"""The times of a run's steps, from its log: planning and estimates use them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from odb_nodes.core.planning import StepTime
from odb_nodes.core.planning.budget import ATTENTION_TOKENS
from odb_nodes.training.memory.model import fitted_time
from odb_nodes.training.monitor.records import read_run

_LEAST_LINES = 8
_KEYS = ("rows", "width", "step_s")
_LEAST_SPREAD = 2.0  # factor by which steps must differ in tokens, to tell `base` from `tokens`
_QUANTILES = (0.05, 0.95)  # so that a few steps at the end of an epoch do not count
_MOST_SLOWDOWN = 3.0  # times the median time of a token; a first step or a checkpoint takes more
_TOKEN_S = 30e-6  # a token of a model of a billion parameters at 200 TFLOP/s
_STEP_S = 20e-3
_CONSTANT_TOKENS = _STEP_S / _TOKEN_S
ASSUMED = StepTime(tokens=_TOKEN_S, squares=_TOKEN_S / ATTENTION_TOKENS, base=_STEP_S)
ASSUMED_ORIGIN = "assumed: 20 ms + 30 us a token, attention doubles a row of 12,288"


def fitted_step_time(log: str | os.PathLike[str]) -> tuple[StepTime, str]:
    """Fit the time of a micro-step, in seconds, to the log of a run.

    The terms are not negative, and minimize the squares of the relative errors. Steps that took
    more than 3 times the median time per token are left out. If the tokens of the steps differ by
    less than a factor of 2, as under a budget that is always full, `base` and `tokens` cannot be
    told apart: their ratio is then the ratio that `tune` assumes without a log, and the returned
    text says so.

    Args:
        log: the folder of a `Monitor`, whose records have the tokens of the slowest rank of each
            step, and the seconds of the steps. Or JSON Lines with `rows`, `width` (tokens) and
            `step_s` (seconds) of one micro-step on one rank, and for packed rows `squares`, the sum
            of the samples' squared lengths. Other lines and keys are ignored.

    Returns:
        The time, which does not tell image patches from tokens, and a text that names the fitted
        steps.

    Raises:
        OSError: `log` cannot be read.
        ValueError: `log` has fewer than 8 such records or lines, or a line has a negative value.
    """
    path = Path(log)
    steps = [*(_steps_of_records(path) if path.is_dir() else _steps_of_lines(path))]
    if len(steps) < _LEAST_LINES:
        needed = "records of steps" if path.is_dir() else f"lines with the keys {_KEYS}"
        raise ValueError(
            f"`{log}` must have at least {_LEAST_LINES} {needed}, but has {len(steps)}. Log more "
            "steps, or leave out `log`."
        )
    counts, tokens, squares, seconds = columns = np.array(steps, dtype=np.float64).T
    is_usual = seconds / tokens <= _MOST_SLOWDOWN * np.median(seconds / tokens)
    counts, tokens, squares, seconds = columns[:, is_usual]
    origin = f"fitted to {int(counts.sum()):,} steps of {path.name}"
    low, high = np.quantile(tokens / counts, _QUANTILES)
    has_spread = high >= _LEAST_SPREAD * low
    if not has_spread:
        tokens = tokens + _CONSTANT_TOKENS * counts
        counts = np.zeros_like(counts)
        origin += (
            ", whose tokens are too much alike to tell the time that every step takes: assumed to "
            f"be the time of {_CONSTANT_TOKENS:,.0f} tokens"
        )
    design = np.column_stack((counts, tokens, squares, np.zeros_like(counts)))
    step_time = fitted_time(design, seconds)
    if not has_spread:
        step_time = replace(step_time, base=_CONSTANT_TOKENS * step_time.tokens)
    return step_time, origin


def _steps_of_lines(path: Path) -> Iterator[tuple[float, ...]]:
    """Yield number, tokens, squares and seconds of the steps in each line of a log."""
    with path.open(errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
                values = {key: float(record[key]) for key in _KEYS}
                squares = float(record.get("squares", values["rows"] * values["width"] ** 2))
            except (KeyError, TypeError, ValueError):  # another kind of line, or cut off
                continue
            for key, value in (*values.items(), ("squares", squares)):
                if not 0 <= value < math.inf:
                    raise ValueError(
                        f"`{key}` in line {number} of `{path}` must be a number of at least 0, but "
                        f"is {record.get(key, value)!r}. Correct the line, or leave it out."
                    )
            if all(values.values()):
                yield 1.0, values["rows"] * values["width"], squares, values["step_s"]


def _steps_of_records(folder: Path) -> Iterator[tuple[float, ...]]:
    """Yield number, tokens, squares and seconds of the steps in each record of a `Monitor`."""
    for record in read_run(folder).steps:
        sums = record["sum"]
        if not sums.get("slowest_squares") or not sums["rank_seconds"]:  # shapes are unknown
            continue
        seconds = sums["seconds"] * (1 - sums["data_wait_s"] / sums["rank_seconds"])
        steps = sum(record["shapes"].values())
        if steps and seconds > 0:
            yield steps, sums["slowest_tokens"], sums["slowest_squares"], seconds
