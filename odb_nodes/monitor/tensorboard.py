"""The records of a run as the scalars of TensorBoard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from odb_nodes._core.checks import import_extra
from odb_nodes._core.user_warning import warn_user
from odb_nodes.monitor.records import Record, scalars

FOLDER = "tensorboard"


def import_tensorboard() -> Any:
    """Return torch's writer of TensorBoard's files."""
    return import_extra("torch.utils.tensorboard", "tools").SummaryWriter


class TensorBoardWriter:
    """Writes each of the `scalars` of a record; a `RecordWriter`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / FOLDER
        self._writer: Any = None

    def begin(self, attempt: Record) -> None:
        """Begin an attempt: TensorBoard forgets the scalars of later steps."""
        self.close()
        self._writer = import_tensorboard()(str(self._folder), purge_step=attempt["step"] + 1)

    def write(self, record: Record) -> None:
        """Write the values of a record; what is not finite is left out."""
        if not self._folder.is_dir():
            warn_user(
                f"`{self._folder}` was deleted while it was being written. It is made anew, and "
                "has the scalars from now on."
            )
            self.begin({"step": record["step"] - 1})
        for name, value in scalars(record).items():
            self._writer.add_scalar(name, value, record["step"], record["time_s"])
        self._writer.flush()  # what a kill finds in the queue is lost

    def close(self) -> None:
        """Close the files. Idempotent."""
        if self._writer is not None:
            self._writer.close()
        self._writer = None
