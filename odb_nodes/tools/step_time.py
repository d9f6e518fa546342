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
from odb_nodes.planning.budget import ATTENTION_TOKENS

__all__ = ["StepTime"]

COUNT, TOKENS, _SQUARES, SECONDS = range(4)  # columns of what a log says

_LEAST_LINES = 8
_KEYS = ("rows", "width", "step_s")
_SPREAD = 2.0  # times by which steps must differ in their tokens, to tell t0 from t1
_MIDDLE = (0.05, 0.95)  # quantiles: not by a few steps at the end of an epoch
_OUTLIER = 3.0  # times the median time of a token: a first step, or one that saved a checkpoint
_TOKEN_S = 30e-6
_STEP_S = 20e-3
_CONSTANT_TOKENS = _STEP_S / _TOKEN_S

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

        Left out are steps that took more than 3 times as long for a token as the median. Where
        the steps' tokens differ by less than a factor of 2, as under one budget that is always
        full, t0 cannot be told from t1: they keep the ratio of the defaults, and `origin` says so.

        Args:
            log: the folder of a `Monitor`, whose records have the tokens of the dearest rank of
                each step, and the time that the steps took; or JSON Lines with `rows`, `width`
                (tokens) and `step_s` (seconds) of a micro-step on a rank in each, and with
                `squares`, the sum of the samples' squared lengths, where a row is packed. Other
                lines and keys do not count.

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
        origin = f"fitted to {int(steps[:, COUNT].sum()):,} steps of {path.name}"
        design = np.column_stack((steps[:, :SECONDS], np.zeros(len(steps))))
        low, high = np.quantile(steps[:, TOKENS] / steps[:, COUNT], _MIDDLE)
        is_known = high >= _SPREAD * low
        if not is_known:
            design[:, TOKENS] += _CONSTANT_TOKENS * design[:, COUNT]
            design[:, COUNT] = 0.0
            origin += (
                ", whose tokens are too much alike to tell what a step takes whatever its batch: "
                f"taken as that of {_CONSTANT_TOKENS:,.0f} tokens"
            )
        constant, token, square, _ = non_negative_fit(design, steps[:, SECONDS]).tolist()
        return cls(
            constant_s=constant if is_known else _CONSTANT_TOKENS * token,
            token_s=token,
            square_s=square,
            origin=origin,
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
                squares = float(record.get("squares", rows * width**2))
            except (KeyError, TypeError, ValueError):  # of another kind, or cut off
                continue
            if min(rows, width, seconds) > 0:
                found.append((1.0, rows * width, squares, seconds))
    return np.array(found, dtype=np.float64).reshape(-1, SECONDS + 1)


def _of_monitor(folder: Path) -> Floats:
    """Return the same for each record of steps that a `Monitor` has written."""
    found = []
    for record in read_run(folder).steps:
        sums = record["sum"]
        if not sums.get("dearest_squares") or not sums["rank_seconds"]:  # shapes are not known
            continue
        seconds = sums["seconds"] * (1 - sums["data_wait_s"] / sums["rank_seconds"])
        steps = sum(record["shapes"].values())
        if steps and seconds > 0:
            found.append((steps, sums["dearest_tokens"], sums["dearest_squares"], seconds))
    return np.array(found, dtype=np.float64).reshape(-1, SECONDS + 1)
