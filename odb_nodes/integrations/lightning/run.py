"""The position of a run on this rank: what was trained on, and what the optimizer took of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from odb_nodes._compat import lightning as compat
from odb_nodes.errors import StateError
from odb_nodes.integrations.lightning.batches import Fetched, TrainBatches


@dataclass(frozen=True, kw_only=True)
class Position:
    """The position of a run between two optimizer steps. Its fields are plain data.

    Attributes:
        epoch: number of epochs that have ended.
        steps: micro-steps of the present epoch that are done; 0 where it has not begun.
        total_steps: micro-steps of the run that are done.
        samples: samples of this rank that are done in the present epoch.
        loader: state of the loader; None before the first batch of a run.
        rngs: states of torch's generators, CPU and GPU; None before the first optimizer step.
    """

    epoch: int = 0
    steps: int = 0
    total_steps: int = 0
    samples: int = 0
    loader: dict[str, Any] | None = None
    rngs: list[Any] | None = None


class Run:
    """Follows a run from its start, or from the position of a checkpoint.

    Args:
        trainer: the Lightning `Trainer` that runs.
        start: the position that the run begins at.
    """

    def __init__(self, trainer: Any, start: Position) -> None:
        self._trainer = trainer
        self.start = start
        self.current: Fetched | None = None
        """The batch that is being trained on, or was last."""
        self.epoch_samples = start.samples
        """Samples of this rank in this epoch, those of the current batch included."""
        self.backwards = 0
        """Losses of this optimizer step that were weighed."""
        self._settled = start
        self._epoch = start.epoch
        self._total_steps = start.total_steps
        self._optimizer_steps = 0  # before the current batch

    def begin(self, batches: TrainBatches, batch_idx: int) -> Fetched:
        """Make the next batch the current one, and return it.

        Args:
            batches: the batches that the trainer iterates.
            batch_idx: number of the batch in the epoch, by the trainer's count.

        Raises:
            StateError: the loader's count differs.
        """
        if self.current is None and self.start.rngs is not None:
            _set_rngs(self.start.rngs)
        self._settled = self.settle()
        fetched = batches.take()
        info = fetched.info
        if info.step != batch_idx:
            raise StateError(
                f"Lightning is at batch {batch_idx} of the epoch, but the loader at {info.step}: "
                "the checkpoint was changed, or an epoch was left before its end."
            )
        self._epoch = self._trainer.current_epoch
        self._total_steps = compat.batches_begun(self._trainer)
        self._optimizer_steps = self._trainer.global_step
        if info.step == 0:
            self._settled = replace(
                self._settled,
                epoch=self._epoch,
                steps=0,
                total_steps=self._total_steps - 1,
                samples=0,
                loader=batches.start_state,
            )
            self.epoch_samples = 0
        if info.micro_step == 0:
            self.backwards = 0
        self.current = fetched
        self.epoch_samples += info.local_samples
        return fetched

    @property
    def has_stepped(self) -> bool:
        """Whether the optimizer has taken the current batch."""
        return bool(self._trainer.global_step > self._optimizer_steps)

    def settle(self) -> Position:
        """Return the position after the last optimizer step.

        It goes by what the optimizer did, not by which hooks have run: another callback may save a
        checkpoint before our hook is called, or after an exception.
        """
        if self.current is None:
            return self._settled
        info = self.current.info
        if not info.ends_optimizer_step or not self.has_stepped:
            return self._settled
        return Position(
            epoch=self._epoch,
            steps=info.step + 1,
            total_steps=self._total_steps,
            samples=self.epoch_samples,
            loader=self.current.state,
            rngs=_get_rngs(),
        )

    def state_after(self, batches: TrainBatches | None) -> dict[str, Any] | None:
        """Return the loader's state after the epoch, if the current batch was its last."""
        end = None if batches is None else batches.end
        return end.state if end is not None and end.last is self.current else None


def _get_rngs() -> list[Any]:
    gpu = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    return [torch.get_rng_state(), gpu]


def _set_rngs(states: list[Any]) -> None:
    cpu, gpu = states
    torch.set_rng_state(cpu)
    if gpu is not None and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(gpu)
