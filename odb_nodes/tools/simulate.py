"""Plan the first epoch of a job on any number of ranks from lengths, and measure it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

from odb_nodes._support.arrays import IntArray
from odb_nodes._support.checks import check_number
from odb_nodes._support.text import html_table, markdown_table
from odb_nodes.core.alignment.exchange import Exchange
from odb_nodes.core.alignment.peers import PEER_TIMEOUT_S, VirtualTeam
from odb_nodes.core.loader.options import LoaderOptions
from odb_nodes.core.loader.pipeline import sample_node
from odb_nodes.core.planning import SimulationOptions, StepTime, TimeFn, TokenBudget, simulate_steps
from odb_nodes.core.planning.auto_window import window_samples
from odb_nodes.core.planning.group_costs import time_of_group
from odb_nodes.core.planning.known_epochs import WINDOW_IN_ORDER, known_window
from odb_nodes.core.planning.simulation import SimulationKeywords, Step, plan_steps
from odb_nodes.core.sample import Observation, Sample, Skipped
from odb_nodes.core.sample_block import SampleBlock
from odb_nodes.core.sources import Mixing, ShardedSampler
from odb_nodes.core.sources.mixing import Weights
from odb_nodes.tools.lengths import LengthTable

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "SimulationOptions",
    "SimulationReport",
    "budget_code",
    "lognormal_lengths",
    "markdown_table",
    "simulate",
    "simulate_steps",
]

MOST_DRAWN = 20_000
"""Samples that represent a dataset if only some of its lengths are known."""
_LEAST_WINDOWS = 8
_COUNTS = ("steps", "samples", "rows", "real_tokens", "padded_tokens", "filler_slots")

Floats = NDArray[np.float64]


def simulate(
    lengths: npt.ArrayLike | LengthTable,
    *,
    shuffle: bool = True,
    weights: Weights | Mixing = None,
    **options: Unpack[SimulationKeywords],
) -> SimulationReport:
    """Plan the first epoch of a job, and return its efficiency, balance and filler.

        simulate(lengths, world_size=64, budget=16_384, window=512)
        simulate(LengthTable.load("lengths.npz"), world_size=64, budget=16_384)

    Args:
        lengths: tokens of each sample, (n,), which ranks read in turn, as with
            `ShardedSampler(shuffle=False)`. Or a `LengthTable`, whose samples are read as an
            `ODBDataLoader` reads them. If it has only some of the dataset's samples, the counts are
            estimates for the whole dataset.
        shuffle: whether the samples of a table are shuffled, except streams. Without a table, it
            only counts with `lengths_known`.
        weights: how the sources of a table are mixed, as for an `ODBDataLoader`.
        options: the fields of `SimulationOptions`: `world_size` and `budget`, and where they differ
            from the defaults `window`, `round_size`, `uneven`, `largest_first`, `diversity`,
            `window_start`, `accumulate`, `seed`, `step_time` and `lengths_known`.

    Raises:
        TypeError, ValueError: an option is not valid, or there is no step.
        SampleError: a sample is too long under `oversize="error"`.
    """
    job = SimulationOptions(**options)
    if isinstance(lengths, LengthTable):
        table = lengths
    else:
        table = LengthTable.of(lengths)
        shuffle = shuffle and job.lengths_known
    return TableEpoch(table=table, shuffle=shuffle, weights=weights).report(job)


def lognormal_lengths(
    samples: int,
    *,
    cv: float,
    mean_tokens: int = 800,
    shortest_tokens: int = 16,
    longest_tokens: int = 8192,
    seed: int = 0,
) -> IntArray:
    """Return clipped lognormal lengths, (samples,) int64.

    Args:
        samples: number of lengths.
        cv: coefficient of variation before clipping: standard deviation / mean.
        mean_tokens: mean length before clipping.
        shortest_tokens: lower bound, to which shorter lengths are clipped.
        longest_tokens: upper bound, to which longer lengths are clipped.
        seed: seed of numpy's generator.
    """
    check_number("cv", cv, "[0, inf)")
    sigma = math.sqrt(math.log(1 + cv**2))
    mu = math.log(mean_tokens) - sigma**2 / 2
    tokens = np.random.default_rng(seed).lognormal(mu, sigma, samples)
    return np.clip(tokens, shortest_tokens, longest_tokens).astype(np.int64)


def budget_code(budget: TokenBudget) -> str:
    """Return the code that makes a budget: a number, if it has tokens alone."""
    default = vars(TokenBudget(budget.tokens))
    fields = [f"{name}={value!r}" for name, value in vars(budget).items() if value != default[name]]
    if not fields:
        return str(budget.tokens)
    return f"TokenBudget({', '.join([str(budget.tokens), *fields])})"


class Batches(NamedTuple):
    """Sums over the batches of a job, each (steps, ranks) float64; 0 for filler."""

    samples: Floats
    real: Floats  # tokens of the samples
    sample_squares: Floats  # sum of their squared lengths
    rows: Floats
    padded: Floats  # tokens, padding included
    squares: Floats  # pairs of tokens of attention: rows x width^2; packed, `sample_squares`
    times: Floats  # in the unit of `step_time`


def measured(
    steps: Iterable[Sequence[SampleBlock | None]],
    budget: TokenBudget,
    step_time: StepTime | TimeFn | None = None,
) -> Batches:
    """Return the batches of steps.

    Args:
        steps: the steps in order, each with the group of every rank; `None` or empty for filler.
        budget: the budget whose layout the batches have.
        step_time: the time of a step with a group. Default: `StepTime.typical`.
    """
    step_time = step_time or StepTime.typical(budget)
    batches = [[_measure(group, budget, step_time) for group in step] for step in steps]
    if not batches:
        raise ValueError("there is no step: all samples are dropped, or a rank has none.")
    # Floats: a sum of squares does not fit 64-bit integers.
    return Batches(*np.moveaxis(np.array(batches, dtype=np.float64), 2, 0))


def _measure(
    group: SampleBlock | None, budget: TokenBudget, step_time: StepTime | TimeFn
) -> tuple[float, ...]:
    if not group:
        return (0,) * len(Batches._fields)
    lengths, patches = group.lengths, group.patches
    rows, width = budget.shape(lengths)
    sample_squares = sum([length * length for length in lengths])
    squares = sample_squares if budget.layout == "packed" else rows * width * width
    time: Any
    if isinstance(step_time, StepTime):
        time = step_time.seconds_of(rows * width, squares, int(patches.sum()))
    else:
        time = time_of_group(step_time, group.tokens, patches, budget, lambda: group)
    return len(lengths), sum(lengths), sample_squares, rows, rows * width, squares, time


@dataclass(frozen=True, kw_only=True)
class SimulationReport:
    """Measures of one epoch of a job. A slot is one step of one rank.

    Attributes:
        steps: number of steps of each rank.
        samples: number of samples that were in a group.
        rows: rows of all batches; samples, where the layout is padded.
        real_tokens: tokens of those samples.
        padded_tokens: tokens of the groups, padding included.
        padding_share: padding tokens / tokens of all batches.
        fill: tokens of a batch / budget, mean over the batches.
        largest_tokens: tokens of the largest batch, padding included.
        shapes: number of different shapes, rows x width, of the batches.
        filler_slots: number of slots in which a rank has no sample left. It waits in them.
        filler_share: filler slots / all slots.
        efficiency: real tokens / (ranks x sum over the steps of the largest rank's padded tokens).
        filler_loss: the part of 1 - efficiency that is filler. The rest is padding, and waiting for
            the largest rank.
        balance: sum over the steps of the ranks' mean padded tokens / sum of their maximum.
        time_balance: sum over the steps of the ranks' mean time / sum of their longest, by
            `step_time` of the job; default: by `StepTime.typical`.
        length_spread: how mixed the lengths of an optimizer step are: the share of the variance of
            lengths that lies within optimizer steps (1 - eta squared, the correlation ratio). 1:
            all steps have the same mean length. 0: each step has samples of one length.
    """

    steps: int
    samples: int
    rows: int
    real_tokens: int
    padded_tokens: int
    padding_share: float
    fill: float
    largest_tokens: int
    shapes: int
    filler_slots: int
    filler_share: float
    efficiency: float
    filler_loss: float
    balance: float
    time_balance: float
    length_spread: float

    @classmethod
    def of(
        cls, steps: Iterable[Sequence[Sequence[Sample] | None]], budget: TokenBudget
    ) -> SimulationReport:
        """Return the report of a job's steps.

        Args:
            steps: the steps in order, each with the group of every rank, `None` for filler.
            budget: the budget that the groups were formed under.

        Raises:
            ValueError: there is no step.
        """
        blocks = ([SampleBlock.of(group) if group else None for group in step] for step in steps)
        return cls.of_batches(measured(blocks, budget), budget)

    @classmethod
    def of_batches(
        cls, batches: Batches, budget: TokenBudget, accumulate: int = 1
    ) -> SimulationReport:
        """Return the report of batches; an optimizer step has `accumulate` of them."""
        padded = batches.padded
        is_batch = batches.rows > 0
        ranks = padded.shape[1]
        most = padded.max(axis=1)
        samples, real = batches.samples.sum(axis=1), batches.real.sum(axis=1)
        fillers = (~is_batch).sum(axis=1)
        capacity = ranks * most.sum()
        mean_square = real.sum() ** 2 / samples.sum()
        variance = batches.sample_squares.sum() - mean_square
        first = np.arange(0, len(padded), accumulate)  # first micro-step of each optimizer step
        tokens_of_step, samples_of_step = np.add.reduceat(np.stack((real, samples)), first, axis=1)
        between = (tokens_of_step**2 / samples_of_step).sum() - mean_square
        shapes = np.column_stack((batches.rows[is_batch], padded[is_batch]))
        return cls(
            steps=len(padded),
            samples=int(samples.sum()),
            rows=int(batches.rows.sum()),
            real_tokens=int(real.sum()),
            padded_tokens=int(padded.sum()),
            padding_share=float(1 - real.sum() / padded.sum()),
            fill=float(padded[is_batch].mean() / budget.tokens),
            largest_tokens=int(padded.max()),
            shapes=len(np.unique(shapes, axis=0)),
            filler_slots=int(fillers.sum()),
            filler_share=float(fillers.sum() / padded.size),
            efficiency=float(real.sum() / capacity),
            filler_loss=float((fillers * most).sum() / capacity),
            balance=float(padded.sum() / capacity),
            time_balance=float(batches.times.sum() / (ranks * batches.times.max(axis=1).sum())),
            length_spread=float(1 - between / variance) if variance else 1.0,
        )

    @property
    def density(self) -> float:
        """Real tokens / padded tokens."""
        return 1 - self.padding_share

    def scaled(self, factor: float) -> SimulationReport:
        """Return the report with the counts of a dataset that is `factor` times as large."""
        counts: Any = {name: round(getattr(self, name) * factor) for name in _COUNTS}
        return replace(self, **counts) if factor != 1 else self

    def _repr_html_(self) -> str:
        return html_table([self.as_row()])

    def as_row(self) -> dict[str, str]:
        """Return the formatted measures as a row of a table: title -> cell."""
        return {
            "steps": f"{self.steps:,}",
            "shapes": f"{self.shapes:,}",
            "real / padded": f"{self.density:.3f}",
            "efficiency": f"{self.efficiency:.4f}",
            "balance": f"{self.balance:.3f}",
            "balance in time": f"{self.time_balance:.3f}",
            "filler slots": f"{self.filler_share:.2%}",
            "lost to filler": f"{self.filler_loss:.4f}",
            "length spread": f"{self.length_spread:.3f}",
        }


@dataclass(frozen=True, kw_only=True)
class TableEpoch:
    """The first epoch of a job over the samples of a table."""

    table: LengthTable
    shuffle: bool = True
    weights: Weights | Mixing = None
    shares_rest: bool = True
    """Whether ranks share their last samples; False with `state="payload"`."""
    samples: int | None = None
    """Number of samples that represent the dataset. Default: all of a whole table; else at least
    20,000, and 8 windows on each rank."""
    _orders: dict[Any, tuple[LengthTable, list[IntArray]]] = field(default_factory=dict, repr=False)

    def order(self, job: SimulationOptions) -> tuple[LengthTable, list[IntArray]]:
        """Return the table or a draw from it, and the rows that each rank reads in order."""
        table, of_data = self.table, self.table.num_samples
        if job.world_size > of_data:
            raise ValueError(
                f"`world_size` must be at most the {of_data} samples of the data, but is "
                f"{job.world_size}."
            )
        samples = self.samples
        if samples is None and table.is_whole:
            samples = of_data
        elif samples is None:
            window = WINDOW_IN_ORDER if job.lengths_known else self.window(job)
            samples = max(MOST_DRAWN, _LEAST_WINDOWS * window * job.world_size)
        # Other options do not change the order.
        key = samples, job.seed, job.world_size, job.lengths_known
        if key not in self._orders:
            if not table.is_whole or samples < of_data:
                table = table.drawn(min(samples, of_data), job.seed)
            mixing = Mixing.of(self.weights).scaled(len(table) / of_data)
            self._orders[key] = table, _shards(table, job, self.shuffle, mixing)
        return self._orders[key]

    def window(self, job: SimulationOptions) -> int:
        """Return the window in samples; `"auto"` depends on the lengths of all samples.

        With `lengths_known`: the number of samples of each rank that are planned together.
        """
        if job.lengths_known:
            window = known_window(job.window, in_order=not self.shuffle)
            return window or -(-self.table.num_samples // job.world_size)
        budget = TokenBudget.of(job.budget)
        costs = self.table.kept(budget).costs
        read = costs.tokens > 0
        return window_samples(job.window, budget, costs.tokens[read], costs.patches[read])

    def steps(self, job: SimulationOptions) -> Iterator[Step]:
        """Yield the steps. The `data` of a sample is its row in the table of `order(job)`."""
        table, shards = self.order(job)
        return plan_steps(
            table.costs,
            shards,
            job,
            # Some streams have no keys.
            shares_rest=self.shares_rest and not table.streams,
            knows_length=Mixing.of(self.weights).stop == "all_exhausted",
            in_order=not self.shuffle,
        )

    def batches(self, job: SimulationOptions) -> Batches:
        """Return the batches of the steps."""
        return measured(self.steps(job), TokenBudget.of(job.budget), job.step_time)

    def scale(self, job: SimulationOptions) -> float:
        """Return the number of samples of the dataset for each planned sample."""
        return self.table.num_samples / len(self.order(job)[0])

    def report(self, job: SimulationOptions, batches: Batches | None = None) -> SimulationReport:
        """Return the report for the whole dataset. batches: default, of `steps(job)`."""
        budget = TokenBudget.of(job.budget)
        report = SimulationReport.of_batches(batches or self.batches(job), budget, job.accumulate)
        return report.scaled(self.scale(job))


class _Rows(list[int]):
    """Rows of a table, in the blocks that a loader reads them in."""

    def __init__(self, rows: Iterable[int], blocks: tuple[Sequence[int], int] | None) -> None:
        super().__init__(rows)
        if blocks is not None:
            self.shuffle_blocks, self.mixed_blocks = blocks


def _shards(
    table: LengthTable, job: SimulationOptions, shuffle: bool, mixing: Mixing
) -> list[IntArray]:
    """Return the rows of the table that each rank reads, in their order."""
    ranks = range(job.world_size)
    if job.lengths_known and (table.names != ("",) or table.streams):
        raise ValueError(
            "`lengths_known` must be False for a mixture, a stream and the order of a `sampler`, "
            "since a loader plans none of them ahead. Leave it out."
        )
    if table.names == ("",):
        if mixing != Mixing():
            raise ValueError("`weights` must be None: the table has one source, without a name.")
        shuffled = shuffle and not table.streams
        read_in = None if job.lengths_known else table.blocks.get("")
        read_from = _Rows(range(len(table)), read_in)
        order = np.array([*ShardedSampler(read_from, shuffled, job.seed, 0, 1)])
        return [order[rank :: job.world_size] for rank in ranks]
    blocks = table.blocks
    rows = {
        name: np.flatnonzero(table.sources == number).tolist()
        for number, name in enumerate(table.names)
    }
    sources = {  # the keys of a dict are an iterable that knows its length, but no sequence
        name: (
            dict.fromkeys(numbers).keys()
            if name in table.streams
            else _Rows(numbers, blocks.get(name))
        )
        for name, numbers in rows.items()
    }
    tokens, patches = table.tokens.tolist(), table.patches.tolist()
    shards = []
    for rank in VirtualTeam(job.world_size, Exchange(), PEER_TIMEOUT_S).ranks():
        options = LoaderOptions(
            token_budget=1,
            process_fn=lambda row: row if tokens[row] else Skipped("skipped"),
            observe=lambda row: Observation(tokens[row], 0, patches[row]),
            shuffle=None if shuffle else False,
            seed=job.seed,
            weights=mixing,
            process_group=rank,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about sizes: the loader warns, too
            node: Any = sample_node(sources, options)
        read = [
            sample.data if isinstance(sample, Sample) else rows[sample.source][sample.key]
            for sample in node
        ]
        shards.append(np.array(read, dtype=np.int64))
    return shards
