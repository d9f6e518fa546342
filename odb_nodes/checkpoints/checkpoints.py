"""Checkpoints of a training loop: saved by all ranks, and found again after a kill at any time."""

from __future__ import annotations

import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torchdata.nodes import Stateful

from odb_nodes._core.checks import check_count, check_seconds, check_type, describe
from odb_nodes._core.content import difference, explain_unreadable, is_readable
from odb_nodes._core.files import sync_folder
from odb_nodes._core.seeds import load_rngs, save_rngs
from odb_nodes._core.text import named_ranks
from odb_nodes._core.user_warning import warn_user
from odb_nodes.alignment.exchange import Meeting, group_rank
from odb_nodes.checkpoints.checkpoint_folders import (
    CheckpointFolders,
    Contents,
    choose,
    gone_files,
    number_of,
    step_of,
)
from odb_nodes.checkpoints.rank_states import rank_file
from odb_nodes.checkpoints.resharding import (
    check_saved_between_steps,
    data_place,
    reshard,
    reshard_parts,
)
from odb_nodes.contract.state_file import load_state, save_state
from odb_nodes.errors import PeerError, StateError
from odb_nodes.loader.loader import Loader
from odb_nodes.loader.reshard_nodes import Ranks

logger = logging.getLogger("odb_nodes")

_LOOKS, _PAUSE_S = 10, 0.5  # for all ranks to see what one sees of a shared file system
_VERSION = 2


class Checkpoints:
    """Saves all parts of a training loop, on one rank or many, and loads the newest checkpoint.

        parts = {"model": model, "optimizer": optimizer, "loader": loader}
        checkpoints = Checkpoints(folder, parts)
        step = checkpoints.load()  # 0 if there is none
        ...
        checkpoints.save(step)  # where an optimizer step ends

    A run goes on in its folder by `load`; a new run needs a folder of its own. Every rank calls
    `load` and `save`, at the same steps, and writes its own file. A checkpoint counts when the
    files of all ranks are there, so a job may be killed at any time. The global random generators
    (Python's, numpy's, torch's) are saved with the parts.

    Args:
        folder: folder of the checkpoints, on a disk that all ranks share; created if needed. Each
            checkpoint is a folder in it.
        parts: name -> object with `state_dict` and `load_state_dict`, or dict of plain data and
            tensors, which `load` updates in place. A key that the checkpoint lacks is an error: set
            it after `load`. A part that differs between ranks may have a method
            `reshard_states(states, world_size)`: the states of all ranks that saved -> one state
            for each of `world_size` ranks.
        keep: number of complete checkpoints to keep. `save` removes older ones, of those that were
            saved here or were in the folder when `load` was called.
        replicated: names of parts that are equal on all ranks, and that rank 0 alone writes: under
            DDP the model and the optimizer; never sharded ones (FSDP, ZeRO), nor the loader. The
            checkpoint records them, so `load` needs no names.
        timeout_s: seconds to wait for another rank before it is an error.
        process_group: the loaders' `process_group`, if some ranks read the same data: a
            `DeviceMesh`.

    Raises:
        TypeError, ValueError: an argument is not valid.
    """

    # Why nothing is mixed up: the ranks agree on the number of the next save and on an identifier
    # of the run, once, and count on alike. So each save has a folder that no other run writes into,
    # and the same save never writes twice.
    #
    # Why nothing is lost: only a rank that sees its own save complete removes older ones. A save
    # that is complete has been reached by all ranks, so none still loads or writes an older one.
    # Folders that appeared in neither `load` nor a save of this object are never removed.

    def __init__(
        self,
        folder: str | os.PathLike[str],
        parts: Mapping[str, Any],
        *,
        keep: int = 2,
        replicated: Sequence[str] = (),
        timeout_s: float = 600.0,
        process_group: Any = None,
    ) -> None:
        check_type("folder", folder, str | os.PathLike)
        if Path(folder).exists() and not Path(folder).is_dir():
            raise ValueError(
                f"`folder` must be a folder, but `{folder}` is none. Pass another path."
            )
        self._folders = CheckpointFolders(Path(folder))
        self._parts = _Parts(parts, replicated, process_group)
        self._keep = check_count("keep", keep)
        check_seconds("timeout_s", timeout_s)
        self._timeout_s = timeout_s
        self._channel = Meeting("Checkpoints", None, timeout_s)
        self._run = ""  # the identifier, once the ranks have agreed
        self._known: dict[str, int] | None = None  # that this run may remove, once agreed
        self._number = self._before = 0  # of the last save, and of that before it
        self._own: list[Path] = []  # the last two of this run
        self._begun: Path | None = None  # where a save has failed

    def folders(self) -> list[Path]:
        """Return the folders of the complete checkpoints, the newest one last. Asks no rank."""
        return self._folders.complete()

    def load(self) -> int:
        """Load the newest checkpoint that is complete. Every rank calls it.

        No part is changed before all ranks have read their files whole. If another number of
        ranks has saved it, loaders among the parts are resharded, see `reshard`, and parts that
        have `reshard_states`, such as a `Monitor`; all other parts must be `replicated`, or equal
        on all ranks. A rank then takes the random generators of one of the old ranks.

        Returns:
            The step that it was saved at; 0 if there is no checkpoint, and nothing is changed.

        Raises:
            StateError: the checkpoint is of other parts, is damaged, has lost the file of a rank,
                or cannot be resharded; a dict among the parts has keys that it lacks; or not all
                ranks see it. No part is changed.
                Or a part refused its state: then the error names those that have changed.
            PeerError: a rank failed, or did not come within `timeout_s`.
        """
        known = self._meet()
        for look in range(_LOOKS):  # All ranks see the same views, and so look equally often.
            time.sleep(_PAUSE_S if look else 0)
            told = self._gather(self._folders.contents())
            views = [{name: Contents(*one) for name, one in view.items()} for view in told]
            name, newest = choose(views)
            if name == newest:
                break
        if newest is None:
            if unfinished := sorted(views[0]):
                warn_user(
                    f"`{self._folders.root}` has no complete checkpoint, but unfinished ones: "
                    f"{unfinished}. Ranks were stopped while they saved, or saved different steps. "
                    "The run begins anew, and leaves these folders: remove them when you like."
                )
            self._known = {}
            return 0
        with self._together(f"loading the checkpoint `{name or newest}`"):
            if gone := gone_files(newest, views):
                raise self._damaged(newest, gone)
            if name is None:
                raise self._not_shared(newest, views)
            ranks = Ranks(views[0][name].world_size, self._channel.world_size)
            folder = self._folders.root / name
            states, generators = self._parts.read(folder, self._channel.rank, ranks)
        with self._together(f"loading the checkpoint `{name}`"):
            self._parts.apply(states, folder)
            load_rngs(generators)  # last: a part may draw numbers as it loads
        # Older folders were left by runs that began anew: they are not this run's to remove.
        oldest = min(number_of(one) for view in views for one in view if not view[one].missing)
        self._known = {one: number for one, number in known.items() if number >= oldest}
        return step_of(name)

    def save(self, step: int) -> Path:
        """Save a checkpoint. Every rank calls it, at the same step.

        No rank waits for another one, except in the first call of a job that has not called `load`,
        and if another rank is two saves behind.

        Args:
            step: the number of the step, which `load` returns.

        Returns:
            The folder of the checkpoint. It counts once all ranks have written their files.

        Raises:
            TypeError, ValueError: `step` is not a number of steps.
            StateError: a loader stands within an optimizer step; a part holds something else than
                plain data and tensors; or the folder holds checkpoints, and `load` was not called,
                or raised.
            PeerError: a rank did not come, or has not saved, within `timeout_s`; or it saves
                another step, which is seen in this call or the next.
        """
        step = check_count("step", step, minimum=0)
        if self._known is None:
            self._known = self._begin_new_run()
        if len(self._own) == 2:
            self._await(self._own[0])
            del self._own[0]
        if self._begun is None:
            self._before = self._number
        else:  # A save has failed: its cause may last.
            self._check_saves(self._begun)
        if self._begun is None or step_of(self._begun.name) != step:  # else it is tried again
            self._number += 1
            self._begun = self._folders.folder(self._number, step, self._run)
            self._known[self._begun.name] = self._number
        folder = self._begun
        folder.mkdir(parents=True, exist_ok=True)  # also shows the others which step it is
        self._check_saves(folder)
        self._parts.save(folder, step, self._channel.rank, self._channel.world_size)
        sync_folder(self._folders.root)
        self._begun = None
        self._own.append(folder)
        self._folders.clean(folder, self._keep, self._known)
        return folder

    def _check_saves(self, *begun: Path) -> None:
        self._folders.check_saves([*self._own, *begun], self._channel.rank, self._before)

    def _meet(self) -> dict[str, int]:
        """Agree on the identifier of the run and the number of a save; return those of all."""
        self._known = None
        self._channel.begin()
        self._channel.agree({**self._parts.names(), "keep": self._keep})
        told = self._gather([secrets.token_hex(4), self._folders.numbers()])
        known = {name: number for _, numbers in told for name, number in numbers.items()}
        self._run, self._number = told[0][0], max(known.values(), default=0)
        self._own, self._begun = [], None
        return known

    def _begin_new_run(self) -> dict[str, int]:
        """Meet for the first save, in a folder that holds no checkpoint of another run."""
        known = self._meet()
        views = self._gather([*self._folders.contents()])
        if saved := sorted({name for view in views for name in view}):
            raise StateError(
                "`folder` must have no checkpoints that were not loaded, but "
                f"`{self._folders.root}` has {len(saved)}, up to `{saved[-1]}`. Call `load()` "
                "before the first `save` to go on from the newest complete checkpoint, or give a "
                "new run another `folder`."
            )
        return known

    def _gather(self, own: Any) -> list[Any]:
        """Return what each rank gives, as JSON data."""
        told = self._channel.gather_bytes(json.dumps(own).encode(), "loading a checkpoint")
        return list(map(json.loads, told))

    @contextmanager
    def _together(self, where: str) -> Iterator[None]:
        """Go on once all ranks have come to the end of this context; raise if one raises in it."""
        try:
            yield
        except Exception as error:
            self._channel.fail(error, where)
            raise
        self._gather(None)

    def _await(self, folder: Path) -> None:
        """Wait until a checkpoint is complete, or so old that it has been removed."""
        deadline = time.monotonic() + self._timeout_s
        while (found := self._folders.contents_of(folder)) and found.missing:
            self._check_saves()
            if time.monotonic() < deadline:
                time.sleep(_PAUSE_S / 10)
                continue
            has = "has" if len(found.missing) == 1 else "have"
            raise PeerError(
                f"{named_ranks(found.missing)} {has} not saved the checkpoint `{folder}` within "
                f"{self._timeout_s} s (`timeout_s`), though this rank has saved one since. All "
                "ranks must call `save`, at the same steps, and share the disk of that folder."
            )

    def _damaged(self, newest: str, gone: Sequence[int]) -> StateError:
        files = "file" if len(gone) == 1 else "files"
        return StateError(
            f"`{self._folders.root / newest}` was complete, but the {files} of "
            f"{named_ranks(gone)} cannot be found now. Put what is missing back; or remove the "
            "folder to go on from the checkpoint before it, or, if there is none, to begin anew."
        )

    def _not_shared(self, newest: str, views: Sequence[Mapping[str, Contents]]) -> StateError:
        seen = "; ".join(
            f"rank {rank} sees the files of "
            f"{view[newest].world_size - len(view[newest].missing) if newest in view else 0} ranks"
            for rank, view in enumerate(views)
        )
        return StateError(
            f"`{self._folders.root / newest}` is complete, but not every rank sees all of its "
            f"files: {seen}. Use a folder on a disk that all ranks share."
        )


# --- what a checkpoint holds of a rank: the states of its parts, in a file of its own -------------


class _Parts:
    """The parts of a rank that are saved together, and the global random generators."""

    def __init__(self, parts: Any, replicated: Any, process_group: Any) -> None:
        self._parts, self._process_group = _check_parts(parts), process_group
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
        for one in states.values():
            check_saved_between_steps(one)
        state = {
            "checkpoint": _about(step, rank, world_size),
            "parts": states,
            "replicated": sorted(self._replicated),
            "generators": save_rngs(),
        }
        try:
            save_state(state, folder / rank_file(rank, world_size, ""))
        except StateError as error:
            if is_readable(states):  # and the file is what is wrong
                raise
            # Dicts first: to look into a large model for what it cannot have takes time and memory.
            order = sorted(states, key=lambda name: not isinstance(self._parts[name], dict))
            place = explain_unreadable({name: states[name] for name in order}, "parts")
            raise StateError(f"the checkpoint of step {step} cannot be saved: {place}") from error

    def read(self, folder: Path, rank: int, ranks: Ranks) -> tuple[dict[str, Any], Any]:
        """Return the states that this rank goes on with, and that of its random generators."""
        own = _read(folder, rank, ranks.after) if ranks.before == ranks.after else None
        if own is not None and self._is_of_these_ranks(own["parts"]):
            shared = {*own["replicated"], *self._replicated}
            first = _read(folder, 0, ranks.after) if rank and shared else own
        else:
            logger.info("`%s` is resharded: %d ranks have saved it, %d load it", folder, *ranks)
            files = [_read(folder, 0, ranks.before)]
            for saved in range(1, ranks.before):
                file = _read(folder, saved, ranks.before)
                files.append({**file, "parts": _kept_once(file["parts"], files[0]["parts"])})
            shared = {*files[0]["replicated"], *self._replicated}
            files[0]["replicated"] = sorted(shared)
            files = reshard_files(files, ranks.after, partial(self._resharded, ranks.after))
            own, first = files[rank], files[0]
        states = own["parts"] | {name: first["parts"][name] for name in shared & {*first["parts"]}}
        self._check(states, folder)
        return states, own["generators"]

    def _is_of_these_ranks(self, states: Mapping[str, Any]) -> bool:
        """Tell whether the loaders are those of this rank of `process_group`."""
        if self._process_group is None:
            return True
        here = group_rank(self._process_group)
        loaders = [one for name, one in states.items() if isinstance(self._parts.get(name), Loader)]
        return all(data_place(one) in (None, here) for one in loaders)

    def _resharded(self, world_size: int, name: str, states: list[Any]) -> list[Any]:
        """Return the states of a part on all ranks as those of another number of ranks."""
        part: Any = self._parts.get(name)
        if isinstance(part, Loader) and self._process_group is not None:
            rank, size = group_rank(self._process_group)
            return [reshard(states, size)[rank]] * world_size  # of which this rank takes its own
        if not hasattr(part, "reshard_states"):
            try:
                return reshard_parts(states, world_size, f"parts[{name!r}]")
            except StateError as error:
                if isinstance(part, Loader):
                    raise
                raise StateError(
                    f"{error} Or give the part a method `reshard_states`: see `Checkpoints`. If "
                    f"the part of rank 0 is right for all, load with `replicated=[{name!r}]`."
                ) from error
        found: list[Any] = part.reshard_states(states, world_size)
        if len(found) != world_size:
            raise ValueError(
                f"`reshard_states` of `parts[{name!r}]` must return the state of each of the "
                f"{world_size} ranks, but returned {len(found)}."
            )
        return found

    def _check(self, states: Mapping[str, Any], folder: Path) -> None:
        """Check that what was read is of these parts."""
        if states.keys() != self._parts.keys():
            raise StateError(
                f"`{folder}` has the parts {sorted(states)}, but this job has "
                f"{sorted(self._parts)}. Give the `parts` that it was saved with."
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
            except Exception as error:  # of any kind: a part may be anybody's
                raise StateError(
                    f"`parts[{name!r}]` refuses its state in `{folder}` "
                    f"({type(error).__name__}: {error}). It may have changed in part, and these "
                    f"have changed already: {[*self._parts][:changed]}. Make all of them anew "
                    "before you go on."
                ) from error


def reshard_files(
    files: Sequence[Mapping[str, Any]],
    world_size: int,
    reshard_part: Callable[[str, list[Any]], list[Any]],
) -> list[dict[str, Any]]:
    """Return the files of a checkpoint of so many ranks, given those of all that have saved one.

    `reshard_part`: name and states of a part on all ranks -> its states on the new ranks.
    """
    replicated = files[0]["replicated"]
    own = [name for name in files[0]["parts"] if name not in replicated]
    parts = {name: reshard_part(name, [file["parts"].get(name) for file in files]) for name in own}
    new = [
        {
            "checkpoint": files[0]["checkpoint"] | {"rank": rank, "world_size": world_size},
            "parts": {name: states[rank] for name, states in parts.items()},
            "replicated": replicated,
            "generators": files[rank % len(files)]["generators"],
        }
        for rank in range(world_size)
    ]
    new[0]["parts"] |= {name: files[0]["parts"][name] for name in {*files[0]["parts"]} - {*own}}
    return new


def _read(folder: Path, rank: int, world_size: int) -> dict[str, Any]:
    """Read the file of a rank, and check that it is one."""
    path = folder / rank_file(rank, world_size, "")
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
        name: first[name] if name in first and not difference(one, first[name]) else one
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
        if isinstance(part, type) or not isinstance(part, dict | Stateful):
            remedy = (
                "Give an object of it." if isinstance(part, type) else "Put numbers into a dict."
            )
            raise TypeError(
                f"`parts[{name!r}]` must be a dict, or have `state_dict` and `load_state_dict`, "
                f"but is {describe(part)} instead. {remedy}"
            )
    return dict(parts)
