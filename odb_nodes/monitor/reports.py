"""Reports of runs: a page of figures to look at, tables, and their numbers as CSV and JSON."""

from __future__ import annotations

import csv as csv_format
import io
import json as json_format
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from odb_nodes._core.checks import check_type
from odb_nodes._core.files import replacing
from odb_nodes._core.text import Rows, Shown, html_table, html_text
from odb_nodes.ledger import Audit, audit
from odb_nodes.monitor.figures import Curve, Figure, curves, dots, page
from odb_nodes.monitor.losses import ALL_RANKS, SampleLoss, read_losses, worst_samples
from odb_nodes.monitor.records import FILE, GROUPS, Record, RunRecords, read_run
from odb_nodes.monitor.step_times import compared_times
from odb_nodes.monitor.window import LOSS_OF, Counts
from odb_nodes.planning import StepTime

AnyPath = str | os.PathLike[str]

MARKS = {
    "html": "<title>Training of ",
    "csv": "run,kind,first_step,step,epoch,",
    "json": '{\n "runs": [\n  {\n   "name": ',
}
"""What the beginning of a file of a report has, by which a later report knows it."""

_WORST = 20  # samples
_LONGEST = 60  # characters of a setting
_GIB = 2**30
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
    ("Peak memory so far, GiB", "peak", "memory_allocated_bytes", _GIB),
    ("Reserved memory, GiB", "last", "memory_reserved_bytes", _GIB),
)
"""Title, group and name of a value, and what it is divided by."""
_SETTINGS = {"loader": "{}", "config": "{} (config)", "versions": "version of {}"}
_OWN_LAST = {name for *_, name, _ in _CURVES}


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """What a run comes to.

    Attributes:
        name: of the run.
        records: its records.
        whole: a record of all of its steps, with the groups of values of any record.
        audit: what `odb_nodes.audit` says of the ledger beside the records; None without one.
        worst: the samples with the highest loss, each with its losses in the order of the epochs.
    """

    name: str
    records: RunRecords = field(repr=False)
    whole: dict[str, dict[str, float | None]]
    audit: Audit | None
    worst: list[list[SampleLoss]] = field(repr=False)

    @classmethod
    def of(cls, name: str, records: RunRecords) -> RunSummary:
        """Return what a run comes to."""
        ledger = _ledger_beside(records.folder)
        return cls(
            name=name,
            records=records,
            whole=_whole(records.steps),
            audit=None if ledger is None else audit(ledger),
            worst=worst_samples(read_losses(records.folder), _WORST),
        )

    def stretches(self) -> list[tuple[int, Record]]:
        """Return (first step, attempt) of each attempt that has steps which count."""
        found: list[tuple[int, Record]] = []
        for attempt in self.records.attempts:
            found = [one for one in found if one[0] <= attempt["step"]]
            found.append((attempt["step"] + 1, attempt))
        return found

    @property
    def resumes(self) -> list[int]:
        """The steps after which the run was resumed, or begun again with other settings."""
        return [attempt["resumed_at"] for _, attempt in self.stretches()[1:]]

    @property
    def unrecorded_steps(self) -> int:
        """The steps between records: those before a resume on another number of ranks."""
        ends = [0, *(one["step"] for one in self.records.steps)]
        return sum(
            one["first_step"] - 1 - end for one, end in zip(self.records.steps, ends, strict=False)
        )

    def settings(self) -> dict[str, str]:
        """Return what the run was made with, by name: where that has changed, by stretch."""
        stretches, found = self.stretches(), {}
        for group, label in _SETTINGS.items():
            for name in dict.fromkeys(name for _, one in stretches for name in one.get(group, {})):
                values = [(first, one.get(group, {}).get(name)) for first, one in stretches]
                found[label.format(name)] = _by_stretch(values)
        return found

    def facts(self) -> dict[str, float | str | None]:
        """Return the figures of the run by name, for a table; None where one is not known."""
        whole, steps = self.whole, self.records.steps
        mean, sums, peak = whole["mean"], whole["sum"], whole["peak"]
        memory = peak.get("memory_allocated_bytes")
        lrs = [lr for one in steps if (lr := one["last"].get("lr")) is not None]
        return {
            "optimizer steps": sums["optimizer_steps"],
            "optimizer steps without a record": self.unrecorded_steps or None,
            "epochs": len(self.records.epochs),
            "times begun or resumed": len(self.records.attempts),
            "resumed after step": ", ".join(map(str, self.resumes)) or None,
            "ranks": _by_stretch([(step, one["world_size"]) for step, one in self.stretches()]),
            "training time, s": sums["seconds"],
            "samples": sums["samples"],
            "tokens": sums["tokens"],
            "loss, last record": steps[-1]["mean"].get("loss"),
            "highest learning rate": max(lrs, default=None),
            "records with a loss that is not finite": sum(
                "loss" in one["mean"] and one["mean"]["loss"] is None for one in steps
            ),
            "tokens / s": mean["real_tokens_per_s"],
            "padding share": mean["padding_share"],
            "rank balance": mean["rank_balance"],
            "rank balance in time": mean.get("time_balance"),
            **self._times(),
            "filler share": mean["filler_share"],
            "share of time waiting for data": mean["data_wait_share"],
            "largest batch, padded tokens": peak.get("padded_tokens"),
            "peak memory, GiB": None if memory is None else memory / _GIB,
            "out of memory, times": sums.get("ooms", 0),
            "samples left out": sums.get("left_out", 0),
        }

    def _times(self) -> dict[str, float | None]:
        """Return what ranks were levelled by, beside what steps took, where there are several."""
        told = [one["step_time"] for one in self.records.attempts if one["world_size"] > 1]
        return compared_times(StepTime(**told[-1]), self.records.folder) if told else {}

    def sources(self) -> dict[str, dict[str, float | None]]:
        """Return samples, tokens, their share, and the mean loss of each task, or source."""
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
        """Return (optimizer step, value / divisor) of each record that has a value."""
        values = ((one["step"], one[group].get(name)) for one in self.records.steps)
        return [(step, value / divisor) for step, value in values if value is not None]

    def tokens_at(self, step: float) -> float:
        """Return the tokens of all records up to a step."""
        return float(sum(one["sum"]["tokens"] for one in self.records.steps if one["step"] <= step))

    def shapes(self) -> dict[tuple[int, int], int]:
        """Return (width, rows) -> how many batches of rank 0 had that shape."""
        found: dict[tuple[int, int], int] = {}
        for record in self.records.steps:
            for shape, count in record["shapes"].items():
                rows, _, width = shape.partition("x")
                found[int(width), int(rows)] = found.get((int(width), int(rows)), 0) + count
        return found

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield each record as a row of a table, the values by `group.name`."""
        for record in [*self.records.steps, *self.records.epochs]:
            row = {name: one for name, one in record.items() if not isinstance(one, dict)}
            for group in GROUPS:
                row |= {f"{group}.{name}": value for name, value in record[group].items()}
            yield {"run": self.name, **row}

    def as_dict(self) -> dict[str, Any]:
        """Return the summary and all records as JSON data."""
        worst = [[one._asdict() for one in history] for history in self.worst]
        for one in (one for history in worst for one in history):
            one["loss"] = one["loss"] if math.isfinite(one["loss"]) else None
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
    """What some runs come to; as a string, and in a notebook, tables to read.

    Attributes:
        runs: a summary of each, in the order of the folders.
    """

    runs: tuple[RunSummary, ...]

    def parts(self) -> list[str | Rows]:
        """Return the texts and tables, in their order."""
        tables = [part for table in self._tables() for part in table if part]
        return [*tables, *(str(run.audit) for run in self.runs if run.audit)]

    def figures(self) -> list[Figure]:
        """Return the figures of the page, which a notebook shows: `plotly.graph_objects.Figure`.

        Raises:
            ImportError: the extra `report` is not installed.
        """
        title = f"Loss over real tokens, {_NATS}"
        found = [self._curves(title, "mean", {"loss": ""}, over="real tokens")]
        has_ranks = any(one["world_size"] > 1 for run in self.runs for _, one in run.stretches())
        for title, group, name, divisor in _CURVES:
            if has_ranks or name not in ("rank_wait_share", "rank_balance", "time_balance"):
                found.append(self._curves(title, group, {name: ""}, divisor))
        told = {name for run in self.runs for name in run.whole["last"]} - _OWN_LAST
        losses = {name for run in self.runs for name in run.whole["mean"] if "/" in name}
        for group, names in (("mean", losses), ("last", told)):
            for kind in sorted({name.partition("/")[0] for name in names}):
                own = sorted(name for name in names if name.partition("/")[0] == kind)
                title = f"Loss by source or task, {_NATS}" if group == "mean" else kind
                labels = {name: name.partition("/")[2] for name in own}
                found.append(self._curves(title, group, labels))
        if shapes := {run.name: run.shapes() for run in self.runs if run.shapes()}:
            found.append(dots("Shapes of the batches of rank 0", ("width, tokens", "rows"), shapes))
        return [one for one in found if one is not None]

    def to_html(self) -> str:
        """Return one page with tables and figures, which needs no network to be looked at.

        Raises:
            ImportError: the extra `report` is not installed.
        """
        first, *runs = [run.name for run in self.runs]
        title = f"Training of {f'{1 + len(runs)} runs' if runs else first}"
        told = "Each point is one record: a mean over its steps, or the value of its last step for "
        told += "learning rates, memory and further values. A dotted line is a resume."
        facts, *tables = self._tables()
        return page(
            title,
            [
                ("", [html_table(facts[1])]),
                ("Curves", [html_text(told), *self.figures()]),
                *((name, [html_table(rows)]) for name, rows in tables),
                *(
                    (f"Samples of {run.name} with the highest loss", [html_table(_worst(run))])
                    for run in self.runs
                    if run.worst
                ),
                *(
                    (f"What {run.name} was trained on", [html_text(str(run.audit), "pre")])
                    for run in self.runs
                    if run.audit
                ),
            ],
        )

    def to_csv(self) -> str:
        """Return a row for each record, the values by `group.name`."""
        rows = [row for run in self.runs for row in run.rows()]
        names = list(dict.fromkeys(name for row in rows for name in row))
        writer = csv_format.DictWriter(file := io.StringIO(), names, restval="")
        writer.writeheader()
        writer.writerows(rows)
        return file.getvalue()

    def to_json(self) -> str:
        """Return the records, and what each run comes to."""
        runs = [run.as_dict() for run in self.runs]
        return json_format.dumps({"runs": runs}, indent=1, allow_nan=False)

    def _tables(self) -> list[tuple[str, Rows]]:
        """Return name and rows of the tables: figures, settings, and the sources of each run."""
        facts = {run.name: run.facts() for run in self.runs}
        settings = {run.name: run.settings() for run in self.runs}
        tables = [("", _columns(facts)), ("Settings", _columns(settings))]
        for run in self.runs:
            rows = [
                {"source or task": name, **{key: _cell(key, one) for key, one in values.items()}}
                for name, values in run.sources().items()
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
        """Return a figure of values of all runs; None where there are none."""
        drawn: list[Curve] = []
        for number, run in enumerate(self.runs):
            place = run.tokens_at if over == "real tokens" else float
            for name, label in labels.items():
                points = [(place(step), one) for step, one in run.curve(group, name, divisor)]
                parts = [run.name] * (len(self.runs) > 1 or not label) + [label] * bool(label)
                color = len(drawn) if len(labels) > 1 else number
                curve = Curve(": ".join(parts), points, [*map(place, run.resumes)], color)
                drawn += [curve] * bool(points)
        return curves(title, over, drawn) if drawn else None


def report(
    folders: AnyPath | Sequence[AnyPath],
    *,
    html: AnyPath | None = None,
    csv: AnyPath | None = None,
    json: AnyPath | None = None,
) -> Report:
    """Return what runs come to, and write it down. Runs that go on can be looked at, too.

    Args:
        folders: those that a `Monitor` wrote into, as `read_run` takes them; several runs are
            drawn over one another.
        html: a page with all figures in it, which needs the extra `report` to be made, and no
            network to be looked at; `None` for none.
        csv: a row for each record; `None` for none.
        json: the records, and the summary of each run; `None` for none.

    Raises:
        FileNotFoundError: a folder has no records.
        ImportError: plotly is not installed.
        ValueError: a run has no record of steps yet, or there is no run.
    """
    given = [folders] if isinstance(folders, str | os.PathLike) else [*folders]
    for folder in given:
        check_type("folders", folder, str | os.PathLike)
    if not given:
        raise ValueError("`folders` must name at least 1 run, but is empty.")
    read = [read_run(folder) for folder in given]
    for one in read:
        if not one.steps:
            raise ValueError(f"`{one.folder}` has no record of steps yet. Wait for the first one.")
    names = _names_of([one.folder for one in read])
    found = Report(tuple(map(RunSummary.of, names, read)))
    for path, make in ((html, found.to_html), (csv, found.to_csv), (json, found.to_json)):
        if path is not None:
            with replacing(Path(path)) as file:
                file.write(make().encode())
    return found


def _names_of(folders: Sequence[Path]) -> list[str]:
    """Return the names of the folders, with as many parents as tell them apart."""
    parts = [folder.resolve().parts for folder in folders]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len({*names}) == len(names):
            return names
    return [f"{folder.name} ({number})" for number, folder in enumerate(folders)]


def _columns(runs: dict[str, dict[str, Any]]) -> Rows:
    """Return a row for each name that is known of a run, a column for each run."""
    names = dict.fromkeys(name for one in runs.values() for name in one)
    rows = [
        {"": name, **{run: _cell(name, one.get(name)) for run, one in runs.items()}}
        for name in names
    ]
    return [row for row in rows if any([*row.values()][1:])]


def _cell(name: str, value: float | str | None) -> str:
    """Return a figure as text; a share as a percentage."""
    if value is None or isinstance(value, str):
        return value or ""
    if "share" in name or "balance" in name:
        return f"{100 * value:.1f} %"
    return f"{value:,.0f}" if value == round(value) or abs(value) >= 1000 else f"{value:.3g}"


def _worst(run: RunSummary) -> Rows:
    epochs = sorted({one.epoch for history in run.worst for one in history})
    rows = []
    for history in run.worst:
        last, losses = history[-1], {one.epoch: f"{one.loss:.4g}" for one in history}
        place = {"source": last.source, "key": str(last.key), "repeat": str(last.repeat)}
        place["rank"] = "" if last.rank == ALL_RANKS else str(last.rank)
        place["supervised tokens"] = f"{last.targets:,}"
        rows.append(place | {f"loss, epoch {one}": losses.get(one, "") for one in epochs})
    return rows


def _by_stretch(values: Sequence[tuple[int, Any]]) -> str:
    """Return (first step, value) of the stretches of a run as text; a value that stays, once."""
    parts: list[str] = []
    for number, (first, value) in enumerate(values):
        text = value if isinstance(value, str) else json_format.dumps(value)
        text = text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}\u2026"
        if not parts or value != values[number - 1][1]:
            parts.append(f"{text} from step {first}" if parts else text)
    return ", then ".join(parts)


def _whole(steps: Sequence[Record]) -> dict[str, dict[str, float | None]]:
    """Return the groups of all steps together; what one record does not know, none does."""
    total = Counts()
    for record in steps:
        mean, sums, peaks, last = (
            {name: math.nan if one is None else one for name, one in record[group].items()}
            for group in GROUPS
        )
        weights = record["weight"]
        totals = {name: mean[name] * weight for name, weight in weights.items()}
        total.add(Counts(sums=sums, totals=totals, weights=weights, peaks=peaks, last=last))
    return total.groups()


def _ledger_beside(folder: Path) -> Path | None:
    """Return the folder of the ledger in the folder of a run; beside it, if of no other run."""
    above = folder.resolve().parent
    is_alone = all(one.parent.samefile(folder) for one in above.glob(f"*/{FILE}"))
    for place in (folder, folder / "ledger", *[above / "ledger"] * is_alone):
        if any(place.glob("rank-*.ledger")):
            return place
    return None
