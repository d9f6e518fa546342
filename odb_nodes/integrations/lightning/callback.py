"""The callback that weighs losses, saves states, and checks what Lightning does."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from odb_nodes._compat import lightning as compat
from odb_nodes._core.checks import check_type
from odb_nodes.contract.state import seal_whole, unseal_whole
from odb_nodes.errors import StateError
from odb_nodes.integrations.lightning.batches import TrainBatches
from odb_nodes.integrations.lightning.checks import (
    check_epoch_end,
    check_one_loader,
    check_optimizer_step,
    check_states,
    check_trainer,
)
from odb_nodes.integrations.lightning.monitoring import RunMonitor
from odb_nodes.integrations.lightning.run import Run, RunState, position_of_rank
from odb_nodes.ledger import Ledger
from odb_nodes.loader.dataloader import ODBDataLoader
from odb_nodes.monitor import Monitor, StepMeter
from odb_nodes.step_info import StepInfo

__all__ = ["ODBCallback"]


class ODBCallback(Callback):
    """Trains with dynamic batches: exact losses, exact resume from `ckpt_path`, `odb/*` metrics.

    `training_step` returns the mean loss over the supervised tokens of its batch. The callback
    weighs the gradient of that loss, and undoes the division by `accumulate_grad_batches`, so that
    the gradient of an optimizer step is that of the mean over the supervised tokens of all its
    batches, on all ranks.

    A checkpoint resumes after the last optimizer step that was taken before it was written. It
    holds the loaders' states of all ranks, and the states of torch's generators.

    Args:
        log_metrics: whether to log `odb/*`, every `log_every_n_steps` optimizer steps.
        ledger: the folder of a `Ledger` of the samples that were trained on; default: none is kept.
            The same for all restarts of a run, and for no other run.
        monitor: a `Monitor` of the run, which its checkpoints resume; default: none.
    """

    STATE_KEY = "odb_nodes"  # of a checkpoint, where it holds a state of each rank

    def __init__(
        self,
        *,
        log_metrics: bool = True,
        ledger: str | os.PathLike[str] | None = None,
        monitor: Monitor | None = None,
    ) -> None:
        check_type("monitor", monitor, Monitor | None)
        self._monitor = None if monitor is None else RunMonitor(monitor)
        self._log_metrics = log_metrics
        self._ledger_folder = ledger
        self._ledger: Ledger | None = None
        self._unrecorded: StepInfo | None = None
        self._batches: TrainBatches | None = None
        self._run = Run(None, RunState())
        self._meter = StepMeter()

    def batches(self, loader: ODBDataLoader) -> TrainBatches:
        """Return what `train_dataloader` of a module or data module must return.

        Args:
            loader: a loader made in that hook, when the process group exists, with
                `accumulate=trainer.accumulate_grad_batches`; with virtual ranks that over the
                number of those that a rank hosts.
        """
        start = self._run.start
        if start.loader is not None:
            loader.load_state_dict(start.loader)
        elif start.epoch:
            loader.set_epoch(start.epoch)
        self._batches = TrainBatches(loader)
        return self._batches

    @property
    def step_info(self) -> StepInfo:
        """Counts of the step that is trained on. Its `loss_scale` is 1: the callback weighs losses.

        Raises:
            RuntimeError: no step has begun.
        """
        if self._run.current is None:
            raise RuntimeError("`step_info` is known only once a training step has begun.")
        return replace(self._run.current.info, loss_scale=1.0)

    # --- a run --------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Reject arguments of the trainer that cannot be used with dynamic batches."""
        if stage == "fit":
            check_trainer(trainer)
            self._batches = None
            self._run = Run(trainer, RunState(epoch=trainer.current_epoch))
            self._unrecorded = None
            if self._ledger_folder is not None:
                rank, world_size = trainer.global_rank, trainer.world_size
                self._ledger = Ledger(self._ledger_folder, rank=rank, world_size=world_size)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the loader, and start the metrics."""
        batches = self._required_batches()
        check_one_loader(trainer.train_dataloader)
        self._meter = StepMeter()
        if self._monitor is not None:
            self._monitor.begin(self._run.start.monitor, trainer.global_step, batches.loader)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin the batch: find its `StepInfo` and the loader's state after it."""
        fetched = self._run.begin(self._required_batches(), batch_idx)
        self._unrecorded = fetched.info
        if self._log_metrics:
            self._meter.add(fetched.batch, fetched.info, fetched.wait_s)

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor
    ) -> None:
        """Weigh the gradient of the loss."""
        if self._run.current is None or not loss.requires_grad:
            return
        # The gradient is scaled, since a hook cannot return another loss.
        factor = self._run.current.info.loss_scale * compat.loss_divisor(trainer, pl_module)
        loss.register_hook(lambda gradient: gradient * factor)
        self._run.backwards += 1
        if self._monitor is not None:
            self._monitor.note_loss(compat.mean_loss(trainer, pl_module, loss))

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Take the norm of the gradient, and the learning rate, for the monitor."""
        if self._monitor is not None:
            self._monitor.note_optimizer(optimizer)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Check that the optimizer has stepped where the loader expects it, and log metrics."""
        check_optimizer_step(trainer, self._run)
        self._record()
        if self._run.has_stepped and self._log_metrics and compat.is_logged(trainer):
            self._log(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reject leaving an epoch before its end, except to end the run."""
        if self._run.state_after(self._batches) is None:
            check_epoch_end(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Have the monitor write what it has counted, while all ranks are there."""
        if self._monitor is not None:
            self._monitor.close(write=True)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Stop the workers, and close ledger and monitor."""
        self._close(ended=False)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stop the workers, and close the ledger."""
        self._close()

    # --- checkpoints --------------------------------------------------------------------------

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Put the states of all ranks into the checkpoint. All ranks call it.

        Raises:
            StateError: this version of Lightning writes its progress under other names.
        """
        if self._batches is None:
            return  # Nothing was trained here.
        if self._run.has_stepped:
            self._record()  # Another callback may save before our hook is called.
        if self._ledger is not None:
            self._ledger.sync()
        progress = compat.loop_progress(checkpoint)
        position = self._run.settle()
        if self._monitor is not None:
            position = replace(position, monitor=self._monitor.state_dict())
        after = self._run.state_after(self._batches)
        if after is not None and compat.epochs_processed(progress) > position.epoch:
            epoch = position.epoch + 1
            position = replace(position, epoch=epoch, steps=0, samples=0, loader=after)
        position.put_into(progress)
        state = seal_whole(ODBCallback.__name__, position)
        checkpoint[self.STATE_KEY] = _of_all_ranks(trainer, state)

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Continue from the position of the checkpoint.

        Raises:
            StateError: it has no state of a loader, is damaged, or was saved by another number of
                ranks and cannot be resharded.
        """
        if not compat.is_fitting(trainer):
            return
        states = check_states(checkpoint.get(self.STATE_KEY))
        runs = [unseal_whole(one, ODBCallback.__name__, RunState) for one in states]
        start = position_of_rank(runs, trainer.global_rank, trainer.world_size)
        if len(runs) != trainer.world_size:
            start.put_into(compat.loop_progress(checkpoint))
        self._run = Run(trainer, start)
        if self._batches is None:
            return
        # Some strategies load a checkpoint only after the module has made the optimizers.
        if self._batches.has_begun:
            raise StateError(
                "`trainer.estimated_stepping_batches` has read batches before "
                f"`{type(trainer.strategy).__name__}` loaded the checkpoint. Use "
                "`ODBDataModule.estimated_steps` instead."
            )
        if start.loader is not None:
            self._batches.loader.load_state_dict(start.loader)

    # --- parts --------------------------------------------------------------------------------

    def _required_batches(self) -> TrainBatches:
        if self._batches is None:
            raise RuntimeError(
                "`ODBCallback` has no batches: `train_dataloader` of the module or data module "
                "must call `callback.batches(loader)` and return that, as `ODBDataModule` does. "
                "What was made before `fit`, and given to it, cannot resume a run."
            )
        return self._batches

    def _record(self) -> None:
        """Write the current step, which is done, into the ledger."""
        info, self._unrecorded = self._unrecorded, None
        if info is not None and self._ledger is not None:
            self._ledger.record(info)
        if info is not None and self._monitor is not None and self._run.current is not None:
            self._monitor.add(self._run.current)

    def _close(self, *, ended: bool = True) -> None:
        if self._ledger is not None:
            self._ledger.close(ended=ended)
            self._ledger = None
        if self._monitor is not None:
            self._monitor.close(write=False)
        if self._batches is not None:
            self._batches.loader.close()

    def _log(self, trainer: Trainer, pl_module: LightningModule) -> None:
        gather: Any = pl_module.all_gather
        metrics = self._meter.take_metrics(gather, pl_module.device)
        pl_module.log_dict(metrics, on_step=True, on_epoch=False, batch_size=1)
        try:
            share = self._run.epoch_samples / self._required_batches().loader.num_samples
        except TypeError:
            return  # A dataset without a length.
        epoch = trainer.current_epoch + share
        pl_module.log("odb/epoch", epoch, on_step=True, on_epoch=False, prog_bar=True, batch_size=1)


def _of_all_ranks(trainer: Trainer, value: Any) -> list[Any]:
    if trainer.world_size == 1:
        return [value]
    values: list[Any] = [None] * trainer.world_size
    dist.all_gather_object(values, value)
    return values
