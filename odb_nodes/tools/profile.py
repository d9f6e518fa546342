"""Summarize the lengths of a dataset, and compare ways to make batches of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from odb_nodes._support.arrays import IntArray
from odb_nodes._support.checks import check_type
from odb_nodes._support.progress import Bar
from odb_nodes._support.text import Rows, Shown, counted, html_table, html_text
from odb_nodes.core.planning import SimulationOptions, TokenBudget
from odb_nodes.core.planning.auto_window import AUTO, WindowSize, shown
from odb_nodes.core.sources import Mixing
from odb_nodes.core.sources.mixing import Weights
from odb_nodes.tools.baselines import STRATEGIES, WINDOWED, Baselines, Strategy, is_available
from odb_nodes.tools.lengths import LengthTable, count_lengths
from odb_nodes.tools.simulate import SimulationReport, TableEpoch, budget_code
from odb_nodes.training.monitor.figures import Figure, histogram, levels, page

__all__ = ["Comparison", "LengthSummary", "Profile", "profile"]

AS_GOOD = 0.01
"""The proposed window is the smallest with an efficiency within this share of the best."""

_WHY = (
    f"The arrow marks the proposed window for each number of ranks: the smallest window within "
    f"{AS_GOOD:.0%} of the best efficiency."
)
PERCENTILES = (0, 1, 5, 25, 50, 75, 95, 99, 100)
BINS = 32
_MOST_HISTOGRAMS = 40  # histograms of a page; tables have all sources


@dataclass(frozen=True, kw_only=True)
class LengthSummary:
    """The lengths of the samples of one source, or of all samples.

    Attributes:
        source: name of the source, or "all samples".
        samples: number of samples that have a length.
        skipped: number of samples that processing skips.
        tokens: tokens of all samples together.
        mean_tokens: their mean length.
        cv: coefficient of variation, standard deviation / mean.
        percentiles: percent -> length in tokens, from the shortest (0) to the longest (100).
        edges: lengths between which `counts` are, (bins + 1), in tokens, evenly spaced by ratio.
        counts: number of samples from each edge up to, but not including, the next one.
    """

    source: str
    samples: int
    skipped: int
    tokens: int
    mean_tokens: float
    cv: float
    percentiles: dict[int, int]
    edges: tuple[int, ...]
    counts: tuple[int, ...]

    @classmethod
    def of(cls, source: str, lengths: IntArray, skipped: int) -> LengthSummary:
        """Return the summary of lengths, at least one."""
        edges, counts = count_lengths(lengths, BINS)
        values = np.percentile(lengths, PERCENTILES, method="nearest")
        return cls(
            source=source,
            samples=len(lengths),
            skipped=skipped,
            tokens=int(lengths.sum()),
            mean_tokens=float(lengths.mean()),
            cv=float(lengths.std() / lengths.mean()),
            percentiles=dict(zip(PERCENTILES, values.astype(int).tolist(), strict=True)),
            edges=tuple(edges),
            counts=tuple(counts),
        )

    def as_row(self) -> dict[str, str]:
        """Return the formatted summary as a row of a table: title -> cell."""
        row = {
            "source": self.source,
            "samples": f"{self.samples:,}",
            "skipped": f"{self.skipped:,}",
            "mean": f"{self.mean_tokens:,.0f}",
            "CV": f"{self.cv:.2f}",
        }
        names = {0: "shortest", 50: "median", 100: "longest"}
        return row | {
            names.get(percent, f"{percent} %"): f"{tokens:,}"
            for percent, tokens in self.percentiles.items()
        }


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Figures of one way to make batches on a number of ranks.

    Attributes:
        world_size: number of ranks.
        strategy: one of `odb_nodes.tools.baselines.STRATEGIES`.
        window: samples that wait on each rank; `None` if the strategy has no window.
        is_auto: whether `"auto"` chose the window.
        figures: the report of the simulated epoch.
    """

    world_size: int
    strategy: Strategy
    window: int | None
    figures: SimulationReport
    is_auto: bool = False

    def as_row(self) -> dict[str, str]:
        """Return the formatted figures as a row of a table: title -> cell."""
        chosen = AUTO if self.is_auto else self.window
        window = "" if self.window is None or chosen is None else shown(chosen, self.window)
        return {
            "ranks": str(self.world_size),
            "batches": self.strategy,
            "window": window,
            "steps": f"{self.figures.steps:,}",
            "padding": f"{self.figures.padding_share:.1%}",
            "fill": f"{self.figures.fill:.3f}",
            "largest batch": f"{self.figures.largest_tokens:,}",
            "efficiency": f"{self.figures.efficiency:.3f}",
        }


@dataclass(frozen=True, kw_only=True)
class Profile(Shown):
    """The lengths of a dataset, and figures of its batches.

    Attributes:
        about: the table of lengths, with its digest.
        budget: the budget of the batches.
        batch_size: samples of a fixed batch.
        lengths: summary of all samples, then of each source if there are several.
        comparisons: the ways to make batches, on each number of ranks.
    """

    about: str
    budget: TokenBudget
    batch_size: int
    lengths: tuple[LengthSummary, ...]
    comparisons: tuple[Comparison, ...]

    def parts(self) -> list[str | Rows]:
        """Return the texts and tables, in their order."""
        lengths = [summary.as_row() for summary in self.lengths]
        return [self.about, lengths, self.heading, self.rows(), _WHY]

    @property
    def best(self) -> tuple[Comparison, ...]:
        """The proposed comparison for each number of ranks."""
        of_ranks: dict[int, list[Comparison]] = {}
        for comparison in self.comparisons:
            if comparison.strategy == "odb_nodes":
                of_ranks.setdefault(comparison.world_size, []).append(comparison)
        best = []
        for comparisons in of_ranks.values():
            least = (1 - AS_GOOD) * max(comparison.figures.efficiency for comparison in comparisons)
            near = [
                comparison for comparison in comparisons if comparison.figures.efficiency >= least
            ]
            best.append(min(near, key=lambda comparison: comparison.window or 0))
        return tuple(best)

    def rows(self) -> list[dict[str, str]]:
        """Return the comparisons as rows of a table, the best ones first and marked."""
        best = self.best
        rows = [*best, *(comparison for comparison in self.comparisons if comparison not in best)]
        return [
            {"": "->" if comparison in best else ""} | comparison.as_row() for comparison in rows
        ]

    @property
    def heading(self) -> str:
        """The budget and the size of fixed batches."""
        batches = f"fixed batches of {counted(self.batch_size, 'sample')}"
        if self.batch_size == 1:
            batches += ": no padding, but each sample takes a step"
        return f"token_budget={budget_code(self.budget)}; {batches}"

    def to_json(self) -> str:
        """Return the profile as JSON."""
        return json.dumps(asdict(self), indent=1) + "\n"

    def figures(self) -> list[Figure]:
        """Return the figures of the page, which a notebook shows: `plotly.graph_objects.Figure`.

        Raises:
            ImportError: the extra `report` is not installed.
        """
        groups: dict[str, dict[str, float]] = {}
        for comparison in self.comparisons:
            name = f"{comparison.strategy} {comparison.as_row()['window']}".rstrip()
            name += " <- take" * (comparison in self.best)
            groups.setdefault(counted(comparison.world_size, "rank"), {})[name] = (
                comparison.figures.efficiency
            )
        axes = ("tokens of a sample", "samples")
        return [
            levels("Efficiency by ranks, batches and window", "efficiency", groups),
            *(
                histogram(f"Lengths of {summary.source}", axes, summary.counts, summary.edges)
                for summary in self.lengths[:_MOST_HISTOGRAMS]
            ),
        ]

    def to_html(self) -> str:
        """Return the profile as one page of HTML that needs no other file.

        Raises:
            ImportError: the extra `report` is not installed.
        """
        chart, *lengths = self.figures()
        terms = "Padding: share of all tokens. Fill: tokens of a batch / budget, padding included. "
        terms += "Efficiency: real tokens / (ranks x sum over the steps of the largest batch)."
        table = html_text(_WHY) + html_table(self.rows()) + html_text(terms)
        return page(
            "Profile of lengths",
            [
                ("", [html_text(self.about)]),
                ("Batches", [html_text(self.heading), chart, table]),
                (
                    "Lengths, in tokens",
                    [html_table([summary.as_row() for summary in self.lengths]), *lengths],
                ),
            ],
        )


def profile(
    table: LengthTable,
    *,
    budget: int | TokenBudget,
    world_sizes: Sequence[int] = (1,),
    windows: Sequence[WindowSize] = (SimulationOptions.window,),
    accumulate: int = SimulationOptions.accumulate,
    batch_size: int | None = None,
    weights: Weights | Mixing = None,
    seed: int = SimulationOptions.seed,
    **options: Any,
) -> Profile:
    """Return the lengths of a dataset, and figures of its batches by each strategy.

    Args:
        table: the lengths of its samples. If the table has some of them, the steps are estimates.
        budget: padded tokens of a batch, or a `TokenBudget`.
        world_sizes: numbers of ranks.
        windows: numbers of samples that wait on each rank, or `"auto"`.
        accumulate: batches of an optimizer step.
        batch_size: samples of a fixed batch; default: as many of the longest as the budget holds.
        weights: how the sources of the table are mixed, as for an `ODBDataLoader`.
        seed: seed of the order of the samples.
        options: further fields of `SimulationOptions`: `round_size`, `uneven`, `largest_first`,
            `diversity`, `window_start`; and `lengths_known`, with which `"auto"` has no window.

    Raises:
        TypeError, ValueError: an option is not valid, or there is no step.
    """
    for name, values in (("world_sizes", world_sizes), ("windows", windows)):
        check_type(name, values, Sequence)
        if isinstance(values, str):
            raise TypeError(
                f"`{name}` must be a `Sequence`, as `({values!r},)`, but is {values!r}."
            )
    base = SimulationOptions(
        world_size=1, budget=budget, accumulate=accumulate, seed=seed, **options
    )
    baselines = Baselines(epoch=TableEpoch(table=table, weights=weights), batch_size=batch_size)
    wanted: list[tuple[int, Strategy, WindowSize | None]] = [
        (world_size, strategy, window)
        for world_size in world_sizes
        for strategy in STRATEGIES
        if is_available(strategy)
        for window in (windows if strategy in WINDOWED else (None,))
    ]
    comparisons = []
    for world_size, strategy, window in Bar(wanted, "comparing", len(wanted)):
        is_known = base.lengths_known and strategy == "odb_nodes"
        job = replace(
            base, world_size=world_size, window=window or base.window, lengths_known=is_known
        )
        has_window = window is not None and not (is_known and window == AUTO)
        comparisons.append(
            Comparison(
                world_size=world_size,
                strategy=strategy,
                window=baselines.epoch.window(job) if has_window else None,
                figures=baselines.figures(strategy, job),
                is_auto=has_window and window == AUTO,
            )
        )
    sources = [None, *table.names] if len(table.names) > 1 else [None]
    return Profile(
        about=str(table),
        budget=TokenBudget.of(budget),
        batch_size=baselines.fixed_size(TokenBudget.of(budget)),
        lengths=tuple(
            LengthSummary.of(source or "all samples", table.lengths(source), table.skipped(source))
            for source in sources
            if len(table.lengths(source))
        ),
        comparisons=tuple(comparisons),
    )
