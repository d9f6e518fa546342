"""The folders of a job's checkpoints: which are complete, which all ranks see, which may go."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "CheckpointFolders",
    "Contents",
    "choose",
    "file_name",
    "number_of",
    "step_of",
]

_FOLDER = re.compile(r"(\d{6,})-step-(\d+)-([0-9a-f]{8})")
_FILE = re.compile(r"rank(\d+)-of-(\d+)\.pt")
_REMOVED = ".removed-"


@dataclass(frozen=True)
class Contents:
    """The files in the folder of a checkpoint.

    Attributes:
        world_size: number of ranks that saved, or save, it.
        missing: the ranks whose file is not there.
    """

    world_size: int
    missing: tuple[int, ...]


class CheckpointFolders:
    """The checkpoints below a folder. A checkpoint is a folder with a file of each rank.

    A folder is named after the number of the save, which counts on over all runs, the step, and an
    identifier of the run. So what a killed job has left is never filled up by another.

    Args:
        root: the folder that they are in.
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
        if not self.root.is_dir():
            return {}
        found = {}
        for name in sorted(os.listdir(self.root), key=number_of):
            if _FOLDER.fullmatch(name) and (contents := _contents_of(self.root / name)):
                found[name] = contents
        return found

    def view(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Return the same as JSON data: `Contents(*view[name])`."""
        return {name: (one.world_size, one.missing) for name, one in self.contents().items()}

    def missing(self, folder: Path) -> tuple[int, ...]:
        """Return the ranks that have not written into a folder; none where it is removed."""
        contents = _contents_of(folder)
        return contents.missing if contents else ()

    def complete(self) -> list[Path]:
        """Return the folders that have the files of all ranks, the newest one last."""
        return [self.root / name for name, found in self.contents().items() if not found.missing]

    def rivals(self, own: Iterable[Path]) -> list[tuple[str, str]]:
        """Return the names of folders of one save that differ in the step: own, another rank's.

        Args:
            own: folders that this rank saves into.
        """
        by_save = {_save_of(folder.name): folder.name for folder in own}
        names = sorted(os.listdir(self.root))
        pairs = ((by_save.get(_save_of(name), name), name) for name in names)
        return [(mine, name) for mine, name in pairs if mine != name]

    def foreign(self, own: Path) -> list[str]:
        """Return the names of folders that another run has saved since this one began.

        Args:
            own: the folder that this rank saves into.
        """
        run = own.name.rpartition("-")[2]
        names = sorted(os.listdir(self.root))
        return [
            name
            for name in names
            if number_of(name) >= number_of(own.name) and not name.endswith(run)
        ]

    def last_number(self) -> int:
        """Return the number of the last save, complete or not; 0 where there is none."""
        names = os.listdir(self.root) if self.root.is_dir() else []
        return max(map(number_of, names), default=0)

    def clean(self, new: Path, keep: int) -> None:
        """Remove what is older than the `keep` newest checkpoints, once `new` is complete.

        What is older than `new` and incomplete never becomes complete: all ranks have gone on.
        """
        complete = self.complete()
        if new not in complete:
            return
        kept = complete[: complete.index(new) + 1][-keep:]
        for name in os.listdir(self.root):
            if 0 < number_of(name) < number_of(new.name) and self.root / name not in kept:
                self._remove(name)
            elif name.startswith(_REMOVED):  # by a job that was killed
                shutil.rmtree(self.root / name, ignore_errors=True)

    def _remove(self, name: str) -> None:
        removed = self.root / f"{_REMOVED}{name}"
        with suppress(OSError):  # Another rank is doing it.
            os.rename(self.root / name, removed)
        shutil.rmtree(removed, ignore_errors=True)


def choose(views: Sequence[Mapping[str, Contents]]) -> tuple[str | None, str | None]:
    """Return the newest checkpoint that all ranks see complete, and the newest that there is.

    These differ where the ranks do not see the same files.

    Args:
        views: what each rank sees.
    """
    everywhere, somewhere = None, None
    for name in sorted({name for view in views for name in view}, key=number_of):
        seen = [view[name] for view in views if name in view]
        if len(seen) == len(views) and not any(contents.missing for contents in seen):
            everywhere = name
        if not set.intersection(*({*contents.missing} for contents in seen)):
            somewhere = name
    return everywhere, somewhere


def number_of(name: str) -> int:
    """Return the number of the save that a folder is named after; 0 where it is none."""
    match = _FOLDER.fullmatch(name)
    return int(match[1]) if match else 0


def step_of(name: str) -> int:
    """Return the step that the folder of a checkpoint is named after."""
    return int(name.split("-")[2])


def _save_of(name: str) -> tuple[str, str] | None:
    """Return the number and the run that a folder is named after; None where it is none."""
    match = _FOLDER.fullmatch(name)
    return (match[1], match[3]) if match else None


def file_name(rank: int, world_size: int) -> str:
    """Return the name of a rank's file."""
    return f"rank{rank:05d}-of-{world_size:05d}.pt"


def _contents_of(folder: Path) -> Contents | None:
    """Return what a folder has; None where it has no file of a rank, or is gone."""
    try:
        names = os.listdir(folder)
    except OSError:
        return None
    files = [(int(match[1]), int(match[2])) for name in names if (match := _FILE.fullmatch(name))]
    if not files:
        return None
    world_size = files[0][1]
    return Contents(world_size, tuple(sorted({*range(world_size)} - {rank for rank, _ in files})))
