"""Where a run stands on this rank: what was trained on, and what of it the optimizer took."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from odb_nodes.errors import StateError
from odb_nodes.integrations.lightning.batches import Fetched, TrainBatches
from odb_nodes.integrations.lightning.position import Position, get_rngs, set_rngs

__all__ = ["Run"]


class Run:
    """Follows a run, from its start or from where a checkpoint stands.

    Args:
        start: where it begins.
    """

    def __init__(self, start: Position) -> None:
        self.start = start
        self.current: Fetched | None = None
        """What is being trained on, or was last."""
        self.epoch_samples = start.samples
        """Samples of this rank in this epoch, those of the present batch included."""
        self.backwards = 0
        """Losses of this optimizer step that were weighed."""
        self._settled = start
        self._epoch = start.epoch
        self._total_steps = start.total_steps
        self._optimizer_steps = 0  # before the present batch

    def begin(
        self,
        batches: TrainBatches,
        batch_idx: int,
        *,
        epoch: int,
        total_steps: int,
        optimizer_steps: int,
    ) -> None:
        """Take up a batch.

        Args:
            batches: what it was read from.
            batch_idx: its number in the epoch, as the trainer counts.
            epoch: number of the epoch, as the trainer counts.
            total_steps: batches of the run up to this one, as the trainer counts.
            optimizer_steps: that were taken before it.

        Raises:
            StateError: the loader counts otherwise.
        """
        if self.current is None and self.start.rngs is not None:
            set_rngs(self.start.rngs)
        self._settled = self.settle(optimizer_steps)
        fetched = batches.take()
        info = fetched.info
        if info.step != batch_idx:
            raise StateError(
                f"Lightning is at batch {batch_idx} of the epoch, but the loader at {info.step}: "
                "the checkpoint was changed, or an epoch was left before its end."
            )
        if info.step == 0:
            self._settled = replace(
                self._settled,
                epoch=epoch,
                steps=0,
                total_steps=total_steps - 1,
                samples=0,
                loader=batches.start_state,
            )
            self.epoch_samples = 0
        if info.micro_step == 0:
            self.backwards = 0
        self.current = fetched
        self.epoch_samples += info.local_samples
        self._epoch, self._optimizer_steps = epoch, optimizer_steps
        self._total_steps = total_steps

    def has_stepped(self, optimizer_steps: int) -> bool:
        """Tell whether the optimizer has taken the present batch.

        Args:
            optimizer_steps: that were taken so far.
        """
        return optimizer_steps > self._optimizer_steps

    def settle(self, optimizer_steps: int) -> Position:
        """Return where the last optimizer step has ended.

        That goes by what the optimizer did, not by which hooks have run: another callback may save
        before ours is called, or after an exception.

        Args:
            optimizer_steps: that were taken so far.
        """
        if self.current is None:
            return self._settled
        info = self.current.info
        if not info.ends_optimizer_step or not self.has_stepped(optimizer_steps):
            return self._settled
        return Position(
            epoch=self._epoch,
            steps=info.step + 1,
            total_steps=self._total_steps,
            samples=self.epoch_samples,
            loader=self.current.state,
            rngs=get_rngs(),
        )

    def state_after(self, batches: TrainBatches | None) -> dict[str, Any] | None:
        """Return the loader's state after the epoch, if the present batch was its last."""
        end = None if batches is None else batches.end
        return end.state if end is not None and end.last is self.current else None
