"""Measures of the steps of a job: efficiency, balance, filler."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from odb_nodes._core.text import html_table
from odb_nodes.planning import TokenBudget
from odb_nodes.planning.budget import ATTENTION_TOKENS
from odb_nodes.sample import Sample
from odb_nodes.sample_block import SampleBlock


@dataclass(frozen=True, kw_only=True)
class SimulationReport:
    """Measures of one epoch of a job. A slot is one step of one rank.

    Attributes:
        steps: number of steps of each rank.
        samples: number of samples that were in a group.
        real_tokens: tokens of those samples.
        padded_tokens: tokens of the groups, padding included.
        shapes: number of different shapes, rows x width, of the batches.
        filler_slots: number of slots in which a rank has no sample left. They count as waiting.
        filler_share: filler slots / all slots.
        density: real tokens / padded tokens.
        efficiency: real tokens / (ranks x sum over the steps of the padded tokens of the rank that
            has most).
        filler_loss: the part of 1 - efficiency that is filler. The rest is padding, and waiting for
            the rank that has most.
        balance: sum over the steps of the ranks' mean padded tokens / sum of their maximum.
        attention_balance: balance by padded tokens x (1 + longest / 12288), a cost that grows with
            length as attention does; for packed samples, by the sum of tokens x
            (1 + tokens / 12288). `attention_tokens` of the budget stand for 12288, where given.
        length_spread: how mixed the lengths of a step are: the share of the variance of all
            samples' lengths that lies within steps (1 - the correlation ratio, eta squared). 1: no
            step is longer than another on average. 0: each step has samples of one length.
    """

    steps: int
    samples: int
    real_tokens: int
    padded_tokens: int
    shapes: int
    filler_slots: int
    filler_share: float
    density: float
    efficiency: float
    filler_loss: float
    balance: float
    attention_balance: float
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
        slots = 0
        rows = []
        shapes = set()
        for step in steps:
            slots += len(step)
            lengths = [SampleBlock.of(group).tokens.tolist() for group in step if group]
            rows.append(_measure(lengths, len(step), budget))
            shapes |= {*map(budget.shape, lengths)}
        if not rows:
            raise ValueError("there is no step: all samples are dropped, or a rank has none.")
        table = np.array(rows, dtype=np.float64)  # a square of tokens does not fit 64-bit integers
        samples, real, squares, fillers, padded, most_padded, cost, most_cost = table.T
        capacity = slots / len(rows) * most_padded.sum()
        between = (real**2 / samples).sum() - real.sum() ** 2 / samples.sum()
        variance = squares.sum() - real.sum() ** 2 / samples.sum()
        return cls(
            steps=len(rows),
            samples=int(samples.sum()),
            real_tokens=int(real.sum()),
            padded_tokens=int(padded.sum()),
            shapes=len(shapes),
            filler_slots=int(fillers.sum()),
            filler_share=float(fillers.sum()) / slots,
            density=float(real.sum() / padded.sum()),
            efficiency=float(real.sum() / capacity),
            filler_loss=float((fillers * most_padded).sum() / capacity),
            balance=float(padded.sum() / capacity),
            attention_balance=float(cost.sum() / (slots / len(rows) * most_cost.sum())),
            length_spread=float(1 - between / variance) if variance else 1.0,
        )

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
            "balance with attention": f"{self.attention_balance:.3f}",
            "filler slots": f"{self.filler_share:.2%}",
            "lost to filler": f"{self.filler_loss:.4f}",
            "length spread": f"{self.length_spread:.3f}",
        }


def _measure(
    lengths: Sequence[Sequence[int]], ranks: int, budget: TokenBudget
) -> tuple[float, ...]:
    """Return the sums and maxima of one step that the report adds up."""
    padded = [budget.padded_tokens(tokens) for tokens in lengths]
    costs = [
        cost + _attention(tokens, cost, budget)
        for tokens, cost in zip(lengths, padded, strict=True)
    ]
    return (
        sum(map(len, lengths)),
        sum(map(sum, lengths)),
        sum(length * length for tokens in lengths for length in tokens),
        ranks - len(lengths),
        sum(padded),
        max(padded),
        sum(costs),
        max(costs),
    )


def _attention(tokens: Sequence[int], cost: int, budget: TokenBudget) -> float:
    """Return what attention adds to the cost of a group."""
    attention_tokens = budget.attention_tokens or ATTENTION_TOKENS
    if budget.layout == "packed":  # each sample attends to itself alone
        return sum(length * length for length in tokens) / attention_tokens
    return cost * budget.width(max(tokens)) / attention_tokens
