"""Errors of resuming, said in the words of the trainer that resumes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from odb_nodes.errors import StateError
from odb_nodes.loader.checkpoint import load_rank_state
from odb_nodes.loader.dataloader import ODBDataLoader

__all__ = ["begin_or_resume", "load_saved_state"]


def load_saved_state(folder: str | os.PathLike[str], remedy: str) -> Any:
    """Return what `load_rank_state` does.

    Args:
        folder: of a checkpoint.
        remedy: why it may have no state of ours, and what to do then.

    Raises:
        FileNotFoundError, StateError: see `load_rank_state`.
    """
    try:
        return load_rank_state(folder)
    except FileNotFoundError:
        if not Path(folder).is_dir():
            raise
        raise FileNotFoundError(f"`{folder}` has no states of batches: {remedy}") from None


def begin_or_resume(loader: ODBDataLoader, remedy: str) -> Iterator[Any]:
    """Return `iter(loader)`.

    Args:
        loader: that may have loaded a state.
        remedy: what to do where that does not fit, a sentence or more.

    Raises:
        StateError: it does not.
    """
    try:
        return iter(loader)
    except StateError as error:
        raise StateError(f"{error} {remedy}") from error
