"""The records of a run: a file with a line of JSON for each, and what reads it."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from odb_nodes._core.files import LockedFile
from odb_nodes._core.user_warning import warn_user

__all__ = ["Record", "RunRecords", "read_run", "scalars"]

FILE = "monitor.jsonl"
VERSION = 1
STEPS, EPOCH, ATTEMPT = "steps", "epoch", "attempt"  # kinds of records

GROUPS = ("mean", "sum", "peak", "last")  # of values in a record
_PLACE = {"first_step", "step", "epoch", "seconds"}
_KEYS = {
    STEPS: {*GROUPS, *_PLACE, "shapes"},
    EPOCH: {*GROUPS, *_PLACE},
    ATTEMPT: {"version", "step", "resumed_at", "world_size"},
}
_NUMBERS = ("version", "resumed_at", "world_size", *sorted(_PLACE), "time_s")
_SUMS = {
    *("samples", "tokens", "padded_tokens", "busiest_tokens", "targets"),
    *("optimizer_steps", "micro_steps", "filler_steps"),
    *("seconds", "rank_seconds", "data_wait_s"),
}

Record = dict[str, Any]
"""A record as JSON data; its `kind` is "steps", "epoch" or "attempt"."""


class JsonlWriter:
    """Appends records to a file. A disk that is full warns once and leaves a gap.

    So does a file that is deleted; it is made anew.
    """

    def __init__(self, folder: Path) -> None:
        self._file = LockedFile(
            folder / FILE,
            "Give each run a folder of its own, and `close()` its monitor before it makes another.",
        )
        self._file.open()
        self._is_torn = self._file.size() > 0 and not _ends_line(self._file.path)
        self._attempt: Record | None = None  # that is not written yet
        self._begun: Record | None = None  # the last one

    def begin(self, attempt: Record) -> None:
        """Begin an attempt: records of later steps that are in the file do not count any more."""
        if not attempt["resumed_at"] and self._file.size():
            warn_user(
                f"a run begins anew in `{self._file.path.parent}`, which has records of a run: "
                "they do not count any more. To go on with that run, load the monitor's state; "
                "otherwise give each run a folder of its own."
            )
        self._attempt = self._begun = attempt

    def write(self, record: Record) -> None:
        """Append a record, and before it the attempt that it is the first of, in one piece."""
        lines = [record] if self._attempt is None else [self._attempt, record]
        text = "".join(json.dumps(one, allow_nan=False) + "\n" for one in lines)
        try:
            self._file.open()  # where it was deleted
            # A line that was cut short stands alone, and is skipped by readers.
            self._file.write(b"\n" * self._is_torn + text.encode())
            self._is_torn, self._attempt = False, None
        except OSError as error:
            self._is_torn = self._file.is_open
            if not self._is_torn:
                self._attempt = self._begun
            self._file.warn(error, "steps that are not recorded are a gap")

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()


def _ends_line(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"


def scalars(record: Record) -> dict[str, float]:
    """Return the values of a record for a chart of each, as `mean/loss`; without `None`.

    Those of the record of an epoch are `epoch_mean/loss` and so on.

    Args:
        record: one of steps, or of an epoch.
    """
    prefix = "" if record["kind"] == STEPS else f"{record['kind']}_"
    return {
        f"{prefix}{group}/{name}": value
        for group in GROUPS
        for name, value in record[group].items()
        if value is not None
    }


@dataclass(frozen=True, kw_only=True)
class RunRecords:
    """The records of a run that count: no step twice, whatever was killed and resumed.

    Attributes:
        folder: the folder of the run.
        attempts: a record for each time that the run was begun or resumed.
        steps: the records of steps, in their order.
        epochs: those of whole epochs.
    """

    folder: Path
    attempts: list[Record]
    steps: list[Record]
    epochs: list[Record]

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.folder.resolve().name


def read_run(folder: str | os.PathLike[str]) -> RunRecords:
    """Read the records of a run, also while it goes on.

    Lines that were cut short by a kill are skipped. Records of steps after the one that a later
    attempt goes on from do not count.

    Args:
        folder: the folder that a `Monitor` wrote into.

    Raises:
        FileNotFoundError: it has no records.
        ValueError: they were written by a later version, or were changed: a field has something
            else than the number that it should have.
    """
    run, damaged = parse_run(Path(folder))
    if damaged:
        warn_user(f"{damaged} lines of `{run.folder / FILE}` are damaged, and left out.")
    return run


def parse_run(folder: Path) -> tuple[RunRecords, int]:
    """Return the same as `read_run`, and the number of damaged lines, without a warning."""
    if not (folder / FILE).is_file():
        raise FileNotFoundError(f"`{folder}` has no `{FILE}`: no `Monitor` has written into it.")
    attempts: list[Record] = []
    found: dict[str, list[Record]] = {STEPS: [], EPOCH: []}
    damaged, is_cut = 0, False  # a kill cuts the last line of an attempt
    for number, line in enumerate((folder / FILE).read_bytes().splitlines(), start=1):
        if not line:
            continue
        record = _parsed(line)
        if record is None:
            damaged, is_cut = damaged + is_cut, True
            continue
        _check_numbers(record, f"line {number} of `{folder / FILE}`")
        kind = record["kind"]
        damaged, is_cut = damaged + (is_cut and kind != ATTEMPT), False
        if kind == ATTEMPT:
            if _is_later(record):
                raise ValueError(
                    f"`{folder / FILE}` has version {record['version']}, but this odb_nodes reads "
                    f"{VERSION}. Read it with the odb_nodes that wrote it."
                )
            if attempts[-1:] != [record]:  # the same where a disk was full within what follows it
                attempts.append(record)
            for name, records in found.items():
                found[name] = [one for one in records if one["step"] <= record["step"]]
        elif kind in found:
            found[kind].append(record)
    run = RunRecords(folder=folder, attempts=attempts, steps=found[STEPS], epochs=found[EPOCH])
    return run, damaged


def _parsed(line: bytes) -> Record | None:
    """Return the record of a line; None where it is damaged, or lacks what its kind has."""
    try:
        record: Record = json.loads(line)
        kind = record["kind"]
        if kind == ATTEMPT and _is_later(record):
            return record  # which may have other keys
        is_whole = _KEYS.get(kind, set()) <= record.keys()
        if kind in (STEPS, EPOCH):
            is_whole = is_whole and record["sum"].keys() >= _SUMS
        return record if is_whole else None
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


def _is_later(attempt: Record) -> bool:
    return isinstance(attempt["version"], int) and attempt["version"] > VERSION


def _check_numbers(record: Record, place: str) -> None:
    """Check that a record has numbers where its kind has them."""
    if record["kind"] not in _KEYS or (record["kind"] == ATTEMPT and _is_later(record)):
        return
    fields = {name: record[name] for name in _NUMBERS if name in record}
    for group in (*GROUPS, "weight", "shapes"):
        values = record.get(group, {})
        if not isinstance(values, dict):
            fields[group] = values
            continue
        fields |= {
            f"{group}.{name}": value
            for name, value in values.items()
            # What was not finite is null; no sum of a count is.
            if value is not None or group not in GROUPS or name in _SUMS
        }
    for name, value in fields.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(
                f"{place} (step {record['step']!r}): `{name}` must be a number, but is "
                f"{value!r:.80} instead. The file was changed: mend the line, or remove it."
            )
    for shape in record.get("shapes", {}):
        if not re.fullmatch("[0-9]+x[0-9]+", shape):
            raise ValueError(
                f"{place} (step {record['step']!r}): `shapes` must name rows and width, as `8x512` "
                f"does, but has {shape!r:.80}. The file was changed: mend the line, or remove it."
            )
