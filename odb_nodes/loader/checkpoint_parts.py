"""What a checkpoint holds of a rank: the states of its parts, in a file of its own."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from odb_nodes._core.checks import check_type, describe
from odb_nodes._core.codec import explain_unreadable, is_readable
from odb_nodes._core.seeds import load_rngs, save_rngs
from odb_nodes.contract.state_file import load_state, save_state
from odb_nodes.errors import StateError
from odb_nodes.loader.checkpoint_folders import file_name, step_of
from odb_nodes.loader.loader import Loader
from odb_nodes.loader.resharding import reshard_parts
from odb_nodes.loader.resharding.sealed import Ranks, deep_equal

__all__ = ["CheckpointParts", "PartStates"]

logger = logging.getLogger("odb_nodes")

_VERSION = 2


class PartStates(NamedTuple):
    """What was read of a checkpoint: the states of the parts, and of the random generators."""

    folder: Path
    parts: dict[str, Any]
    generators: dict[str, Any]


@runtime_checkable
class _Part(Protocol):
    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


@runtime_checkable
class _ReshardedPart(Protocol):
    """A part that knows itself what another number of ranks goes on with."""

    def reshard_states(self, states: list[Any], world_size: int) -> list[Any]: ...


class CheckpointParts:
    """The parts of a rank that are saved together, and the global random generators."""

    def __init__(self, parts: Any, replicated: Any) -> None:
        self._parts = _check_parts(parts)
        check_type("replicated", replicated, Collection)
        if isinstance(replicated, str) or any(name not in [*self._parts] for name in replicated):
            raise ValueError(
                f"`replicated` must be names of `parts`, of {sorted(self._parts)}, but is "
                f"{replicated!r} instead."
            )
        for name in replicated:
            if isinstance(self._parts[name], Loader):
                raise ValueError(
                    f"`replicated` must not have {name!r}: each rank's loader stands elsewhere, in "
                    "its own share of the data. Leave it out."
                )
        self._replicated = tuple(replicated)

    def names(self) -> dict[str, list[str]]:
        """Return what must be the same on all ranks."""
        return {"parts": sorted(self._parts), "replicated": sorted(self._replicated)}

    def save(self, folder: Path, step: int, rank: int, world_size: int) -> None:
        """Write the file of this rank, atomically."""
        states = {
            name: dict(part) if isinstance(part, dict) else part.state_dict()
            for name, part in self._parts.items()
            if rank == 0 or name not in self._replicated
        }
        state = {
            "checkpoint": _about(step, rank, world_size),
            "parts": states,
            "replicated": sorted(self._replicated),
            "generators": save_rngs(),
        }
        try:
            save_state(state, folder / file_name(rank, world_size))
        except StateError as error:
            if is_readable(states):  # and the file is what is wrong
                raise
            # Dicts first: to look into a large model for what it cannot have takes time and memory.
            order = sorted(states, key=lambda name: not isinstance(self._parts[name], dict))
            place = explain_unreadable({name: states[name] for name in order}, "parts")
            raise StateError(f"the checkpoint of step {step} cannot be saved: {place}") from error

    def read(self, folder: Path, rank: int, ranks: Ranks) -> PartStates:
        """Read what this rank goes on with. Changes no part."""
        if ranks.before == ranks.after:
            state = _read(folder, rank, ranks.after)
            states = state["parts"]
            if rank and (state["replicated"] or self._replicated):
                states |= self._replicated_of(_read(folder, 0, ranks.after))
            return self._checked(PartStates(folder, states, state["generators"]))
        logger.info("`%s` is resharded: %d ranks have saved it, %d load it", folder, *ranks)
        first = _read(folder, 0, ranks.before)
        shared = self._replicated_of(first)
        of_ranks = [{name: one for name, one in first["parts"].items() if name not in shared}]
        generators = [first["generators"]]
        for saved in range(1, ranks.before):
            file = _read(folder, saved, ranks.before)
            of_ranks.append(_kept_once(file["parts"], of_ranks[0]))
            generators.append(file["generators"])
        own = {}
        for name in of_ranks[0]:
            states = [one.get(name) for one in of_ranks]
            own[name] = self._resharded(name, states, ranks.after)[rank]
        return self._checked(PartStates(folder, own | shared, generators[rank % ranks.before]))

    def _resharded(self, name: str, states: list[Any], world_size: int) -> list[Any]:
        """Return the states of a part on all ranks as those of another number of ranks."""
        part = self._parts.get(name)
        if not isinstance(part, _ReshardedPart):
            try:
                return reshard_parts(states, world_size, f"parts[{name!r}]")
            except StateError as error:
                if isinstance(part, Loader):
                    raise
                raise StateError(
                    f"{error} Or give the part a method `reshard_states`: see `Checkpoints`. If "
                    f"the part of rank 0 is right for all, load with `replicated=[{name!r}]`."
                ) from error
        found = part.reshard_states(states, world_size)
        if len(found) != world_size:
            raise ValueError(
                f"`reshard_states` of `parts[{name!r}]` must return the state of each of the "
                f"{world_size} ranks, but returned {len(found)}."
            )
        return found

    def _replicated_of(self, first: Mapping[str, Any]) -> dict[str, Any]:
        """Return the parts in the file of rank 0 that it has written for all, or now stands for."""
        names = {*first["replicated"], *self._replicated}
        return {name: one for name, one in first["parts"].items() if name in names}

    def _checked(self, saved: PartStates) -> PartStates:
        """Return what was read, once it is known to be of these parts."""
        folder, states, _ = saved
        if states.keys() != self._parts.keys():
            raise StateError(
                f"`{folder}` has the parts {sorted(states)}, but this job has "
                f"{sorted(self._parts)}. Give the `parts` that it was saved with."
            )
        for name, part in self._parts.items():
            if isinstance(part, dict):
                _check_keys(f"parts[{name!r}]", part, states[name], folder)
        return saved

    def apply(self, saved: PartStates) -> None:
        """Give each part its state."""
        for changed, (name, part) in enumerate(self._parts.items()):
            state = saved.parts[name]
            try:
                if isinstance(part, dict):
                    part.clear()
                    part.update(state)
                else:
                    part.load_state_dict(state)
            except Exception as error:  # of any kind: a part may be anybody's
                raise StateError(
                    f"`parts[{name!r}]` refuses its state in `{saved.folder}` "
                    f"({type(error).__name__}: {error}). It may have changed in part, and these "
                    f"have changed already: {[*self._parts][:changed]}. Make all of them anew "
                    "before you go on."
                ) from error
        load_rngs(saved.generators)  # last: a part may draw numbers as it loads


def _read(folder: Path, rank: int, world_size: int) -> dict[str, Any]:
    """Read the file of a rank, and check that it is one."""
    path = folder / file_name(rank, world_size)
    try:
        state: Any = load_state(path)
    except (StateError, FileNotFoundError) as error:
        raise StateError(f"{error} Remove `{folder}` to go on from the one before.") from error
    expected = _about(step_of(folder.name), rank, world_size)
    found = state.get("checkpoint") if isinstance(state, dict) else None
    if found != expected:
        raise StateError(
            f"`{path}` must be the file of {expected}, but is that of {found!r:.200}. Remove "
            f"`{folder}` to go on from the one before."
        )
    return dict(state)


def _about(step: int, rank: int, world_size: int) -> dict[str, int]:
    return {"version": _VERSION, "step": step, "rank": rank, "world_size": world_size}


def _kept_once(parts: Mapping[str, Any], first: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a rank; those that are equal to the first one's take no memory more."""
    return {
        name: first[name] if name in first and deep_equal(one, first[name]) else one
        for name, one in parts.items()
    }


def _check_keys(place: str, part: dict[Any, Any], state: object, folder: Path) -> None:
    """Check that loading a dict would remove nothing from it, nor from the dicts in it."""
    if not isinstance(state, dict):
        raise StateError(
            f"`{place}` is a dict, but in `{folder}` it is {describe(state)}. Give the "
            "`parts` that it was saved with."
        )
    if newer := [key for key in part if key not in state]:
        raise StateError(
            f"`{place}` has the keys {newer}, but `{folder}` was saved without them. Add them "
            "after `load`, with the values that they should have by then."
        )
    for key, value in part.items():
        if isinstance(value, dict):
            _check_keys(f"{place}[{key!r}]", value, state[key], folder)


def _check_parts(parts: Any) -> dict[str, Any]:
    check_type("parts", parts, Mapping, 'Name them: `{"model": model, "loader": loader}`.')
    if not parts:
        raise ValueError(
            "`parts` must have what is to be saved, but is empty instead. Name it: "
            '`{"model": model, "loader": loader}`.'
        )
    for name, part in parts.items():
        check_type("a name in `parts`", name, str)
        if isinstance(part, type) or not isinstance(part, dict | _Part):
            remedy = (
                "Give an object of it." if isinstance(part, type) else "Put numbers into a dict."
            )
            raise TypeError(
                f"`parts[{name!r}]` must be a dict, or have `state_dict` and `load_state_dict`, "
                f"but is {describe(part)} instead. {remedy}"
            )
    return dict(parts)
