"""What a checkpoint holds of a rank: the states of its parts, in a file of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from odb_nodes._core.checks import check_type, describe
from odb_nodes._core.seeds import load_rngs, save_rngs
from odb_nodes.contract.state_file import load_state, save_state
from odb_nodes.errors import StateError
from odb_nodes.loader.checkpoint_folders import file_name, step_of

__all__ = ["CheckpointParts"]

_VERSION = 1


@runtime_checkable
class _Part(Protocol):
    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


class CheckpointParts:
    """The parts of a rank that are saved together, and the global random generators.

    Args:
        parts: by name; see `Checkpoints`.
        replicated: names of those that rank 0 writes for all.

    Raises:
        TypeError, ValueError: an argument is not what is said there.
    """

    def __init__(self, parts: Any, replicated: Any) -> None:
        self._parts = _check_parts(parts)
        if isinstance(replicated, str) or not {*replicated} <= self._parts.keys():
            raise ValueError(
                f"`replicated` must be names of `parts`, of {sorted(self._parts)}, but is "
                f"{replicated!r} instead."
            )
        self._replicated = tuple(replicated)

    def names(self) -> dict[str, list[str]]:
        """Return what must be the same on all ranks."""
        return {"parts": sorted(self._parts), "replicated": sorted(self._replicated)}

    def save(self, folder: Path, step: int, rank: int, world_size: int) -> None:
        """Write the file of this rank, atomically.

        Raises:
            StateError: a part holds something else than plain data and tensors.
        """
        states = {
            name: dict(part) if isinstance(part, dict) else part.state_dict()
            for name, part in self._parts.items()
            if rank == 0 or name not in self._replicated
        }
        about = {"version": _VERSION, "step": step, "rank": rank, "world_size": world_size}
        state = {"checkpoint": about, "parts": states, "generators": save_rngs()}
        save_state(state, folder / file_name(rank, world_size))

    def load(self, folder: Path, rank: int, world_size: int) -> None:
        """Load the file of this rank, and what rank 0 wrote for all.

        Raises:
            StateError: a file is damaged, or has other parts.
        """
        state = _read(folder, rank, world_size)
        states = state["parts"]
        if rank and self._replicated:
            shared = _read(folder, 0, world_size)["parts"]
            states |= {name: shared[name] for name in self._replicated if name in shared}
        if states.keys() != self._parts.keys():
            raise StateError(
                f"`{folder}` has the parts {sorted(states)}, but this job has "
                f"{sorted(self._parts)}. Give the `parts` and `replicated` that it was saved with."
            )
        for name, part in self._parts.items():
            if isinstance(part, dict):
                part.clear()
                part.update(states[name])
            else:
                part.load_state_dict(states[name])
        load_rngs(state["generators"])  # last: a part may draw numbers as it loads


def _read(folder: Path, rank: int, world_size: int) -> dict[str, Any]:
    """Read the file of a rank, and check that it is one.

    Raises:
        StateError: it is damaged, gone, or of something else.
    """
    path = folder / file_name(rank, world_size)
    try:
        state: Any = load_state(path)
    except (StateError, FileNotFoundError) as error:
        raise StateError(f"{error} Remove `{folder}` to go on from the one before.") from error
    expected = {
        "version": _VERSION,
        "step": step_of(folder.name),
        "rank": rank,
        "world_size": world_size,
    }
    found = state.get("checkpoint") if isinstance(state, dict) else None
    if found != expected:
        raise StateError(
            f"`{path}` must be the file of {expected}, but is that of {found!r:.200}. Remove "
            f"`{folder}` to go on from the one before."
        )
    return dict(state)


def _check_parts(parts: Any) -> dict[str, Any]:
    check_type("parts", parts, Mapping, 'Name them: `{"model": model, "loader": loader}`.')
    for name, part in parts.items():
        check_type("a name in `parts`", name, str)
        if not isinstance(part, dict | _Part):
            raise TypeError(
                f"`parts[{name!r}]` must be a dict, or have `state_dict` and `load_state_dict`, "
                f"but is {describe(part)} instead. Put numbers into a dict."
            )
    return dict(parts)
