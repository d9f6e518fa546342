"""What takes the records of a run: a file, TensorBoard, Weights & Biases, MLflow, or your own."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from odb_nodes._core.checks import check_choice, check_type, describe, import_extra
from odb_nodes._core.files import LockedFile
from odb_nodes._core.user_warning import warn_user
from odb_nodes.monitor.records import FILE, Record, line_of, scalars


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


class JsonlWriter:
    """Appends records to a file; a full disk, or a deletion, warns once and leaves a gap."""

    def __init__(self, folder: Path) -> None:
        self._file = LockedFile(
            folder / FILE,
            "Give each run a folder of its own, and `close()` its monitor before it makes another.",
        )
        self._file.open()
        size = self._file.size()
        self._is_torn = size > 0 and self._file.tail(1) != b"\n"
        self._begun: Record = {}  # the last attempt
        self._is_written = False  # whether that is in the file

    def begin(self, attempt: Record) -> None:
        """Begin an attempt, which is written with its first record, in one piece."""
        if not attempt["resumed_at"] and self._file.size():
            warn_user(
                f"a run begins anew in `{self._file.path.parent}`, which has records of a run: "
                "they do not count any more. To go on with that run, load the monitor's state; "
                "otherwise give each run a folder of its own."
            )
        self._begun, self._is_written = attempt, False

    def write(self, record: Record) -> None:
        """Append a record."""
        lines = [record] if self._is_written else [self._begun, record]
        text = "".join(map(line_of, lines))
        try:
            self._file.open()  # where it was deleted
            # A line that was cut short stands alone, and is skipped by readers.
            self._file.write(b"\n" * self._is_torn + text.encode())
            self._is_torn, self._is_written = False, True
        except OSError as error:
            self._is_torn = self._file.is_open
            self._is_written = self._is_written and self._is_torn
            self._file.warn(error, "steps that are not recorded are a gap")

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()


class TensorBoardWriter:
    """Writes the scalars of each record for TensorBoard, into a folder of the run's folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "tensorboard"
        self._writer: Any = None

    def begin(self, attempt: Record) -> None:
        """Begin an attempt: TensorBoard forgets the scalars of later steps."""
        self.close()
        self._writer = _tensorboard().SummaryWriter(self._folder, purge_step=attempt["step"] + 1)

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


class WandbWriter:
    """Logs the scalars of each record to Weights & Biases, over the optimizer step.

    Steps after a checkpoint come again where a run is resumed: the newest are drawn last.

    Args:
        options: of `wandb.init`, such as `project`; with `id` and `resume="allow"`, a run that is
            resumed goes on in its chart. By default, `config` is what the run was made with.
    """

    def __init__(self, **options: Any) -> None:
        self._wandb, self._options = import_extra("wandb", "tracking"), options
        self._run: Any = None

    def begin(self, attempt: Record) -> None:
        """Begin a run, or go on with it."""
        self.close()
        self._run = self._wandb.init(**{"config": _settings(attempt), **self._options})
        self._run.define_metric("*", step_metric="optimizer_step")

    def write(self, record: Record) -> None:
        """Log the values of a record."""
        self._run.log({"optimizer_step": record["step"], **scalars(record)})

    def close(self) -> None:
        """Finish the run. Idempotent."""
        if self._run is not None:
            self._run.finish()
        self._run = None


class MlflowWriter:
    """Logs the scalars of each record to MLflow, into the run that is active, or one of its own.

    Steps after a checkpoint come again where a run is resumed.

    Args:
        options: of `mlflow.start_run`, such as `run_name`; with `run_id`, a run that is resumed
            goes on in its chart.
    """

    def __init__(self, **options: Any) -> None:
        self._mlflow, self._options = import_extra("mlflow", "tracking"), options
        self._run_id, self._is_own = "", False

    def begin(self, attempt: Record) -> None:
        """Begin a run, or go on with it, and log what it was made with as its parameters."""
        run = self._mlflow.active_run()
        if run is None:
            run, self._is_own = self._mlflow.start_run(**self._options), True
        self._run_id = run.info.run_id
        if not run.data.params:  # which cannot be changed
            self._mlflow.log_params({_metric(one): v for one, v in _settings(attempt).items()})

    def write(self, record: Record) -> None:
        """Log the values of a record."""
        values = {_metric(name): value for name, value in scalars(record).items()}
        self._mlflow.log_metrics(values, step=record["step"], run_id=self._run_id)

    def close(self) -> None:
        """End the run, if it is one of its own. Idempotent."""
        if self._is_own:
            self._mlflow.end_run()
        self._is_own = False


def _settings(attempt: Record) -> dict[str, Any]:
    return {**attempt["loader"], **attempt["config"], "world_size": attempt["world_size"]}


def _metric(name: str) -> str:
    """Return a name that MLflow allows; its files cannot hold both `loss` and `loss/web`."""
    group, slash, rest = name.partition("/")
    return re.sub(r"[^\w\-. /]", "_", f"{group}{slash}{rest.replace('/', '.')}")


def _tensorboard() -> Any:
    return import_extra("torch.utils.tensorboard", "tools")


_WRITERS: dict[str, Callable[[Path], RecordWriter]] = {
    "jsonl": JsonlWriter,
    "tensorboard": TensorBoardWriter,
}


def check_writers(kinds: Any) -> tuple[str | RecordWriter, ...]:
    """Raise unless `kinds` are names of writers and writers, and what they need is installed."""
    check_type("writers", kinds, tuple | list, 'Pass `("jsonl",)`, say.')
    for kind in kinds:
        if isinstance(kind, str):
            others = "Pass others as a `RecordWriter`, such as `WandbWriter()`."
            check_choice("writers", kind, [*_WRITERS], others)
        elif isinstance(kind, type) or not isinstance(kind, RecordWriter):
            raise TypeError(
                "`writers` must be names and objects with `begin`, `write` and `close`, but "
                f"has {describe(kind)}. See `RecordWriter`."
            )
    if "tensorboard" in kinds:
        _tensorboard()  # now, not after the first steps
    return (*kinds,)


def make_writer(kind: str | RecordWriter, folder: Path) -> RecordWriter:
    """Return a writer; its files are made with the first record."""
    return _WRITERS[kind](folder) if isinstance(kind, str) else kind
