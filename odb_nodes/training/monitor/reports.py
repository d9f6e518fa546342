"""Reports of runs: an HTML page of figures, tables as text, and the records as CSV and JSON."""

from __future__ import annotations

import csv as csv_format
import io
import json as json_format
import math
import os
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from odb_nodes._support.checks import check_type
from odb_nodes._support.files import replacing
from odb_nodes._support.text import Rows, Shown, html_table, html_text
from odb_nodes.training.ledger import Audit, audit
from odb_nodes.training.memory.meter import GIB
from odb_nodes.training.monitor.counts import LOSS_OF, Counts
from odb_nodes.training.monitor.figures import Curve, Figure, curves, dots, page
from odb_nodes.training.monitor.losses import ALL_RANKS, SampleLoss, read_losses, worst_samples
from odb_nodes.training.monitor.records import FILE, GROUPS, Record, RunRecords, read_run

AnyPath = str | os.PathLike[str]

MARKS = {
    "html": "<title>Training of ",
    "csv": "run,kind,first_step,step,epoch,",
    "json": '{\n "runs": [\n  {\n   "name": ',
}
"""Text at the beginning of a report's file: such a file may be replaced by a new report."""

_WORST = 20  # samples with the highest loss that a report lists
_LONGEST = 60  # characters of a setting
_NATS = "nats per supervised token"

_CURVES = (
    (f"Loss, {_NATS}", "mean", "loss", 1),
    ("Throughput, real tokens per second", "mean", "real_tokens_per_s", 1),
    ("Padding, % of the tokens computed", "mean", "padding_share", 0.01),
    ("Waiting for data, % of the time", "mean", "data_wait_share", 0.01),
    ("Waiting for plans of other ranks, % of the time", "mean", "rank_wait_share", 0.01),
    ("Balance of the ranks, %", "mean", "rank_balance", 0.01),
    ("Balance of the ranks in time, %", "mean", "time_balance", 0.01),
    ("Size of an optimizer step, samples", "mean", "samples_per_step", 1),
    ("Norm of the gradient", "mean", "grad_norm", 1),
    ("Learning rate", "last", "lr", 1),
    ("Peak memory so far, GiB", "peak", "memory_allocated_bytes", GIB),
    ("Reserved memory, GiB", "last", "memory_reserved_bytes", GIB),
)
"""Title of the curve, group and name of the value, divisor of the value."""
_CURVE_NAMES = {name for *_, name, _ in _CURVES}
_SETTINGS = {"loader": "{}", "config": "{} (config)", "versions": "version of {}"}


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """The summary of one run.

    Attributes:
        name: name of the run.
        records: its records.
        whole: one record over all steps, with the groups of values of a record.
        audit: the audit of the ledger beside the records; `None` without a ledger.
        worst: the samples with the highest loss, each with its losses in the order of the epochs.
    """

    name: str
    records: RunRecords = field(repr=False)
    whole: dict[str, dict[str, float | None]]
    audit: Audit | None
    worst: list[list[SampleLoss]] = field(repr=False)

    @classmethod
    def of(cls, name: str, records: RunRecords) -> RunSummary:
        """Return the summary of a run."""
        ledger = _ledger_beside(records.folder)
        return cls(
            name=name,
            records=records,
            whole=_whole(records.steps),
            audit=None if ledger is None else audit(ledger),
            worst=worst_samples(read_losses(records.folder), _WORST),
        )

    def counted_attempts(self) -> list[tuple[int, Record]]:
        """Return (first step, attempt) of each attempt whose steps count."""
        attempts: list[tuple[int, Record]] = []
        for attempt in self.records.attempts:
            while attempts and attempts[-1][0] > attempt["step"]:
                attempts.pop()
            attempts.append((attempt["step"] + 1, attempt))
        return attempts

    @property
    def resumes(self) -> list[int]:
        """The steps after which the run was resumed, or started again with other settings."""
        return [attempt["resumed_at"] for _, attempt in self.counted_attempts()[1:]]

    def settings(self) -> dict[str, str]:
        """Return the settings of the run by name; a changed setting, by attempt."""
        attempts = self.counted_attempts()
        settings = {}
        for group, label in _SETTINGS.items():
            groups = [(first, attempt.get(group, {})) for first, attempt in attempts]
            for name in dict.fromkeys(name for _, values in groups for name in values):
                by_attempt = [(first, values.get(name)) for first, values in groups]
                settings[label.format(name)] = _by_attempt(by_attempt)
        return settings

    def facts(self) -> dict[str, float | str | None]:
        """Return the figures of the run by name, for a table; `None` for an unknown figure."""
        whole, steps = self.whole, self.records.steps
        mean, sums, peak = whole["mean"], whole["sum"], whole["peak"]
        # Steps before a resume on another number of ranks may have no record.
        recorded = sum(step["step"] - step["first_step"] + 1 for step in steps)
        memory = peak.get("memory_allocated_bytes")
        lrs = [step["last"]["lr"] for step in steps if step["last"].get("lr") is not None]
        losses = [step["mean"]["loss"] for step in steps if "loss" in step["mean"]]
        return {
            "optimizer steps": sums["optimizer_steps"],
            "optimizer steps without a record": steps[-1]["step"] - recorded or None,
            "epochs": len(self.records.epochs),
            "times begun or resumed": len(self.records.attempts),
            "resumed after step": ", ".join(map(str, self.resumes)) or None,
            "ranks": _by_attempt(
                [(first, attempt["world_size"]) for first, attempt in self.counted_attempts()]
            ),
            "training time, s": sums["seconds"],
            "samples": sums["samples"],
            "tokens": sums["tokens"],
            "loss, last record": steps[-1]["mean"].get("loss"),
            "highest learning rate": max(lrs, default=None),
            "records with a loss that is not finite": losses.count(None),
            "tokens / s": mean["real_tokens_per_s"],
            "padding share": mean["padding_share"],
            "rank balance": mean["rank_balance"],
            "rank balance in time": mean.get("time_balance"),
            "filler share": mean["filler_share"],
            "share of time waiting for data": mean["data_wait_share"],
            "largest batch, padded tokens": peak.get("padded_tokens"),
            "peak memory, GiB": None if memory is None else memory / GIB,
            "out of memory, times": sums.get("ooms", 0),
            "samples left out": sums.get("left_out", 0),
        }

    def sources(self) -> dict[str, dict[str, float | None]]:
        """Return samples, tokens, share of tokens and mean loss of each task, or source."""
        sums, mean = self.whole["sum"], self.whole["mean"]
        names = [name.partition("/")[2] for name in sums if name.startswith("tokens/")]
        return {
            name: {
                "samples": sums[f"samples/{name}"],
                "tokens": sums[f"tokens/{name}"],
                "share of tokens": (sums[f"tokens/{name}"] or 0) / (sums["tokens"] or 1),
                "loss": mean.get(f"{LOSS_OF}{name}"),
            }
            for name in sorted(names)
        }

    def curve(self, group: str, name: str, divisor: float = 1) -> list[tuple[float, float]]:
        """Return (optimizer step, value / divisor) of each record that has the value."""
        values = ((record["step"], record[group].get(name)) for record in self.records.steps)
        return [(step, value / divisor) for step, value in values if value is not None]

    def tokens_at(self, step: float) -> float:
        """Return the tokens of all records up to a step."""
        steps, totals = self._tokens
        return totals[bisect_right(steps, step)]

    @cached_property
    def _tokens(self) -> tuple[list[int], list[float]]:
        """The steps of the records, and the tokens before the first and up to each record."""
        records = self.records.steps
        tokens = [float(record["sum"]["tokens"]) for record in records]
        return [record["step"] for record in records], [*accumulate(tokens, initial=0.0)]

    def shapes(self) -> dict[tuple[int, int], int]:
        """Return (width, rows) -> number of rank 0's batches with that shape."""
        shapes: Counter[tuple[int, int]] = Counter()
        for record in self.records.steps:
            for shape, count in record["shapes"].items():
                rows, _, width = shape.partition("x")
                shapes[int(width), int(rows)] += count
        return shapes

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield each record as a row of a table, with values by `group.name`."""
        for record in [*self.records.steps, *self.records.epochs]:
            row = {name: value for name, value in record.items() if not isinstance(value, dict)}
            for group in GROUPS:
                row |= {f"{group}.{name}": value for name, value in record[group].items()}
            yield {"run": self.name, **row}

    def as_dict(self) -> dict[str, Any]:
        """Return the summary and all records as JSON data."""
        worst = [
            [
                {**loss._asdict(), "loss": loss.loss if math.isfinite(loss.loss) else None}
                for loss in history
            ]
            for history in self.worst
        ]
        return {
            "name": self.name,
            "folder": str(self.records.folder),
            "facts": self.facts(),
            "settings": self.settings(),
            "sources": self.sources(),
            **self.whole,
            "worst": worst,
            "audit": None if self.audit is None else str(self.audit),
            "attempts": self.records.attempts,
            "steps": self.records.steps,
            "epochs": self.records.epochs,
        }


@dataclass(frozen=True)
class Report(Shown):
    """A report of runs: `str(report)`, and a notebook, show it as tables.

    Attributes:
        runs: the summary of each run, in the order of the folders.
    """

    runs: tuple[RunSummary, ...]

    def parts(self) -> list[str | Rows]:
        """Return the texts and tables, in their order."""
        tables = [part for table in self._tables() for part in table if part]
        return [*tables, *(str(run.audit) for run in self.runs if run.audit)]

    def figures(self) -> list[Figure]:
        """Return the figures of the page as `plotly.graph_objects.Figure`, for a notebook.

        Raises:
            ImportError: the extra `report` is not installed.
        """
        title = f"Loss over real tokens, {_NATS}"
        figures = [self._curves(title, "mean", {"loss": ""}, over="real tokens")]
        has_ranks = any(
            attempt["world_size"] > 1 for run in self.runs for _, attempt in run.counted_attempts()
        )
        for title, group, name, divisor in _CURVES:
            if has_ranks or name not in ("rank_wait_share", "rank_balance", "time_balance"):
                figures.append(self._curves(title, group, {name: ""}, divisor))
        losses = {name for run in self.runs for name in run.whole["mean"] if "/" in name}
        users_values = {name for run in self.runs for name in run.whole["last"]} - _CURVE_NAMES
        for group, names in (("mean", losses), ("last", users_values)):
            labels_of: dict[str, dict[str, str]] = {}  # a figure for all names with one prefix
            for name in sorted(names):
                prefix, _, label = name.partition("/")
                labels_of.setdefault(prefix, {})[name] = label
            for prefix, labels in sorted(labels_of.items()):
                title = f"Loss by source or task, {_NATS}" if group == "mean" else prefix
                figures.append(self._curves(title, group, labels))
        if shapes := {run.name: run.shapes() for run in self.runs if run.shapes()}:
            axes = ("width, tokens", "rows")
            figures.append(dots("Shapes of the batches of rank 0", axes, shapes))
        return [figure for figure in figures if figure is not None]

    def to_html(self) -> str:
        """Return an HTML page with tables and figures. A browser needs no network to show it.

        Raises:
            ImportError: the extra `report` is not installed.
        """
        title = self.runs[0].name if len(self.runs) == 1 else f"{len(self.runs)} runs"
        caption = (
            "Each point is one record: a mean over its steps, or the value of its last step for "
            "learning rates, memory and further values. A dotted line is a resume."
        )
        facts, *tables = self._tables()
        sections: list[tuple[str, list[Any]]] = [("", [html_table(facts[1])])]
        sections.append(("Curves", [html_text(caption), *self.figures()]))
        for name, rows in tables:
            sections.append((name, [html_table(rows)]))
        for run in self.runs:
            if run.worst:
                name = f"Samples of {run.name} with the highest loss"
                sections.append((name, [html_table(_worst(run))]))
        for run in self.runs:
            if run.audit:
                name = f"What {run.name} was trained on"
                sections.append((name, [html_text(str(run.audit), "pre")]))
        return page(f"Training of {title}", sections)

    def to_csv(self) -> str:
        """Return CSV with a row for each record, and values by `group.name`."""
        rows = [row for run in self.runs for row in run.rows()]
        names = list(dict.fromkeys(name for row in rows for name in row))
        file = io.StringIO()
        writer = csv_format.DictWriter(file, names, restval="")
        writer.writeheader()
        writer.writerows(rows)
        return file.getvalue()

    def to_json(self) -> str:
        """Return JSON with the records and the summary of each run."""
        runs = [run.as_dict() for run in self.runs]
        return json_format.dumps({"runs": runs}, indent=1, allow_nan=False)

    def _tables(self) -> list[tuple[str, Rows]]:
        """Return name and rows of the tables: figures, settings, and the sources of each run."""
        facts = {run.name: run.facts() for run in self.runs}
        settings = {run.name: run.settings() for run in self.runs}
        tables = [("", _columns(facts)), ("Settings", _columns(settings))]
        for run in self.runs:
            rows = [
                {"source or task": source}
                | {name: _cell(name, value) for name, value in figures.items()}
                for source, figures in run.sources().items()
            ]
            tables.append((f"Sources and tasks of {run.name}", rows))
        return [table for table in tables if table[1]]

    def _curves(
        self,
        title: str,
        group: str,
        labels: dict[str, str],
        divisor: float = 1,
        over: str = "optimizer steps",
    ) -> Figure | None:
        """Return a figure with the curves of all runs; `None` if no run has the values."""
        drawn: list[Curve] = []
        for number, run in enumerate(self.runs):
            x_of = run.tokens_at if over == "real tokens" else float
            for name, label in labels.items():
                points = [(x_of(step), value) for step, value in run.curve(group, name, divisor)]
                if not points:
                    continue
                run_label = run.name if len(self.runs) > 1 or not label else ""
                legend = ": ".join(filter(None, (run_label, label)))
                color = len(drawn) if len(labels) > 1 else number
                drawn.append(Curve(legend, points, [*map(x_of, run.resumes)], color))
        return curves(title, over, drawn) if drawn else None


def report(
    folders: AnyPath | Sequence[AnyPath],
    *,
    html: AnyPath | None = None,
    csv: AnyPath | None = None,
    json: AnyPath | None = None,
) -> Report:
    """Summarize runs, finished or running, and write the summary to files.

    Args:
        folders: the folder of each run, as for `read_run`; figures show all runs together.
        html: file for a page with all tables and figures. Writing it needs the extra `report`;
            looking at it needs no network.
        csv: file for a row of each record.
        json: file for the records and the summary of each run.

    Raises:
        FileNotFoundError: a folder has no records.
        ImportError: plotly is not installed.
        ValueError: a run has no record of steps yet, or `folders` is empty.
    """
    folders = [folders] if isinstance(folders, str | os.PathLike) else [*folders]
    for folder in folders:
        check_type("folders", folder, str | os.PathLike)
    if not folders:
        raise ValueError("`folders` must name at least 1 run, but is empty.")
    runs = [read_run(folder) for folder in folders]
    for run in runs:
        if not run.steps:
            raise ValueError(
                f"`{run.folder}` has no record of steps yet. Wait for the first record."
            )
    names = _names_of([run.folder for run in runs])
    result = Report(tuple(map(RunSummary.of, names, runs)))
    for path, make in ((html, result.to_html), (csv, result.to_csv), (json, result.to_json)):
        if path is not None:
            with replacing(Path(path)) as file:
                file.write(make().encode())
    return result


def _names_of(folders: Sequence[Path]) -> list[str]:
    """Return the names of the folders, with as many parents as are needed to differ."""
    parts = [folder.resolve().parts for folder in folders]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len({*names}) == len(names):
            return names
    return [f"{folder.name} ({number})" for number, folder in enumerate(folders)]


def _columns(runs: dict[str, dict[str, Any]]) -> Rows:
    """Return a table with a row for each name that a run has a value for, a column for each run."""
    rows = []
    for name in dict.fromkeys(name for values in runs.values() for name in values):
        cells = {run: _cell(name, values.get(name)) for run, values in runs.items()}
        if any(cells.values()):
            rows.append({"": name, **cells})
    return rows


def _cell(name: str, value: float | str | None) -> str:
    """Return a figure as text; a share as a percentage."""
    if value is None or isinstance(value, str):
        return value or ""
    if "share" in name or "balance" in name:
        return f"{100 * value:.1f} %"
    return f"{value:,.0f}" if value == round(value) or abs(value) >= 1000 else f"{value:.3g}"


def _worst(run: RunSummary) -> Rows:
    epochs = sorted({loss.epoch for history in run.worst for loss in history})
    rows = []
    for history in run.worst:
        last = history[-1]
        row = {"source": last.source, "key": str(last.key), "repeat": str(last.repeat)}
        row["rank"] = "" if last.rank == ALL_RANKS else str(last.rank)
        row["supervised tokens"] = f"{last.targets:,}"
        losses = {loss.epoch: f"{loss.loss:.4g}" for loss in history}
        rows.append(row | {f"loss, epoch {epoch}": losses.get(epoch, "") for epoch in epochs})
    return rows


def _by_attempt(values: Sequence[tuple[int, Any]]) -> str:
    """Return (first step, value) of each attempt as text, such as "2, then 1 from step 9"."""
    parts: list[str] = []
    for number, (first, value) in enumerate(values):
        text = value if isinstance(value, str) else json_format.dumps(value)
        text = text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}\u2026"
        if not parts or value != values[number - 1][1]:
            parts.append(f"{text} from step {first}" if parts else text)
    return ", then ".join(parts)


def _whole(steps: Sequence[Record]) -> dict[str, dict[str, float | None]]:
    """Return the groups of all steps together; a value that is `None` in a record is `None`."""
    total = Counts()
    for record in steps:
        mean, sums, peaks, last = (
            {name: math.nan if value is None else value for name, value in record[group].items()}
            for group in GROUPS
        )
        weights = record["weight"]
        totals = {name: mean[name] * weight for name, weight in weights.items()}
        total.add(Counts(sums=sums, totals=totals, weights=weights, peaks=peaks, last=last))
    return total.groups()


def _ledger_beside(folder: Path) -> Path | None:
    """Return the folder of a run's ledger: in its folder, or beside it if no other run is there."""
    above = folder.resolve().parent
    places = [folder, folder / "ledger"]
    if all(path.parent.samefile(folder) for path in above.glob(f"*/{FILE}")):
        places.append(above / "ledger")
    return next((place for place in places if any(place.glob("rank-*.ledger"))), None)
