"""What the records of a run are written as."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from odb_nodes._core.checks import check_choice, check_type, describe
from odb_nodes.monitor.records import ATTEMPT, VERSION, JsonlWriter, Record
from odb_nodes.monitor.tensorboard import TensorBoardWriter, import_tensorboard


@runtime_checkable
class RecordWriter(Protocol):
    """Takes the records of a run, such as for a tracking service; see `Monitor(writers=)`.

    It is called on rank 0 alone. What it raises ends the run: catch what a run may go on without.
    """

    def begin(self, attempt: Record) -> None:
        """Begin an attempt: records of later steps than `attempt["step"]` do not count any more.

        Called before the first record after each start or resume. Within one process it may be
        called again, also after `close`.

        Args:
            attempt: with `step`, `resumed_at`, `world_size`, `loader`, `config` and `versions`.
        """

    def write(self, record: Record) -> None:
        """Take a record of steps or of an epoch; `scalars(record)` are its values by name."""

    def close(self) -> None:
        """Write what is left. May be called again."""


_WRITERS: dict[str, Callable[[Path], RecordWriter]] = {
    "jsonl": JsonlWriter,
    "tensorboard": TensorBoardWriter,
}


class Writers:
    """Writes the records of a run, on rank 0. Files are made with the first record."""

    def __init__(self, folder: Path, kinds: Sequence[str | RecordWriter]) -> None:
        check_type("writers", kinds, tuple | list, 'Pass `("jsonl",)`, say.')
        for kind in kinds:
            if isinstance(kind, str):
                check_choice("writers", kind, [*_WRITERS], "Pass others as a `RecordWriter`.")
            elif isinstance(kind, type) or not isinstance(kind, RecordWriter):
                raise TypeError(
                    "`writers` must be names and objects with `begin`, `write` and `close`, but "
                    f"has {describe(kind)}. See `RecordWriter`."
                )
        if "tensorboard" in kinds:
            import_tensorboard()  # now, not after the first steps
        self._folder, self._kinds = folder, tuple(kinds)
        self._writers: list[RecordWriter] = []
        self._attempt: Record | None = None

    def begin(self, attempt: Record) -> None:
        """Let the next record begin an attempt."""
        self._attempt = {"kind": ATTEMPT, "version": VERSION, **attempt}

    def write(self, record: Record) -> None:
        """Write a record."""
        now = {"time_s": time.time()}
        if not self._writers:
            self._writers = [
                _WRITERS[kind](self._folder) if isinstance(kind, str) else kind
                for kind in self._kinds
            ]
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
