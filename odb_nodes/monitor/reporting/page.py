"""The page that compares runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from odb_nodes._core.checks import import_extra
from odb_nodes.monitor.loss_book import ALL_RANKS
from odb_nodes.monitor.reporting.summary import RunSummary, thinned
from odb_nodes.monitor.reporting.svg import Curve, line_chart, number, scatter
from odb_nodes.monitor.reporting.template import PAGE

Points = Sequence[tuple[float, float]]

_MOST_POINTS = 4000  # of all curves of a picture, which keeps the page small
_MOST_NUMBERS = 12  # rows of a run in the table of a picture
_GIB = 2**30
_PERCENT = 0.01
_NATS = "nats per supervised token"
_NEAR = 0.005  # of the height of a picture: lines that are not farther apart hide each other
_ALIKE = 0.9  # share of the points that are near, from which on a curve is drawn with gaps


@dataclass(frozen=True)
class Table:
    """A table of texts."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""


@dataclass(frozen=True)
class Chart:
    """A picture, what is to be seen in it, and its numbers."""

    title: str
    svg: str
    words: Sequence[tuple[int, str]]
    """Number of a run, which decides the colour, and what is to be seen of it."""
    table: Table


_CURVES: Sequence[tuple[str, str, str, float]] = (
    (f"Loss, {_NATS}", "mean", "loss", 1),
    ("Throughput, real tokens per second", "mean", "real_tokens_per_s", 1),
    ("Padding, % of the tokens computed", "mean", "padding_share", _PERCENT),
    ("Waiting for data, % of the time", "mean", "data_wait_share", _PERCENT),
    ("Waiting for plans of other ranks, % of the time", "mean", "rank_wait_share", _PERCENT),
    ("Balance of the ranks, %", "mean", "rank_balance", _PERCENT),
    ("Size of an optimizer step, samples", "mean", "samples_per_step", 1),
    ("Norm of the gradient", "mean", "grad_norm", 1),
    ("Learning rate", "last", "lr", 1),
    ("Peak memory so far, GiB", "peak", "memory_allocated_bytes", _GIB),
    ("Reserved memory, GiB", "last", "memory_reserved_bytes", _GIB),
)
"""Title, group and name of a value, and what it is divided by."""
_OF_RANKS = ("rank_wait_share", "rank_balance")  # of several


def make_page(runs: Sequence[RunSummary]) -> str:
    """Return the HTML of a report."""
    jinja2 = import_extra("jinja2", "tools")
    names = [run.name for run in runs]
    found: str = (
        jinja2.Environment(autoescape=True)
        .from_string(PAGE)
        .render(
            title=f"Training of {names[0]}" if len(names) == 1 else f"{len(names)} training runs",
            runs=names,
            facts=facts_table(runs),
            settings=settings_table(runs),
            charts=[
                *_curve_charts(runs),
                *_source_charts(runs),
                *_value_charts(runs),
                *_shape_charts(runs),
            ],
            sources=[source_table(run) for run in runs if run.sources()],
            samples=[_worst_table(run) for run in runs if run.worst],
            audits=[(run.name, str(run.audit)) for run in runs if run.audit is not None],
        )
    )
    return found


def facts_table(runs: Sequence[RunSummary]) -> Table:
    """Return the figures of the runs, a column for each."""
    columns = [run.facts() for run in runs]
    rows = [
        (name, *(_cell(name, column[name]) for column in columns))
        for name in columns[0]
        if any(column[name] is not None for column in columns)
    ]
    return Table(("", *(run.name for run in runs)), rows)


def settings_table(runs: Sequence[RunSummary]) -> Table:
    """Return what the runs were made with, a column for each."""
    columns = [run.settings() for run in runs]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [(name, *(column.get(name, "") for column in columns)) for name in names]
    return Table(("setting", *(run.name for run in runs)), rows)


def _cell(name: str, value: float | str | None) -> str:
    """Return a figure as text; a share as a percentage."""
    if value is None or isinstance(value, str):
        return value or ""
    is_share = "share" in name or "balance" in name
    return f"{100 * value:.1f} %" if is_share else number(value)


def _curve_charts(runs: Sequence[RunSummary]) -> list[Chart]:
    over_tokens = [run.loss_over_tokens() for run in runs]
    charts = _chart(f"Loss over real tokens, {_NATS}", runs, over_tokens, "real tokens")
    for title, group, name, divisor in _CURVES:
        if name in _OF_RANKS and all(count == 1 for run in runs for _, count in run.ranks()):
            continue
        curves = [
            [(step, value / divisor) for step, value in run.curve(group, name)] for run in runs
        ]
        charts += _chart(title, runs, curves)
    return charts


def _source_charts(runs: Sequence[RunSummary]) -> list[Chart]:
    """Return a picture of the loss for each task, or source."""
    charts = []
    for name in sorted({name for run in runs for name in run.sources()}):
        curves = [run.curve("mean", f"loss/{name}") for run in runs]
        charts += _chart(f"Loss of {name}, {_NATS}", runs, curves)
    return charts


def _value_charts(runs: Sequence[RunSummary]) -> list[Chart]:
    """Return a picture for each of the further numbers that the monitor was told."""
    known = {name for *_, name, _ in _CURVES}
    told = {name for run in runs for name in run.whole["last"]} - known
    charts = []
    for name in sorted(told):
        curves = [run.curve("last", name) for run in runs]
        charts += _chart(name, runs, curves)
    return charts


def _chart(
    title: str,
    runs: Sequence[RunSummary],
    curves: Sequence[Points],
    x_label: str = "optimizer steps",
) -> list[Chart]:
    """Return a picture of the curves of the runs; none where none has a point."""
    known = [
        (run, index, points)
        for index, (run, points) in enumerate(zip(runs, curves, strict=True))
        if points
    ]
    if not known:
        return []
    bins = min(150, max(10, _MOST_POINTS // (2 * len(runs))))
    words, drawn = [], []
    for (run, index, points), below in zip(
        known, _beneath([one for *_, one in known]), strict=True
    ):
        on = "".join(f" (dashed, on {known[one][0].name})" for one in below[:1])
        words.append((index, f"{run.name}{on}: {_in_words(points)}"))
        marks = [run.tokens_at(one) if "tokens" in x_label else one for one in run.resumes]
        drawn.append(Curve(index, thinned(points, bins), len(below), marks))
    text = " ".join(one for _, one in words)
    is_whole = all(len(points) <= _MOST_NUMBERS for _, _, points in known)
    table = Table(
        (f"run, {x_label}", "value"),
        [
            (f"{run.name}, {step:,}", number(value))
            for run, _, points in known
            for step, value in _spread(points)
        ],
        "" if is_whole else "Some of the records.",
    )
    return [Chart(title, line_chart(title, text, x_label, drawn), words, table)]


def _in_words(points: Points) -> str:
    values = [value for _, value in points]
    ends = f"from {number(values[0])} to {number(values[-1])}"
    return f"{ends}, lowest {number(min(values))}, highest {number(max(values))}."


def _beneath(curves: Sequence[Points]) -> list[list[int]]:
    """Return for each curve the numbers of those drawn before it that it would hide."""
    values = [value for points in curves for _, value in points]
    near = _NEAR * (max(values) - min(values))
    places = [np.array(points, dtype=np.float64).T for points in curves]

    def is_on(one: int, other: int) -> bool:
        (x, y), (below_x, below_y) = places[one], places[other]
        is_far = np.abs(np.interp(x, below_x, below_y) - y) > near
        is_common = (x >= below_x[0]) & (x <= below_x[-1])
        return bool(is_common.any() and (~is_far)[is_common].mean() >= _ALIKE)

    return [[other for other in range(one) if is_on(one, other)] for one in range(len(curves))]


def _spread(points: Points) -> Points:
    """Return the first, the last and some points between them."""
    if len(points) <= _MOST_NUMBERS:
        return [*points]
    last = len(points) - 1
    return [points[number * last // (_MOST_NUMBERS - 1)] for number in range(_MOST_NUMBERS)]


def _shape_charts(runs: Sequence[RunSummary]) -> list[Chart]:
    """Return a picture of the shapes of batches."""
    title, dots, rows, words = "Shapes of the batches of rank 0", [], [], []
    for index, run in enumerate(runs):
        shapes = sorted(run.shapes().items(), key=lambda one: -one[1])
        if not shapes:
            continue
        for (height, width), count in shapes[: max(20, _MOST_POINTS // (4 * len(runs)))]:
            dots.append((Curve(index, [(width, height)]), min(9.0, 2.0 + count**0.5)))
        rows += [
            (f"{run.name}, {h} x {w}", number(count)) for (h, w), count in shapes[:_MOST_NUMBERS]
        ]
        most = max(h * w for (h, w), _ in shapes)
        seen = f"{len(shapes):,} shapes, the largest with {most:,} tokens."
        words.append((index, f"{run.name}: {seen}"))
    if not dots:
        return []
    text = " ".join(one for _, one in words)
    svg = scatter(title, text, ("width, tokens", "rows"), dots)
    table = Table(("run, rows x width", "batches"), rows, "The most frequent ones.")
    return [Chart(title, svg, words, table)]


def source_table(run: RunSummary) -> Table:
    """Return the figures of the tasks, or sources, of a run that has some, a row for each."""
    sources = run.sources()
    head = [
        name
        for name in next(iter(sources.values()))
        if any(one[name] is not None for one in sources.values())
    ]
    rows = [(source, *(_cell(name, one[name]) for name in head)) for source, one in sources.items()]
    return Table(("source or task", *head), rows, run.name)


def _worst_table(run: RunSummary) -> Table:
    epochs = sorted({one.epoch for history in run.worst for one in history})
    has_own = any(history[-1].rank != ALL_RANKS for history in run.worst)
    rows = []
    for history in run.worst:
        last, losses = history[-1], {one.epoch: f"{one.loss:.4g}" for one in history}
        rank = ["" if last.rank == ALL_RANKS else str(last.rank)] if has_own else []
        place = [last.source, *rank, str(last.key), str(last.repeat), f"{last.targets:,}"]
        rows.append((*place, *(losses.get(epoch, "") for epoch in epochs)))
    head = ["source", *["rank"] * has_own, "key", "repeat", "supervised tokens"]
    head += [f"epoch {one}" for one in epochs]
    return Table(head, rows, f"{run.name}: mean loss, by the last epoch")
