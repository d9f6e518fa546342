"""One model on several tasks: weighted losses, and weights that follow gradients."""

from odb_nodes.tasks.task_gradients import GradNorm, PCGrad
from odb_nodes.tasks.weights import TaskWeights

__all__ = ["GradNorm", "PCGrad", "TaskWeights"]
