"""Budgets that fit into memory, and training steps that survive out-of-memory errors."""

from odb_nodes.training.memory.calibration import Calibration, find_budget, preflight
from odb_nodes.training.memory.checkpointing import Checkpointing, enable_checkpointing
from odb_nodes.training.memory.estimate import MemoryEstimate, estimate_training_memory
from odb_nodes.training.memory.generation import LongestFirst, generate_in_parts
from odb_nodes.training.memory.guard import OomGuard
from odb_nodes.training.memory.guarded_step import GuardedStep
from odb_nodes.training.memory.meter import (
    CudaMeter,
    MemoryMeter,
    ShapeTooLargeError,
    free_memory,
    is_out_of_memory,
)
from odb_nodes.training.memory.model import Fit, MemoryModel
from odb_nodes.training.memory.trials import Trial

__all__ = [
    "Calibration",
    "Checkpointing",
    "CudaMeter",
    "Fit",
    "GuardedStep",
    "LongestFirst",
    "MemoryEstimate",
    "MemoryMeter",
    "MemoryModel",
    "OomGuard",
    "ShapeTooLargeError",
    "Trial",
    "enable_checkpointing",
    "estimate_training_memory",
    "find_budget",
    "free_memory",
    "generate_in_parts",
    "is_out_of_memory",
    "preflight",
]
