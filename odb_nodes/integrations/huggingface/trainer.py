"""`Trainer` and `Seq2SeqTrainer` with dynamic batches; and an existing trainer, given them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from transformers import Seq2SeqTrainer, Trainer
from transformers.trainer_utils import get_last_checkpoint

from odb_nodes.collate import PaddingCollate
from odb_nodes.integrations.huggingface.building import (
    allow_streams,
    can_pad,
    check_overrides,
    check_trainer,
    make_batches,
    make_run,
)
from odb_nodes.integrations.huggingface.callback import RunCallback
from odb_nodes.integrations.huggingface.config import ODBConfig
from odb_nodes.integrations.huggingface.run import Run
from odb_nodes.integrations.learning_rate import follow
from odb_nodes.planning import TokenBudget

if TYPE_CHECKING:  # What the mixin is mixed into.
    _Mixed = Trainer
else:
    _Mixed = object

AnyTrainer = TypeVar("AnyTrainer", bound=Trainer)


class ODBTrainerMixin(_Mixed):
    """Gives dynamic batches to a class of trainers: `class MyTrainer(ODBTrainerMixin, Trainer)`.

    Only training changes, not evaluation, but that samples are padded there too where the trainer
    has no `data_collator` that could. A batch has as many samples as `odb.token_budget` allows;
    `gradient_accumulation_steps` of them make an optimizer step, on every rank. Its gradient is
    that of the mean over the supervised tokens of all of them, whether the model divides by
    `num_items_in_batch` or returns a mean: which one it is, is found out at the first step.

    `max_steps` is in optimizer steps. With `num_train_epochs` every sample comes once per epoch,
    and the number of steps is known only at the end: see `ODBConfig.steps_per_epoch`.

    Args:
        odb: of the dynamic batches.
        *args, **kwargs: of the trainer.

    Raises:
        TypeError, ValueError: an argument of the trainer does not go with dynamic batches.
    """

    odb: ODBConfig
    odb_run: Run | None = None
    lr_scheduler: Any

    def __init__(self, *args: Any, odb: ODBConfig, **kwargs: Any) -> None:
        kinds = type(self).__mro__
        check_overrides(kinds[kinds.index(ODBTrainerMixin) + 1 :])
        with allow_streams(self, odb, kwargs.get("train_dataset"), (*args, *kwargs.values())):
            super().__init__(*args, **kwargs)
        self._configure(odb)

    def _configure(self, odb: ODBConfig) -> None:
        check_trainer(self, odb)
        self.odb = odb
        # The first one, so that all others see the epoch, and checkpoints with our file in them.
        self.callback_handler.callbacks.insert(0, RunCallback(self))

    def get_train_dataloader(self) -> Any:
        """Return the batches of the run, or, outside of `train`, those of a run from its start.

        Raises:
            ValueError: an argument has changed since the run was made.
        """
        if self.odb_run is None:
            return make_batches(self)
        self.odb_run.check_arguments()
        return self.odb_run.batches

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Return the trainer's own loader, which pads where training does."""
        with self._padding():
            return super().get_eval_dataloader(*args, **kwargs)

    def get_test_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Return the trainer's own loader, which pads where training does."""
        with self._padding():
            return super().get_test_dataloader(*args, **kwargs)

    @contextmanager
    def _padding(self) -> Iterator[None]:
        """Let the trainer pad, where it would not and nobody has said how to collate."""
        before = self.data_collator
        if self.odb.collate_fn is None and not can_pad(before):
            multiple = TokenBudget.of(self.odb.token_budget).pad_to_multiple_of
            self.data_collator = PaddingCollate(pad_to_multiple_of=multiple)
        try:
            yield
        finally:
            self.data_collator = before

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Train; see `Trainer.train`. A checkpoint must have been saved by as many ranks.

        Raises:
            FileNotFoundError, StateError: the checkpoint has no state of this rank's batches.
            ValueError: the loss is neither a mean nor divided by `num_items_in_batch`; or a
                hyperparameter search changes what the batches are made of.
        """
        check_trainer(self, self.odb)
        checkpoint = resume_from_checkpoint or None
        if checkpoint is True:
            checkpoint = get_last_checkpoint(self.args.output_dir)
        self.odb_run = run = make_run(self, checkpoint)
        try:
            with self._arguments(run):
                return super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            self.odb_run = None
            run.batches.loader.close()

    @contextmanager
    def _arguments(self, run: Run) -> Iterator[None]:
        """Let the `Trainer` neither count the steps of an epoch nor read batches to skip them."""
        args = self.args
        before = args.max_steps, args.ignore_data_skip
        args.max_steps, args.ignore_data_skip = run.most_steps, True
        try:
            yield
        finally:
            args.max_steps, args.ignore_data_skip = before

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> Any:
        """Make the learning-rate schedule; by samples, if it is to follow them."""
        run, is_given = self.odb_run, self.lr_scheduler is not None
        if run is None:
            return super().create_scheduler(num_training_steps, optimizer)
        if self.odb.schedule == "samples" and is_given:
            raise ValueError(
                '`schedule` must be "steps" where a scheduler of your own is given: see '
                "`odb_nodes.integrations.learning_rate.follow`."
            )
        total = run.total_steps
        if run.ends_by_epochs:  # The `Trainer` knows only what bounds the steps.
            self.state.max_steps = total
            if not self.state.global_step:  # Else they are those of the checkpoint.
                self.state.compute_steps(self.args, total)
        scheduler = super().create_scheduler(total, optimizer)
        if self.odb.schedule == "samples":
            scheduler = follow(scheduler, lambda: run.batches.share_done * total)
            self.lr_scheduler = scheduler
        return scheduler

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> Any:
        """Return the batches of an optimizer step, and what their loss is to be divided by."""
        run, state, control = self.odb_run, self.state, self.control
        if run is None:
            return super().get_batch_samples(epoch_iterator, num_batches, device)
        is_over = state.global_step >= state.max_steps  # A checkpoint from the very end.
        taken = ([], None) if is_over else run.take(epoch_iterator, num_batches)
        if not taken[0]:
            control.should_epoch_stop = True
            if is_over or run.batches.is_done:
                control.should_training_stop = True
        if run.ends_by_epochs:
            # What the flow of the `Trainer` ends by, and saves and evaluates at the end by.
            next_step = state.global_step + 1
            run.check_estimate(state.global_step + bool(taken[0]), ends=run.batches.is_done)
            state.max_steps = (
                next_step if run.batches.is_done else max(run.total_steps, next_step + 1)
            )
        return taken

    def training_step(
        self, model: Any, inputs: Any, num_items_in_batch: Any = None, *args: Any
    ) -> Any:
        """Compute a batch, whose loss is normalised once.

        Raises:
            ValueError: it would be normalised twice or not at all, since a method of a subclass
                stands in between.
        """
        run = self.odb_run
        if run is None or not run.waiting:
            return super().training_step(model, inputs, num_items_in_batch, *args)
        with run.computing(num_items_in_batch):
            return super().training_step(model, inputs, num_items_in_batch, *args)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Return the loss, in training weighed by its share of the optimizer step."""
        result = super().compute_loss(*args, **kwargs)
        micro_step = None if self.odb_run is None else self.odb_run.active
        return result if micro_step is None else micro_step.scale(result)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log, beside the loss, what the batches were like."""
        run = self.odb_run
        if run is not None:
            if "loss" in logs and self.odb.log_metrics:
                logs.update(run.take_metrics())
            if "train_samples_per_second" in logs:
                seen = run.batches.samples_seen / max(logs["train_runtime"], 1e-9)
                logs["train_samples_per_second"] = round(seen, 3)
        super().log(logs, *args, **kwargs)


class ODBTrainer(ODBTrainerMixin, Trainer):
    """`Trainer` with dynamic batches; see `ODBTrainerMixin`."""


class ODBSeq2SeqTrainer(ODBTrainerMixin, Seq2SeqTrainer):
    """`Seq2SeqTrainer` with dynamic batches; see `ODBTrainerMixin`."""


def configure_trainer(
    trainer: AnyTrainer, *, token_budget: int | TokenBudget, **options: Any
) -> AnyTrainer:
    """Give dynamic batches to a trainer that exists already, of any class; returns it.

    Its class becomes one that has `ODBTrainerMixin` before what it was.

    Args:
        trainer: that is not training.
        token_budget: padded tokens of a batch on one rank, or a `TokenBudget`.
        options: further fields of `ODBConfig`.

    Raises:
        TypeError, ValueError: an argument, or one of the trainer, is not what it must be.
    """
    if isinstance(trainer, ODBTrainerMixin):
        raise ValueError(
            f"`trainer` is a `{type(trainer).__name__}`, which has dynamic batches already."
        )
    config = ODBConfig(token_budget=token_budget, **options)
    check_trainer(trainer, config)
    check_overrides(type(trainer).__mro__)
    kind = type(trainer)
    trainer.__class__ = type(f"ODB{kind.__name__}", (ODBTrainerMixin, kind), {})
    ODBTrainerMixin._configure(trainer, config)  # type: ignore[arg-type]
    return trainer
