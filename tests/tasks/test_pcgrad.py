"""Gradients of tasks that conflict: against the algorithm by hand, on any number of ranks."""

from dataclasses import replace

import pytest
import torch
from gradients import relative_error
from rank_jobs import run_ranks
from task_models import (
    NEAR_FAR_WEIGHTS,
    Model,
    flat,
    joint_batches,
    loader_of,
    projected_gradients,
    regression,
)

from odb_nodes import Observation, ODBDataLoader, pop_step_info
from odb_nodes.tasks import PCGrad, TaskWeights


def by_hand(data, ranks, accumulate):
    """Algorithm 1 of the paper for two tasks, and in how many steps there was a conflict."""
    model, found, conflicts = Model(), [], 0
    options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
    for batch in joint_batches(data, ranks, accumulate):
        factors = torch.tensor([*NEAR_FAR_WEIGHTS.values()], dtype=torch.float64)[batch["task"]]
        weighed = factors * model.losses(batch) / factors.sum()
        totals = [weighed[batch["task"] == task].sum() for task in range(2)]
        first, second = (
            flat(torch.autograd.grad(total, [*model.parameters()], **options)) for total in totals
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
    data = regression()
    found = projected_gradients(loader_of(data, shuffle=False, accumulate=accumulate))
    expected, conflicts = by_hand(data, 1, accumulate)
    for (own, _), other in zip(found, expected, strict=True):
        assert relative_error(own, other) < 1e-12
    assert conflicts == sum(relative_error(own, plain) > 1e-6 for own, plain in found) > 5


RANKS = """
from task_models import NEAR_FAR, loader_of, projected_gradients, regression

data = regression()[rank::world_size]
loader = loader_of(data, sharded=True, shuffle=False, timeout_s=20)
found = projected_gradients(loader, NEAR_FAR[:: 1 - 2 * rank])  # named in another order
print(json.dumps([own.tolist() for own, _ in found]))
"""


def test_two_ranks_have_the_gradient_of_the_joint_batch(tmp_path):
    one, other = run_ranks(tmp_path, RANKS, 2)
    assert one == other
    expected, _ = by_hand(regression(), 2, 1)
    for own, joint in zip(one, expected, strict=True):
        assert relative_error(torch.tensor(own, dtype=torch.float64), joint) < 1e-12


def test_the_order_of_the_others_depends_on_seed_and_step_alone():
    pulls = {"a": [1.0, 2.0], "b": [-2.0, 1.0], "c": [0.5, -3.0]}
    options = {"observe": lambda task: Observation(4, task=task), "tasks": [*pulls]}
    loader = ODBDataLoader([*pulls], token_budget=12, collate_fn=lambda rows: {}, **options)
    info = pop_step_info(next(iter(loader)))
    assert {*info.row_tasks} == {*pulls}

    def gradient(seed, step):
        at = torch.nn.Parameter(torch.zeros(2))
        conflicts = PCGrad(TaskWeights(dict.fromkeys(pulls, 1.0)), [at], seed=seed)
        losses = torch.tensor([pulls[task] for task in info.row_tasks]) @ at
        conflicts.backward(losses, replace(info, step=step))
        conflicts.step()
        return tuple(at.grad.tolist())

    assert gradient(0, 1) == gradient(0, 1)
    assert len({gradient(0, step) for step in range(20)}) > 2
    assert len({gradient(seed, 1) for seed in range(20)}) > 2


def test_without_a_conflict_sums_are_plain_and_of_half_precision_kept_in_float32():
    at = torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    projected = PCGrad(TaskWeights(NEAR_FAR_WEIGHTS), [at])
    batch = next(iter(loader_of([row for row in regression() if row["task"] == 0])))
    info = pop_step_info(batch)
    for number in range(1000):
        place = {"step": number, "micro_step": number, "micro_steps": 1000}
        projected.backward(at.expand(len(info.row_tasks)) + 1, replace(info, **place))
    projected.step()
    assert at.grad.dtype == torch.bfloat16
    assert float(at.grad) == 1000.0


def test_another_loss_beside_those_of_the_tasks_is_an_error():
    at = torch.nn.Parameter(torch.ones(1))
    projected = PCGrad(TaskWeights(NEAR_FAR_WEIGHTS), [at])
    loader = iter(loader_of(regression()))
    for step in range(2):
        info = pop_step_info(next(loader))
        loss = projected.loss(at.expand(len(info.row_tasks)) + 1, info)
        if not step:  # `step` overwrites its own gradients, which need not be zeroed.
            loss.backward()
            projected.step()
    with pytest.raises(RuntimeError, match="was multiplied by 2, which would change no"):
        (2 * loss).backward()
    at.grad = None
    (loss + at.square().sum()).backward()
    with pytest.raises(RuntimeError, match="a parameter has a gradient before `PCGrad.step`"):
        projected.step()
