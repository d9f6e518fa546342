"""The first epoch of a job over a table of lengths: who reads what, and the steps of all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from odb_nodes.alignment.exchange.in_process import InProcessHub
from odb_nodes.loader.options import LoaderOptions
from odb_nodes.loader.pipeline import sample_node
from odb_nodes.planning import SimulationOptions, TokenBudget
from odb_nodes.planning.auto_window import window_samples
from odb_nodes.planning.simulation import Step, plan_steps
from odb_nodes.planning.table import IntArray
from odb_nodes.sample import Observation, Sample, Skipped
from odb_nodes.sources import Mixing, ShardedSampler
from odb_nodes.sources.mixing import Weights
from odb_nodes.tools.length_table import LengthTable
from odb_nodes.tools.simulation_report import SimulationReport

__all__ = ["TableEpoch"]

MOST_DRAWN = 20_000
"""Samples that stand for a dataset of which some are known, unless the windows need more."""
LEAST_WINDOWS = 8
"""Windows that each rank then has at least, or what it has of the dataset."""
_COUNTS = ("steps", "samples", "real_tokens", "padded_tokens", "filler_slots")


@dataclass(frozen=True, kw_only=True)
class TableEpoch:
    """The first epoch of a job whose samples cost what a table says."""

    table: LengthTable
    shuffle: bool = True
    weights: Weights | Mixing = None
    most_drawn: int = MOST_DRAWN
    least_windows: int = LEAST_WINDOWS
    _orders: dict[Any, tuple[LengthTable, list[IntArray]]] = field(default_factory=dict, repr=False)

    def order(self, job: SimulationOptions) -> tuple[LengthTable, list[IntArray]]:
        """Return a whole table, and the rows of it that each rank reads, in their order.

        The table is this one, or one that is drawn from it.
        """
        table, samples = self.table, len(self.table)
        if job.world_size > table.num_samples:
            raise ValueError(
                f"`world_size` must be at most the {table.num_samples} samples of the data, but is "
                f"{job.world_size}."
            )
        if not table.is_whole:
            least = self.least_windows * self.window(job) * job.world_size
            samples = min(table.num_samples, max(self.most_drawn, least))
        key = samples, job.seed, job.world_size  # jobs that differ in others read alike
        if key not in self._orders:
            table = table if table.is_whole else table.drawn(samples, job.seed)
            mixing = Mixing.of(self.weights).scaled(len(table) / self.table.num_samples)
            shards = _shards(table, job, self.shuffle, mixing)
            self._orders[key] = table, shards
        return self._orders[key]

    def window(self, job: SimulationOptions) -> int:
        """Return the window in samples: of `"auto"`, what the lengths of all samples come to."""
        budget = TokenBudget.of(job.budget)
        costs = self.table.kept(budget).costs
        read = costs.tokens > 0
        return window_samples(job.window, budget, costs.tokens[read], costs.patches[read])

    def steps(self, job: SimulationOptions) -> Iterator[Step]:
        """Yield the steps. The `data` of a sample is its row in the table of `order(job)`."""
        table, shards = self.order(job)
        knows_length = Mixing.of(self.weights).stop == "all_exhausted"
        # Of streams some have keys, and some have none.
        shares_rest = not table.streams
        return plan_steps(
            table.costs, shards, job, shares_rest=shares_rest, knows_length=knows_length
        )

    def report(self, job: SimulationOptions) -> SimulationReport:
        """Return the report of the steps, with the counts of the whole dataset."""
        report = SimulationReport.of(self.steps(job), TokenBudget.of(job.budget))
        factor = self.table.num_samples / len(self.order(job)[0])
        counts: Any = {name: round(getattr(report, name) * factor) for name in _COUNTS}
        return replace(report, **counts) if factor != 1 else report


def _shards(
    table: LengthTable, job: SimulationOptions, shuffle: bool, mixing: Mixing
) -> list[IntArray]:
    """Return the rows of the table that each rank reads, in their order."""
    ranks = range(job.world_size)
    if table.names == ("",):
        if mixing != Mixing():
            raise ValueError("`weights` must be None: the table has one source, without a name.")
        shuffled = shuffle and not table.streams
        order = np.array([*ShardedSampler(len(table), shuffled, job.seed, 0, 1)])
        return [order[rank :: job.world_size] for rank in ranks]
    rows = {
        name: np.flatnonzero(table.sources == number).tolist()
        for number, name in enumerate(table.names)
    }
    sources = {
        name: _InOrder(found) if name in table.streams else found for name, found in rows.items()
    }
    hub = InProcessHub(job.world_size)
    tokens, patches = table.tokens.tolist(), table.patches.tolist()

    def look_up(row: int) -> Any:
        return row if tokens[row] else Skipped("skipped")

    shards = []
    for rank in ranks:
        options = LoaderOptions(
            token_budget=1,
            process_fn=look_up,
            observe=lambda row: Observation(tokens[row], 0, patches[row]),
            shuffle=None if shuffle else False,
            seed=job.seed,
            weights=mixing,
            process_group=hub.exchange(rank),
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of sizes: the loader says it
            node = sample_node(sources, options)
        shards.append(_rows_read(node, rows))
    return shards


class _InOrder:
    """An iterable that knows its length, but is no sequence."""

    def __init__(self, rows: list[int]) -> None:
        self._rows = rows

    def __iter__(self) -> Iterator[int]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


def _rows_read(node: Any, rows: dict[str, list[int]]) -> IntArray:
    """Return the rows that a node of samples yields in its first epoch."""
    read = [
        sample.data if isinstance(sample, Sample) else rows[sample.source][sample.key]
        for sample in node
    ]
    return np.array(read, dtype=np.int64)
