"""A data module whose training batches are dynamic."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightning.pytorch import LightningDataModule

from odb_nodes.core.loader.dataloader import ODBDataLoader
from odb_nodes.core.loader.options import LoaderOptions
from odb_nodes.core.planning import TokenBudget
from odb_nodes.integrations.lightning.callback import ODBCallback
from odb_nodes.integrations.lightning.run import TrainBatches
from odb_nodes.tools.estimate import (
    ESTIMATE_SAMPLES,
    check_samples_can_be_drawn,
    estimate_loader_steps,
)
from odb_nodes.training.tasks.trainer_options import task_names


class ODBDataModule(LightningDataModule):
    """Makes the loader of each rank, once the process group exists.

    The trainer must have an `ODBCallback`. For validation, add `val_dataloader` in a subclass: with
    a data module, Lightning ignores `val_dataloader` of the module.

    Args:
        dataset: the dataset to train on; see `ODBDataLoader`.
        token_budget: padded tokens of a batch on one rank, or a `TokenBudget`.
        options: further arguments of `ODBDataLoader`, except `accumulate`: it follows from the
            trainer's `accumulate_grad_batches`, divided by the virtual ranks that a rank hosts.

    Raises:
        TypeError, ValueError: an option is not valid, or `accumulate` or `on_oom` is given.
    """

    def __init__(self, dataset: Any, *, token_budget: int | TokenBudget, **options: Any) -> None:
        super().__init__()
        if "accumulate" in options:
            raise ValueError(
                "`accumulate` must not be given: it follows from `accumulate_grad_batches`."
            )
        if "on_oom" in options:
            raise ValueError(
                "`on_oom` must not be given: automatic optimization cannot recompute a batch in "
                "parts. Let `train_dataloader` of the module return "
                "`callback.batches(OomGuard(loader))`, and optimize by hand: see docs/lightning.md."
            )
        self._dataset = dataset
        self._options = LoaderOptions(token_budget=token_budget, **options)

    def train_dataloader(self) -> TrainBatches:
        """Return the batches of a run.

        Raises:
            RuntimeError: the trainer has no `ODBCallback`, or several.
            ValueError: `accumulate_grad_batches` does not fit `virtual_ranks`.
        """
        trainer = self._trainer_of("train_dataloader")
        callbacks = [
            callback for callback in trainer.callbacks if isinstance(callback, ODBCallback)
        ]
        if len(callbacks) != 1:
            raise RuntimeError(
                f"the trainer must have one `ODBCallback`, but has {len(callbacks)}. Make it with "
                "`Trainer(callbacks=[ODBCallback()])`. (A `Tuner` removes callbacks while it "
                "searches: `lr_find` and `scale_batch_size` do not work with dynamic batches.)"
            )
        options = self._options_of(trainer)
        if (tasks := callbacks[0].task_weights) is not None:
            options = replace(options, tasks=task_names(tasks, options.tasks))
        return callbacks[0].batches(ODBDataLoader(self._dataset, **vars(options)))

    def estimated_steps(self) -> int:
        """Estimate the optimizer steps of the run from the lengths of 512 samples.

        The result is the same on all ranks. Call it on all ranks, in `configure_optimizers`, for a
        schedule. Lightning's `trainer.estimated_stepping_batches` cannot count dynamic batches: it
        is `max_steps`, -1 by default.

        Raises:
            TypeError: the dataset is neither map-style with a length nor a `JsonlSource`.
            ValueError: the run has no end, or `accumulate_grad_batches` does not fit
                `virtual_ranks`.
        """
        trainer = self._trainer_of("estimated_steps")
        max_epochs = trainer.max_epochs
        max_steps = int(trainer.max_steps)
        if max_epochs is None or max_epochs < 0:
            if max_steps < 0:
                raise ValueError("`max_epochs` or `max_steps` must be given, so that the run ends.")
            return max_steps
        check_samples_can_be_drawn(self._dataset, "Make the schedule for a fixed number of steps.")
        steps = 0
        if trainer.is_global_zero:
            steps = max_epochs * estimate_loader_steps(
                self._dataset,
                self._options_of(trainer),
                world_size=self._options.virtual_ranks or trainer.world_size,
                samples=ESTIMATE_SAMPLES,
            )
        agreed = int(trainer.strategy.broadcast(steps))
        return agreed if max_steps < 0 else min(agreed, max_steps)

    def _options_of(self, trainer: Any) -> LoaderOptions:
        batches = trainer.accumulate_grad_batches
        ranks_per_process = max(1, (self._options.virtual_ranks or 1) // trainer.world_size)
        if batches % ranks_per_process:
            raise ValueError(
                f"`accumulate_grad_batches` must be a multiple of {ranks_per_process}, the number "
                f"of virtual ranks of each of {trainer.world_size} processes, but is {batches}: it "
                "counts the batches of an optimizer step of a process, so it depends on the "
                "number of processes."
            )
        return replace(self._options, accumulate=batches // ranks_per_process)

    def _trainer_of(self, name: str) -> Any:
        if self.trainer is None:
            raise RuntimeError(f"`{name}` needs a trainer: call `trainer.fit(datamodule=...)`.")
        return self.trainer
