"""Tells where a pool is too small to fill groups of its budget."""

from __future__ import annotations

import math

from odb_nodes._core.user_warning import warn_user
from odb_nodes.planning import TokenBudget
from odb_nodes.sample import Sample

_GROUPS = 16  # that are looked at
_LEAST_BUDGETS = 6.0  # of pooled tokens: below, real/padded is under 0.9 to 0.95 (simulated)
_GOOD_BUDGETS = 12.0
_MOST_PADDING = 0.15


class PoolCheck:
    """Looks at the first groups of a pool, and warns if they are padded much for want of samples.

    Args:
        budget: the budget that groups are formed under.
    """

    def __init__(self, budget: TokenBudget) -> None:
        self._budget = budget
        self._groups = self._samples = self._real_tokens = self._padded_tokens = self._cost = 0

    def note(self, group: list[Sample], window: int) -> None:
        """Take a group into account that was formed from a full pool of `window` samples."""
        if self._groups == _GROUPS:
            return
        tokens = [sample.tokens for sample in group]
        self._groups += 1
        self._samples += len(group)
        self._real_tokens += sum(tokens)
        self._padded_tokens += self._budget.padded_tokens(tokens)
        self._cost += sum(map(self._budget.row_cost, tokens))
        if self._groups == _GROUPS and self._budget.layout == "padded":
            self._judge(window)

    def _judge(self, window: int) -> None:
        mean, mean_cost = self._real_tokens / self._samples, self._cost / self._samples
        most = self._budget.max_samples
        limit = min(self._budget.tokens, math.inf if most is None else most * mean_cost)
        pooled = window * mean_cost / limit
        padding = 1 - self._real_tokens / self._padded_tokens
        if pooled >= _LEAST_BUDGETS or padding <= _MOST_PADDING:
            return
        enough = math.ceil(_GOOD_BUDGETS * limit / mean_cost)
        warn_user(
            f"{padding:.0%} of the tokens of the first {_GROUPS} batches are padding: the pool of "
            f"{window} samples, {mean:.0f} tokens long on average, holds no more "
            f"than {pooled:.1f} budgets of {self._budget.tokens} tokens, from which no group of "
            f"like lengths can be chosen. Raise it to `window={enough}`, or lower the budget.",
            once=("padding", self._budget, window),
        )
