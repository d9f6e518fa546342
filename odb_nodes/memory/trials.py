"""Steps of training that are tried, to see whether they fit into memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from odb_nodes._core.progress import Bar
from odb_nodes._core.user_warning import warn_user
from odb_nodes.memory.failures import free_memory, is_out_of_memory
from odb_nodes.memory.meter import MemoryMeter, measuring
from odb_nodes.memory.training_state import TrainingState

__all__ = ["Trial", "Trials"]

TRIALS_TO_SEE = 3  # after which a meter that has seen nothing is one that sees nothing

TrainStep = Callable[[Any], Any]
MakeBatch = Callable[..., Any]
"""(rows, width), or (rows, width, patches) where rows have patches, -> batch."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One step of training with a batch of one shape.

    Attributes:
        rows: rows of the batch.
        width: tokens of each row.
        patches: image patches of the batch.
        peak_bytes: what the step took at its peak; where it failed, up to then.
        fits: whether it ended, and took no more than the meter's limit.
        seconds: how long it took.
        error: what the step that ran out of memory said; `""` for others.
    """

    rows: int
    width: int
    patches: int
    peak_bytes: int
    fits: bool
    seconds: float
    error: str = ""

    def reason(self, limit_bytes: int) -> str:
        """Return, for an error, why the step does not fit.

        Args:
            limit_bytes: the meter's limit.
        """
        taken = f"it took {self.peak_bytes:,} bytes, but the limit is {limit_bytes:,}"
        return self.error.strip().rstrip(".") or taken


class Trials:
    """Runs steps of training with batches of given shapes, and keeps what came of it."""

    def __init__(
        self,
        train_step: TrainStep,
        make_batch: MakeBatch,
        meter: MemoryMeter,
        state: TrainingState,
        patches_per_row: int,
        bar: Bar | None = None,
    ) -> None:
        self._train_step, self._make_batch = train_step, make_batch
        self._meter = meter
        self._state = state
        self.patches_per_row, self._bar = patches_per_row, bar
        self.done: list[Trial] = []
        self._is_seen = False

    def run(self, rows: int, width: int, most_patches: int | None = None) -> Trial:
        """Make one step with a batch of a shape."""
        patches = rows * self.patches_per_row
        if most_patches is not None:
            patches = min(patches, most_patches)
        shape = (rows, width, patches) if self.patches_per_row else (rows, width)
        failure: Exception | None = None
        had_gradients = self._state.with_gradients()
        with measuring(self._meter), self._state.computed_gradients() as gradients:
            self._meter.reset()
            idle_bytes = self._meter.peak_bytes()
            start_s = time.perf_counter()
            try:
                self._train_step(self._make_batch(*shape))
                _finish()
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                failure = error
            seconds = time.perf_counter() - start_s
            peak_bytes = self._meter.peak_bytes()
        if failure is not None:
            free_memory(failure)
            self._state.drop_gradients_but(had_gradients)
        self._state.restore_values()
        trial = Trial(
            rows=rows,
            width=width,
            patches=patches,
            peak_bytes=peak_bytes,
            fits=failure is None and peak_bytes <= self._meter.limit_bytes,
            seconds=seconds,
            error="" if failure is None else str(failure),
        )
        self.done.append(trial)
        self._show(trial)
        self._is_seen |= peak_bytes > idle_bytes
        if len(self.done) == 1 and failure is None and gradients and not any(gradients.values()):
            warn_user(
                f"`train_step` has computed no gradient of the {len(gradients)} weights that can "
                "be found from it. If it makes no backward pass, a step of training takes more "
                "than is measured."
            )
        if len(self.done) == TRIALS_TO_SEE:
            self.check_seen()
        return trial

    def _show(self, trial: Trial) -> None:
        if self._bar is not None:
            outcome = f"fits, {trial.peak_bytes / 2**30:.2f} GiB" if trial.fits else "does not fit"
            self._bar.set_postfix_str(f"{trial.rows} x {trial.width} {outcome}", refresh=False)
            self._bar.update()

    def check_seen(self) -> None:
        """Check that the meter has seen something of the trials."""
        if not self._is_seen:
            trial = self.done[-1]
            raise ValueError(
                f"`meter` sees nothing of `train_step`: {len(self.done)} steps, the last one with "
                f"{trial.rows} rows of {trial.width} tokens, took no more than the "
                f"{trial.peak_bytes:,} bytes that were taken before. Pass a meter of the device "
                "that the model and its batches are on."
            )


def _finish() -> None:
    """Wait until the GPU has done what it was given: an error may come only then."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
