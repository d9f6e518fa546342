"""One model on several tasks: weighted losses, and weights that follow gradients."""

from odb_nodes.training.tasks.task_gradients import GradNorm, PCGrad
from odb_nodes.training.tasks.weights import TaskWeights

__all__ = ["GradNorm", "PCGrad", "TaskWeights"]
