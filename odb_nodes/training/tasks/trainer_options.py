"""The weights of tasks as an option of trainers."""

from __future__ import annotations

from collections.abc import Collection

from odb_nodes._support.checks import check_type
from odb_nodes.training.tasks.gradnorm import GradNorm
from odb_nodes.training.tasks.pcgrad import PCGrad
from odb_nodes.training.tasks.weights import TaskWeights

AnyWeights = TaskWeights | GradNorm | PCGrad


def check_task_weights(value: object) -> None:
    """Check the argument `task_weights` of a trainer."""
    remedy = 'Pass `TaskWeights({"chat": 1.0, "code": 0.5})`, or a `GradNorm` or `PCGrad` with it.'
    check_type("task_weights", value, AnyWeights | None, remedy)


def task_names(task_weights: AnyWeights, tasks: Collection[str] | None) -> list[str]:
    """Return the names of the tasks for a loader; raise if its argument `tasks` has other names."""
    names = [*task_weights.weights]
    if tasks and {*tasks} != {*names}:
        raise ValueError(
            f"`tasks` must be the tasks of `task_weights`, {names}, but are {[*tasks]}. Leave out "
            "`tasks`."
        )
    return names
