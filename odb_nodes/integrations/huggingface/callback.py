"""What happens at the events of a `Trainer`: states are saved, progress is told in samples."""

from __future__ import annotations

import math
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from odb_nodes.loader.checkpoint import save_rank_state


class RunCallback(TrainerCallback):
    """Acts on the run of a trainer, where it has one.

    Args:
        trainer: an `ODBTrainerMixin`.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._scaled = ExitStack()
        self._has_stepped = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Show the epochs that were asked for, not those that bound the loop."""
        self._has_stepped = False
        self._run.meter.take()  # The metrics of the first steps are not to hold all set-up.
        if self._run.ends_by_epochs:
            state.num_train_epochs = math.ceil(args.num_train_epochs)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Scale the learning rate of this step."""
        scaling = self._trainer.odb.lr_scaling
        if scaling is not None:
            samples = self._run.optimizer_samples
            self._scaled.enter_context(scaling.applied(given["optimizer"], samples))

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Put the learning rate back, for the schedule."""
        self._scaled.close()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Set the epoch, with the share of it that is done."""
        state.epoch = self._run.epoch
        self._has_stepped = True

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Leave an epoch that another callback has stopped; evaluate and save at a late end."""
        if control.should_epoch_stop:
            self._run.batches.abandon_epoch()
        state.epoch = self._run.epoch
        step = state.global_step
        if not (self._has_stepped and self._run.batches.is_done and step < state.max_steps):
            return
        # Samples were left out, so the last step was not known to be the last, and the `Trainer`
        # has not done there what it does at the end.
        state.max_steps = step
        if args.eval_strategy == "steps" and args.eval_delay <= step and step % state.eval_steps:
            control.should_evaluate = True
        if args.save_strategy == "steps" and (not state.save_steps or step % state.save_steps):
            control.should_save = True

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Put the state of this rank into the checkpoint."""
        if args.save_only_model or state.is_hyper_param_search:
            return
        folder = Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        save_rank_state(self._run.state_dict(), folder)

    @property
    def _run(self) -> Any:
        return self._trainer.odb_run
