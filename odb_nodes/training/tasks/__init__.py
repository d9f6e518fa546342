"""One model on several tasks: weighted losses, and weights that follow gradients."""

from odb_nodes.training.tasks.gradnorm import GradNorm
from odb_nodes.training.tasks.pcgrad import PCGrad
from odb_nodes.training.tasks.weights import TaskWeights

__all__ = ["GradNorm", "PCGrad", "TaskWeights"]
