"""Reports of runs: a page to look at, and their numbers as CSV and JSON."""

from __future__ import annotations

import csv as csv_format
import io
import json as json_format
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from odb_nodes._core.checks import check_type
from odb_nodes._core.files import replacing
from odb_nodes._core.text import html_table, html_text
from odb_nodes.monitor.loss_book import SampleLoss
from odb_nodes.monitor.records import read_run
from odb_nodes.monitor.reporting.page import (
    Table,
    facts_table,
    make_page,
    settings_table,
    source_table,
)
from odb_nodes.monitor.reporting.summary import RunSummary

__all__ = ["Report", "RunSummary", "report"]

AnyPath = str | os.PathLike[str]


@dataclass(frozen=True)
class Report:
    """What some runs come to; as a string, a table to read.

    Attributes:
        runs: a summary of each, in the order of the folders.
    """

    runs: tuple[RunSummary, ...]

    def __str__(self) -> str:
        audits = [str(run.audit) for run in self.runs if run.audit is not None]
        return "\n\n".join([*map(_as_text, self._tables()), *audits])

    def _repr_html_(self) -> str:
        audits = [run.audit._repr_html_() for run in self.runs if run.audit is not None]
        return "".join([*map(_as_html, self._tables()), *audits])

    def _tables(self) -> list[Table]:
        settings = settings_table(self.runs)
        sources = [source_table(run) for run in self.runs if run.sources()]
        return [facts_table(self.runs), *[settings] * bool(settings.rows), *sources]


def report(
    folders: AnyPath | Sequence[AnyPath],
    *,
    html: AnyPath | None = None,
    csv: AnyPath | None = None,
    json: AnyPath | None = None,
) -> Report:
    """Return what runs come to, and write it down. Runs that go on can be looked at, too.

    Args:
        folders: those that a `Monitor` wrote into; several runs are drawn over one another.
        html: a page with all pictures in it, which needs the extra `tools` to be made, and no
            network to be looked at; `None` for none.
        csv: a row for each record; `None` for none.
        json: the records, and the summary of each run; `None` for none.

    Raises:
        FileNotFoundError: a folder has no records.
        ImportError: jinja2 is not installed.
        ValueError: a run has no record of steps yet, or there is no run.
    """
    given = [folders] if isinstance(folders, str | os.PathLike) else [*folders]
    for folder in given:
        check_type("folders", folder, str | os.PathLike)
    if not given:
        raise ValueError("`folders` must name at least 1 run, but is empty.")
    runs = []
    for name, folder in zip(_names_of(given), given, strict=True):
        records = read_run(folder)
        if not records.steps:
            raise ValueError(f"`{folder}` has no record of steps yet. Wait for the first one.")
        runs.append(RunSummary.of(name, records))
    found = Report(tuple(runs))
    for path, make in ((html, make_page), (csv, _as_csv), (json, _as_json)):
        if path is not None:
            with replacing(Path(path)) as file:
                file.write(make(found.runs).encode())
    return found


def _names_of(folders: Sequence[AnyPath]) -> list[str]:
    """Return the names of the folders, with as many parents as tell them apart."""
    parts = [Path(folder).resolve().parts for folder in folders]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len({*names}) == len(names):
            return names
    return [f"{Path(folder).name} ({number})" for number, folder in enumerate(folders)]


def _as_text(table: Table) -> str:
    rows = [[str(cell) for cell in row] for row in (table.head, *table.rows)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [table.caption] if table.caption else []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells[1:]]).rstrip())
    return "\n".join(lines)


def _as_html(table: Table) -> str:
    head = [*map(str, table.head)]
    rows = [dict(zip(head, map(str, row), strict=True)) for row in table.rows]
    return (html_text(table.caption) if table.caption else "") + html_table(rows)


def _as_csv(runs: Sequence[RunSummary]) -> str:
    rows = [row for run in runs for row in run.rows()]
    names = list(dict.fromkeys(name for row in rows for name in row))
    file = io.StringIO()
    writer = csv_format.DictWriter(file, names, restval="")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def _as_data(one: SampleLoss) -> dict[str, Any]:
    """Return the loss of a sample as JSON data; None where it is not finite."""
    return one._asdict() | {"loss": one.loss if math.isfinite(one.loss) else None}


def _as_json(runs: Sequence[RunSummary]) -> str:
    found = [
        {
            "name": run.name,
            "folder": str(run.records.folder),
            "facts": run.facts(),
            "settings": run.settings(),
            "sources": run.sources(),
            **run.whole,
            "worst": [[_as_data(one) for one in history] for history in run.worst],
            "audit": None if run.audit is None else str(run.audit),
            "attempts": run.records.attempts,
            "steps": run.records.steps,
            "epochs": run.records.epochs,
        }
        for run in runs
    ]
    return json_format.dumps({"runs": found}, indent=1, allow_nan=False)
