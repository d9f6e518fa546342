"""What we rely on inside of Lightning: the counters of its loops, and what it does to losses.

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
    """Return the batches of the run that have begun, in all epochs, with the present one."""
    return int(trainer.fit_loop.total_batch_idx) + 1


def loss_divisor(trainer: Any, module: Any) -> int:
    """Return what automatic optimization divides the loss of a batch by, however few are left."""
    return int(trainer.accumulate_grad_batches) if module.automatic_optimization else 1


def mean_loss(trainer: Any, module: Any, loss: torch.Tensor) -> torch.Tensor:
    """Return what `training_step` returned, of a loss that is divided, and scaled for fp16."""
    loss = loss.detach() * loss_divisor(trainer, module)
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return loss if scaler is None else loss / scaler.scale(torch.ones_like(loss))


def steps_at_epoch_end(trainer: Any) -> bool:
    """Tell whether the optimizer steps after the last batch of an epoch, however few came."""
    is_full_always = int(trainer.accumulate_grad_batches) == 1
    return is_full_always or not trainer.strategy.handles_gradient_accumulation


def is_logged(trainer: Any) -> bool:
    """Tell, in `on_train_batch_end`, whether Lightning passes on what is logged in this step."""
    return bool(trainer.global_step % max(1, trainer.log_every_n_steps) == 0)


# --- progress in checkpoints ----------------------------------------------------------------------


def loop_progress(checkpoint: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Return the progress of the fit loop in a checkpoint, empty where it has none."""
    progress: MutableMapping[str, Any] = checkpoint.get("loops", {}).get("fit_loop", {})
    return progress


def epochs_processed(progress: MutableMapping[str, Any]) -> int:
    """Return the epochs that Lightning counts as ended; its own end of a run counts as one."""
    try:
        return int(progress[_EPOCHS]["current"]["processed"])
    except KeyError as error:
        raise _unknown(error) from None


def set_progress(progress: MutableMapping[str, Any], position: Any) -> None:
    """Make the progress of Lightning's loops agree with a `RunState`.

    What Lightning writes itself resumes exactly only within an epoch and after an optimizer step:
    it may have ended an epoch twice, or keep a batch counter. It has read one batch ahead, too.
    """
    try:
        epochs, batches = progress[_EPOCHS], progress[_BATCHES]
        epoch, steps = position.epoch, position.steps
        begun = epoch + (steps > 0)
        for name in ("total", "current"):
            epochs[name].update(ready=begun, started=begun, processed=epoch, completed=epoch)
        for name, done in (("total", position.total_steps), ("current", steps)):
            # Unchanged where the numbers agree: they also say whether the batch was validated.
            if batches[name]["ready"] != done:
                batches[name].update(ready=done, started=done, processed=done, completed=done)
        batches["is_last_batch"] = False  # The loader itself ends the epoch.
    except KeyError as error:
        raise _unknown(error) from None
    progress.get("state_dict", {}).pop("combined_loader", None)


def _unknown(error: KeyError) -> StateError:
    return StateError(
        f"the checkpoint has no {error} in the progress of its loops, where lightning 2.6 has it, "
        "so it could not be resumed exactly. Use a version from 2.6 on."
    )
