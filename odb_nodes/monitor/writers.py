"""What the records of a run are written as."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from odb_nodes._core.checks import check_choice, check_type
from odb_nodes.monitor.records import ATTEMPT, VERSION, JsonlWriter, Record
from odb_nodes.monitor.tensorboard import TensorBoardWriter, import_tensorboard

_WRITERS: dict[str, Callable[[Path], JsonlWriter | TensorBoardWriter]] = {
    "jsonl": JsonlWriter,
    "tensorboard": TensorBoardWriter,
}


class Writers:
    """Writes the records of a run, on rank 0. Files are made with the first record.

    Args:
        folder: of the run.
        kinds: names of the writers.

    Raises:
        ImportError: TensorBoard is asked for, and not installed.
        TypeError, ValueError: an argument is not valid.
    """

    def __init__(self, folder: Path, kinds: Sequence[str]) -> None:
        check_type("writers", kinds, tuple | list, 'Pass `("jsonl",)`, say.')
        for kind in kinds:
            check_choice("writers", kind, [*_WRITERS])
        if "tensorboard" in kinds:
            import_tensorboard()  # now, not after the first steps
        self._folder, self._kinds = folder, tuple(kinds)
        self._writers: list[JsonlWriter | TensorBoardWriter] = []
        self._attempt: Record | None = None

    def begin(self, attempt: Record) -> None:
        """Let the next record begin an attempt.

        Args:
            attempt: what else is to be known of it.
        """
        self._attempt = {"kind": ATTEMPT, "version": VERSION, **attempt}

    def write(self, record: Record) -> None:
        """Write a record.

        Args:
            record: without its time.

        Raises:
            OSError: a file cannot be made.
            RuntimeError: another process writes into the folder.
        """
        now = {"time_s": time.time()}
        if not self._writers:
            self._writers = [_WRITERS[kind](self._folder) for kind in self._kinds]
        for writer in self._writers:
            if self._attempt is not None:
                writer.begin(self._attempt | now)
            writer.write(record | now)
        self._attempt = None

    def close(self) -> None:
        """Close the files. Idempotent; a later record begins an attempt."""
        for writer in self._writers:
            writer.close()
        self._writers = []
