"""An estimate of how long a micro-step takes, from the shape of its batch."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from odb_nodes.memory.fitting import non_negative_fit
from odb_nodes.monitor import read_run
from odb_nodes.planning.attention import ATTENTION_TOKENS

__all__ = ["StepTime"]

COUNT, TOKENS, _SQUARES, SECONDS = range(4)  # columns of what a log says

_LEAST_LINES = 8
_KEYS = ("rows", "width", "step_s")
_OUTLIER = 3.0  # times the median time of a token: a first step, or one that saved a checkpoint
_TOKEN_S = 30e-6
_STEP_S = 20e-3

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The time of a micro-step of n rows of w tokens: t0 + t1 * n * w + t2 * n * w**2 seconds.

    The defaults are those of no particular machine: 30 us per token, what a model of a billion
    parameters takes at 200 TFLOP/s (6 FLOP per parameter and token); attention that costs as much
    as all else at 12,288 tokens; and 20 ms whatever the batch. Where times of a run are known, use
    `fitted`.

    Args:
        constant_s: t0.
        token_s: t1, of each token of the batch, padding included.
        square_s: t2, of each pair of tokens of a row; in a packed row, of a sample.
        origin: where these come from.
    """

    constant_s: float = _STEP_S
    token_s: float = _TOKEN_S
    square_s: float = _TOKEN_S / ATTENTION_TOKENS
    origin: str = "assumed: 20 ms + 30 us a token, attention doubles a row of 12,288"

    @classmethod
    def fitted(cls, log: str | os.PathLike[str]) -> StepTime:
        """Return what fits the log of a run: non-negative least squares of the relative errors.

        Left out are steps that took more than 3 times as long for a token as the median.

        Args:
            log: the folder of a `Monitor`, whose records have the shapes of rank 0's batches and
                the time that they took; or JSON Lines with `rows`, `width` (tokens) and `step_s`
                (seconds) of a micro-step on a rank in each, other lines and keys aside.

        Raises:
            OSError: it cannot be read.
            ValueError: it has fewer than 8 such records or lines.
        """
        path = Path(log)
        steps = _of_monitor(path) if path.is_dir() else _of_lines(path)
        if len(steps) < _LEAST_LINES:
            what = "records of steps" if path.is_dir() else f"lines with the keys {_KEYS}"
            raise ValueError(
                f"`{log}` must have at least {_LEAST_LINES} {what}, but has {len(steps)}. Log more "
                "steps, or leave out `log`."
            )
        per_token = steps[:, SECONDS] / steps[:, TOKENS]
        steps = steps[per_token <= _OUTLIER * np.median(per_token)]
        design = np.column_stack((steps[:, :SECONDS], np.zeros(len(steps))))
        constant, token, square, _ = non_negative_fit(design, steps[:, SECONDS]).tolist()
        return cls(
            constant_s=constant,
            token_s=token,
            square_s=square,
            origin=f"fitted to {int(steps[:, COUNT].sum()):,} steps of {path.name}",
        )

    def seconds(self, padded_tokens: Floats, squares: Floats) -> Floats:
        """Return the time of batches, 0 where there is none.

        Args:
            padded_tokens: n * w of each.
            squares: n * w**2 of each; of a packed one, the sum of its samples' squared lengths.
        """
        times = self.constant_s + self.token_s * padded_tokens + self.square_s * squares
        return np.asarray(np.where(padded_tokens > 0, times, 0.0))


def _of_lines(path: Path) -> Floats:
    """Return number, tokens, squares and seconds of the steps in each line of a log, (N, 4)."""
    found = []
    with path.open() as lines:
        for line in lines:
            try:
                record = json.loads(line)
                rows, width, seconds = (float(record[key]) for key in _KEYS)
            except (KeyError, TypeError, ValueError):  # of another kind, or cut off
                continue
            if min(rows, width, seconds) > 0:
                found.append((1.0, rows * width, rows * width**2, seconds))
    return np.array(found, dtype=np.float64).reshape(-1, SECONDS + 1)


def _of_monitor(folder: Path) -> Floats:
    """Return the same for each record of steps that a `Monitor` has written."""
    found = []
    for record in read_run(folder).steps:
        shapes = [(*map(int, shape.split("x")), count) for shape, count in record["shapes"].items()]
        sums = record["sum"]
        seconds = sums["seconds"] * (1 - sums["data_wait_s"] / sums["rank_seconds"])
        steps = sum(count for _, _, count in shapes)
        tokens = sum(rows * width * count for rows, width, count in shapes)
        squares = sum(rows * width**2 * count for rows, width, count in shapes)
        if tokens and seconds > 0:
            found.append((steps, tokens, squares, seconds))
    return np.array(found, dtype=np.float64).reshape(-1, SECONDS + 1)
