"""Resuming under a trainer: errors that name the remedy in the trainer's own terms."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from odb_nodes.errors import StateError
from odb_nodes.loader.checkpoint import load_rank_state
from odb_nodes.loader.dataloader import ODBDataLoader

__all__ = ["begin_or_resume", "changed_arguments_remedy", "load_saved_state"]


def changed_arguments_remedy(*, names: str, load: str, leave_out: str, smaller: str) -> str:
    """Return the remedy for a state that does not fit the arguments, under a `Trainer`.

    Args:
        names: a clause that says what the trainer calls the arguments of the loader.
        load: the framework's function that loads weights alone.
        leave_out: the argument that asks the trainer to resume.
        smaller: a clause that says where a trainer has `change_budget`.
    """
    return (
        f"Under a `Trainer` there is no `strict=False`, and {smaller}. "
        "Resume with the arguments and data that the "
        f"run was saved with ({names}), or begin a new run with its weights: load them with "
        f"`{load}`, and leave out `{leave_out}`."
    )


def load_saved_state(folder: str | os.PathLike[str], remedy: str) -> Any:
    """Return the state that this rank saved; see `load_rank_state`.

    Args:
        folder: the folder of the checkpoint.
        remedy: why a checkpoint may have no state of a loader, and what to do then.

    Raises:
        FileNotFoundError: the folder does not exist, or has no state of a loader.
        StateError: see `load_rank_state`.
    """
    try:
        return load_rank_state(folder)
    except FileNotFoundError:
        if not Path(folder).is_dir():
            raise
        raise FileNotFoundError(f"`{folder}` has no state of a loader: {remedy}") from None


def begin_or_resume(loader: ODBDataLoader, remedy: str) -> Iterator[Any]:
    """Return `iter(loader)`.

    Args:
        loader: a loader that may have loaded a state.
        remedy: what to do where the state does not fit; one sentence or more.

    Raises:
        StateError: the state does not fit the arguments or the data of `loader`.
    """
    try:
        return iter(loader)
    except StateError as error:
        raise StateError(f"{error} {remedy}") from error
