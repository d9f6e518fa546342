"""What happens at the events of a `Trainer`: states are saved, progress is set in samples."""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import Any

from transformers import TrainerCallback

from odb_nodes._compat import transformers as compat
from odb_nodes.memory.meter import free_memory


class RunCallback(TrainerCallback):
    """Keeps the run of a trainer and the state of the `Trainer` in step."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._scaled = ExitStack()
        self._has_stepped = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Show the epochs that were asked for, not those that bound the loop."""
        self._run.check_step(state.global_step)
        self._has_stepped = False
        self._run.meter.take()  # The time of all set-up is not the first steps'.
        if self._run.monitor is not None:
            self._run.monitor.start_clock()
        if self._run.ends_by_epochs:
            # Before version 5, the `Trainer` sets its bound after the scheduler is made. Later it
            # does not, and a resumed run keeps the number of its checkpoint.
            if state.max_steps == self._run.most_steps:
                compat.plan_steps(self._trainer, self._run.total_steps)
            state.num_train_epochs = math.ceil(args.num_train_epochs)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Scale the learning rate of this step."""
        scaling = self._trainer.odb.lr_scaling
        if scaling is not None:
            samples = self._run.optimizer_samples
            self._scaled.enter_context(scaling.applied(given["optimizer"], samples))
        if self._run.monitor is not None:
            self._run.monitor.note_lr(given["optimizer"])

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Restore the learning rate, which the schedule goes on from."""
        self._scaled.close()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Record the step, and set the epoch, with the share of it that is done."""
        self._run.record_step()
        state.epoch = self._run.epoch
        self._has_stepped = True

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Abandon an epoch that another callback has stopped; finish a run whose end was late.

        Memory that the allocator caches is given back where the configuration says so.
        """
        if control.should_epoch_stop:
            self._run.batches.abandon_epoch()
        state.epoch = self._run.epoch
        # Where samples were dropped, the last step was not known to be the last.
        is_late = state.global_step < state.max_steps
        if self._has_stepped and self._run.batches.is_done and is_late:
            compat.finish_at_this_step(args, state, control)
        if self._trainer.odb.empty_cache is not None:
            free_memory()

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Write the state of this rank into the checkpoint."""
        if not (args.save_only_model or state.is_hyper_param_search):
            self._run.save(compat.checkpoint_folder(args, state))

    @property
    def _run(self) -> Any:
        return self._trainer.odb_run
