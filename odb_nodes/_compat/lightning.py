"""Internals of Lightning that we rely on: the counters of its loops, and its scale of losses.

Read in lightning 2.6.6; the extra `lightning` allows 2.6.4 and later. Each function has a canary in
`tests/_compat/test_lightning.py`.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch

from odb_nodes.errors import StateError

_EPOCHS = "epoch_progress"
_BATCHES = "epoch_loop.batch_progress"


def is_fitting(trainer: Any) -> bool:
    """Return whether `fit` runs; relies on `Trainer.state.fn`, an enum of strings."""
    return bool(trainer.state.fn == "fit")


def batches_begun(trainer: Any) -> int:
    """Return the number of batches of the run that have begun, in all epochs.

    Relies on `fit_loop.total_batch_idx` to count a batch before `on_train_batch_start`.
    """
    return int(trainer.fit_loop.total_batch_idx) + 1


def loss_divisor(trainer: Any, module: Any) -> int:
    """Return the number by which Lightning divides the loss of a batch before backward.

    Relies on automatic optimization to divide by `accumulate_grad_batches`, even in the last
    optimizer step of an epoch, which may have fewer batches; manual optimization does not divide.
    """
    return int(trainer.accumulate_grad_batches) if module.automatic_optimization else 1


def mean_loss(trainer: Any, module: Any, loss: torch.Tensor) -> torch.Tensor:
    """Return the loss that `training_step` returned, from the argument of `on_before_backward`.

    Relies on `MixedPrecision.pre_backward`, which multiplies the loss by the scale of its `scaler`
    before the hook, and on `loss_divisor`. Does not synchronize the device.
    """
    loss = loss.detach() * loss_divisor(trainer, module)
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return loss if scaler is None else loss / scaler.scale(torch.ones_like(loss))


def steps_at_epoch_end(trainer: Any) -> bool:
    """Return whether the optimizer steps at the end of an epoch, even after fewer batches.

    Relies on `Strategy.handles_gradient_accumulation`, which is True for DeepSpeed: its engine
    steps only after `accumulate_grad_batches` batches.
    """
    is_full_always = int(trainer.accumulate_grad_batches) == 1
    return is_full_always or not trainer.strategy.handles_gradient_accumulation


def is_logged(trainer: Any) -> bool:
    """Return whether Lightning writes the values that are logged in this optimizer step.

    Mirrors `_LoggerConnector.should_update_logs`, which counts `_batches_that_stepped`: one behind
    `global_step` in `on_train_batch_end`.
    """
    return bool(trainer.global_step % max(1, trainer.log_every_n_steps) == 0)


# --- progress in checkpoints ----------------------------------------------------------------------


def loop_progress(checkpoint: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Return the progress of the fit loop in a checkpoint, empty if there is none."""
    progress: MutableMapping[str, Any] = checkpoint.get("loops", {}).get("fit_loop", {})
    return progress


def epochs_processed(progress: MutableMapping[str, Any]) -> int:
    """Return the epochs that Lightning counts as ended; the end of a run counts as one."""
    try:
        return int(progress[_EPOCHS]["current"]["processed"])
    except KeyError as error:
        raise _unknown(error) from None


def set_progress(progress: MutableMapping[str, Any], position: Any) -> None:
    """Make the progress of Lightning's loops agree with a `RunState`.

    Lightning's own progress resumes exactly only within an epoch and after an optimizer step. A
    checkpoint of the last batch resumes as if the epoch had ended twice, a checkpoint at
    `max_steps` as if the epoch had ended, and a checkpoint after an epoch of a run with `max_steps`
    keeps the batch counter of that epoch.

    Relies on the names of the counters, and on the loops to resume from `ready` and `completed`.
    The state of the `combined_loader` is deleted: Lightning has read one batch ahead of it.
    """
    try:
        epochs, batches = progress[_EPOCHS], progress[_BATCHES]
        epoch, steps = position.epoch, position.steps
        begun = epoch + (steps > 0)
        for name in ("total", "current"):
            epochs[name].update(ready=begun, started=begun, processed=epoch, completed=epoch)
        for name, done in (("total", position.total_steps), ("current", steps)):
            # Equal numbers stay: they also record whether the batch was validated.
            if batches[name]["ready"] != done:
                batches[name].update(ready=done, started=done, processed=done, completed=done)
        batches["is_last_batch"] = False  # The loader itself ends the epoch.
    except KeyError as error:
        raise _unknown(error) from None
    progress.get("state_dict", {}).pop("combined_loader", None)


def _unknown(error: KeyError) -> StateError:
    return StateError(
        f"the checkpoint has no {error} in the progress of its loops, as lightning 2.6 has, so it "
        "could not be resumed exactly. Use a version from 2.6 on."
    )
