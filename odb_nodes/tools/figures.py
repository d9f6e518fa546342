"""What the batches of a job come to: steps, padding, fill, the largest batch, efficiency."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from odb_nodes.planning import TokenBudget
from odb_nodes.planning.simulation import Step

__all__ = ["BatchShapes", "Figures"]

BatchShapes = NDArray[np.float64]
"""Rows, width and real tokens of each batch: (steps, ranks, 3), all 0 where a rank has none."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Measures of the batches of one epoch of a job.

    Attributes:
        steps: number of steps of each rank, or of the one that has most.
        rows: rows of all batches; samples, where the layout is padded.
        padding_share: padding tokens / tokens of all batches.
        fill: tokens of a batch / budget, mean over the batches.
        largest_tokens: tokens of the largest batch, padding included.
        efficiency: real tokens / (ranks x sum over the steps of the largest batch's tokens).
    """

    steps: int
    rows: int
    padding_share: float
    fill: float
    largest_tokens: int
    efficiency: float

    @classmethod
    def of(cls, batches: BatchShapes, budget: TokenBudget) -> Figures:
        """Return the figures of batches.

        Args:
            batches: rows, width and real tokens of each, (steps, ranks, 3).
            budget: what a batch may have, or should have.
        """
        rows, width, real = np.moveaxis(batches, 2, 0)
        padded = rows * width
        return cls(
            steps=len(batches),
            rows=int(rows.sum()),
            padding_share=float(1 - real.sum() / padded.sum()),
            fill=float(padded[rows > 0].mean() / budget.tokens),
            largest_tokens=int(padded.max()),
            efficiency=float(real.sum() / (padded.shape[1] * padded.max(axis=1).sum())),
        )

    def as_row(self) -> dict[str, str]:
        """Return the formatted figures as a row of a table: title -> cell."""
        return {
            "steps": f"{self.steps:,}",
            "padding": f"{self.padding_share:.1%}",
            "fill": f"{self.fill:.3f}",
            "largest batch": f"{self.largest_tokens:,}",
            "efficiency": f"{self.efficiency:.3f}",
        }


def shapes_of_steps(steps: Iterable[Step], budget: TokenBudget) -> BatchShapes:
    """Return the shapes of the batches of steps that were planned under a budget."""
    return _stacked(
        [_shape([sample.tokens for sample in group] if group else [], budget) for group in step]
        for step in steps
    )


def shapes_of_lengths(steps: Iterable[Sequence[Sequence[int]]], budget: TokenBudget) -> BatchShapes:
    """Return the shapes of batches in the layout of a budget."""
    return _stacked([_shape(lengths, budget) for lengths in step] for step in steps)


def shapes_of_rows(
    steps: Iterable[Sequence[Sequence[int]]], lengths: NDArray[np.int64], multiple: int
) -> BatchShapes:
    """Return the shapes of padded batches."""
    plain = TokenBudget(multiple, pad_to_multiple_of=multiple)
    known = lengths.tolist()
    return _stacked(
        [_shape([known[row] for row in rows], plain) for rows in step] for step in steps
    )


def _shape(lengths: Sequence[int], budget: TokenBudget) -> tuple[int, int, int]:
    return (*budget.shape(lengths), sum(lengths)) if lengths else (0, 0, 0)


def _stacked(rows: Iterable[Sequence[tuple[int, int, int]]]) -> BatchShapes:
    found = [*rows]
    if not found:
        raise ValueError("there is no step: all samples are dropped, or a rank has none.")
    return np.array(found, dtype=np.float64)
