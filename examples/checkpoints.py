"""Checkpoints that all ranks write, each its part: a folder per step, and a note of the last one.

    checkpoints = Checkpoints(folder)
    checkpoints.save(step, write)
    read(checkpoints.latest())

A folder counts once every rank has written, so a job that is killed while it saves goes on from the
checkpoint before.

This is a module for the examples beside it, not a script.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

LATEST = "latest"


class Checkpoints:
    """The checkpoints of a job, of which the last complete one is kept.

    Args:
        root: their folder, the same on all ranks.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def save(self, step: int, write: Callable[[Path], None]) -> None:
        """Make the checkpoint of a step. All ranks call it.

        Args:
            step: its number.
            write: writes what this rank has into a folder, which exists.
        """
        folder = self._root / f"step-{step:06d}"
        folder.mkdir(parents=True, exist_ok=True)
        write(folder)
        dist.barrier()
        if dist.get_rank():
            return
        note = self._root / f".{LATEST}"
        note.write_text(folder.name)
        os.replace(note, self._root / LATEST)
        for other in self._root.glob("step-*"):
            if other != folder:
                shutil.rmtree(other)

    def latest(self) -> Path:
        """Return the folder of the last checkpoint that is complete.

        Raises:
            FileNotFoundError: there is none.
        """
        return self._root / (self._root / LATEST).read_text()
