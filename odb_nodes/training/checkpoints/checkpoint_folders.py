"""The folders of a job's checkpoints: which are complete, which all ranks see, which are old."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from odb_nodes.errors import PeerError
from odb_nodes.training.checkpoints.rank_states import rank_file_names

_FOLDER = re.compile(r"(\d{6,})-step-(\d+)-([0-9a-f]{8})")
_REMOVED = ".removed-"
_COMPLETE = "complete"  # file that marks a folder in which the files of all ranks were seen


class Contents(NamedTuple):
    """The number of ranks of a checkpoint, and the ranks whose file is missing."""

    world_size: int
    missing: Sequence[int]
    was_complete: bool = False


class Save(NamedTuple):
    """The parts of a folder's name: number of the save over all runs, step, and run."""

    number: int  # 1 for the first save; 0 if the folder is no checkpoint
    step: int
    run: str

    @classmethod
    def of(cls, name: str) -> Save:
        """Return the parts of the name of a folder."""
        match = _FOLDER.fullmatch(name)
        return cls(int(match[1]), int(match[2]), match[3]) if match else cls(0, 0, "")


class CheckpointFolders:
    """The checkpoints below a folder. A checkpoint is a folder with a file for each rank.

    Each run saves into folders with its own name, and never completes a folder of a killed run.
    """

    # Files appear by an atomic rename, and a whole folder disappears by a rename: every visible
    # file is complete, and a folder that is being removed does not count as a checkpoint.

    def __init__(self, root: Path) -> None:
        self.root = root

    def folder(self, number: int, step: int, run: str) -> Path:
        """Return the folder of a save."""
        return self.root / f"{number:06d}-step-{step}-{run}"

    def contents(self) -> dict[str, Contents]:
        """Return the contents of each folder by name, in the order of the saves."""
        all_contents = {name: self.contents_of(self.root / name) for name in self._saves()}
        return {name: contents for name, contents in all_contents.items() if contents is not None}

    def contents_of(self, folder: Path) -> Contents | None:
        """Return the contents of a folder; `None` if it is gone or never had a file of a rank."""
        files = [file for file in rank_file_names(folder) if not file.prefix]
        was_complete = (folder / _COMPLETE).exists()
        if not files and not was_complete:
            return None
        world_size = files[0].world_size if files else 1
        missing = {*range(world_size)} - {file.rank for file in files}
        return Contents(world_size, tuple(sorted(missing)), was_complete or not missing)

    def complete(self) -> list[Path]:
        """Return the folders that have the files of all ranks, the newest one last."""
        return [
            self.root / name for name, contents in self.contents().items() if not contents.missing
        ]

    def numbers(self) -> dict[str, int]:
        """Return the number of each save, complete or not, by the name of its folder."""
        return {name: save.number for name, save in self._saves().items()}

    def check_saves(self, folders: Sequence[Path], rank: int, before: int) -> None:
        """Raise if another rank saves another step, or another run saves here.

        folders: the last folders that this rank saves into, the newest one last.
        before: number of the save before them: a later save of another run is an error.
        """
        names = {Save.of(folder.name)._replace(step=0): folder.name for folder in folders}
        newest = Save.of(folders[-1].name)
        for name, save in self._saves().items():
            if save.number > before and save.run != newest.run:
                raise PeerError(
                    f"another run saves into `{self.root}`: `{name}` is not of this run, which "
                    f"saves `{folders[-1].name}`. End the other run and start this one again, or "
                    "give each run its own folder."
                )
            expected = names.get(save._replace(step=0), name)
            if expected != name:
                raise PeerError(
                    f"the ranks save different steps: rank {rank} saves `{expected}`, but "
                    f"another rank `{name}`, in `{self.root}`. All ranks must call `save` at "
                    "the same steps. The earlier checkpoints are kept."
                )

    def clean(self, new: Path, keep: int, removable: Collection[str]) -> None:
        """Mark complete folders; if `new` is complete, remove folders before its `keep` newest.

        A folder older than `new` that is incomplete then never becomes complete: all ranks have
        saved since. Only folders in `removable` are marked or removed.
        """
        complete = [path for path in self.complete() if path.name in removable]
        for path in complete:
            with suppress(OSError):  # Another rank removes it.
                (path / _COMPLETE).touch()
        if new not in complete:
            return
        kept = complete[: complete.index(new) + 1][-keep:]
        for name in os.listdir(self.root):
            is_older = 0 < Save.of(name).number < Save.of(new.name).number
            if is_older and name in removable and self.root / name not in kept:
                removed = self.root / f"{_REMOVED}{name}"
                with suppress(OSError):  # Another rank is renaming it.
                    os.rename(self.root / name, removed)
                shutil.rmtree(removed, ignore_errors=True)
            elif name.startswith(_REMOVED):  # left by a killed job
                shutil.rmtree(self.root / name, ignore_errors=True)

    def _saves(self) -> dict[str, Save]:
        names = os.listdir(self.root) if self.root.is_dir() else []
        saves = [(Save.of(name), name) for name in names]
        return {name: save for save, name in sorted(saves) if save.number}


def choose(views: Sequence[Mapping[str, Contents]]) -> tuple[str | None, str | None]:
    """Return the newest checkpoint that all ranks see complete, and the newest complete one.

    The two differ if the ranks do not see the same files, or if files have disappeared.

    views: the contents of the folders, as each rank sees them.
    """
    everywhere, somewhere = None, None
    for name in sorted({name for view in views for name in view}, key=Save.of):
        seen = [view[name] for view in views if name in view]
        if len(seen) == len(views) and not any(contents.missing for contents in seen):
            everywhere = name
        if not missing_files(name, views) or any(contents.was_complete for contents in seen):
            somewhere = name
    return everywhere, somewhere


def missing_files(name: str, views: Sequence[Mapping[str, Contents]]) -> list[int]:
    """Return the ranks whose file of a checkpoint no rank sees."""
    missing = [{*view[name].missing} for view in views if name in view]
    return sorted(set.intersection(*missing))
