"""Writers of a run's records: to a file, TensorBoard, Weights & Biases, MLflow, or your service."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from odb_nodes._support.checks import check_choice, check_type, describe, import_extra
from odb_nodes._support.files import LockedFile
from odb_nodes._support.user_warning import warn_user
from odb_nodes.training.monitor.records import FILE, Record, line_of, scalars


@runtime_checkable
class RecordWriter(Protocol):
    """Interface of a writer of records, for example to a tracking service: `Monitor(writers=)`.

    Rank 0 calls it. An error that it raises ends the run: catch errors that should not.
    """

    def begin(self, attempt: Record) -> None:
        """Begin an attempt: earlier records of steps above `attempt["step"]` no longer count.

        Called before the first record after each start or resume. A process may call it again, even
        after `close`.

        Args:
            attempt: with `step`, `resumed_at`, `world_size`, `loader`, `config` and `versions`.
        """

    def write(self, record: Record) -> None:
        """Write a record of steps or of an epoch; `scalars(record)` are its values by name."""

    def close(self) -> None:
        """Flush and close. May be called several times."""


class JsonlWriter:
    """Appends records to a file; a full disk, or a deletion, warns once and leaves a gap."""

    def __init__(self, folder: Path) -> None:
        self._file = LockedFile(
            folder / FILE,
            "Give each run its own folder, and `close()` a monitor before you make another.",
        )
        self._file.open()
        size = self._file.size()
        self._is_torn = size > 0 and self._file.tail(1) != b"\n"
        self._attempt: Record = {}  # the current attempt
        self._is_begun = False  # whether `_attempt` is in the file

    def begin(self, attempt: Record) -> None:
        """Begin an attempt. It is written together with its first record."""
        if not attempt["resumed_at"] and self._file.size():
            warn_user(
                f"a run begins anew in `{self._file.path.parent}`, which has records of a run: "
                "these no longer count. To continue that run, load the monitor's state; otherwise "
                "give each run its own folder."
            )
        self._attempt, self._is_begun = attempt, False

    def write(self, record: Record) -> None:
        """Append a record."""
        lines = [record] if self._is_begun else [self._attempt, record]
        text = "".join(map(line_of, lines))
        try:
            self._file.open()  # again, if it was deleted
            if self._is_torn:  # End the line that was cut short: readers skip it.
                text = f"\n{text}"
            self._file.write(text.encode())
            self._is_torn, self._is_begun = False, True
        except OSError as error:
            self._is_torn = self._file.is_open
            self._is_begun = self._is_begun and self._is_torn
            self._file.warn(error, "the missing records are a gap")

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()


class TensorBoardWriter:
    """Writes the scalars of each record for TensorBoard, into a folder inside the run's folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "tensorboard"
        self._writer: Any = None

    def begin(self, attempt: Record) -> None:
        """Begin an attempt: TensorBoard forgets the scalars of later steps."""
        self.close()
        self._writer = _tensorboard().SummaryWriter(self._folder, purge_step=attempt["step"] + 1)

    def write(self, record: Record) -> None:
        """Write the values of a record, except values that are not finite."""
        if not self._folder.is_dir():
            warn_user(
                f"`{self._folder}` was deleted while it was being written. It is created again, "
                "with the scalars from now on."
            )
            self.begin({"step": record["step"] - 1})
        for name, value in scalars(record).items():
            self._writer.add_scalar(name, value, record["step"], record["time_s"])
        self._writer.flush()  # a kill would lose the queue

    def close(self) -> None:
        """Close the files. Idempotent."""
        if self._writer is not None:
            self._writer.close()
        self._writer = None


class WandbWriter:
    """Logs the scalars of each record to Weights & Biases, over the optimizer step.

    After a resume, the steps since the checkpoint are logged again: charts draw the newest last.

    Args:
        options: options of `wandb.init`, such as `project`. With `id` and `resume="allow"`, a
            resumed run continues its chart. Default of `config`: the settings of the run.
    """

    def __init__(self, **options: Any) -> None:
        self._wandb = import_extra("wandb", "tracking")
        self._options = options
        self._run: Any = None

    def begin(self, attempt: Record) -> None:
        """Begin or continue a run."""
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
    """Logs the scalars of each record to MLflow, into the active run or a new run.

    After a resume, the steps since the checkpoint are logged again.

    Args:
        options: options of `mlflow.start_run`, such as `run_name`. With `run_id`, a resumed run
            continues its chart.
    """

    def __init__(self, **options: Any) -> None:
        self._mlflow = import_extra("mlflow", "tracking")
        self._options = options
        self._run_id, self._has_started = "", False

    def begin(self, attempt: Record) -> None:
        """Begin or continue a run, and log its settings as parameters."""
        run = self._mlflow.active_run()
        if run is None:
            run = self._mlflow.start_run(**self._options)
            self._has_started = True
        self._run_id = run.info.run_id
        if not run.data.params:  # parameters cannot be changed
            params = {_mlflow_name(name): value for name, value in _settings(attempt).items()}
            self._mlflow.log_params(params)

    def write(self, record: Record) -> None:
        """Log the values of a record."""
        values = {_mlflow_name(name): value for name, value in scalars(record).items()}
        self._mlflow.log_metrics(values, step=record["step"], run_id=self._run_id)

    def close(self) -> None:
        """End the run, if this writer started it. Idempotent."""
        if self._has_started:
            self._mlflow.end_run()
        self._has_started = False


def _settings(attempt: Record) -> dict[str, Any]:
    return {**attempt["loader"], **attempt["config"], "world_size": attempt["world_size"]}


def _mlflow_name(name: str) -> str:
    """Return a name that MLflow allows; its files cannot hold both `loss` and `loss/web`."""
    group, slash, value = name.partition("/")
    return re.sub(r"[^\w\-. /]", "_", f"{group}{slash}{value.replace('/', '.')}")


def _tensorboard() -> Any:
    return import_extra("torch.utils.tensorboard", "tools")


_WRITERS: dict[str, Callable[[Path], RecordWriter]] = {
    "jsonl": JsonlWriter,
    "tensorboard": TensorBoardWriter,
}


def check_writers(kinds: Any) -> tuple[str | RecordWriter, ...]:
    """Check names of writers and `RecordWriter` objects, and that TensorBoard is installed."""
    check_type("writers", kinds, tuple | list, 'Pass `("jsonl",)`, for example.')
    for kind in kinds:
        if isinstance(kind, str):
            remedy = "Pass other writers as objects, such as `WandbWriter()`."
            check_choice("writers", kind, [*_WRITERS], remedy)
        elif isinstance(kind, type) or not isinstance(kind, RecordWriter):
            raise TypeError(
                "`writers` must be names and objects with `begin`, `write` and `close`, but "
                f"has {describe(kind)}. See `RecordWriter`."
            )
    if "tensorboard" in kinds:
        _tensorboard()  # now, not after the first steps
    return (*kinds,)


def make_writer(kind: str | RecordWriter, folder: Path) -> RecordWriter:
    """Return the writer of this name, or the object itself."""
    return _WRITERS[kind](folder) if isinstance(kind, str) else kind
