"""Convert the files of a checkpoint to another number of ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from odb_nodes._support.checks import check_count
from odb_nodes.core.contract.state_file import load_state, save_state
from odb_nodes.errors import StateError
from odb_nodes.training.checkpoints.rank_parts import reshard_files
from odb_nodes.training.checkpoints.rank_states import rank_file, rank_file_names, rank_files
from odb_nodes.training.checkpoints.resharding import reshard, reshard_parts

__all__ = ["reshard_folder"]

_FIELDS = {"checkpoint": Mapping, "parts": Mapping, "replicated": list, "generators": Mapping}
"""Fields of a file of `Checkpoints`, and their types."""


def reshard_folder(
    folder: str | os.PathLike[str], world_size: int, out: str | os.PathLike[str]
) -> list[Path]:
    """Convert the files of a checkpoint to another number of ranks. See `reshard`.

    Args:
        folder: the folder of a checkpoint of `Checkpoints`, `save_rank_state` or a trainer. Other
            files in it are not copied.
        world_size: the new number of ranks.
        out: the folder to write into; created if needed. For a checkpoint of `Checkpoints` it must
            have the name of `folder`.

    Returns:
        The files, by rank.

    Raises:
        FileNotFoundError: there is no such folder, or the folder has no states.
        TypeError, ValueError: `world_size` is not valid, or `out` has another name.
        StateError: the states cannot be resharded, or `out` has states already.
    """
    folder, out = Path(folder), Path(out)
    world_size = check_count("world_size", world_size)
    files = rank_files(folder)
    states = [*map(load_state, files)]
    if rank_file_names(out):
        raise StateError(f"`{out}` has states already. Give a folder without any.")
    if isinstance(states[0], Mapping) and states[0].keys() == _FIELDS.keys():
        if out.resolve().name != folder.resolve().name:
            raise ValueError(
                f"`out` must have the name of `folder`, by which `Checkpoints` finds it, but is "
                f"`{out}`. Give `{out / folder.resolve().name}`."
            )
        resharded = _of_checkpoints(states, world_size)
    else:
        resharded = reshard(states, world_size)
    prefix, _, _ = files[0].name.rpartition("rank")
    out.mkdir(parents=True, exist_ok=True)
    files = [out / rank_file(rank, world_size, prefix) for rank in range(world_size)]
    for state, file in zip(resharded, files, strict=True):
        save_state(state, file)
    return files


def _of_checkpoints(states: Sequence[Any], world_size: int) -> list[dict[str, Any]]:
    """Return the files of `Checkpoints` for each new rank."""
    for rank, state in enumerate(states):
        fields = state if isinstance(state, Mapping) else {}
        if not all(isinstance(fields.get(name), kind) for name, kind in _FIELDS.items()):
            raise StateError(f"the file of rank {rank} is damaged. Use an earlier checkpoint.")
    if len(states) == world_size:
        return [*states]
    return reshard_files(
        states, world_size, lambda name, parts: reshard_parts(parts, world_size, f"parts[{name!r}]")
    )
