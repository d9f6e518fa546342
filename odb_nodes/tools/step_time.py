"""An estimate of how long a micro-step takes, from the shape of its batch."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from odb_nodes.memory.fitting import fit_peaks
from odb_nodes.tools.report import ATTENTION_TOKENS

__all__ = ["StepTime"]

_LEAST_LINES = 8
_KEYS = ("rows", "width", "step_s")
_MICROSECONDS = 1e6
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

        Args:
            log: JSON Lines with `rows`, `width` (tokens) and `step_s` (seconds) of a micro-step on
                a rank in each. Other lines and keys are left out, and so are steps that took more
                than 3 times as long for a token as the median.

        Raises:
            OSError: it cannot be read.
            ValueError: it has fewer than 8 such lines.
        """
        steps = _read(Path(log))
        if len(steps) < _LEAST_LINES:
            raise ValueError(
                f"`{log}` must have at least {_LEAST_LINES} lines with the keys {_KEYS}, but has "
                f"{len(steps)}. Log more steps, or leave out `log`."
            )
        per_token = steps[:, 2] / (steps[:, 0] * steps[:, 1])
        steps = steps[per_token <= _OUTLIER * np.median(per_token)]
        shapes = np.column_stack((steps[:, :2], np.zeros(len(steps))))
        fit = fit_peaks(shapes, steps[:, 2] * _MICROSECONDS)
        return cls(
            constant_s=fit.constant_bytes / _MICROSECONDS,
            token_s=fit.token_bytes / _MICROSECONDS,
            square_s=fit.square_bytes / _MICROSECONDS,
            origin=f"fitted to {len(steps):,} steps of {Path(log).name}",
        )

    def seconds(self, padded_tokens: Floats, squares: Floats) -> Floats:
        """Return the time of batches, 0 where there is none.

        Args:
            padded_tokens: n * w of each.
            squares: n * w**2 of each; of a packed one, the sum of its samples' squared lengths.
        """
        times = self.constant_s + self.token_s * padded_tokens + self.square_s * squares
        return np.asarray(np.where(padded_tokens > 0, times, 0.0))


def _read(path: Path) -> Floats:
    """Return rows, width and seconds of the steps in a log, (N, 3)."""
    found = []
    with path.open() as lines:
        for line in lines:
            try:
                record = json.loads(line)
                row = [float(record[key]) for key in _KEYS]
            except (KeyError, TypeError, ValueError):  # of another kind, or cut off
                continue
            if min(row) > 0:
                found.append(row)
    return np.array(found, dtype=np.float64).reshape(-1, len(_KEYS))
