"""Decide which samples form a group. Knows integers and numpy; knows neither torch nor samples."""

from odb_nodes.planning.budget import TokenBudget
from odb_nodes.planning.pool import MAX_AGE_WINDOWS, RollingPool

__all__ = ["MAX_AGE_WINDOWS", "RollingPool", "TokenBudget"]
