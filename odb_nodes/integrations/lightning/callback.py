"""The callback that weighs losses, saves states, and checks Lightning's steps."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
)
from lightning.pytorch.strategies.xla import XLAStrategy

from odb_nodes._compat import lightning as compat
from odb_nodes._support.checks import check_type, refuse
from odb_nodes.core.contract.state import seal_whole, unseal_whole
from odb_nodes.core.loader.dataloader import ODBDataLoader
from odb_nodes.core.step_info import StepInfo
from odb_nodes.errors import StateError
from odb_nodes.integrations.lightning.run import (
    FetchedBatch,
    FitRun,
    RunState,
    TrainBatches,
    position_of_rank,
)
from odb_nodes.integrations.recording import StepRecorder
from odb_nodes.training.memory.guard import OomGuard
from odb_nodes.training.monitor import Monitor
from odb_nodes.training.tasks.trainer_options import AnyWeights, check_task_weights


class ODBCallback(Callback):
    """Trains with dynamic batches: exact losses, exact resume from `ckpt_path`, `odb/*` metrics.

    `training_step` returns the mean loss over the supervised tokens of its batch. The callback
    weighs the gradient of that loss, and undoes the division by `accumulate_grad_batches`, so that
    an optimizer step minimizes the mean over the supervised tokens of all its batches, on all
    ranks.

    A checkpoint resumes after the last optimizer step before it was written. It holds the states of
    the loaders of all ranks, and of the random generators of torch, numpy and Python.

    Args:
        log_metrics: whether to log `odb/*`, every `log_every_n_steps` optimizer steps.
        ledger: the folder of a `Ledger` of the trained samples, shared by all restarts of this run
            only. Default: no ledger.
        monitor: a `Monitor` of the run, which its checkpoints resume. Default: no monitor.
        task_weights: `TaskWeights`, or a `GradNorm` or `PCGrad` of parameters of the module, which
            checkpoints keep: `training_step` returns `task_loss` of its losses. Default: all
            supervised tokens weigh the same.
    """

    STATE_KEY = "odb_nodes"  # in a checkpoint: the list of the states of all ranks

    def __init__(
        self,
        *,
        log_metrics: bool = True,
        ledger: str | os.PathLike[str] | None = None,
        monitor: Monitor | None = None,
        task_weights: AnyWeights | None = None,
    ) -> None:
        check_type("monitor", monitor, Monitor | None)
        check_task_weights(task_weights)
        self.task_weights = task_weights
        self._monitor, self._log_metrics, self._ledger_folder = monitor, log_metrics, ledger
        self._begin_run(FitRun(None, RunState()), StepRecorder())

    def _begin_run(self, run: FitRun, recorder: StepRecorder) -> None:
        self._run, self._recorder = run, recorder
        self._batches: TrainBatches | None = None
        self._unrecorded: list[FetchedBatch] = []  # batches of the current optimizer step

    def batches(self, loader: ODBDataLoader | OomGuard) -> TrainBatches:
        """Return the batches for `train_dataloader` of a module or data module.

        Args:
            loader: a loader made in that hook, when the process group exists, with
                `accumulate=trainer.accumulate_grad_batches`, divided by the virtual ranks that a
                rank hosts. Or an `OomGuard` of such a loader: `training_step` then gets its steps,
                for manual optimization.
        """
        start = self._run.start
        guard = loader if isinstance(loader, OomGuard) else None
        train_loader: Any = loader if guard is None else guard.loader
        check_type("loader", train_loader, ODBDataLoader)
        if start.loader is not None:
            train_loader.load_state_dict(start.loader)
        elif start.epoch:
            train_loader.set_epoch(start.epoch)
        self._batches = TrainBatches(train_loader, guard)
        return self._batches

    def task_loss(
        self, losses: torch.Tensor, *, position_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the loss for `training_step` to return, if the callback has `task_weights`.

        Args:
            losses: losses of the tokens or samples of the batch, see `TaskWeights.loss`.
            position_ids: the `position_ids` of a packed batch.

        Raises:
            RuntimeError: no training step has begun, or the callback has no `task_weights`.
        """
        info = self.step_info
        if self.task_weights is None:
            raise RuntimeError("`task_loss` needs `ODBCallback(task_weights=...)`.")
        self._weighs_tasks = True
        return self.task_weights.loss(losses, info, position_ids=position_ids)

    @property
    def step_info(self) -> StepInfo:
        """Counts of the current step. Its `loss_scale` is 1: the callback weighs losses.

        Raises:
            RuntimeError: no step has begun.
        """
        if self._run.current is None:
            raise RuntimeError("`step_info` exists only once a training step has begun.")
        return replace(self._run.current.last_info, loss_scale=1.0)

    # --- a run --------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Reject arguments of the trainer that cannot be used with dynamic batches."""
        if stage == "fit":
            _check_trainer(trainer, self.task_weights)
            run = FitRun(trainer, RunState(epoch=trainer.current_epoch), self.task_weights)
            recorder = StepRecorder(
                self._ledger_folder,
                self._monitor,
                rank=trainer.global_rank,
                world_size=trainer.world_size,
                tasks=self.task_weights,
            )
            self._begin_run(run, recorder)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the loader, and begin the monitor."""
        batches = self._required_batches()
        loaders = trainer.train_dataloader
        if isinstance(loaders, (list, tuple, Mapping)):
            raise ValueError(
                "`train_dataloader` must return one `callback.batches(loader)`, but returned a "
                f"`{type(loaders).__name__}` instead. To train on several datasets, give one "
                "`ODBDataLoader` a dict of them."
            )
        if self.task_weights is not None:
            self.task_weights.check_model(pl_module)
        if batches.guard is not None:
            _check_guard(trainer, batches.guard, self.task_weights)
        self._recorder.guard = batches.guard
        self._recorder.resume(batches.loader, self._run.start.monitor, trainer.global_step)
        self._recorder.start_clock()

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Take the batch's `StepInfo` and the loader's state after it."""
        fetched = self._run.begin(self._required_batches(), batch_idx)
        if fetched.infos[0].micro_step == 0:
            self._unrecorded = []
            self._recorder.begin_step()
        self._unrecorded.append(fetched)
        self._weighs_tasks = False

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor
    ) -> None:
        """Weigh the gradient of the loss."""
        if self._run.current is None or not loss.requires_grad:
            return
        if self.task_weights is not None and not self._weighs_tasks:
            raise RuntimeError(
                "`training_step` must return `callback.task_loss(losses)` if `ODBCallback` has "
                "`task_weights`, but returned another loss, whose tasks were not weighed."
            )
        weight = self._run.current.last_info.loss_scale if self.task_weights is None else 1.0
        # This hook of Lightning cannot return another loss, so the gradient is scaled.
        factor = weight * compat.loss_divisor(trainer, pl_module)
        loss.register_hook(lambda gradient: gradient * factor)
        self._run.backwards += 1
        if weight:  # A loss without targets may be NaN.
            self._recorder.losses.append(compat.mean_loss(trainer, pl_module, loss) * weight)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Step the task weights; take gradient norm and learning rate for the monitor."""
        ends = self._run.current is not None and self._run.current.last_info.ends_optimizer_step
        if ends and self.task_weights is not None:
            self.task_weights.step()
        if self._monitor is not None:
            groups = optimizer.param_groups
            weights = [weight for group in groups for weight in group["params"]]
            grads = [weight.grad for weight in weights if weight.grad is not None]
            norm = torch.nn.utils.get_total_norm(grads) if grads else None
            self._recorder.step_values = {"grad_norm": norm, "lr": float(groups[0]["lr"])}

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Check that the optimizer has stepped where the loader expects it, and log metrics."""
        self._check_optimizer_step(trainer)
        self._record()
        if self._run.has_stepped and self._log_metrics and compat.is_logged(trainer):
            self._log(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Raise if an epoch was left before its end, except to end the run."""
        is_over = trainer.should_stop or 0 <= trainer.max_steps <= trainer.global_step
        if (
            not (is_over or trainer.fast_dev_run)
            and self._run.state_after(self._required_batches()) is None
        ):
            raise RuntimeError(
                "the epoch was left before its end, and its remaining samples would never be "
                "trained on. Do not return -1 from `on_train_batch_start`; to end the run, set "
                "`trainer.should_stop`."
            )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let the monitor write its last record, while all ranks are running."""
        self._recorder.close()

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
            StateError: this version of Lightning saves its progress under other names.
        """
        if self._batches is None:
            return  # Nothing was trained here.
        self._record()  # Another callback may save before our hook is called.
        progress = compat.loop_progress(checkpoint)
        position = replace(self._run.settle(), monitor=self._recorder.save())
        after = self._run.state_after(self._batches)
        if after is not None and compat.epochs_processed(progress) > position.epoch:
            epoch = position.epoch + 1
            position = replace(position, epoch=epoch, steps=0, samples=0, loader=after)
        compat.set_progress(progress, position)
        state = seal_whole(ODBCallback.__name__, position)
        states: list[Any] = [state] * trainer.world_size
        if trainer.world_size > 1:
            dist.all_gather_object(states, state)
        checkpoint[self.STATE_KEY] = states

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Continue from the position of the checkpoint.

        Raises:
            StateError: the checkpoint has no state of a loader, is damaged, or was saved by another
                number of ranks and cannot be resharded.
        """
        if not compat.is_fitting(trainer):
            return
        if (states := checkpoint.get(self.STATE_KEY)) is None:
            raise StateError(
                "the checkpoint has no state of a loader: it was saved without `ODBCallback`. To "
                "begin a run with its weights, use `load_from_checkpoint`."
            )
        if not isinstance(states, list) or not states:
            raise StateError(
                "the checkpoint must have a list of the states of all ranks, but has "
                f"{states!r:.80} instead: it is damaged. Use an earlier checkpoint."
            )
        runs = [unseal_whole(state, ODBCallback.__name__, RunState) for state in states]
        start = position_of_rank(runs, trainer.global_rank, trainer.world_size)
        if len(runs) != trainer.world_size:
            compat.set_progress(compat.loop_progress(checkpoint), start)
        self._run = FitRun(trainer, start, self.task_weights)
        if self.task_weights is not None and start.tasks is not None:
            self.task_weights.load_state_dict(start.tasks)
        if self._batches is None:
            return
        # Some strategies load a checkpoint after `configure_optimizers`.
        if self._batches.start_state is not None:
            raise StateError(
                "`trainer.estimated_stepping_batches` has read batches before "
                f"`{type(trainer.strategy).__name__}` loaded the checkpoint. Use "
                "`ODBDataModule.estimated_steps` instead."
            )
        if start.loader is not None:
            self._batches.loader.load_state_dict(start.loader)

    # --- checks and records -----------------------------------------------------------------

    def _required_batches(self) -> TrainBatches:
        if self._batches is None:
            raise RuntimeError(
                "`ODBCallback` has no batches: `train_dataloader` of the module or data module "
                "must return `callback.batches(loader)`, as `ODBDataModule` does. A loader made "
                "before `fit` and passed to it cannot resume a run."
            )
        return self._batches

    def _check_optimizer_step(self, trainer: Any) -> None:
        """Check that the optimizer has stepped exactly where the loader ends an optimizer step."""
        run = self._run
        if run.current is None or trainer.fast_dev_run:
            return
        info = run.current.last_info
        has_stepped = run.has_stepped
        if has_stepped != info.ends_optimizer_step:
            actual, expected = ("", "not ") if has_stepped else ("not ", "")
            share = "" if info.batches_per_step == 1 else f" // {info.batches_per_step}"
            raise RuntimeError(
                f"the optimizer must {expected}step after batch {info.step} of the epoch, but did "
                f"{actual}step: the loader weighs the losses of {info.micro_steps} batches as one "
                f"step. Make the loader with `accumulate=trainer.accumulate_grad_batches{share}`. "
                f"`accumulate_grad_batches` is {trainer.accumulate_grad_batches}: do not change "
                "that during the run."
            )
        is_manual = not trainer.lightning_module.automatic_optimization
        step = run.current.step
        is_weighed = run.backwards if step is None else step.is_done
        if has_stepped and is_manual and not is_weighed:
            right = "`self.manual_backward(loss)`"
            if step is not None:
                right = "`step.backward(self.trainer.strategy.model, loss_fn)`"
            raise RuntimeError(
                "the optimizer stepped, but no loss of the step was weighed by its share of the "
                f"supervised tokens: the module did not call {right}, as by `loss.backward()`."
            )

    def _record(self) -> None:
        """Record the batches of an optimizer step in ledger and monitor, once it is taken."""
        step_batches = self._unrecorded
        is_whole = step_batches and step_batches[-1].last_info.ends_optimizer_step
        if not (is_whole and self._run.has_stepped):
            return
        step = step_batches[-1].step
        if step is not None and step.loss is not None:
            self._recorder.losses = [step.loss]
        self._unrecorded = []
        rows = (
            (batch, info, fetched.wait_s)
            for fetched in step_batches
            for batch, info in zip(fetched.batches, fetched.infos, strict=True)
        )
        self._recorder.record(rows, meter=self._log_metrics)
        self._recorder.report_to_monitor()

    def _close(self, *, ended: bool = True) -> None:
        self._recorder.close(ended=ended)
        if self._batches is not None:
            self._batches.close()

    def _log(self, trainer: Trainer, pl_module: LightningModule) -> None:
        gather: Any = pl_module.all_gather
        metrics = self._recorder.take_metrics(gather, pl_module.device)
        pl_module.log_dict(metrics, on_step=True, on_epoch=False, batch_size=1)
        try:
            share = self._run.after.samples / self._required_batches().loader.num_samples
        except TypeError:
            return  # A dataset without a length.
        epoch = trainer.current_epoch + share
        pl_module.log("odb/epoch", epoch, on_step=True, on_epoch=False, prog_bar=True, batch_size=1)


def _is_ddp(strategy: Any) -> bool:
    derived = (DeepSpeedStrategy, XLAStrategy)
    return isinstance(strategy, DDPStrategy) and not isinstance(strategy, derived)


def _check_guard(trainer: Any, guard: OomGuard, tasks: AnyWeights | None) -> None:
    """Reject a trainer whose steps a guard could not recompute or weigh."""
    strategy = trainer.strategy
    is_ddp = _is_ddp(trainer.strategy)
    is_supported = is_ddp or isinstance(strategy, (SingleDeviceStrategy, ModelParallelStrategy))
    refuse(
        {
            "the module must have `self.automatic_optimization = False` with an `OomGuard`, whose "
            "step is computed by `step.backward` in `training_step`.": (
                trainer.lightning_module.automatic_optimization
            ),
            f"an `OomGuard` computes no steps under `{type(strategy).__name__}`. Train on one "
            "device, with DDP, or with FSDP2, the `ModelParallelStrategy`.": not is_supported,
            "`guard_above` of the `OomGuard` must be 0.0 under DDP: in a `training_step` DDP "
            "averages no gradients, so each rank must compute each step alone first.": (
                is_ddp and guard.guard_above > 0
            ),
            "`task_weights` must not be given with an `OomGuard`, which gives all supervised "
            "tokens the same weight. Leave one out, or use `ODBTrainer`.": tasks is not None,
        }
    )


def _check_trainer(trainer: Any, tasks: AnyWeights | None) -> None:
    """Reject arguments of a trainer that would silently change the steps, the data or losses."""
    limit = trainer.limit_train_batches  # 1 is one batch, 1.0 is all
    strategy, every = type(trainer.strategy).__name__, trainer.reload_dataloaders_every_n_epochs
    is_whole = isinstance(trainer.strategy, SingleDeviceStrategy) or _is_ddp(trainer.strategy)
    follows = tasks is not None and tasks.needs_gradients
    name = type(tasks).__name__
    refuse(
        {
            f"`overfit_batches` must be 0, but is {trainer.overfit_batches}. Train on a small "
            "dataset instead.": trainer.overfit_batches,
            f"`limit_train_batches` must be 1.0, but is {limit}: the samples after the limit would "
            "never be trained on. End a run by `max_steps`, validate by `val_check_interval`.": (
                (limit != 1.0 or isinstance(limit, int)) and not trainer.fast_dev_run
            ),
            f"`reload_dataloaders_every_n_epochs` must be 0, but is {every}: a new loader would "
            "begin with epoch 0.": every,
            f"`accumulate_grad_batches` must be 1 with `{strategy}`, but is "
            f"{trainer.accumulate_grad_batches}: the optimizer would not step at the end of an "
            "epoch. Raise the token budget instead.": not compat.steps_at_epoch_end(trainer),
            f"`{name}` needs whole gradients on each rank, which `{strategy}` does not have. Train "
            "on one device or with DDP, or give `TaskWeights`.": follows and not is_whole,
            f"`{name}` must not be given with `16-mixed`, which scales losses.": (
                follows and trainer.precision == "16-mixed"
            ),
        }
    )
