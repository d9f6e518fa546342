"""What a Lightning `Trainer` must not be or do to train with dynamic batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from odb_nodes._compat import lightning as compat
from odb_nodes.errors import StateError
from odb_nodes.integrations.lightning.run import Run


def check_trainer(trainer: Any) -> None:
    """Reject arguments of a trainer that would silently change the steps or the data."""
    if trainer.overfit_batches:
        raise ValueError(
            f"`overfit_batches` must be 0, but is {trainer.overfit_batches}. Train on a small "
            "dataset instead."
        )
    limit = trainer.limit_train_batches  # 1 is one batch, 1.0 is all
    if (limit != 1.0 or isinstance(limit, int)) and not trainer.fast_dev_run:
        raise ValueError(
            f"`limit_train_batches` must be 1.0, but is {limit}: the samples after the limit would "
            "never be trained on. End a run by `max_steps`, and validate by `val_check_interval`."
        )
    if trainer.reload_dataloaders_every_n_epochs:
        raise ValueError(
            "`reload_dataloaders_every_n_epochs` must be 0, but is "
            f"{trainer.reload_dataloaders_every_n_epochs}: a new loader would begin with epoch 0."
        )
    if not compat.steps_at_epoch_end(trainer):
        raise ValueError(
            f"`accumulate_grad_batches` must be 1 with `{type(trainer.strategy).__name__}`, but is "
            f"{trainer.accumulate_grad_batches}: the optimizer would not step at the end of an "
            "epoch. Raise the token budget instead."
        )


def check_one_loader(loaders: Any) -> None:
    """Reject several loaders, each of which would give a part of every batch."""
    if isinstance(loaders, (list, tuple, Mapping)):
        raise ValueError(
            f"`train_dataloader` must return one `callback.batches(loader)`, but returned a "
            f"`{type(loaders).__name__}` instead. To train on several datasets, give one "
            "`ODBDataLoader` a dict of them."
        )


def check_optimizer_step(trainer: Any, run: Run) -> None:
    """Check that the optimizer has stepped exactly where the loader ends an optimizer step."""
    if run.current is None or trainer.fast_dev_run:
        return
    info, has_stepped = run.current.info, run.has_stepped
    if has_stepped != info.ends_optimizer_step:
        found, expected = ("", "not ") if has_stepped else ("not ", "")
        hosted = info.batches_per_step
        share = "" if hosted == 1 else f" // {hosted}"
        remark = "" if hosted == 1 else f" ({hosted} virtual ranks are on this rank)"
        raise RuntimeError(
            f"the optimizer must {expected}step after batch {info.step} of the epoch, but did "
            f"{found}step: the loader weighs the losses of {info.micro_steps} batches as one step. "
            f"Make the loader with `accumulate=trainer.accumulate_grad_batches{share}`{remark}. "
            f"`accumulate_grad_batches` is {trainer.accumulate_grad_batches}: do not change that "
            "during the run."
        )
    if has_stepped and not run.backwards and not trainer.lightning_module.automatic_optimization:
        raise RuntimeError(
            "the optimizer stepped, but no loss of the step was weighed by its share of the "
            "supervised tokens: the module called `loss.backward()`. Call "
            "`self.manual_backward(loss)` instead."
        )


def check_epoch_end(trainer: Any) -> None:
    """Check that the run ends, where an epoch was left before its end."""
    is_over = trainer.should_stop or 0 <= trainer.max_steps <= trainer.global_step
    if not (is_over or trainer.fast_dev_run):
        raise RuntimeError(
            "the epoch was left before its end, and the rest of its samples would never be trained "
            "on. Do not return -1 from `on_train_batch_start`; to end the run, set "
            "`trainer.should_stop`."
        )


def check_states(states: Any) -> list[Any]:
    """Return the states of all ranks in a checkpoint."""
    if states is None:
        raise StateError(
            "the checkpoint has no state of a loader: it was saved without `ODBCallback`. To begin "
            "a run with its weights, load them with `load_from_checkpoint`."
        )
    if not isinstance(states, list) or not states:
        raise StateError(
            "the checkpoint must have a list of the states of all ranks, but has "
            f"{states!r:.80} instead: it is damaged. Use an earlier checkpoint."
        )
    return states
