"""Options as code to paste."""

from __future__ import annotations

from odb_nodes.planning import TokenBudget

__all__ = ["budget_code"]


def budget_code(budget: TokenBudget) -> str:
    """Return what makes a budget, as a number of tokens where that is all."""
    default = TokenBudget(budget.tokens)
    fields = [
        f"{name}={value!r}"
        for name, value in vars(budget).items()
        if value != getattr(default, name)
    ]
    if not fields:
        return str(budget.tokens)
    return f"TokenBudget({', '.join([str(budget.tokens), *fields])})"
