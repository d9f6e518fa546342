"""Records the optimizer steps of a trainer: in a ledger, a monitor, and metrics of its log."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from odb_nodes.core.loader.dataloader import ODBDataLoader
from odb_nodes.core.step_info import StepInfo
from odb_nodes.training.ledger import Ledger
from odb_nodes.training.memory.guard import OomGuard
from odb_nodes.training.monitor import Monitor, StepMeter
from odb_nodes.training.tasks.trainer_options import AnyWeights


class UnreportedBatch(NamedTuple):
    """A trained batch that the monitor has not received yet."""

    batch: Any
    info: StepInfo
    wait_s: float
    measured: dict[str, Any]  # in the last batch of a step: the step's loss, learning rate, ...


class StepRecorder:
    """Passes each finished optimizer step to the ledger, the monitor and the meter."""

    def __init__(
        self,
        ledger: str | os.PathLike[str] | None = None,
        monitor: Monitor | None = None,
        *,
        rank: int = 0,
        world_size: int = 1,
        tasks: AnyWeights | None = None,
    ) -> None:
        self._ledger = None if ledger is None else Ledger(ledger, rank=rank, world_size=world_size)
        self.monitor, self._tasks = monitor, tasks
        self.meter = StepMeter()
        self.guard: OomGuard | None = None
        self._ooms = 0
        self._unreported: list[UnreportedBatch] = []
        self.begin_step()

    def resume(self, loader: ODBDataLoader, state: Mapping[str, Any] | None, step: int) -> None:
        """Resume the monitor from its state, or without a state from optimizer step `step`."""
        if self.monitor is not None:
            if state is None:
                self.monitor.reset(step)
            else:
                self.monitor.load_state_dict(state)
            self.monitor.attach(loader)

    def start_clock(self) -> None:
        """Begin to time steps, after all set-up."""
        self.meter.take()
        if self.guard is not None:  # An earlier run may have used the guard.
            self._ooms = self.guard.ooms
            self.guard.context.take_counts()
        if self.monitor is not None:
            self.monitor.start_clock()

    def begin_step(self) -> None:
        """Reset the measurements of the optimizer step."""
        self.losses: list[torch.Tensor] = []  # this rank's shares of the step's loss
        self.step_values: dict[str, Any] = {}  # learning rate and gradient norm

    def record(self, batches: Iterable[tuple[Any, StepInfo, float]], *, meter: bool = True) -> None:
        """Record (batch, info, seconds waited) of each batch of an optimizer step."""
        for batch, info, wait_s in batches:
            if meter:
                self.meter.add(batch, info, wait_s)
            if self._ledger is not None:
                self._ledger.record(info)
            if self.monitor is not None:
                self._unreported.append(UnreportedBatch(batch, info, wait_s, {}))
        if self._unreported:
            ooms = 0 if self.guard is None else self.guard.ooms
            last = self._unreported[-1]
            last.measured.update(
                loss=sum(self.losses) if self.losses else None,
                loss_weight=last.info.optimizer_targets / last.info.world_size,
                ooms=ooms - self._ooms,
                **self.step_values,
            )
            self._ooms = ooms
        self.begin_step()

    def report_to_monitor(self, grad_norm: float | None = None) -> None:
        """Pass the recorded step to the monitor, if any. All ranks call it together."""
        unreported = self._unreported
        self._unreported = []
        if grad_norm is not None and unreported:
            unreported[-1].measured["grad_norm"] = grad_norm
        for batch, info, wait_s, measured in unreported:
            self.monitor.step(batch, info, wait_s=wait_s, **measured)  # type: ignore[union-attr]

    def take_metrics(
        self, gather: Callable[[torch.Tensor], torch.Tensor], device: torch.device | str
    ) -> dict[str, float]:
        """Return `odb/*` of the steps since the last call; see `StepMeter.take_metrics`."""
        if not len(self.meter):
            return {}
        metrics = self.meter.take_metrics(gather, device)
        if self._tasks is not None:
            weights = self._tasks.weights.items()
            metrics |= {f"odb/weight/{task}": weight for task, weight in weights}
        return metrics if self.guard is None else metrics | self.guard.take_metrics(gather, device)

    def save(self) -> dict[str, Any] | None:
        """Write all records to disk, and return the state of the monitor."""
        self.report_to_monitor()
        if self._ledger is not None:
            self._ledger.sync()
        return None if self.monitor is None else self.monitor.state_dict()

    def begin_attempt(self) -> None:
        """Go back to a checkpoint: records of later steps no longer count."""
        if self._ledger is not None:
            self._ledger.begin_attempt()

    def close(self, *, ended: bool = True) -> None:
        """Close ledger and monitor. Idempotent. If the run has ended, all ranks call it."""
        if self._ledger is not None:
            self._ledger.close(ended=ended)
        if ended:
            self.report_to_monitor()
        if self.monitor is not None:
            self.monitor.close(write=ended)
