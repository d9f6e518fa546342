"""The records of a run: their content, and how to read them from `monitor.jsonl`."""

from __future__ import annotations

import json
import os
import re
import sys
import zlib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from platform import python_version
from typing import Any

from odb_nodes._support.checks import check_named, check_type
from odb_nodes._support.files import folder_with
from odb_nodes._support.user_warning import warn_user
from odb_nodes.core.loader.options import LoaderOptions

FILE = "monitor.jsonl"
VERSION = 2
STEPS, EPOCH, ATTEMPT = "steps", "epoch", "attempt"  # kinds of records

GROUPS = ("mean", "sum", "peak", "last")  # groups of values in a record
Record = dict[str, Any]
"""A record as JSON data; its `kind` is "steps", "epoch" or "attempt"."""


def scalars(record: Record) -> dict[str, float]:
    """Return the values of a record by name for charts, such as `mean/loss`; without `None`.

    Names of a record of an epoch, rather than of steps, begin with `epoch_`: `epoch_mean/loss`.
    """
    prefix = "" if record["kind"] == STEPS else f"{record['kind']}_"
    return {
        f"{prefix}{group}/{name}": value
        for group in GROUPS
        for name, value in record[group].items()
        if value is not None
    }


# --- reading --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RunRecords:
    """The records of a run that count: each step once, even after kills and resumes.

    Attributes:
        folder: the folder of the run.
        attempts: a record for each start or resume of the run.
        steps: the records of steps, in their order.
        epochs: the records of whole epochs.
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
    """Read the records of a run, finished or running.

    Lines that a kill has cut short are skipped; other damaged lines are skipped with a warning.
    After a resume, earlier records of later steps do not count.

    Args:
        folder: the folder that a `Monitor` wrote into, or a folder that has exactly one such
            folder.

    Raises:
        FileNotFoundError: the folder has no records.
        ValueError: another version wrote the records, or several folders in `folder` have records.
    """
    run, damaged = parse_run(folder_with(FILE, folder))
    if damaged:
        lines = ", ".join(map(str, damaged))
        warn_user(f"lines of `{run.folder / FILE}` are damaged, and left out: {lines}.")
    return run


def parse_run(folder: Path) -> tuple[RunRecords, list[int]]:
    """Return the records of a run, and the numbers of damaged lines."""
    if not (folder / FILE).is_file():
        raise FileNotFoundError(f"`{folder}` has no `{FILE}`: no `Monitor` has written into it.")
    run = RunRecords(folder=folder, attempts=[], steps=[], epochs=[])
    damaged: list[int] = []
    cut: list[int] = []  # the line just before this one, if a kill may have cut it short
    data = (folder / FILE).read_bytes()
    for number, line in enumerate(data.splitlines(), start=1):
        if not line:
            continue
        record = _parsed(line)
        if record is None:
            damaged = damaged + cut
            cut = [number]
            continue
        kind = record["kind"]
        if kind != ATTEMPT:
            damaged += cut
        elif record["version"] != VERSION:
            raise ValueError(
                f"`{folder / FILE}` has version {record['version']}, but this odb_nodes reads "
                f"{VERSION}. Read it with the odb_nodes that wrote it."
            )
        cut = []
        last = record["step"] if kind == ATTEMPT else record["first_step"] - 1
        for records in (run.epochs,) if kind == EPOCH else (run.steps, run.epochs):
            while records and records[-1]["step"] > last:
                records.pop()
        if kind == STEPS:
            run.steps.append(record)
        elif kind == EPOCH:
            run.epochs.append(record)
        elif run.attempts[-1:] != [record]:  # written again after a full disk cut the next record
            run.attempts.append(record)
    if data.endswith(b"\n"):  # the last line was not cut short
        damaged += cut
    return run, damaged


def line_of(record: Record) -> str:
    """Return the line of a record, which ends with a checksum."""
    text = json.dumps(record, allow_nan=False)
    return f'{text[:-1]}, "crc": {zlib.crc32(text.encode())}}}\n'


def _parsed(line: bytes) -> Record | None:
    """Return the record of a line; `None` if it is damaged."""
    try:
        record: Record = json.loads(line)
        has_crc = record.pop("crc", None) is not None
        if line_of(record).encode() == line + b"\n":
            return record
        is_other_version = record["kind"] == ATTEMPT and record["version"] != VERSION
        return record if is_other_version and not has_crc else None
    except (KeyError, TypeError, ValueError):
        return None


# --- settings of a run ----------------------------------------------------------------------------

_PACKAGES = ("odb_nodes", "torch", "torchdata", "numpy", "transformers", "accelerate", "lightning")
_RECORDED_OPTIONS = ("token_budget", "window", "seed", "accumulate")
_MOST_ITEMS = 100  # items of a recorded list; of a longer list, only the length is recorded
_LEFT_OUT = ("exclude", "process_group")  # `exclude` may have many keys of samples


def checked_config(config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a copy of the user's settings as JSON data; objects that JSON lacks become text."""
    remedy = 'Pass values by name, such as {"lr": 1e-4}, or `vars(args)`.'
    check_type("config", config, Mapping | None, remedy)
    check_named("config", config or {})
    checked: dict[str, Any] = {}
    for name, value in (config or {}).items():
        try:
            checked[name] = _as_json(value)
        except (TypeError, ValueError) as error:
            rule = f"`config[{name!r}]` must be data that JSON can hold"
            raise ValueError(f"{rule}, but: {error}. {remedy}") from None
    return checked


def loader_settings(options: LoaderOptions) -> dict[str, Any]:
    """Return the main options of a loader, and all that differ from their defaults, as JSON."""
    settings = {name: getattr(options, name) for name in _RECORDED_OPTIONS} | _differing(options)
    for name, value in settings.items():
        if isinstance(value, list | tuple) and len(value) > _MOST_ITEMS:  # such as indices
            settings[name] = f"{len(value)} items"
    return {name: _as_json(value) for name, value in settings.items() if name not in _LEFT_OUT}


def versions() -> dict[str, str]:
    """Return the versions of Python and of the imported packages."""
    packages = {name: getattr(sys.modules.get(name), "__version__", None) for name in _PACKAGES}
    imported = {name: str(version) for name, version in packages.items() if version}
    return {"python": python_version()} | imported


def _differing(options: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that differ from their defaults, by name."""
    differing = {}
    for field in fields(options):
        value = getattr(options, field.name)
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if type(value) is not type(default) or value != default:
            differing[field.name] = value
    return differing


def _as_json(value: Any) -> Any:
    return json.loads(json.dumps(value, default=_as_plain, allow_nan=False))


def _as_plain(value: Any) -> Any:
    """Return an object as JSON data, equal after a resume: without its address in memory."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    if getattr(value, "ndim", None) == 0:  # a number of numpy or torch
        return value.item()
    if is_dataclass(value) and not isinstance(value, type):
        return _differing(value)
    if name := getattr(value, "__qualname__", ""):
        return f"{value.__module__}.{name}"
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))
