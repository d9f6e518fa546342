"""Decide which samples form a group, and which groups form a step. Needs numpy alone."""

from odb_nodes.core.planning.budget import TokenBudget
from odb_nodes.core.planning.known_epochs import plan_epoch
from odb_nodes.core.planning.pool import MAX_AGE_WINDOWS, RollingPool
from odb_nodes.core.planning.rounds import (
    CostReport,
    GroupCost,
    RoundPlan,
    Uneven,
    plan_round,
    round_steps,
)
from odb_nodes.core.planning.simulation import SimulationOptions, simulate_steps
from odb_nodes.core.planning.step_time import StepTime, TimeFn

__all__ = [
    "MAX_AGE_WINDOWS",
    "CostReport",
    "GroupCost",
    "RollingPool",
    "RoundPlan",
    "SimulationOptions",
    "StepTime",
    "TimeFn",
    "TokenBudget",
    "Uneven",
    "plan_epoch",
    "plan_round",
    "round_steps",
    "simulate_steps",
]
