"""Choose budget, window, accumulation and rounds from the lengths of a dataset."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from odb_nodes._core.checks import check_count
from odb_nodes._core.progress import Bar
from odb_nodes._core.text import counted, html_table, html_text
from odb_nodes.memory import MemoryModel
from odb_nodes.planning import SimulationOptions, TokenBudget
from odb_nodes.planning.auto_window import AUTO, LEAST_WINDOW, MOST_WINDOW, WindowSize
from odb_nodes.processing import ParallelProcessor, WorkerOptions
from odb_nodes.sources import IterableSource
from odb_nodes.sources.mixing import Mixing, Weights
from odb_nodes.tools.code import budget_code
from odb_nodes.tools.length_table import LengthTable
from odb_nodes.tools.step_time import StepTime
from odb_nodes.tools.table_epoch import TableEpoch
from odb_nodes.tools.tables import markdown_table
from odb_nodes.tools.tuning import Choice, Outcome, Simulator

__all__ = ["Choice", "Outcome", "StepTime", "Tuning", "tune"]

AS_FAST = 0.01
"""Of choices whose times differ by no more than this share, the one that holds least is taken."""

_MOST_SAMPLES = 20_000  # of a simulation
_LEAST_OF_RANK = 2_048  # samples; more where there are many ranks
_POOLS = (8, 16, 32, 64)  # budgets that a pool holds
_ROUNDS = (16, 32, 64)
_MOST_BUDGETS = 5  # of at most 60 choices with 4 windows and 3 rounds, and those that are given
_AT_ONCE = 2


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """What was tried, and what is best of it.

    Attributes:
        about: which table the lengths are of, with its digest.
        world_size: number of ranks.
        step_time: what a micro-step is taken to last.
        tried: all outcomes.
        front: those that no other one is as good as in time, balance, samples held and replay.
        best: the one that is proposed.
        why: why that one.
        weights: how the sources of the table are mixed.
        job: options that were not chosen.
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

    def __str__(self) -> str:
        return "\n\n".join([self.about, markdown_table(self.rows()), self.why, self.code()])

    def _repr_html_(self) -> str:
        code = html_text(self.code(), "pre")
        return html_text(self.about) + html_table(self.rows()) + html_text(self.why) + code

    def rows(self) -> list[dict[str, str]]:
        """Return the front as rows of a table, the best one first and marked: title -> cell."""
        rows = [self.best, *(one for one in self.front if one is not self.best)]
        return [{"": "->" if one is self.best else ""} | one.as_row() for one in rows]

    def code(self) -> str:
        """Return code to paste: a loader, and the configuration of a `Trainer`."""
        choice, samples = self.best.choice, round(self.best.samples_per_step)
        budget = budget_code(choice.budget)
        options = f"token_budget={budget}, window={choice.window}, round_size={choice.round_size}"
        for name in ("uneven", "dearest_first", "diversity"):
            if (value := getattr(self.job, name)) != getattr(SimulationOptions, name):
                options += f", {name}={value!r}"
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
    limit: int | TokenBudget | tuple[MemoryModel, int] | None = None,
    log: str | os.PathLike[str] | None = None,
    weights: Weights | Mixing = None,
    seed: int = SimulationOptions.seed,
    **options: Any,
) -> Tuning:
    """Simulate an epoch with up to 100 choices of options, and propose one.

    Tried are budgets, with the accumulation that goes with them, windows that hold 8 to 64 budgets,
    and rounds. Time is an estimate; the rest is what will be, for the lengths of the table.

    Args:
        table: the lengths of the samples. Of a large dataset, some are drawn.
        world_size: number of ranks.
        tokens_per_step: padded tokens of an optimizer step over all ranks. Default: those of one
            batch of the limit on each rank.
        limit: what a batch may be at most: padded tokens; a `TokenBudget`, whose other fields are
            kept, and which may drop samples that exceed it; or a `MemoryModel` and the memory of a
            device in bytes. Default: 4 times the longest sample.
        log: what the times of micro-steps are fitted to: the folder of a `Monitor`, or a file, see
            `StepTime.fitted`.
        weights: how the sources of the table are mixed, as for an `ODBDataLoader`.
        seed: seed of the order of the samples.
        options: further fields of `SimulationOptions`: `uneven`, `dearest_first` and `diversity` of
            all choices; `window` and `round_size`, which are tried, too.

    Raises:
        OSError: `log` cannot be read.
        TypeError, ValueError: an argument is not valid, or no budget holds the longest sample.
    """
    step_time = StepTime() if log is None else StepTime.fitted(log)
    check_count("world_size", world_size)
    limits, about = _limit(limit, table), str(table)
    table = table.kept(limits)  # all choices drop what the limit drops
    samples = max(_MOST_SAMPLES, _LEAST_OF_RANK * world_size)
    known = table
    if table.is_whole and len(table) > samples:
        known = replace(table.drawn(samples, seed), sizes=table.sizes)
    epoch = TableEpoch(table=known, weights=weights, most_drawn=samples, least_windows=0)
    job = SimulationOptions(world_size=world_size, budget=limits, seed=seed, **options)
    pairs = [*_budgets(limits, table, world_size, tokens_per_step)][:_MOST_BUDGETS]
    rounds = sorted({*(_ROUNDS if world_size > 1 else ()), job.round_size})
    choices = [
        Choice(budget=budget, window=window, accumulate=accumulate, round_size=round_size)
        for budget, accumulate in pairs
        for window in _windows(budget, table, job.window)
        for round_size in rounds
    ]
    epoch.order(job)  # once, and not in each process
    tried = [*_outcomes(Simulator(epoch=epoch, job=job, step_time=step_time), choices)]
    front = sorted(_front(tried), key=lambda one: one.epoch_s)
    near = [one for one in front if one.epoch_s <= (1 + AS_FAST) * front[0].epoch_s]
    best = min(near, key=lambda one: (one.held_samples, one.epoch_s))
    auto = replace(job, budget=best.choice.budget, window=AUTO)
    why = (
        f"Of {len(tried)} choices, {len(front)} are not worse than another one in all of time, "
        f"balance, samples held and replay. {len(near)} of them are within {AS_FAST:.0%} of the "
        f"shortest time; the arrow marks the one of these that holds the fewest samples. Times are "
        f"estimates ({step_time.origin}), without waiting for data. Under its budget "
        f'`window="auto"` comes to {epoch.window(auto):,} samples.'
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


def _front(tried: list[Outcome]) -> Iterator[Outcome]:
    """Yield the outcomes that are not worse than another one; of several that are alike, one."""
    for place, one in enumerate(tried):
        alike = any(other.objectives == one.objectives for other in tried[:place])
        if not alike and not any(other.dominates(one) for other in tried):
            yield one


def _limit(
    limit: int | TokenBudget | tuple[MemoryModel, int] | None, table: LengthTable
) -> TokenBudget:
    if isinstance(limit, tuple):
        model, limit_bytes = limit
        return model.budget(limit_bytes)
    if limit is None:
        limit = 4 * int(table.tokens.max())
    return TokenBudget.of(limit, "limit")


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


def _windows(budget: TokenBudget, table: LengthTable, given: WindowSize) -> list[int]:
    """Return numbers of samples that are some budgets, on average, and the one that is given."""
    lengths = table.lengths()
    mean = budget.row_cost(lengths).mean()
    windows = [2 ** round(math.log2(pool * budget.tokens / mean)) for pool in _POOLS]
    own = () if given == AUTO else (given,)
    return sorted({*(min(max(one, LEAST_WINDOW), MOST_WINDOW) for one in windows), *own})


def _outcomes(simulator: Simulator, choices: list[Choice]) -> Iterator[Outcome]:
    """Yield the outcome of each choice, simulated two at a time."""
    workers = WorkerOptions(num_workers=_AT_ONCE, chunk_size=1)
    node: Any = ParallelProcessor(IterableSource(choices, 0, 1), simulator, workers=workers)
    try:
        node.reset(None)
        yield from Bar(node, "simulating", len(choices))
    finally:
        node.close()
