"""Resuming under a trainer, with errors whose remedy names the trainer's arguments."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from odb_nodes.core.contract import NodeState
from odb_nodes.core.contract.config import CHANGE_REMEDY
from odb_nodes.core.loader.dataloader import ODBDataLoader
from odb_nodes.core.loader.reshard_states import check_same
from odb_nodes.errors import PositionError, StateError
from odb_nodes.training.checkpoints.rank_states import saved_states
from odb_nodes.training.checkpoints.resharding import reshard
from odb_nodes.training.monitor import Monitor

S = TypeVar("S", bound=NodeState)

CHANGED_ARGUMENTS = (
    "Under a `Trainer` there is no `strict=False`, and {smaller}. Resume with the arguments and "
    "data that the run was saved with ({names}), or begin a new run with its weights: load them "
    "with `{load}`, and leave out `{leave_out}`."
)
"""The remedy if a state does not fit the arguments."""


def load_saved_states(
    folder: str | os.PathLike[str], rank: int, world_size: int, remedy: str
) -> tuple[list[Any], bool]:
    """Return this rank's state and True, or all states of another number of ranks and False."""
    try:
        return saved_states(folder, rank, world_size)
    except FileNotFoundError:
        if not Path(folder).is_dir():
            raise
        raise FileNotFoundError(f"`{folder}` has no state of a loader: {remedy}") from None


def resharded_run(
    runs: Sequence[S], rank: int, world_size: int, shared: Sequence[str], **fields: Any
) -> S:
    """Return the resharded position of `rank`, with `fields` replaced.

    shared: names of the fields that are equal on all ranks.
    """
    check_same("the run", runs, *shared)
    positions: Sequence[Any] = runs
    if positions[0].loader is not None:
        fields["loader"] = reshard([run.loader for run in positions], world_size)[rank]
    if positions[0].monitor is not None:
        monitors = Monitor.reshard_states([run.monitor for run in positions], world_size)
        fields["monitor"] = monitors[rank]
    resharded: S = replace(positions[0], **fields)
    return resharded


def begin_or_resume(loader: ODBDataLoader, remedy: str) -> Iterator[Any]:
    """Return `iter(loader)`; a state that does not fit the loader is an error with a remedy."""
    try:
        return iter(loader)
    except PositionError:  # The state fits, but the loader cannot go to this position.
        raise
    except StateError as error:
        raise StateError(f"{str(error).removesuffix(CHANGE_REMEDY).rstrip()} {remedy}") from error
