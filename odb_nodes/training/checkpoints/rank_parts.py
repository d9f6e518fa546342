"""The parts of a training loop on one rank: their states in a file, for any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchdata.nodes import Stateful

from odb_nodes._support.checks import check_type, describe
from odb_nodes._support.content import explain_unreadable, is_readable
from odb_nodes._support.difference import difference
from odb_nodes._support.seeds import save_rngs
from odb_nodes.core.alignment.exchange import group_rank
from odb_nodes.core.contract.state_file import load_state, save_state
from odb_nodes.core.loader.loader import Loader
from odb_nodes.core.loader.reshard_states import Ranks
from odb_nodes.errors import StateError
from odb_nodes.training.checkpoints.checkpoint_folders import Save
from odb_nodes.training.checkpoints.rank_states import log_resharding, rank_file
from odb_nodes.training.checkpoints.resharding import (
    check_saved_between_steps,
    data_place,
    reshard,
    reshard_parts,
)

if TYPE_CHECKING:
    from odb_nodes.core.alignment.exchange.base import ProcessGroupLike

_VERSION = 2


class RankParts:
    """The parts of a rank that are saved together, and the global random generators."""

    def __init__(self, parts: Any, replicated: Any, process_group: ProcessGroupLike) -> None:
        self._parts = _check_parts(parts)
        self._process_group = process_group
        check_type("replicated", replicated, Collection)
        if isinstance(replicated, str) or any(name not in [*self._parts] for name in replicated):
            raise ValueError(
                f"`replicated` must be names of `parts`, of {sorted(self._parts)}, but is "
                f"{replicated!r} instead."
            )
        for name in replicated:
            if isinstance(self._parts[name], Loader):
                raise ValueError(
                    f"`replicated` must not have {name!r}: the loader of each rank has another "
                    "state. Leave it out."
                )
        self._replicated = tuple(replicated)

    def names(self) -> dict[str, list[str]]:
        """Return the names, which must be equal on all ranks."""
        return {"parts": sorted(self._parts), "replicated": sorted(self._replicated)}

    def save(self, folder: Path, step: int, rank: int, world_size: int) -> None:
        """Write the file of this rank, atomically."""
        states = {
            name: dict(part) if isinstance(part, dict) else part.state_dict()
            for name, part in self._parts.items()
            if rank == 0 or name not in self._replicated
        }
        for part_state in states.values():
            check_saved_between_steps(part_state)
        state = {
            "checkpoint": _about(step, rank, world_size),
            "parts": states,
            "replicated": sorted(self._replicated),
            "generators": save_rngs(),
        }
        try:
            save_state(state, folder / rank_file(rank, world_size, ""))
        except StateError as error:
            if is_readable(states):  # The error is about the file, not about the states.
                raise
            # Dicts first: to search a large model takes time and memory.
            order = sorted(states, key=lambda name: not isinstance(self._parts[name], dict))
            place = explain_unreadable({name: states[name] for name in order}, "parts")
            raise StateError(f"the checkpoint of step {step} cannot be saved: {place}") from error

    def read(self, folder: Path, rank: int, ranks: Ranks) -> tuple[dict[str, Any], Any]:
        """Return the states of this rank's parts, and the state of its random generators."""
        file = _read_rank_file(folder, rank, ranks.after) if ranks.before == ranks.after else None
        if file is not None and self._is_of_this_rank(file["parts"]):
            shared = {*file["replicated"], *self._replicated}
            first = _read_rank_file(folder, 0, ranks.after) if rank and shared else file
        else:
            log_resharding(folder, *ranks)
            files = [_read_rank_file(folder, 0, ranks.before)]
            for old_rank in range(1, ranks.before):
                file = _read_rank_file(folder, old_rank, ranks.before)
                files.append({**file, "parts": _without_copies(file["parts"], files[0]["parts"])})
            shared = {*files[0]["replicated"], *self._replicated}
            files[0]["replicated"] = sorted(shared)
            files = reshard_files(files, ranks.after, partial(self._resharded, ranks.after))
            file, first = files[rank], files[0]
        states = file["parts"] | {name: first["parts"][name] for name in shared & {*first["parts"]}}
        self._check(states, folder)
        return states, file["generators"]

    def _is_of_this_rank(self, states: Mapping[str, Any]) -> bool:
        """Tell whether the loaders' states are of this rank of `process_group`."""
        if self._process_group is None:
            return True
        place = group_rank(self._process_group)
        return all(
            data_place(state) in (None, place)
            for name, state in states.items()
            if isinstance(self._parts.get(name), Loader)
        )

    def _resharded(self, world_size: int, name: str, states: list[Any]) -> list[Any]:
        """Return the states of a part, given for all old ranks, for `world_size` ranks."""
        part: Any = self._parts.get(name)
        if isinstance(part, Loader) and self._process_group is not None:
            rank, size = group_rank(self._process_group)
            return [reshard(states, size)[rank]] * world_size  # only this rank's state is used
        if not hasattr(part, "reshard_states"):
            try:
                return reshard_parts(states, world_size, f"parts[{name!r}]")
            except StateError as error:
                if isinstance(part, Loader):
                    raise
                raise StateError(
                    f"{error} Or give the part a method `reshard_states`: see `Checkpoints`. If "
                    "the part of rank 0 is right for all ranks, load with "
                    f"`replicated=[{name!r}]`."
                ) from error
        resharded: list[Any] = part.reshard_states(states, world_size)
        if len(resharded) != world_size:
            raise ValueError(
                f"`reshard_states` of `parts[{name!r}]` must return the state of each of the "
                f"{world_size} ranks, but returned {len(resharded)}."
            )
        return resharded

    def _check(self, states: Mapping[str, Any], folder: Path) -> None:
        """Check that the states fit the parts."""
        if states.keys() != self._parts.keys():
            raise StateError(
                f"`{folder}` has the parts {sorted(states)}, but this job has "
                f"{sorted(self._parts)}. Give the `parts` that were saved."
            )
        for name, part in self._parts.items():
            if isinstance(part, dict):
                _check_keys(f"parts[{name!r}]", part, states[name], folder)

    def apply(self, states: Mapping[str, Any], folder: Path) -> None:
        """Give each part its state."""
        for changed, (name, part) in enumerate(self._parts.items()):
            try:
                if isinstance(part, dict):
                    part.clear()
                    part.update(states[name])
                else:
                    part.load_state_dict(states[name])
            except Exception as error:  # a part may be any object
                raise StateError(
                    f"`parts[{name!r}]` refuses its state in `{folder}` "
                    f"({type(error).__name__}: {error}). It may have changed in part, and these "
                    f"parts have changed already: {[*self._parts][:changed]}. Create all of them "
                    "again before you continue."
                ) from error


def reshard_files(
    files: Sequence[Mapping[str, Any]],
    world_size: int,
    reshard_part: Callable[[str, list[Any]], list[Any]],
) -> list[dict[str, Any]]:
    """Return the files of a checkpoint for `world_size` ranks, given the files of all old ranks.

    reshard_part: name and states of a part on the old ranks -> its states on the new ranks.
    """
    first = files[0]
    parts = {
        name: reshard_part(name, [file["parts"].get(name) for file in files])
        for name in first["parts"]
        if name not in first["replicated"]
    }
    new = [
        {
            "checkpoint": first["checkpoint"] | {"rank": rank, "world_size": world_size},
            "parts": {name: states[rank] for name, states in parts.items()},
            "replicated": first["replicated"],
            "generators": files[rank % len(files)]["generators"],
        }
        for rank in range(world_size)
    ]
    new[0]["parts"] = {**first["parts"], **new[0]["parts"]}
    return new


def _read_rank_file(folder: Path, rank: int, world_size: int) -> dict[str, Any]:
    """Read the file of a rank, and check that it is of this rank and step."""
    remedy = f"Remove `{folder}` to continue from the checkpoint before it."
    path = folder / rank_file(rank, world_size, "")
    try:
        state: Any = load_state(path)
    except (StateError, FileNotFoundError) as error:
        raise StateError(f"{error} {remedy}") from error
    expected = _about(Save.of(folder.name).step, rank, world_size)
    about = state.get("checkpoint") if isinstance(state, dict) else None
    if about != expected:
        raise StateError(
            f"`{path}` must be the file of {expected}, but is the file of {about!r:.200}. {remedy}"
        )
    return dict(state)


def _about(step: int, rank: int, world_size: int) -> dict[str, int]:
    return {"version": _VERSION, "step": step, "rank": rank, "world_size": world_size}


def _without_copies(parts: Mapping[str, Any], first: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a rank, with the objects of rank 0 for equal parts: saves memory."""
    return {
        name: first[name] if name in first and not difference(state, first[name]) else state
        for name, state in parts.items()
    }


def _check_keys(place: str, part: dict[Any, Any], state: object, folder: Path) -> None:
    """Check that a dict, and the dicts in it, would lose no key when they are loaded."""
    if not isinstance(state, dict):
        raise StateError(
            f"`{place}` is a dict, but in `{folder}` it is {describe(state)}. Give the `parts` "
            "that were saved."
        )
    if newer := [key for key in part if key not in state]:
        raise StateError(
            f"`{place}` has the keys {newer}, but `{folder}` was saved without them. Add them "
            "after `load`."
        )
    for key, value in part.items():
        if isinstance(value, dict):
            _check_keys(f"{place}[{key!r}]", value, state[key], folder)


def _check_parts(parts: Any) -> dict[str, Any]:
    check_type("parts", parts, Mapping, 'Name them: `{"model": model, "loader": loader}`.')
    if not parts:
        raise ValueError(
            "`parts` must name objects to save, but is empty instead. Name them: "
            '`{"model": model, "loader": loader}`.'
        )
    for name, part in parts.items():
        check_type(f"the name {name!r} in parts", name, str)
        if isinstance(part, type) or not isinstance(part, dict | Stateful):
            remedy = (
                "Pass an object of it." if isinstance(part, type) else "Put numbers into a dict."
            )
            raise TypeError(
                f"`parts[{name!r}]` must be a dict, or have `state_dict` and `load_state_dict`, "
                f"but is {describe(part)} instead. {remedy}"
            )
    return dict(parts)
