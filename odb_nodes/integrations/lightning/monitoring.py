"""Tells a `Monitor` what Lightning does."""

from __future__ import annotations

from typing import Any

import torch

from odb_nodes.integrations.lightning.batches import Fetched
from odb_nodes.loader.dataloader import ODBDataLoader
from odb_nodes.monitor import Monitor


class RunMonitor:
    """Tells a monitor of each optimizer step, once it is taken.

    Lightning saves checkpoints within an optimizer step, too, which resume before it. So nothing of
    a step is told before its end: the state of the monitor is that of the checkpoint.
    """

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor
        self._clear()

    def _clear(self) -> None:
        self._waiting: list[tuple[Fetched, torch.Tensor | None]] = []
        self._loss: torch.Tensor | None = None
        self._norm: torch.Tensor | None = None
        self._lr: float | None = None

    def begin(self, saved: dict[str, Any] | None, step: int, loader: ODBDataLoader) -> None:
        """Go to where the run stands."""
        self._clear()
        if saved is None:
            self._monitor.reset(step)
        else:
            self._monitor.load_state_dict(saved)
        self._monitor.attach(loader)

    def note_loss(self, loss: torch.Tensor) -> None:
        """Take the mean loss over the supervised tokens of the current batch."""
        self._loss = loss

    def note_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the norm of the gradient, and the learning rate, of the step to be made."""
        groups = optimizer.param_groups
        grads = [one.grad for group in groups for one in group["params"] if one.grad is not None]
        self._norm = torch.nn.utils.get_total_norm(grads) if grads else None
        self._lr = float(groups[0]["lr"])

    def add(self, fetched: Fetched) -> None:
        """Add a batch that is done; where it ends an optimizer step, record that."""
        self._waiting.append((fetched, self._loss))
        self._loss = None
        if not fetched.info.ends_optimizer_step:
            return
        for one, loss in self._waiting[:-1]:
            self._monitor.step(one.batch, one.info, loss=loss, wait_s=one.wait_s)
        one, loss = self._waiting[-1]
        self._monitor.step(
            one.batch, one.info, loss=loss, grad_norm=self._norm, lr=self._lr, wait_s=one.wait_s
        )
        self._clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the monitor."""
        return self._monitor.state_dict()

    def close(self, *, write: bool) -> None:
        """Close the files; see `Monitor.close`."""
        self._monitor.close(write=write)
