"""Tells a `Monitor` what a `Trainer` does."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from odb_nodes._compat.accelerate import noting_gradient_norms
from odb_nodes.integrations.huggingface.run_state import TakenStep
from odb_nodes.loader.dataloader import ODBDataLoader
from odb_nodes.monitor import Monitor
from odb_nodes.step_info import StepInfo


class RunMonitor:
    """Tells a monitor of each optimizer step of a run."""

    def __init__(
        self, monitor: Monitor | str | os.PathLike[str], trainer: Any, loader: ODBDataLoader
    ) -> None:
        self._monitor = monitor if isinstance(monitor, Monitor) else Monitor(monitor)
        self._trainer, self._loader = trainer, loader
        self._losses: list[torch.Tensor] = []  # of this optimizer step, as the `Trainer` has them
        self._norm: Any = None
        self._lr: float | None = None
        self._ooms = 0

    def begin(self, saved: dict[str, Any] | None, step: int) -> None:
        """Go to where the run stands."""
        if saved is None:
            self._monitor.reset(step)
        else:
            self._monitor.load_state_dict(saved)
        self._monitor.attach(self._loader)

    def start_clock(self) -> None:
        """Let the time begin now: that of all set-up is not the first steps'."""
        self._monitor.start_clock()

    def note_loss(self, loss: torch.Tensor) -> None:
        """Take what `training_step` returned; over ranks, the mean of their sums is the loss."""
        self._losses.append(loss)

    def note_lr(self, optimizer: Any) -> None:
        """Take the learning rate of the optimizer step that is about to be made."""
        self._lr = float(optimizer.param_groups[0]["lr"])

    @contextmanager
    def noting_norms(self) -> Iterator[None]:
        """Take the norms of the gradients that the `Trainer` computes within this context."""

        def note(norm: Any) -> None:
            self._norm = norm

        with noting_gradient_norms(self._trainer.accelerator, note):
            yield

    def record(
        self, step: TakenStep, batches: Sequence[Any], infos: Sequence[StepInfo], ooms: int
    ) -> None:
        """Record the optimizer step that is done."""
        # The last one of its own ends the step: those that repeat it come before.
        numbers = [*range(step.own - 1), *range(step.own, len(infos)), step.own - 1]
        for number in numbers[:-1]:
            self._monitor.step(batches[number], infos[number], wait_s=step.wait_s)
        last = infos[step.own - 1]
        self._monitor.step(
            batches[step.own - 1],
            last,
            loss=sum(self._losses) if self._losses else None,
            loss_weight=last.optimizer_targets / self._trainer.args.world_size,
            grad_norm=self._norm,
            lr=self._lr,
            ooms=ooms - self._ooms,
            wait_s=step.wait_s,
        )
        self._losses, self._norm, self._lr, self._ooms = [], None, None, ooms

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the monitor."""
        return self._monitor.state_dict()

    def close(self, *, write: bool) -> None:
        """Close the files; see `Monitor.close`."""
        self._monitor.close(write=write)
