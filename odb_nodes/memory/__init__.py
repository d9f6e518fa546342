"""Budgets whose batches fit into memory, and steps that lose nothing where it runs out."""

from odb_nodes.memory.accuracy import Accuracy, StepErrors
from odb_nodes.memory.calibration import Calibration, find_budget
from odb_nodes.memory.checkpointing import Checkpointing, enable_checkpointing
from odb_nodes.memory.failures import ShapeTooLargeError, free_memory, is_out_of_memory
from odb_nodes.memory.fitting import Fit
from odb_nodes.memory.generation import LongestFirst, generate_in_parts
from odb_nodes.memory.guard import OomGuard
from odb_nodes.memory.guarded_step import GuardedStep
from odb_nodes.memory.meter import CudaMeter, MemoryMeter
from odb_nodes.memory.model import MemoryModel
from odb_nodes.memory.preflight import preflight
from odb_nodes.memory.trials import Trial

__all__ = [
    "Accuracy",
    "Calibration",
    "Checkpointing",
    "CudaMeter",
    "Fit",
    "GuardedStep",
    "LongestFirst",
    "MemoryMeter",
    "MemoryModel",
    "OomGuard",
    "ShapeTooLargeError",
    "StepErrors",
    "Trial",
    "enable_checkpointing",
    "find_budget",
    "free_memory",
    "generate_in_parts",
    "is_out_of_memory",
    "preflight",
]
