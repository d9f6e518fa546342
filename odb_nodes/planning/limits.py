"""Limits of a budget, which may become tighter while a run goes on."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from odb_nodes.planning.budget import TokenBudget


class Limits(NamedTuple):
    """The fields of a `TokenBudget` that bound a group, and a sample.

    Attributes:
        tokens, max_samples, max_patches: of a group; see `TokenBudget`.
        sample_tokens, sample_patches: the like, of a sample that is not oversize.
    """

    tokens: int
    max_samples: int | None
    max_patches: int | None
    sample_tokens: int
    sample_patches: int | None

    @classmethod
    def of(cls, budget: TokenBudget) -> Limits:
        """Return those of a budget."""
        tokens, patches = budget.tokens, budget.max_patches
        return cls(tokens, budget.max_samples, patches, tokens, patches)

    def tightened(self, other: Limits) -> Limits:
        """Return the tighter of each two."""
        return Limits(
            min(self.tokens, other.tokens),
            _tighter(self.max_samples, other.max_samples),
            _tighter(self.max_patches, other.max_patches),
            min(self.sample_tokens, other.sample_tokens),
            _tighter(self.sample_patches, other.sample_patches),
        )

    def of_groups(self, budget: TokenBudget) -> TokenBudget:
        """Return the budget of groups; its `tokens` hold the shortest row at least."""
        tokens = max(self.tokens, budget.row_cost(budget.pad_to_multiple_of))
        return replace(
            budget, tokens=tokens, max_samples=self.max_samples, max_patches=self.max_patches
        )

    def of_samples(self, budget: TokenBudget) -> TokenBudget:
        """Return the budget that a sample exceeds on its own, or not."""
        return replace(budget, tokens=self.sample_tokens, max_patches=self.sample_patches)


def _tighter(one: int | None, other: int | None) -> int | None:
    return min((limit for limit in (one, other) if limit is not None), default=None)
