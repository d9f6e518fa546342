"""Limits of a budget, which may become tighter while a run goes on."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from odb_nodes.planning.budget import TokenBudget


class Limits(NamedTuple):
    """The fields of a `TokenBudget` that bound a group.

    Attributes:
        tokens, max_samples, max_patches: see `TokenBudget`.
    """

    tokens: int
    max_samples: int | None = None
    max_patches: int | None = None

    @classmethod
    def of(cls, budget: TokenBudget) -> Limits:
        """Return those of a budget."""
        return cls(budget.tokens, budget.max_samples, budget.max_patches)

    def to_state(self) -> tuple[int, int | None, int | None]:
        """Return them as plain data."""
        return self.tokens, self.max_samples, self.max_patches

    def tightened(self, other: Limits) -> Limits:
        """Return the tighter of each two."""
        return Limits(
            min(self.tokens, other.tokens),
            _tighter(self.max_samples, other.max_samples),
            _tighter(self.max_patches, other.max_patches),
        )

    def applied_to(self, budget: TokenBudget) -> TokenBudget:
        """Return a budget with these limits; its `tokens` hold the shortest row at least."""
        shortest = budget.row_cost(budget.pad_to_multiple_of)
        limits = {**self._asdict(), "tokens": max(self.tokens, shortest)}
        return replace(budget, **limits)


def _tighter(one: int | None, other: int | None) -> int | None:
    return min((limit for limit in (one, other) if limit is not None), default=None)
