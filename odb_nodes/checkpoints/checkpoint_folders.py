"""The folders of a job's checkpoints: which are complete, which all ranks see, which may go."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from odb_nodes.checkpoints.rank_states import names_in
from odb_nodes.errors import PeerError

_FOLDER = re.compile(r"(\d{6,})-step-(\d+)-([0-9a-f]{8})")
_REMOVED = ".removed-"
_COMPLETE = "complete"  # a file that says that those of all ranks have been there


class Contents(NamedTuple):
    """The number of ranks that save a checkpoint, those without a file, and if all had one once."""

    world_size: int
    missing: Sequence[int]
    was_complete: bool = False


class _Save(NamedTuple):
    """What a folder is named after: its number, from 1 on over all runs, the step, and the run."""

    number: int
    step: int
    run: str


class CheckpointFolders:
    """The checkpoints below a folder. A checkpoint is a folder with a file of each rank.

    What a killed job has left is never filled up by another, whose folders have its own name.
    """

    # Files come by an atomic rename, and a whole folder goes by one: what is seen is written in
    # full, and a folder that is being removed is none.

    def __init__(self, root: Path) -> None:
        self.root = root

    def folder(self, number: int, step: int, run: str) -> Path:
        """Return the folder of one save."""
        return self.root / f"{number:06d}-step-{step}-{run}"

    def contents(self) -> dict[str, Contents]:
        """Return what each folder has, by name, in the order in which they were saved."""
        found = {name: self.contents_of(self.root / name) for name in self._saves()}
        return {name: one for name, one in found.items() if one is not None}

    def contents_of(self, folder: Path) -> Contents | None:
        """Return what a folder has; None where it never had a file of a rank, or is gone."""
        files = [(int(one[2]), int(one[3])) for one in names_in(folder) if not one[1]]
        was_complete = (folder / _COMPLETE).exists()
        if not files and not was_complete:
            return None
        world_size = files[0][1] if files else 1
        missing = {*range(world_size)} - {rank for rank, _ in files}
        return Contents(world_size, tuple(sorted(missing)), was_complete or not missing)

    def complete(self) -> list[Path]:
        """Return the folders that have the files of all ranks, the newest one last."""
        return [self.root / name for name, found in self.contents().items() if not found.missing]

    def numbers(self) -> dict[str, int]:
        """Return the number of each save, complete or not, by the name of its folder."""
        return {name: save.number for name, save in self._saves().items()}

    def check_saves(self, own: Sequence[Path], rank: int, before: int) -> None:
        """Raise where another rank saves another step, or another run saves here.

        `own`: the folders that this rank saves into, the newest one last. `before`: the number
        of the last save before that: a later one is of another run where it has another name.
        """
        mine = {_save_of(folder.name)._replace(step=0): folder.name for folder in own}
        newest = _save_of(own[-1].name)
        for name, save in self._saves().items():
            if save.number > before and save.run != newest.run:
                raise PeerError(
                    f"another run saves into `{self.root}`: `{name}` is not of this one, which "
                    f"saves `{own[-1].name}`. End it and start this one again, or give each "
                    "a folder of its own."
                )
            if (of_rank := mine.get(save._replace(step=0), name)) != name:
                raise PeerError(
                    f"the ranks save different steps: rank {rank} saves `{of_rank}`, but "
                    f"another rank `{name}`, in `{self.root}`. All ranks must call `save` at "
                    "the same steps. The checkpoints before that are kept."
                )

    def clean(self, new: Path, keep: int, known: Collection[str]) -> None:
        """Mark what is complete; once `new` is, remove those of `known` but its `keep` newest.

        What is older than `new` and incomplete never becomes complete: all ranks have gone on.
        """
        complete = [path for path in self.complete() if path.name in known]
        for path in complete:
            with suppress(OSError):  # Another rank removes it.
                (path / _COMPLETE).touch()
        if new not in complete:
            return
        kept = complete[: complete.index(new) + 1][-keep:]
        for name in os.listdir(self.root):
            is_older = 0 < _save_of(name).number < _save_of(new.name).number
            if is_older and name in known and self.root / name not in kept:
                removed = self.root / f"{_REMOVED}{name}"
                with suppress(OSError):  # Another rank is doing it.
                    os.rename(self.root / name, removed)
                shutil.rmtree(removed, ignore_errors=True)
            elif name.startswith(_REMOVED):  # by a job that was killed
                shutil.rmtree(self.root / name, ignore_errors=True)

    def _saves(self) -> dict[str, _Save]:
        names = os.listdir(self.root) if self.root.is_dir() else []
        saves = {name: save for name in names if (save := _save_of(name)).number}
        return dict(sorted(saves.items(), key=lambda one: one[1]))


def choose(views: Sequence[Mapping[str, Contents]]) -> tuple[str | None, str | None]:
    """Return the newest checkpoint that all ranks see complete, and the newest that was complete.

    These differ where the ranks do not see the same files, or files are gone. `views`: what each
    rank sees.
    """
    everywhere, somewhere = None, None
    for name in sorted({name for view in views for name in view}, key=_save_of):
        seen = [view[name] for view in views if name in view]
        if len(seen) == len(views) and not any(contents.missing for contents in seen):
            everywhere = name
        if not gone_files(name, views) or any(contents.was_complete for contents in seen):
            somewhere = name
    return everywhere, somewhere


def gone_files(name: str, views: Sequence[Mapping[str, Contents]]) -> list[int]:
    """Return the ranks whose file of a checkpoint no rank sees."""
    seen = [{*view[name].missing} for view in views if name in view]
    return sorted(set.intersection(*seen))


def number_of(name: str) -> int:
    """Return the number of the save that a folder is named after."""
    return _save_of(name).number


def step_of(name: str) -> int:
    """Return the step that the folder of a checkpoint is named after."""
    return _save_of(name).step


def _save_of(name: str) -> _Save:
    """Return what a folder is named after; number 0 where it is none."""
    match = _FOLDER.fullmatch(name)
    return _Save(int(match[1]), int(match[2]), match[3]) if match else _Save(0, 0, "")
