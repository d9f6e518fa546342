"""Decide which samples form a group, and which groups a step. Knows integers and numpy alone."""

from odb_nodes.planning.alignment import (
    GroupCost,
    Offer,
    RoundPlan,
    Uneven,
    make_offer,
    plan_round,
)
from odb_nodes.planning.budget import TokenBudget
from odb_nodes.planning.pool import MAX_AGE_WINDOWS, RollingPool
from odb_nodes.planning.rounds import round_steps

__all__ = [
    "MAX_AGE_WINDOWS",
    "GroupCost",
    "Offer",
    "RollingPool",
    "RoundPlan",
    "TokenBudget",
    "Uneven",
    "make_offer",
    "plan_round",
    "round_steps",
]
