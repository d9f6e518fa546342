"""Checkpoints of a training loop: saved by all ranks, and safe against a kill at any time."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from odb_nodes._support.checks import check_count, check_seconds
from odb_nodes._support.files import check_folder, sync_folder
from odb_nodes._support.seeds import load_rngs
from odb_nodes._support.text import named_ranks
from odb_nodes._support.user_warning import warn_user
from odb_nodes.core.alignment.exchange import Meeting
from odb_nodes.core.loader.reshard_states import Ranks
from odb_nodes.errors import PeerError, StateError
from odb_nodes.training.checkpoints.checkpoint_folders import (
    CheckpointFolders,
    Contents,
    Save,
    choose,
    missing_files,
)
from odb_nodes.training.checkpoints.rank_parts import RankParts

if TYPE_CHECKING:
    from odb_nodes.core.alignment.exchange.base import ProcessGroupLike

_LOOKS, _PAUSE_S = 10, 0.5  # until all ranks see the files of a shared file system


class Checkpoints:
    """Saves all parts of a training loop, on one rank or many, and loads the newest checkpoint.

        parts = {"model": model, "optimizer": optimizer, "loader": loader}
        checkpoints = Checkpoints(folder, parts)
        step = checkpoints.load()  # 0 if there is none
        ...
        checkpoints.save(step)  # where an optimizer step ends

    `load` continues the run in the folder; a new run needs a new folder. Every rank calls `load`
    and `save`, at the same steps, and writes one file. A checkpoint counts when it has the files of
    all ranks, so a job may be killed at any time. The global random generators (Python's, numpy's,
    torch's) are saved with the parts.

    Args:
        folder: folder of the checkpoints, on a disk that all ranks share; created if needed. Each
            checkpoint is a folder in it.
        parts: name -> object with `state_dict` and `load_state_dict`, or dict of plain data and
            tensors, which `load` updates in place. A key that the checkpoint lacks is an error: set
            it after `load`. A part that differs between ranks may have a method
            `reshard_states(states, world_size)`, which turns the states of all ranks that saved
            into one state for each of `world_size` ranks.
        keep: number of complete checkpoints to keep. `save` removes older ones, if they were
            saved by this object or were in the folder when `load` was called.
        replicated: names of parts that are equal on all ranks, which only rank 0 writes: under DDP
            the model and the optimizer; never sharded parts (FSDP, ZeRO), nor the loader. The
            checkpoint records them, so `load` needs no names.
        timeout_s: seconds to wait for another rank before it is an error.
        process_group: the loaders' `process_group`, if some ranks read the same data: a
            `DeviceMesh`.

    Raises:
        TypeError, ValueError: an argument is not valid.
    """

    # Why saves never mix: the ranks agree once on the number of the next save and on an identifier
    # of the run, and count on from there. So each save has a folder that no other run writes into,
    # and no file is written twice.
    #
    # Why no checkpoint is lost: a rank removes older checkpoints only after it sees its own save
    # complete. Then all ranks have reached that save, and none loads or writes an older one.
    # Folders that appeared in neither `load` nor a save of this object are never removed.

    def __init__(
        self,
        folder: str | os.PathLike[str],
        parts: Mapping[str, Any],
        *,
        keep: int = 2,
        replicated: Sequence[str] = (),
        timeout_s: float = 600.0,
        process_group: ProcessGroupLike = None,
    ) -> None:
        self._folders = CheckpointFolders(check_folder(folder))
        self._parts = RankParts(parts, replicated, process_group)
        self._keep = check_count("keep", keep)
        check_seconds("timeout_s", timeout_s)
        self._timeout_s = timeout_s
        self._channel = Meeting("Checkpoints", None, timeout_s)
        self._run = ""  # identifier of the run, once the ranks have agreed
        self._removable: dict[str, int] | None = None  # saves by folder, once the ranks have agreed
        self._number = self._before = 0  # numbers of the last save, and of the save before it
        self._saved: list[Path] = []  # the last two saves of this run
        self._failed: Path | None = None  # folder of a save that has begun and failed

    def folders(self) -> list[Path]:
        """Return the folders of the complete checkpoints, the newest one last.

        One rank may call it alone.
        """
        return self._folders.complete()

    def load(self) -> int:
        """Load the newest complete checkpoint. Every rank calls it.

        No part changes before all ranks have read their files. If another number of ranks saved the
        checkpoint, these parts are resharded: loaders (see `reshard`), and parts that have
        `reshard_states`, such as a `Monitor`; all other parts must be `replicated`, or equal on all
        ranks. Each rank then gets the random generators of one of the old ranks.

        Returns:
            The step of the checkpoint; 0 if there is none, and no part changes.

        Raises:
            StateError: the checkpoint has other parts, is damaged, lacks the file of a rank, or
                cannot be resharded; a dict among the parts has keys that the checkpoint lacks; or
                not all ranks see the checkpoint. No part has changed.
                Or a part refused its state: then the error names the parts that have changed.
            PeerError: a rank failed, or did not answer within `timeout_s`.
        """
        saves = self._meet()
        for look in range(_LOOKS):  # All ranks have the same views, and so look equally often.
            time.sleep(_PAUSE_S if look else 0)
            views = [
                {name: Contents(*fields) for name, fields in view.items()}
                for view in self._gather(self._folders.contents())
            ]
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
            self._removable = {}
            return 0
        with self._together(f"loading the checkpoint `{name or newest}`"):
            if missing := missing_files(newest, views):
                raise self._damaged(newest, missing)
            if name is None:
                raise self._not_shared(newest, views)
            ranks = Ranks(views[0][name].world_size, self._channel.world_size)
            folder = self._folders.root / name
            states, generators = self._parts.read(folder, self._channel.rank, ranks)
        with self._together(f"loading the checkpoint `{name}`"):
            self._parts.apply(states, folder)
            load_rngs(generators)  # at the end: a part may draw random numbers while it loads
        # Older folders belong to runs that began anew: this run must not remove them.
        complete = [name for view in views for name in view if not view[name].missing]
        oldest = min(Save.of(name).number for name in complete)
        self._removable = {name: number for name, number in saves.items() if number >= oldest}
        return Save.of(name).step

    def save(self, step: int) -> Path:
        """Save a checkpoint. Every rank calls it, at the same step.

        Ranks wait for each other only in the first call of a job that has not called `load`, and if
        a rank is two saves behind.

        Args:
            step: the number of the step, which `load` returns.

        Returns:
            The folder of the checkpoint. It counts once all ranks have written their files.

        Raises:
            TypeError, ValueError: `step` is not a number of steps.
            StateError: a loader stands within an optimizer step; a part holds objects other than
                plain data and tensors; or the folder has checkpoints, and `load` was not called or
                raised.
            PeerError: a rank did not answer, or has not saved, within `timeout_s`; or a rank saved
                another step, which this call or the next notices.
        """
        step = check_count("step", step, minimum=0)
        if self._removable is None:
            self._removable = self._begin_new_run()
        if len(self._saved) == 2:
            self._await(self._saved[0])
            del self._saved[0]
        if self._failed is None:
            self._before = self._number
        else:  # The cause of the failed save may last.
            self._check_saves(self._failed)
        folder = self._failed
        if folder is None or Save.of(folder.name).step != step:  # else the save is tried again
            self._number += 1
            folder = self._folders.folder(self._number, step, self._run)
            self._removable[folder.name] = self._number
        self._failed = folder
        folder.mkdir(parents=True, exist_ok=True)  # also shows the other ranks this rank's step
        self._check_saves(folder)
        self._parts.save(folder, step, self._channel.rank, self._channel.world_size)
        sync_folder(self._folders.root)
        self._failed = None
        self._saved.append(folder)
        self._folders.clean(folder, self._keep, self._removable)
        return folder

    def _check_saves(self, *begun: Path) -> None:
        self._folders.check_saves([*self._saved, *begun], self._channel.rank, self._before)

    def _meet(self) -> dict[str, int]:
        """Agree on the run's identifier and the next number; return the saves that ranks see."""
        self._removable = None
        self._channel.begin()
        self._channel.agree({**self._parts.names(), "keep": self._keep})
        gathered = self._gather([secrets.token_hex(4), self._folders.numbers()])
        self._run = gathered[0][0]
        saves = {name: number for _, numbers in gathered for name, number in numbers.items()}
        self._number = max(saves.values(), default=0)
        self._saved, self._failed = [], None
        return saves

    def _begin_new_run(self) -> dict[str, int]:
        """Meet for the first save; raise if the folder has a checkpoint of another run."""
        saves = self._meet()
        views = self._gather([*self._folders.contents()])
        if saved := sorted({name for view in views for name in view}):
            raise StateError(
                "`folder` must have no checkpoints that were not loaded, but "
                f"`{self._folders.root}` has {len(saved)}, up to `{saved[-1]}`. Call `load()` "
                "before the first `save` to continue from the newest complete checkpoint, or give "
                "a new run another `folder`."
            )
        return saves

    def _gather(self, value: Any) -> list[Any]:
        """Return the value of each rank, as JSON data."""
        values = self._channel.gather_bytes(json.dumps(value).encode(), "agreeing on a checkpoint")
        return list(map(json.loads, values))

    @contextmanager
    def _together(self, where: str) -> Iterator[None]:
        """End when all ranks have reached the end of this context; raise if a rank raises in it."""
        try:
            yield
        except Exception as error:
            self._channel.fail(error, where)
            raise
        self._gather(None)

    def _await(self, folder: Path) -> None:
        """Wait until a checkpoint is complete, or so old that it has been removed."""
        deadline = time.monotonic() + self._timeout_s
        while (contents := self._folders.contents_of(folder)) and contents.missing:
            self._check_saves()
            if time.monotonic() < deadline:
                time.sleep(_PAUSE_S / 10)
                continue
            has = "has" if len(contents.missing) == 1 else "have"
            raise PeerError(
                f"{named_ranks(contents.missing)} {has} not saved the checkpoint `{folder}` within "
                f"{self._timeout_s} s (`timeout_s`), but this rank has saved a later one. All "
                "ranks must call `save`, at the same steps, and share the disk of that folder."
            )

    def _damaged(self, newest: str, missing: Sequence[int]) -> StateError:
        files = "file" if len(missing) == 1 else "files"
        return StateError(
            f"`{self._folders.root / newest}` was complete, but the {files} of "
            f"{named_ranks(missing)} cannot be found now. Put the {files} back; or remove the "
            "folder to continue from the checkpoint before it, or to begin anew if there is none."
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
