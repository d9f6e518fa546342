"""Trial training steps: batches of chosen shapes, whose memory and time are measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import register_multi_grad_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from odb_nodes._support.checks import check_callable, check_count, check_type
from odb_nodes._support.progress import Bar
from odb_nodes._support.user_warning import warn_user
from odb_nodes.training.memory.meter import (
    GIB,
    MemoryMeter,
    check_meter,
    free_memory,
    is_out_of_memory,
    measuring,
)
from odb_nodes.training.memory.training_state import TrainingState

TrainStep = Callable[[Any], Any]
MakeBatch = Callable[..., Any]
"""(rows, width), or (rows, width, patches) where rows have patches, -> batch."""


TRIALS_TO_SEE = 3  # a meter that reports no growth in this many trials is an error


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One step of training with a batch of one shape.

    Attributes:
        rows: rows of the batch.
        width: tokens of each row.
        patches: image patches of the batch.
        peak_bytes: peak memory of the step, up to its failure if it failed.
        fits: whether the step finished within the meter's limit.
        seconds: duration of the step.
        error: message of the out-of-memory error; `""` if there was none.
    """

    rows: int
    width: int
    patches: int
    peak_bytes: int
    fits: bool
    seconds: float
    error: str = ""

    def reason(self, limit_bytes: int) -> str:
        """Return, for an error, why the step does not fit under a meter's limit."""
        over_limit = f"it took {self.peak_bytes:,} bytes, but the limit is {limit_bytes:,}"
        return self.error.strip().rstrip(".") or over_limit


def checked_widths(widths: Sequence[int]) -> list[int]:
    """Return the widths as a list of integers, at least one."""
    check_type("widths", widths, list | tuple | range, "Pass a list of lengths in tokens.")
    if not widths:
        raise ValueError("`widths` must have at least one length, but is empty.")
    return [check_count("widths", width) for width in widths]


class Trials:
    """Makes training steps with batches of chosen shapes, and restores what they change."""

    def __init__(
        self,
        train_step: TrainStep,
        make_batch: MakeBatch,
        states: Sequence[Any],
        meter: MemoryMeter,
        patches_per_row: int,
        bar: Bar | None = None,
    ) -> None:
        check_callable("train_step", train_step)
        check_callable("make_batch", make_batch)
        self._train_step, self._make_batch, self._bar = train_step, make_batch, bar
        self._per_row = check_count("patches_per_row", patches_per_row, 0)
        self._meter = check_meter(meter)
        self._state = TrainingState(states)
        self.done: list[Trial] = []
        self._has_grown = False  # whether the measured memory has grown in a step

    def __enter__(self) -> None:
        self._handle = register_optimizer_step_pre_hook(self._state.check_saved)

    def __exit__(self, *error: object) -> None:
        self._handle.remove()
        free_memory()
        self._state.restore()

    def run(self, rows: int, width: int, most_patches: int | None = None) -> Trial:
        """Make a step with a batch of this shape."""
        patches = rows * self._per_row
        if most_patches is not None:
            patches = min(patches, most_patches)
        weights = self._state.weights
        has_gradients = set[bool]()
        without_gradient = [weight for weight in weights if weight.grad is None]
        hook = register_multi_grad_hook(weights, lambda _: has_gradients.add(True), mode="any")
        try:
            trial, failure = self._measure(rows, width, patches)
        finally:
            hook.remove()
        if failure is not None:
            free_memory(failure)
            for weight in without_gradient:
                weight.grad = None
        self._state.restore_values()
        self.done.append(trial)
        if self._bar is not None:
            outcome = f"fits, {trial.peak_bytes / GIB:.2f} GiB" if trial.fits else "does not fit"
            self._bar.set_postfix_str(f"{rows} x {width} {outcome}", refresh=False)
            self._bar.update()
        if len(self.done) == 1 and failure is None and weights and not has_gradients:
            warn_user(
                "`train_step` has computed no gradient of the weights in `states`. If it makes no "
                "backward pass, training takes more memory than these trials."
            )
        if len(self.done) == TRIALS_TO_SEE:
            self.check_meter_measures()
        return trial

    def _measure(self, rows: int, width: int, patches: int) -> tuple[Trial, Exception | None]:
        """Make a step; return the trial, and the out-of-memory error of the step, if any."""
        meter, failure = self._meter, None
        shape = (rows, width, patches) if self._per_row else (rows, width)
        with measuring(meter):
            meter.reset()
            idle_bytes = meter.peak_bytes()
            start_s = time.perf_counter()
            try:
                self._train_step(self._make_batch(*shape))
                if torch.cuda.is_initialized():
                    torch.cuda.synchronize()  # raises an error of a kernel
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                failure = error
            seconds = time.perf_counter() - start_s
            peak_bytes = meter.peak_bytes()
        self._has_grown |= peak_bytes > idle_bytes
        trial = Trial(
            rows=rows,
            width=width,
            patches=patches,
            peak_bytes=peak_bytes,
            fits=failure is None and peak_bytes <= meter.limit_bytes,
            seconds=seconds,
            error="" if failure is None else str(failure),
        )
        return trial, failure

    def check_meter_measures(self) -> None:
        """Raise a `ValueError` if the meter has measured no growth in any trial."""
        if not self._has_grown:
            trial = self.done[-1]
            raise ValueError(
                f"`meter` sees nothing of `train_step`: {len(self.done)} steps, the last one with "
                f"{trial.rows} rows of {trial.width} tokens, took no more than the "
                f"{trial.peak_bytes:,} bytes that were in use before. Pass a meter of the device "
                "that holds the model and its batches."
            )
