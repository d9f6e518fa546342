"""What one choice of options comes to: time, balance, samples that are held, replay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from odb_nodes.loader.options import LoaderOptions
from odb_nodes.planning import SimulationOptions, TokenBudget, round_steps
from odb_nodes.planning.simulation import Step
from odb_nodes.tools.step_time import StepTime
from odb_nodes.tools.table_epoch import TableEpoch

__all__ = ["Choice", "Outcome", "Simulator"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Options that are tried.

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
    """What a choice comes to in one epoch. All times are estimates.

    Attributes:
        choice: the options.
        epoch_s: estimated seconds, without waiting for data: each step takes as long as its rank
            that takes longest.
        steps: number of batches of each rank.
        padding_share: padding tokens / tokens of all batches.
        balance: sum over the steps of the ranks' mean time / sum of that of the slowest rank.
        held_samples: samples in memory on a rank: pool, round, batches read ahead, and as many in
            flight as a refill of the pool takes.
        replayed_samples: samples that a restore makes again, at most, where the source reads items
            by their keys: pool and round.
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
        """Time, imbalance, samples held and replay: what should be small."""
        return self.epoch_s, -self.balance, self.held_samples, self.replayed_samples

    def dominates(self, other: Outcome) -> bool:
        """Tell whether this is nowhere worse than another one, and somewhere better."""
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


@dataclass(frozen=True, kw_only=True)
class Simulator:
    """Plans an epoch for a choice, and measures it; may be sent to another process."""

    epoch: TableEpoch
    job: SimulationOptions
    step_time: StepTime

    def __call__(self, choice: Choice) -> Outcome:
        """Return what a choice comes to."""
        job = replace(self.job, **vars(choice))
        steps = [*self.epoch.steps(job)]
        samples, real, padded, squares = _measure(steps, choice.budget)
        times = self.step_time.seconds(padded, squares)
        dearest_s = times.max(axis=1).sum()
        factor = self.epoch.table.num_samples / len(self.epoch.order(job)[0])
        of_rank = -(-self.epoch.table.num_samples // job.world_size)
        replayed = min(choice.window + _most_of_a_round(samples, job), of_rank)
        batch = LoaderOptions.prefetch * samples.max(axis=0).mean()
        return Outcome(
            choice=choice,
            epoch_s=float(dearest_s * factor),
            steps=round(len(steps) * factor),
            padding_share=float(1 - real.sum() / padded.sum()),
            balance=float(times.mean(axis=1).sum() / dearest_s),
            held_samples=min(replayed + choice.window + round(float(batch)), of_rank),
            replayed_samples=replayed,
            samples_per_step=float(samples.sum() / -(-len(steps) // choice.accumulate)),
        )


def _measure(steps: Sequence[Step], budget: TokenBudget) -> Floats:
    """Return samples, tokens, padded tokens and squares of each batch: (4, steps, ranks)."""
    rows = [
        [
            _of_batch([sample.tokens for sample in group], budget) if group else (0, 0, 0, 0)
            for group in step
        ]
        for step in steps
    ]
    return np.moveaxis(np.array(rows, dtype=np.float64), 2, 0)


def _of_batch(tokens: list[int], budget: TokenBudget) -> tuple[int, int, int, int]:
    rows, width = budget.shape(tokens)
    is_packed = budget.layout == "packed"
    squares = sum(one * one for one in tokens) if is_packed else rows * width * width
    return len(tokens), sum(tokens), rows * width, squares


def _most_of_a_round(samples: Floats, job: SimulationOptions) -> int:
    """Return the most samples of a rank that a round has."""
    number = start = most = 0
    while start < len(samples):
        steps = round_steps(number, job.world_size, job.round_size, job.accumulate)
        most = max(most, int(samples[start : start + steps].sum(axis=0).max()))
        number, start = number + 1, start + steps
    return most
