"""`Trainer` and `Seq2SeqTrainer` with dynamic batches, and a function for existing trainers."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from transformers import Seq2SeqTrainer, Trainer, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from odb_nodes._compat import transformers as compat
from odb_nodes.core.planning import TokenBudget
from odb_nodes.integrations.huggingface.auto_budget import check_auto
from odb_nodes.integrations.huggingface.complete_checkpoints import (
    agreed_checkpoint,
    warn_of_other_checkpoints,
)
from odb_nodes.integrations.huggingface.config import (
    ODBConfig,
    allow_streams,
    check_overrides,
    check_trainer,
)
from odb_nodes.integrations.huggingface.loss import MicroStep, count_targets, shifts, token_losses
from odb_nodes.integrations.huggingface.run import TrainBatches, TrainRun
from odb_nodes.integrations.huggingface.samples import TrainerPadding, evaluated
from odb_nodes.integrations.learning_rate import follow

if TYPE_CHECKING:  # The mixin calls the methods of the class that it is mixed into.
    _Mixed = Trainer
else:
    _Mixed = object

AnyTrainer = TypeVar("AnyTrainer", bound=Trainer)


class ODBTrainerMixin(_Mixed):
    """Gives dynamic batches to a class of trainers: `class MyTrainer(ODBTrainerMixin, Trainer)`.

    A batch has as many samples as `odb.token_budget` allows; `gradient_accumulation_steps` batches
    on every rank make an optimizer step, which minimizes the mean loss over the supervised tokens
    of all these batches, whether a loss is divided by `num_items_in_batch` or is a mean. Evaluation
    does not change, except that it pads like training if the trainer has no `data_collator`, and
    that `ODBConfig.process_fn` processes raw samples.

    `max_steps` counts optimizer steps. With `num_train_epochs` every sample comes once per epoch,
    and the number of steps is known only at the end: see `ODBConfig.steps_per_epoch`.

    Args:
        odb: the options of the dynamic batches.
        args, kwargs: the arguments of the trainer.

    Attributes:
        odb_budget: the budget of the batches. For `"auto"`, the budget of the last call of `train`,
            and `None` before.

    Raises:
        TypeError, ValueError: an argument of the trainer cannot be used with dynamic batches.
    """

    odb: ODBConfig
    odb_budget: TokenBudget | None
    odb_run: TrainRun | None = None
    lr_scheduler: Any
    _odb_weights: str  # folder of the weights that are being loaded

    def __init__(self, *args: Any, odb: ODBConfig, **kwargs: Any) -> None:
        kinds = type(self).__mro__
        check_overrides(kinds[kinds.index(ODBTrainerMixin) + 1 :])
        with allow_streams(self, odb, kwargs.get("train_dataset"), (*args, *kwargs.values())):
            super().__init__(*args, **kwargs)
        self._configure(odb)

    def _configure(self, odb: ODBConfig) -> None:
        _check(self, odb)
        self.odb = odb
        self.odb_budget = None if odb.finds_budget else odb.budget
        compat.collator_columns(self)  # now: between the trials of a search there is no model
        if odb.collate_fn is None and compat.pads_by_default(self):
            self.data_collator = TrainerPadding(self, odb)
        if odb.task_weights is not None and self.compute_loss_func is None:
            self.compute_loss_func = partial(token_losses, self)
        # First, so that other callbacks see the epoch, and checkpoints with our file in them.
        self.callback_handler.callbacks.insert(0, RunCallback(self))

    # --- batches ----------------------------------------------------------------------------------

    def get_train_dataloader(self) -> Any:
        """Return the batches of the run; outside of `train`, the batches of a new run.

        Raises:
            ValueError: an argument has changed since the run was made.
        """
        if self.odb_run is None:
            return TrainBatches(self)
        self.odb_run.check_arguments()
        return self.odb_run.batches

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> Any:
        """Return the batches of an optimizer step, and `None`: each batch counts its own items."""
        run, state = self.odb_run, self.state
        if run is None:
            return super().get_batch_samples(epoch_iterator, num_batches, device)
        is_over = state.global_step >= state.max_steps  # The checkpoint is from the very end.
        batches = [] if is_over else run.take(epoch_iterator, num_batches)
        is_done = run.batches.is_done
        if not batches:
            compat.stop_epoch(self, ends_training=is_over or is_done)
        if run.by_epochs:
            # The `Trainer` ends the run, and saves and evaluates at its end, by `max_steps`.
            next_step = state.global_step + 1
            run.check_estimate(state.global_step + bool(batches), ends=is_done)
            state.max_steps = next_step if is_done else max(run.total_steps, next_step + 1)
        return batches, None

    def _get_dataloader(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the batches of evaluation or prediction, with raw samples processed."""
        dataset = evaluated(self, dataset, kwargs.get("dataloader_key"))
        return super()._get_dataloader(dataset, *args, **kwargs)

    # --- the loss ---------------------------------------------------------------------------------

    def training_step(
        self, model: Any, inputs: Any, num_items_in_batch: Any = None, *args: Any
    ) -> Any:
        """Compute the weighed loss and the gradient of a batch.

        Raises:
            ValueError: a subclass overrides `compute_loss` without calling `super().compute_loss`.
            StepMemoryError: memory ran out, and `ODBConfig.on_oom` cannot make the step fit.
        """
        run = self.odb_run
        training_step = super().training_step
        if run is None or not run.losses.waiting:
            return training_step(model, inputs, num_items_in_batch, *args)

        def compute(batch: dict[str, Any], weight: MicroStep) -> Any:
            with run.losses.computing(weight):
                return training_step(model, batch, weight.items, *args)

        weight = run.losses.waiting.popleft()
        if weight is None:
            return torch.zeros((), device=self.args.device)
        if run.guard is None:
            loss = compute(inputs, weight)
        else:
            loss = run.guard.compute(model, inputs, weight, compute)
        run.recorder.losses.append(loss)
        if weight.info.ends_optimizer_step and weight.tasks is not None:
            weight.tasks.step()
        return loss

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the loss; in training, weighed by the batch's share of the optimizer step."""
        micro_step = None if self.odb_run is None else self.odb_run.losses.active
        original = dict(inputs)  # The `Trainer` removes the labels.
        result = super().compute_loss(model, inputs, *args, **kwargs)
        loss, *outputs = result if isinstance(result, tuple) else (result,)
        if micro_step is not None:
            loss = micro_step.scale(loss, original.get("position_ids"))
        elif self.odb.task_weights is not None and loss.ndim:
            names = self.label_names or ()
            loss = loss.sum() / (count_targets(original, shift=shifts(self), names=names) or 1)
        return (loss, *outputs) if outputs else loss

    # --- the run ----------------------------------------------------------------------------------

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Train; see `Trainer.train`. True resumes the newest complete checkpoint, on any ranks.

        Raises:
            FileNotFoundError, StateError: the checkpoint has no state of this rank's batches.
            ShapeTooLargeError: with `token_budget="auto"`, a single sample does not fit.
            ValueError: the loss is neither a mean nor divided by `num_items_in_batch`, or a
                hyperparameter search changes an argument that batches depend on.
        """
        _check(self, self.odb)
        checkpoint = None
        if resume_from_checkpoint:
            checkpoint = agreed_checkpoint(self.args, resume_from_checkpoint)
        else:
            warn_of_other_checkpoints(self.args)
        self.odb_run = None  # Trial steps are not part of a run.
        if self.odb.finds_budget:
            self.odb_budget = None
        self.odb_run = run = TrainRun(self, checkpoint)
        try:
            with run.running(), compat.bounded_loop(self.args, run.most_steps):
                return super().train(checkpoint or resume_from_checkpoint, *args, **kwargs)
        finally:
            self.odb_run = None

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> Any:
        """Make the learning-rate schedule, by steps or by samples: see `ODBConfig.schedule`.

        Raises:
            ValueError: `schedule` is `"samples"`, but the trainer was given a scheduler.
        """
        run = self.odb_run
        is_given = self.lr_scheduler is not None
        if run is None:
            return super().create_scheduler(num_training_steps, optimizer)
        if self.odb.schedule == "samples" and is_given:
            raise ValueError(
                '`schedule` must be "steps" if the trainer is given a scheduler. To make that '
                "scheduler follow samples, see `odb_nodes.integrations.learning_rate.follow`."
            )
        total = run.schedule_steps
        if run.by_epochs:  # The `Trainer` knows only the upper bound.
            compat.plan_steps(self, run.total_steps)
        scheduler = super().create_scheduler(total, optimizer)
        if self.odb.schedule == "samples":
            scheduler = self.lr_scheduler = follow(
                scheduler, lambda: run.batches.share_done * total
            )
        elif not is_given:
            scheduler = self.lr_scheduler = run.paced(scheduler)
        return scheduler

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log `odb/*` beside the loss, and the true samples per second."""
        run = self.odb_run
        if run is not None:
            if "loss" in logs and self.odb.log_metrics:
                gather = self.accelerator.gather
                logs.update(run.recorder.take_metrics(gather, self.args.device))
            if "train_samples_per_second" in logs:  # The `Trainer` assumes a fixed batch size.
                per_second = run.batches.samples_seen / max(logs["train_runtime"], 1e-9)
                logs["train_samples_per_second"] = round(per_second, 3)
        super().log(logs, *args, **kwargs)

    # --- weights ----------------------------------------------------------------------------------

    def _load_from_checkpoint(self, resume_from_checkpoint: str, *args: Any, **kwargs: Any) -> None:
        """Load all weights of a checkpoint, or raise a `StateError`."""
        self._odb_weights = resume_from_checkpoint
        super()._load_from_checkpoint(resume_from_checkpoint, *args, **kwargs)

    def _load_best_model(self) -> None:
        """Load all weights of the best checkpoint, or raise a `StateError`."""
        self._odb_weights = str(self.state.best_model_checkpoint)
        super()._load_best_model()

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Load the weights that the `Trainer` has skipped with a warning."""
        compat.load_skipped_weights(self.model, self._odb_weights, load_result)


class RunCallback(TrainerCallback):
    """Keeps the state of the `Trainer` in step with the run, and records the run."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._scaled = ExitStack()
        self._has_stepped = False

    @property
    def _run(self) -> Any:
        return self._trainer.odb_run

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Show the epochs of the arguments, not the bound of the loop."""
        run = self._run
        run.check_step(state.global_step)
        self._has_stepped = False
        run.recorder.start_clock()
        if run.by_epochs:
            # Before version 5, the `Trainer` sets the bound after it has made the scheduler. In
            # version 5, a resumed run keeps the number of its checkpoint.
            if state.max_steps == run.most_steps:
                compat.plan_steps(self._trainer, run.total_steps)
            state.num_train_epochs = math.ceil(args.num_train_epochs)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Scale the learning rate of this step."""
        scaling = self._trainer.odb.lr_scaling
        optimizer = objects["optimizer"]
        if scaling is not None:
            samples = self._run.computed().infos[0].optimizer_samples  # without skipped samples
            self._scaled.enter_context(scaling.applied(optimizer, samples))
        self._run.recorder.step_values = {"lr": float(optimizer.param_groups[0]["lr"])}

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Restore the learning rate, from which the schedule continues."""
        self._scaled.close()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Record the step, and set the epoch with its fraction."""
        self._run.record_step()
        state.epoch = self._run.epoch
        self._has_stepped = True

    def on_log(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Give the monitor the gradient norm, which only logs have."""
        if self._run is not None:
            self._run.recorder.report_to_monitor(objects["logs"].get("grad_norm"))

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Leave an epoch that another callback has stopped; finish a run that ended early."""
        if control.should_epoch_stop:
            self._run.batches.abandon_epoch()
        state.epoch = self._run.epoch
        # If samples were dropped, nothing told the last step that it was the last.
        is_early = state.global_step < state.max_steps
        if self._has_stepped and self._run.batches.is_done and is_early:
            compat.finish_at_this_step(args, state, control)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Write the state of this rank into the checkpoint."""
        if not (args.save_only_model or state.is_hyper_param_search):
            # The folder of `Trainer._save_checkpoint` outside of hyperparameter searches.
            name = f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
            self._run.save(os.path.join(args.output_dir, name))


class ODBTrainer(ODBTrainerMixin, Trainer):
    """`Trainer` with dynamic batches; see `ODBTrainerMixin`."""


class ODBSeq2SeqTrainer(ODBTrainerMixin, Seq2SeqTrainer):
    """`Seq2SeqTrainer` with dynamic batches; see `ODBTrainerMixin`."""


def configure_trainer(
    trainer: AnyTrainer, *, token_budget: int | TokenBudget | Literal["auto"], **options: Any
) -> AnyTrainer:
    """Give dynamic batches to an existing trainer of any class, and return it.

    Its class becomes a subclass of `ODBTrainerMixin` and of its previous class.

    Args:
        trainer: a trainer that is not training.
        token_budget: padded tokens of a batch on one rank, a `TokenBudget`, or `"auto"`.
        options: further fields of `ODBConfig`.

    Raises:
        TypeError, ValueError: an argument, or one of the trainer, cannot be used.
    """
    if isinstance(trainer, ODBTrainerMixin):
        raise ValueError(
            f"`trainer` has dynamic batches already: it is a `{type(trainer).__name__}`."
        )
    config = ODBConfig(token_budget=token_budget, **options)
    _check(trainer, config)
    check_overrides(type(trainer).__mro__)
    kind = type(trainer)
    # Methods of an object change only with its class: docs/internals/upstream_faults.md.
    trainer.__class__ = type(f"ODB{kind.__name__}", (ODBTrainerMixin, kind), {})
    ODBTrainerMixin._configure(trainer, config)  # type: ignore[arg-type]
    return trainer


def _check(trainer: Any, config: ODBConfig) -> None:
    check_trainer(trainer, config)
    check_auto(trainer, config)
