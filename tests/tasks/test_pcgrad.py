"""Gradients of tasks that conflict: against the algorithm by hand, on any number of ranks."""

from dataclasses import replace

import pytest
import torch
from gradients import relative_error, samples_of
from rank_jobs import run_ranks
from task_models import (
    NEAR_FAR_WEIGHTS,
    TASKS,
    Model,
    flat,
    joint_batches,
    loader_of,
    observe,
    projected_gradients,
    regression,
)

from odb_nodes import ODBDataLoader, pop_step_info
from odb_nodes.tasks import PCGrad, TaskWeights


def by_hand(data, ranks, accumulate):
    """The same, and how many steps had a conflict; Algorithm 1 of the paper for two tasks."""
    model, found, conflicts = Model(), [], 0
    for batch in joint_batches(data, ranks, accumulate):
        factors = torch.tensor([*NEAR_FAR_WEIGHTS.values()], dtype=torch.float64)[batch["task"]]
        weighed = factors * model.losses(batch) / factors.sum()
        first, second = (
            flat(
                torch.autograd.grad(
                    weighed[batch["task"] == task].sum(),
                    [*model.parameters()],
                    retain_graph=True,
                    allow_unused=True,
                    materialize_grads=True,
                )
            )
            for task in range(2)
        )
        inner = first @ second
        if inner < 0:
            conflicts += 1
            first, second = (
                first - inner / (second @ second) * second,
                second - inner / (first @ first) * first,
            )
        found.append(first + second)
    return found, conflicts


@pytest.mark.parametrize("accumulate", [1, 3])
def test_conflicts_are_projected_away(accumulate):
    data = regression(240)
    found = projected_gradients(loader_of(data, shuffle=False, accumulate=accumulate))
    expected, conflicts = by_hand(data, 1, accumulate)
    for (own, _), other in zip(found, expected, strict=True):
        assert relative_error(own, other) < 1e-12
    assert conflicts == sum(relative_error(own, plain) > 1e-6 for own, plain in found) > 5


def test_without_a_conflict_the_gradient_is_that_of_the_weighted_mean():
    data = [row for row in regression(240) if row["task"] == 0]
    for own, plain in projected_gradients(loader_of(data)):
        assert relative_error(own, plain) < 1e-12


def test_the_order_of_the_others_depends_on_seed_and_step_alone():
    pulls = {"a": [1.0, 2.0], "b": [-2.0, 1.0], "c": [0.5, -3.0]}
    options = {"token_budget": 400, "window": 1024, "observe": observe, "tasks": TASKS}
    loader = ODBDataLoader(samples_of(0, 200), shuffle=False, **options)
    infos = [pop_step_info(one) for one in loader]
    one = next(info for info in infos if {*info.row_tasks} == {*TASKS})

    def gradient(seed, step):
        at = torch.nn.Parameter(torch.zeros(2))
        conflicts = PCGrad(TaskWeights(dict.fromkeys(TASKS, 1.0)), [at], seed=seed)
        losses = torch.tensor([pulls[task] for task in one.row_tasks]) @ at
        conflicts.backward(losses, replace(one, step=step))
        conflicts.step()
        return tuple(at.grad.tolist())

    assert gradient(0, 1) == gradient(0, 1)
    assert len({gradient(0, step) for step in range(20)}) > 2
    assert len({gradient(seed, 1) for seed in range(20)}) > 2


RANKS = """
from task_models import NEAR_FAR, loader_of, projected_gradients, regression

data = regression(240)[rank::world_size]
loader = loader_of(data, sharded=True, shuffle=False, timeout_s=20)
found = projected_gradients(loader, NEAR_FAR[:: 1 - 2 * rank])  # named in another order
print(json.dumps([own.tolist() for own, _ in found]))
"""


def test_two_ranks_have_the_gradient_of_the_joint_batch(tmp_path):
    one, other = run_ranks(tmp_path, RANKS, 2)
    assert one == other
    expected, _ = by_hand(regression(240), 2, 1)
    for own, joint in zip(one, expected, strict=True):
        assert relative_error(torch.tensor(own, dtype=torch.float64), joint) < 1e-12


def test_what_is_not_trained_is_refused():
    with pytest.raises(ValueError, match="`parameters` must hold a parameter"):
        PCGrad(TaskWeights(NEAR_FAR_WEIGHTS), [])
