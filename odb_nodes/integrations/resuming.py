"""Resuming under a trainer: errors that name the remedy in the trainer's own terms."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from odb_nodes.checkpoints.rank_states import saved_states
from odb_nodes.checkpoints.resharding import reshard
from odb_nodes.contract import NodeState
from odb_nodes.errors import PositionError, StateError
from odb_nodes.loader.dataloader import ODBDataLoader
from odb_nodes.loader.reshard_nodes import check_same
from odb_nodes.monitor import Monitor

S = TypeVar("S", bound=NodeState)

CHANGED_ARGUMENTS = (
    "Under a `Trainer` there is no `strict=False`, and {smaller}. Resume with the arguments and "
    "data that the run was saved with ({names}), or begin a new run with its weights: load them "
    "with `{load}`, and leave out `{leave_out}`."
)
"""The remedy for a state that does not fit the arguments."""


def load_saved_states(
    folder: str | os.PathLike[str], rank: int, world_size: int, remedy: str
) -> tuple[list[Any], bool]:
    """Return the state that this rank saved, or those of another number of ranks."""
    try:
        return saved_states(folder, rank, world_size)
    except FileNotFoundError:
        if not Path(folder).is_dir():
            raise
        raise FileNotFoundError(f"`{folder}` has no state of a loader: {remedy}") from None


def resharded_run(
    runs: Sequence[S], rank: int, world_size: int, alike: Sequence[str], **own: Any
) -> S:
    """Return the position of a run on one rank, out of those of another number of ranks."""
    check_same("the run", runs, *alike)
    positions: Sequence[Any] = runs
    if positions[0].loader is not None:
        own["loader"] = reshard([one.loader for one in positions], world_size)[rank]
    if positions[0].monitor is not None:
        own["monitor"] = Monitor.reshard_states([one.monitor for one in positions], world_size)[
            rank
        ]
    run: S = replace(positions[0], **own)
    return run


def begin_or_resume(loader: ODBDataLoader, remedy: str) -> Iterator[Any]:
    """Return `iter(loader)`; a state that does not fit the loader is an error with a remedy."""
    try:
        return iter(loader)
    except PositionError:  # The loader was asked for what it cannot do: it fits.
        raise
    except StateError as error:
        raise StateError(f"{error} {remedy}") from error
