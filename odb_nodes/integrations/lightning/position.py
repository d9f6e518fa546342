"""Where a run stands on one rank; and Lightning's own counters, made to say the same."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

import torch

from odb_nodes.errors import StateError

__all__ = ["Position", "get_rngs", "set_progress", "set_rngs"]

_EPOCHS = "epoch_progress"
_BATCHES = "epoch_loop.batch_progress"


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where a run stands, between two optimizer steps. Its fields are plain data.

    Attributes:
        epoch: number of epochs that have ended.
        steps: micro-steps of the present epoch that are done; 0 where it has not begun.
        total_steps: micro-steps of the run that are done.
        samples: of this rank in this epoch that are done.
        loader: state of the loader; `None` before the first batch of a run.
        rngs: torch's generators; see `get_rngs`.
    """

    epoch: int = 0
    steps: int = 0
    total_steps: int = 0
    samples: int = 0
    loader: dict[str, Any] | None = None
    rngs: list[Any] | None = None


def get_rngs() -> list[Any]:
    """Return the states of torch's generators: of the CPU, and of the GPU if one is in use."""
    gpu = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    return [torch.get_rng_state(), gpu]


def set_rngs(states: list[Any]) -> None:
    """Set torch's generators to what `get_rngs` returned."""
    cpu, gpu = states
    torch.set_rng_state(cpu)
    if gpu is not None and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(gpu)


def epochs_processed(fit_loop: MutableMapping[str, Any]) -> int:
    """Return how many epochs Lightning takes for ended; its own end of a run counts as one.

    Raises:
        StateError: the checkpoint does not say so.
    """
    try:
        return int(fit_loop[_EPOCHS]["current"]["processed"])
    except KeyError as error:
        raise _unknown(error) from None


def set_progress(fit_loop: MutableMapping[str, Any], position: Position) -> None:
    """Let the progress of Lightning's loops in a checkpoint say where the loader stands.

    What Lightning writes itself resumes exactly only within an epoch and after an optimizer step:
    in a last batch it resumes as if the epoch had ended twice; where `max_steps` ends a run, as if
    the epoch had ended; after an epoch of a run with `max_steps`, with the number of its batches.

    Args:
        fit_loop: progress of the fit loop in a checkpoint; is changed.
        position: where the loader stands.

    Raises:
        StateError: the progress is not where this expects it.
    """
    try:
        epochs, batches = fit_loop[_EPOCHS], fit_loop[_BATCHES]
        begun = position.epoch + (position.steps > 0)
        for name in ("total", "current"):
            epochs[name].update(ready=begun, started=begun)
            epochs[name].update(processed=position.epoch, completed=position.epoch)
        for name, done in (("total", position.total_steps), ("current", position.steps)):
            # Left as it is where the numbers agree: it also says whether the batch was validated.
            if batches[name]["ready"] != done:
                batches[name].update(ready=done, started=done, processed=done, completed=done)
        batches["is_last_batch"] = False  # The loader says so itself, by ending.
    except KeyError as error:
        raise _unknown(error) from None
    fit_loop.get("state_dict", {}).pop("combined_loader", None)  # of loaders, a batch too late


def _unknown(error: KeyError) -> StateError:
    return StateError(
        f"the checkpoint has no {error} in the progress of its loops, where other versions of "
        "Lightning have it, so it could not be resumed exactly. Use a version from 2.6 on."
    )
