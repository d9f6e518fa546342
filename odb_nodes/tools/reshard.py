"""Make the files of a checkpoint those of another number of ranks."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import odb_nodes.monitor.resharding  # noqa: F401  its rule is followed
from odb_nodes._core.checks import check_count
from odb_nodes.contract.state_file import load_state, save_state
from odb_nodes.errors import StateError
from odb_nodes.loader.resharding import reshard, reshard_parts

__all__ = ["reshard_folder", "states_in"]

_RANK_FILE = re.compile(r"(.*)rank(\d+)-of-(\d+)\.pt")
"""The name of a rank's file: what it begins with, the rank, and the number of ranks."""

_FIELDS = {"checkpoint": Mapping, "parts": Mapping, "replicated": list, "generators": Mapping}
"""What a file of `Checkpoints` has."""


def reshard_folder(
    folder: str | os.PathLike[str], world_size: int, out: str | os.PathLike[str]
) -> list[Path]:
    """Write the files of a checkpoint of another number of ranks. See `reshard`.

    Args:
        folder: the folder of a checkpoint, of `Checkpoints`, `save_rank_state` or a trainer. Its
            other files are not copied.
        world_size: number of ranks from now on.
        out: the folder to write into, made where it does not exist. For a checkpoint of
            `Checkpoints` it must have the name that `folder` has.

    Returns:
        The files, by rank.

    Raises:
        FileNotFoundError: there is no such folder.
        TypeError, ValueError: `world_size` is no number of ranks, or `out` has another name.
        StateError: the states cannot be resharded, or `out` has states already.
    """
    folder, out = Path(folder), Path(out)
    check_count("world_size", world_size)
    states = states_in(folder)
    if out.is_dir() and _rank_files(out):
        raise StateError(f"`{out}` has states already. Give a folder without any.")
    if isinstance(states[0], Mapping) and states[0].keys() == _FIELDS.keys():
        if out.resolve().name != folder.resolve().name:
            raise ValueError(
                f"`out` must have the name of `folder`, by which `Checkpoints` finds it, but is "
                f"`{out}`. Give `{out / folder.resolve().name}`."
            )
        found = _of_checkpoints(states, world_size)
    else:
        found = reshard(states, world_size)
    prefix = _rank_files(folder)[0][1]
    out.mkdir(parents=True, exist_ok=True)
    files = [out / f"{prefix}rank{rank:05d}-of-{world_size:05d}.pt" for rank in range(world_size)]
    for state, file in zip(found, files, strict=True):
        save_state(state, file)
    return files


def _of_checkpoints(states: Sequence[Any], world_size: int) -> list[dict[str, Any]]:
    """Return what `Checkpoints` has of each rank; rank 0 alone has replicated parts."""
    for rank, state in enumerate(states):
        found = state if isinstance(state, Mapping) else {}
        if not all(isinstance(found.get(name), kind) for name, kind in _FIELDS.items()):
            raise StateError(f"the file of rank {rank} is damaged. Use an earlier checkpoint.")
    if len(states) == world_size:
        return [*states]
    replicated = states[0]["replicated"]
    own = [
        {name: one for name, one in state["parts"].items() if name not in replicated}
        for state in states
    ]
    of_parts = {
        name: reshard_parts([one.get(name) for one in own], world_size, f"parts[{name!r}]")
        for name in own[0]
    }
    parts = [{name: of[rank] for name, of in of_parts.items()} for rank in range(world_size)]
    parts[0] |= {name: one for name, one in states[0]["parts"].items() if name in replicated}
    return [
        {
            "checkpoint": states[0]["checkpoint"] | {"rank": rank, "world_size": world_size},
            "parts": parts[rank],
            "replicated": replicated,
            "generators": states[rank % len(states)]["generators"],
        }
        for rank in range(world_size)
    ]


def states_in(folder: Path) -> list[Any]:
    """Return the state of each rank in a folder, in their order."""
    if not folder.is_dir():
        raise FileNotFoundError(
            f"there is no folder `{folder}`: pass the folder of a checkpoint, with a file per rank."
        )
    files = _rank_files(folder)
    found = {int(match[2]): folder / match[0] for match in files}
    if not found and (inner := sorted(one.name for one in folder.iterdir() if one.is_dir())):
        raise StateError(f"`{folder}` has no states, but folders {inner}: pass one of them.")
    if not found:
        raise StateError(
            f"`{folder}` has no states: pass the folder of a checkpoint, with a file per rank."
        )
    if len(kinds := sorted({match[1] for match in files})) > 1:
        raise StateError(
            f"`{folder}` must hold the states of one checkpoint, but has files of several kinds, "
            f"which begin with {kinds}. Give those of the loader a folder of their own."
        )
    sizes = {int(match[3]) for match in files}
    if len(sizes) != 1 or sorted(found) != [*range(min(sizes))]:
        raise StateError(
            f"`{folder}` must hold one state of each rank, but has {sorted(found)} of "
            f"{sorted(sizes)} ranks."
        )
    return [load_state(found[rank]) for rank in sorted(found)]


def _rank_files(folder: Path) -> list[re.Match[str]]:
    return [match for file in folder.iterdir() if (match := _RANK_FILE.fullmatch(file.name))]
