"""One model on several tasks: losses that weigh them, and weights that follow their gradients."""

from odb_nodes.tasks.task_gradients import GradNorm, PCGrad
from odb_nodes.tasks.weights import TaskWeights

__all__ = ["GradNorm", "PCGrad", "TaskWeights"]
