"""The position of a run on this rank: what was trained on, and what the optimizer took of it."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from odb_nodes._compat import lightning as compat
from odb_nodes.contract import NodeState, SourceState
from odb_nodes.errors import StateError
from odb_nodes.integrations.lightning.batches import Fetched, TrainBatches
from odb_nodes.integrations.resuming import resharded_run
from odb_nodes.loader.reshard_nodes import Ranks
from odb_nodes.loader.resharding import batches_per_step


@dataclass(kw_only=True)
class RunState(NodeState):
    """The position of a run on one rank, between two optimizer steps. It is never changed.

    Attributes:
        epoch: number of epochs that have ended.
        steps: micro-steps of the present epoch that are done; 0 where it has not begun.
        total_steps: micro-steps of the run that are done.
        samples: samples of this rank that are done in the present epoch.
        loader: state of the loader; None before the first batch of a run.
        cpu_rng: state of torch's generator; None before the first optimizer step.
        gpu_rng: that of the GPU; None also where the rank has none.
        monitor: state of the `Monitor`; None where the run has none.
    """

    epoch: int = 0
    steps: int = 0
    total_steps: int = 0
    samples: int = 0
    loader: SourceState | None = None
    cpu_rng: bytes | None = None
    gpu_rng: bytes | None = None
    monitor: dict[str, Any] | None = None

    def put_into(self, progress: MutableMapping[str, Any]) -> None:
        """Make the progress of Lightning's loops in a checkpoint agree with this position."""
        compat.set_progress(
            progress, epoch=self.epoch, steps=self.steps, total_steps=self.total_steps
        )


def position_of_rank(runs: Sequence[RunState], rank: int, world_size: int) -> RunState:
    """Return the position of a rank, out of those of all ranks, however many have saved them."""
    if len(runs) == world_size:
        return runs[rank]
    before = runs[rank % len(runs)]
    samples = Ranks(len(runs), world_size).split(sum(one.samples for one in runs))[rank]
    own = {"samples": samples, "cpu_rng": before.cpu_rng, "gpu_rng": before.gpu_rng}
    found = resharded_run(runs, rank, world_size, ("epoch", "steps", "total_steps"), **own)
    if before.loader is None or found.loader is None:
        return found
    # A rank that hosts more virtual ranks than before has as many times the batches.
    was, now = batches_per_step(before.loader), batches_per_step(found.loader)
    steps, total_steps = found.steps * now // was, found.total_steps * now // was
    return replace(found, steps=steps, total_steps=total_steps)


class Run:
    """Follows a run from its start, or from the position of a checkpoint."""

    def __init__(self, trainer: Any, start: RunState) -> None:
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
        """Make the next batch the current one, and return it."""
        if self.current is None:
            self._set_rngs()
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

    def settle(self) -> RunState:
        """Return the position after the last optimizer step.

        It goes by what the optimizer did, not by which hooks have run: another callback may save a
        checkpoint before our hook is called, or after an exception.
        """
        if self.current is None:
            return self._settled
        info = self.current.info
        if not info.ends_optimizer_step or not self.has_stepped:
            return self._settled
        return RunState(
            epoch=self._epoch,
            steps=info.step + 1,
            total_steps=self._total_steps,
            samples=self.epoch_samples,
            loader=self.current.state,
            cpu_rng=_bytes_of(torch.get_rng_state()),
            gpu_rng=_bytes_of(torch.cuda.get_rng_state()) if torch.cuda.is_initialized() else None,
        )

    def state_after(self, batches: TrainBatches | None) -> dict[str, Any] | None:
        """Return the loader's state after the epoch, if the current batch was its last."""
        end = None if batches is None else batches.end
        return end.state if end is not None and end.last is self.current else None

    def _set_rngs(self) -> None:
        start = self.start
        if start.cpu_rng is not None:
            torch.set_rng_state(_tensor_of(start.cpu_rng))
        if start.gpu_rng is not None and torch.cuda.is_initialized():
            torch.cuda.set_rng_state(_tensor_of(start.gpu_rng))


def _bytes_of(rng: torch.Tensor) -> bytes:
    return rng.numpy().tobytes()


def _tensor_of(rng: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(rng), dtype=torch.uint8)
