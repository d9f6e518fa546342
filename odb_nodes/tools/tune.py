"""Choose budget, window, accumulation and rounds from the lengths of a dataset."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from odb_nodes._support.checks import check_count
from odb_nodes._support.progress import Bar
from odb_nodes._support.text import Rows, Shown, counted
from odb_nodes.core.loader.options import LoaderOptions
from odb_nodes.core.planning import SimulationOptions, StepTime, TimeFn, TokenBudget, round_steps
from odb_nodes.core.planning.auto_window import AUTO, LEAST_WINDOW, MOST_WINDOW, WindowSize
from odb_nodes.core.processing import ParallelProcessor, WorkerOptions
from odb_nodes.core.sources import IterableSource
from odb_nodes.core.sources.mixing import Mixing, Weights
from odb_nodes.tools.lengths import LengthTable
from odb_nodes.tools.simulate import MOST_DRAWN, TableEpoch, budget_code
from odb_nodes.training.monitor.step_times import ASSUMED, ASSUMED_ORIGIN, fitted_step_time

__all__ = ["Choice", "Outcome", "Tuning", "tune"]

AS_FAST = 0.01
"""`tune` proposes the choice that holds the fewest samples within this share of the least time."""

_LEAST_OF_RANK = 2_048  # samples of each rank that are planned at least
_POOLS = (8, 16, 32, 64)  # pool sizes to try, in budgets
_ROUNDS = (16, 32, 64)  # round sizes to try, in steps
_MOST_BUDGETS = 5  # 60 choices with 4 windows and 3 rounds
_AT_ONCE = 2  # choices that are simulated at the same time


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Options to simulate.

    Attributes:
        budget: the budget of a batch.
        window: samples that wait on each rank.
        accumulate: batches of an optimizer step.
        round_size: steps between two messages of the ranks.
    """

    budget: TokenBudget
    window: int
    accumulate: int
    round_size: int


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Figures of one epoch under a choice. Times are estimates.

    Attributes:
        choice: the options.
        epoch_s: estimated seconds, without waiting for data: each step takes as long as its rank
            that takes longest.
        steps: number of batches of each rank.
        padding_share: padding tokens / tokens of all batches.
        balance: sum over the steps of the ranks' mean time / sum of the slowest rank's time.
        held_samples: samples in memory on a rank: pool, round, batches read ahead, and one refill
            of the pool in flight.
        replayed_samples: most samples that a restore makes again if the source reads items by
            their keys: pool and round.
        samples_per_step: samples of an optimizer step over all ranks, on average.
    """

    choice: Choice
    epoch_s: float
    steps: int
    padding_share: float
    balance: float
    held_samples: int
    replayed_samples: int
    samples_per_step: float

    @property
    def objectives(self) -> tuple[float, ...]:
        """Time, imbalance, samples held and replay: all should be small."""
        return self.epoch_s, -self.balance, self.held_samples, self.replayed_samples

    def dominates(self, other: Outcome) -> bool:
        """Tell whether no objective is worse than in another outcome, and one is better."""
        pairs = zip(self.objectives, other.objectives, strict=True)
        return self.objectives != other.objectives and all(a <= b for a, b in pairs)

    def as_row(self) -> dict[str, str]:
        """Return the formatted outcome as a row of a table: title -> cell."""
        return {
            "budget": f"{self.choice.budget.tokens:,}",
            "accumulate": str(self.choice.accumulate),
            "window": f"{self.choice.window:,}",
            "round": str(self.choice.round_size),
            "time, estimated s": f"{self.epoch_s:,.1f}",
            "steps": f"{self.steps:,}",
            "padding": f"{self.padding_share:.1%}",
            "balance": f"{self.balance:.3f}",
            "samples held": f"{self.held_samples:,}",
            "replayed": f"{self.replayed_samples:,}",
        }


def outcome_of(
    choice: Choice, *, epoch: TableEpoch, job: SimulationOptions, step_time: StepTime
) -> Outcome:
    """Plan an epoch under a choice, and return its figures."""
    job = replace(job, **vars(choice))
    batches, scale = epoch.batches(job), epoch.scale(job)
    steps = len(batches.rows)
    samples = batches.samples
    padded = batches.padded
    times = np.where(padded > 0, step_time.seconds_of(padded, batches.squares), 0.0)
    slowest_s = times.max(axis=1).sum()
    of_rank = -(-epoch.table.num_samples // job.world_size)
    rounds, start = [0], 0  # the most samples of a rank in each round
    while start < steps:
        end = start + round_steps(len(rounds) - 1, job.world_size, job.round_size, job.accumulate)
        rounds.append(int(samples[start:end].sum(axis=0).max()))
        start = end
    replayed = min(choice.window + max(rounds), of_rank)
    ahead = LoaderOptions.prefetch * samples.max(axis=0).mean()
    return Outcome(
        choice=choice,
        epoch_s=float(slowest_s * scale),
        steps=round(steps * scale),
        padding_share=float(1 - batches.real.sum() / padded.sum()),
        balance=float(times.mean(axis=1).sum() / slowest_s),
        held_samples=min(replayed + choice.window + round(float(ahead)), of_rank),
        replayed_samples=replayed,
        samples_per_step=float(samples.sum() / -(-steps // choice.accumulate)),
    )


@dataclass(frozen=True, kw_only=True)
class Tuning(Shown):
    """The choices that were tried, and the best of them.

    Attributes:
        about: the table of lengths, with its digest.
        world_size: number of ranks.
        step_time: estimated time of a micro-step, in seconds.
        tried: all outcomes.
        front: outcomes that no other outcome equals or beats in all of time, balance, samples held
            and replay.
        best: the proposed outcome.
        why: the reason for the proposal.
        weights: how the sources of the table are mixed.
        job: the fixed options.
    """

    about: str
    world_size: int
    step_time: StepTime
    tried: tuple[Outcome, ...]
    front: tuple[Outcome, ...]
    best: Outcome
    why: str
    weights: Weights | Mixing
    job: SimulationOptions

    def parts(self) -> list[str | Rows]:
        """Return the texts and tables, in their order."""
        return [self.about, self.rows(), self.why, self.code()]

    def rows(self) -> list[dict[str, str]]:
        """Return the front as rows of a table, the best one first and marked: title -> cell."""
        rows = [self.best, *(outcome for outcome in self.front if outcome is not self.best)]
        return [{"": "->" if row is self.best else ""} | row.as_row() for row in rows]

    def code(self) -> str:
        """Return code to paste: a loader, and the configuration of a `Trainer`."""
        choice = self.best.choice
        samples = round(self.best.samples_per_step)
        budget = budget_code(choice.budget)
        options = f"token_budget={budget}, window={choice.window}, round_size={choice.round_size}"
        for name in ("uneven", "largest_first", "diversity", "window_start"):
            if (value := getattr(self.job, name)) != getattr(SimulationOptions, name):
                options += f", {name}={value!r}"
        if self.job.step_time is not None:
            options += f", step_time={_time_code(self.job.step_time)}"
        order = "" if self.weights is None else f", weights={self.weights!r}"
        arguments = f"gradient_accumulation_steps={choice.accumulate}"
        if (seed := self.job.seed) != SimulationOptions.seed:
            order += f", seed={seed}"
            arguments += f", data_seed={seed}"
        return f"""\
loader = ODBDataLoader(dataset, {options}, accumulate={choice.accumulate}{order})

# Or under the `Trainer`, with `{arguments}`. A step has
# {counted(samples, "sample")} on average: put the number that your learning rate was tuned for.
scaling = LrScaling(reference_samples={samples}, rule="sqrt")
config = ODBConfig({options}, lr_scaling=scaling)
"""


def tune(
    table: LengthTable,
    *,
    world_size: int,
    tokens_per_step: int | None = None,
    limit: int | TokenBudget | None = None,
    log: str | os.PathLike[str] | None = None,
    weights: Weights | Mixing = None,
    seed: int = SimulationOptions.seed,
    **options: Any,
) -> Tuning:
    """Simulate an epoch with up to 100 choices of options, and propose one.

    It tries budgets, with the accumulation that follows from them, windows that hold 8 to 64
    budgets, and rounds. Times are estimates that do not count image patches. All other figures are
    exact for the table's lengths.

    Args:
        table: the lengths of the samples. A large dataset is represented by a draw.
        world_size: number of ranks.
        tokens_per_step: padded tokens of an optimizer step over all ranks. Default: one batch of
            the limit on each rank.
        limit: largest budget of a batch: padded tokens; or a `TokenBudget`, such as
            `MemoryModel.budget` returns, whose other fields are kept, and which may drop samples
            that exceed it. Default: 4 times the longest sample.
        log: fit the times of micro-steps to this log: the folder of a `Monitor`, or a file, see
            `fitted_step_time`. On several ranks, all choices are planned with the fitted time as
            `step_time`, unless `options` have one.
        weights: how the sources of the table are mixed, as for an `ODBDataLoader`.
        seed: seed of the order of the samples.
        options: further fields of `SimulationOptions`: `uneven`, `largest_first`, `diversity`,
            `window_start` and `step_time` of all choices; `window` and `round_size`, which are
            tried, too.

    Raises:
        OSError: `log` cannot be read.
        TypeError, ValueError: an argument is not valid, or no budget holds the longest sample.
    """
    step_time, origin = (ASSUMED, ASSUMED_ORIGIN) if log is None else fitted_step_time(log)
    world_size = check_count("world_size", world_size)
    plans_by_log = log is not None and world_size > 1 and options.get("step_time") is None
    if plans_by_log:
        options["step_time"] = _in_tokens(step_time)
    about = str(table)
    limits = TokenBudget.of(4 * int(table.tokens.max()) if limit is None else limit, "limit")
    table = table.kept(limits)  # all choices drop what the limit drops
    samples = max(MOST_DRAWN, _LEAST_OF_RANK * world_size)
    epoch = TableEpoch(table=table, weights=weights, samples=samples)
    job = SimulationOptions(world_size=world_size, budget=limits, seed=seed, **options)
    choices = _choices(table, job, tokens_per_step)
    epoch.order(job)  # once, and not in each process
    tried = _outcomes(partial(outcome_of, epoch=epoch, job=job, step_time=step_time), choices)
    front = _front(tried)
    near = [outcome for outcome in front if outcome.epoch_s <= (1 + AS_FAST) * front[0].epoch_s]
    best = min(near, key=lambda outcome: (outcome.held_samples, outcome.epoch_s))
    why = (
        f"{counted(len(tried), 'choice')} tried. Listed: those that no other choice equals or "
        f"beats in all of time, balance, samples held and replay ({len(front)}). The arrow marks "
        f"the one that holds the fewest samples, of those within {AS_FAST:.0%} of the shortest "
        f"time ({len(near)}). Times are estimates ({origin}), without waiting for data. "
        f"{_notes(epoch, job, best, plans_by_log=plans_by_log)}"
    )
    return Tuning(
        about=about,
        world_size=world_size,
        step_time=step_time,
        tried=tuple(tried),
        front=tuple(front),
        best=best,
        why=why,
        weights=weights,
        job=job,
    )


def _choices(
    table: LengthTable, job: SimulationOptions, tokens_per_step: int | None
) -> list[Choice]:
    """Return the choices to simulate: budgets up to the budget of `job`, windows and rounds."""
    limit = TokenBudget.of(job.budget)
    pairs = [*_budgets(limit, table, job.world_size, tokens_per_step)][:_MOST_BUDGETS]
    rounds = sorted({*(_ROUNDS if job.world_size > 1 else ()), job.round_size})
    return [
        Choice(budget=budget, window=window, accumulate=accumulate, round_size=round_size)
        for budget, accumulate in pairs
        for window in _windows(budget, table, job.window)
        for round_size in rounds
    ]


def _notes(epoch: TableEpoch, job: SimulationOptions, best: Outcome, *, plans_by_log: bool) -> str:
    """Return what `"auto"` chooses, and what planning by the times of a log means."""
    auto = replace(job, budget=best.choice.budget, window=AUTO)
    notes = f'Under its budget `window="auto"` comes to {epoch.window(auto):,} samples.'
    if plans_by_log:
        notes += (
            " All choices are planned with the fitted time, so ranks are levelled by it: give the "
            "loader its `step_time`."
        )
        if TokenBudget.of(job.budget).layout == "padded":
            notes += (
                " A padded step then has samples of one length, which may cost quality unless "
                "several batches are accumulated."
            )
    return notes


def _front(outcomes: list[Outcome]) -> list[Outcome]:
    """Return the outcomes that no other dominates, fastest first; one of each equal objectives."""
    unique = {outcome.objectives: outcome for outcome in reversed(outcomes)}.values()
    undominated = [
        outcome for outcome in unique if not any(other.dominates(outcome) for other in unique)
    ]
    return sorted(undominated, key=lambda outcome: outcome.epoch_s)


def _in_tokens(step_time: StepTime) -> StepTime:
    """Return the time of steps in the unit of a token, without the constant time of a step.

    The length at which attention takes half of the time is rounded, so that code can show it.
    """
    if not step_time.squares:
        return StepTime()
    return StepTime(squares=1 / max(1, round(step_time.half_at)))


def _time_code(step_time: StepTime | TimeFn) -> str:
    """Return the code that makes a `StepTime`, or the name of a function."""
    if not isinstance(step_time, StepTime):
        return getattr(step_time, "__name__", type(step_time).__name__)
    default = StepTime()
    terms = []
    for name, value in vars(step_time).items():
        if value == getattr(default, name):
            continue
        length = round(1 / value) if name == "squares" and 1e-9 < value < 1 else 0
        is_fraction = length > 0 and value == 1 / length
        terms.append(f"{name}=1 / {length}" if is_fraction else f"{name}={value!r}")
    return f"StepTime({', '.join(terms)})"


def _budgets(
    limit: TokenBudget, table: LengthTable, world_size: int, tokens_per_step: int | None
) -> Iterator[tuple[TokenBudget, int]]:
    """Yield budgets within the limit, each with the batches of an optimizer step."""
    if not (longest := int(table.tokens.max())):
        raise ValueError(
            f"`limit` must hold a sample, but drops them all: raise it from {limit.tokens} tokens."
        )
    least = limit.row_cost(limit.width(longest))
    if least > limit.tokens:
        raise ValueError(
            f"`limit` must hold the longest sample, which costs {least} tokens, but is "
            f"{limit.tokens} instead. Cut samples off at {limit.capacity} tokens."
        )
    if tokens_per_step is None:
        tokens_per_step = limit.tokens * world_size
    of_rank = check_count("tokens_per_step", tokens_per_step, least * world_size) / world_size
    accumulate = math.ceil(of_rank / limit.tokens)
    while (tokens := math.ceil(of_rank / accumulate)) >= least:
        yield replace(limit, tokens=tokens), accumulate
        accumulate *= 2


def _windows(budget: TokenBudget, table: LengthTable, window: WindowSize) -> list[int]:
    """Return windows that hold 8 to 64 budgets on average, and the user's window."""
    lengths = table.lengths()
    mean = budget.row_cost(lengths).mean()
    windows = [2 ** round(math.log2(pool * budget.tokens / mean)) for pool in _POOLS]
    bounded = {min(max(samples, LEAST_WINDOW), MOST_WINDOW) for samples in windows}
    return sorted(bounded if window == AUTO else bounded | {window})


def _outcomes(simulate: Callable[[Choice], Outcome], choices: list[Choice]) -> list[Outcome]:
    """Return the outcome of each choice, simulated two at a time."""
    workers = WorkerOptions(num_workers=_AT_ONCE, chunk_size=1)
    node: Any = ParallelProcessor(IterableSource(choices, 0, 1), simulate, workers=workers)
    try:
        node.reset(None)
        return [*Bar(node, "simulating", len(choices))]
    finally:
        node.close()
