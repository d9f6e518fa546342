"""One model on several tasks: losses that weigh them, and weights that follow their gradients."""

from collections.abc import Collection

from odb_nodes._core.checks import check_type
from odb_nodes.tasks.task_gradients import GradNorm, PCGrad, TaskGradients
from odb_nodes.tasks.weights import TaskWeights

AnyWeights = TaskWeights | GradNorm | PCGrad

__all__ = ["GradNorm", "PCGrad", "TaskWeights"]


def check_task_weights(value: object) -> None:
    """Raise a `TypeError` unless `value` weighs the losses of tasks, or is None."""
    remedy = 'Pass `TaskWeights({"chat": 1.0, "code": 0.5})`, or a `GradNorm` or `PCGrad` of some.'
    check_type("task_weights", value, AnyWeights | None, remedy)


def weights_of(tasks: AnyWeights) -> TaskWeights:
    """Return the weights themselves."""
    return tasks.weights if isinstance(tasks, TaskGradients) else tasks


def task_names(tasks: AnyWeights, given: Collection[str] | None) -> list[str]:
    """Return the names that a loader needs; raise a `ValueError` if it was given others."""
    names = [*weights_of(tasks)]
    if given and {*given} != {*names}:
        raise ValueError(
            f"`tasks` must be those of `task_weights`, {names}, but are {[*given]}. Leave them out."
        )
    return names


def weight_metrics(tasks: AnyWeights | None) -> dict[str, float]:
    """Return the weights as trainers log them."""
    weights = {} if tasks is None else weights_of(tasks)
    return {f"odb/weight/{task}": weight for task, weight in weights.items()}
