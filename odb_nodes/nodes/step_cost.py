"""What a step costs by default, for matching the groups of several ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchdata.nodes import BaseNode

from odb_nodes.graph import walk
from odb_nodes.planning import TokenBudget
from odb_nodes.sample import Sample


class BudgetCost:
    """Group -> the tokens that its batch has under a budget, padding included.

    Args:
        budget: of the groups.
    """

    def __init__(self, budget: TokenBudget) -> None:
        self._budget = budget
        self.__qualname__ = f"{budget.layout}_tokens"  # for fingerprints

    def __call__(self, group: Sequence[Sample]) -> int:
        """Return the tokens of a group's batch."""
        return self._budget.cost([sample.tokens for sample in group])


def cost_below(source: BaseNode[Any]) -> BudgetCost | None:
    """Return the cost under the budget of the `WindowBucketer` below; `None` without one."""
    for node in walk(source):
        if isinstance(budget := getattr(node, "budget", None), TokenBudget):
            return BudgetCost(budget)
    return None
