"""The states of all ranks in a folder."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from odb_nodes.contract.state_file import load_state
from odb_nodes.errors import StateError

__all__ = ["RANK_FILE", "states_in"]

RANK_FILE = re.compile(r"(.*)rank(\d+)-of-(\d+)\.pt")
"""The name of a rank's file: what it begins with, the rank, and the number of ranks."""


def states_in(folder: Path) -> list[Any]:
    """Return the state of each rank, in their order."""
    if not folder.is_dir():
        raise FileNotFoundError(
            f"there is no folder `{folder}`: pass the folder of a checkpoint, with a file per rank."
        )
    files = [match for file in folder.iterdir() if (match := RANK_FILE.fullmatch(file.name))]
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
