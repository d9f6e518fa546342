"""What a step of training takes of memory, and the budget whose batches fit."""

from odb_nodes.memory.accuracy import Accuracy, StepErrors
from odb_nodes.memory.calibration import Calibration, find_budget
from odb_nodes.memory.checkpointing import Checkpointing, enable_checkpointing
from odb_nodes.memory.failures import ShapeTooLargeError, free_memory, is_out_of_memory
from odb_nodes.memory.fitting import Fit
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
    "MemoryMeter",
    "MemoryModel",
    "ShapeTooLargeError",
    "StepErrors",
    "Trial",
    "enable_checkpointing",
    "find_budget",
    "free_memory",
    "is_out_of_memory",
    "preflight",
]
