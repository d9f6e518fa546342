"""The page that compares runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from odb_nodes._core.extras import import_extra
from odb_nodes.monitor.loss_book import ALL_RANKS
from odb_nodes.monitor.reporting.summary import RunSummary, thinned
from odb_nodes.monitor.reporting.svg import Curve, line_chart, number, scatter
from odb_nodes.monitor.reporting.template import PAGE

Points = Sequence[tuple[float, float]]

_MOST_POINTS = 4000  # of all curves of a picture, which keeps the page small
_MOST_NUMBERS = 12  # rows of a run in the table of a picture
_GIB = 2**30


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
    text: str
    table: Table


_CURVES: Sequence[tuple[str, str, str, float]] = (
    ("Loss, nats per supervised token", "mean", "loss", 1),
    ("Throughput, real tokens per second", "mean", "real_tokens_per_s", 1),
    ("Padding, share of the tokens computed", "mean", "padding_share", 1),
    ("Waiting for data, share of the time", "mean", "data_wait_share", 1),
    ("Waiting for plans of other ranks, share of the time", "mean", "rank_wait_share", 1),
    ("Balance of the ranks", "mean", "rank_balance", 1),
    ("Samples per optimizer step", "mean", "samples_per_step", 1),
    ("Norm of the gradient", "mean", "grad_norm", 1),
    ("Learning rate, of the last step of a record", "last", "lr", 1),
    ("Memory at its peak so far, GiB", "peak", "memory_allocated_bytes", _GIB),
    ("Memory reserved, GiB, at the end of a record", "last", "memory_reserved_bytes", _GIB),
)
"""Title, group and name of a value, and what it is divided by."""
_OF_RANKS = ("rank_wait_share", "rank_balance")  # of several


def make_page(runs: Sequence[RunSummary]) -> str:
    """Return the HTML of a report.

    Raises:
        ImportError: jinja2 is not installed.
    """
    jinja2 = import_extra("jinja2", "tools")
    names = [run.name for run in runs]
    found: str = (
        jinja2.Environment(autoescape=True)
        .from_string(PAGE)
        .render(
            title=f"Training of {names[0]}" if len(names) == 1 else f"{len(names)} training runs",
            runs=names,
            facts=facts_table(runs),
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
        (name, *("" if column[name] is None else number(column[name] or 0) for column in columns))
        for name in columns[0]
        if any(column[name] is not None for column in columns)
    ]
    return Table(("", *(run.name for run in runs)), rows)


def _curve_charts(runs: Sequence[RunSummary]) -> list[Chart]:
    over_tokens = [run.loss_over_tokens() for run in runs]
    charts = _chart("Loss over real tokens", runs, over_tokens, "real tokens")
    for title, group, name, divisor in _CURVES:
        if name in _OF_RANKS and all(run.ranks == 1 for run in runs):
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
        charts += _chart(f"Loss of {name}", runs, curves)
    return charts


def _value_charts(runs: Sequence[RunSummary]) -> list[Chart]:
    """Return a picture for each of the further numbers that the monitor was told."""
    known = {name for *_, name, _ in _CURVES}
    told = {name for run in runs for name in run.whole["last"]} - known
    charts = []
    for name in sorted(told):
        curves = [run.curve("last", name) for run in runs]
        charts += _chart(f"{name}, of the last step of a record", runs, curves)
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
    text = " ".join(_in_words(run.name, points) for run, _, points in known)
    bins = min(150, max(10, _MOST_POINTS // (2 * len(runs))))
    drawn = [Curve(index, thinned(points, bins)) for _, index, points in known]
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
    return [Chart(title, line_chart(title, text, x_label, drawn), text, table)]


def _in_words(run: str, points: Points) -> str:
    values = [value for _, value in points]
    ends = f"from {number(values[0])} to {number(values[-1])}"
    return f"{run}: {ends}, lowest {number(min(values))}, highest {number(max(values))}."


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
        words.append(f"{run.name}: {len(shapes):,} shapes, the largest with {most:,} tokens.")
    if not dots:
        return []
    text = " ".join(words)
    svg = scatter(title, text, ("width, tokens", "rows"), dots)
    table = Table(("run, rows x width", "batches"), rows, "The most frequent ones.")
    return [Chart(title, svg, text, table)]


def source_table(run: RunSummary) -> Table:
    """Return the figures of the tasks, or sources, of a run that has some, a row for each."""
    sources = run.sources()
    head = [
        name
        for name in next(iter(sources.values()))
        if any(one[name] is not None for one in sources.values())
    ]
    rows = [
        (source, *("" if one[name] is None else number(one[name] or 0) for name in head))
        for source, one in sources.items()
    ]
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
