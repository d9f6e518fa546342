"""PCGrad: projects conflicting gradients of tasks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.weak import TensorWeakRef

from odb_nodes._support.checks import check_integer
from odb_nodes._support.hashing import hash_ints
from odb_nodes.core.alignment.peers import PEER_TIMEOUT_S
from odb_nodes.core.step_info import StepInfo
from odb_nodes.training.tasks.task_gradients import TaskGradients
from odb_nodes.training.tasks.weights import TaskWeights


class PCGrad(TaskGradients):
    """Projects the gradient of each task onto the normal plane of each conflicting gradient.

        conflicts = PCGrad(weights, model.parameters())
        for batch in loader:
            info = pop_step_info(batch)
            losses = ...  # loss of each token, see `TaskWeights.loss`
            conflicts.backward(losses, info)  # in place of `weights.loss(losses, info).backward()`
            if info.ends_optimizer_step:
                conflicts.step()
                optimizer.step()

    Two gradients conflict if their inner product is negative (Yu et al., 2020). The gradient of a
    task is over all ranks and micro-steps, times the weight of the task. Without conflicts, the sum
    of the gradients is the gradient of `TaskWeights.loss`. The order of the projections is drawn
    from `seed`, epoch and step: there is no state, and all ranks have the same order. In the first
    `step` the ranks compare weights and seed, in each `step` their epoch and step.

    Args:
        weights: the weights of the tasks.
        parameters: all trained parameters. Their gradients take memory once for each task.
        seed: seed of the order of the projections.
        process_group: the ranks that train together. Default: all ranks of the job. DDP is not
            needed, and has no effect here.
        timeout_s: seconds to wait in `step` for another rank before it is an error.

    Raises:
        TypeError, ValueError: an argument is not valid, or a parameter is sharded; or no parameter
            is trained.
    """

    option, method, sets_gradients = "parameters", "backward", True

    def __init__(
        self,
        weights: TaskWeights,
        parameters: Iterable[torch.nn.Parameter],
        *,
        seed: int = 0,
        process_group: dist.ProcessGroup | None = None,
        timeout_s: float = PEER_TIMEOUT_S,
    ) -> None:
        super().__init__(weights, parameters, process_group, timeout_s)
        self._seed = check_integer("seed", seed)
        self._last: list[Callable[[], Any]] = []  # weak references to the last gradients of `step`

    def backward(
        self, losses: torch.Tensor, info: StepInfo, *, position_ids: torch.Tensor | None = None
    ) -> None:
        """Add the gradients of a batch. Call it on each rank, in filler steps too.

        The arguments are as for `TaskWeights.loss`.

        Raises:
            RuntimeError: a batch of the optimizer step is missing or comes twice, or `step` was not
                called after the previous optimizer step.
            TypeError, ValueError: see `TaskWeights.loss`; or a task uses none of the parameters, or
                its losses have no graph.
        """
        self._add(losses, info, position_ids)

    def loss(
        self, losses: torch.Tensor, info: StepInfo, *, position_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Add the gradients of a batch, and return its loss, whose `backward` adds no gradient."""
        self.backward(losses, info, position_ids=position_ids)
        loss = self.weights.loss(losses, info, position_ids=position_ids).detach().requires_grad_()
        loss.register_hook(_check_is_unchanged)
        return loss

    def step(self) -> None:
        """End an optimizer step: set `grad` of all parameters. All ranks call it.

        Raises:
            PeerError: a rank was lost, or did not answer.
            RuntimeError: this rank has not called `backward` for each batch of an optimizer step;
                or a parameter has a gradient of another loss.
            StateError: the ranks differ in weights or seed, or end different steps.
        """
        last_grads = self._last or [lambda: None] * len(self._parameters)
        for parameter, last_grad in zip(self._parameters, last_grads, strict=True):
            grad = parameter.grad
            if grad is not None and grad is not last_grad() and grad.any():
                raise RuntimeError(
                    "a parameter has a gradient before `PCGrad.step`, which would overwrite it. "
                    "Add the loss that it comes from, such as a regularizer, to the losses of the "
                    "tasks; or call `zero_grad` first."
                )
        info = self._end_step({"seed": self._seed})
        sums = self._sum_over_ranks(info)
        factors = sums.new_tensor([*self.weights.values()])
        scale = self.weights.scale(info) / info.world_size  # 1 / sum of weight x targets
        gradients = sums[:, :-1] * factors[:, None] * scale
        rng = random.Random(hash_ints(self._seed, info.epoch, info.step))
        projected = gradients.clone()
        for row, gradient in enumerate(projected):
            other_rows = [other for other in range(len(gradients)) if other != row]
            rng.shuffle(other_rows)
            for other in other_rows:
                # Scaled to at most 1: squares of a small gradient are 0 in float32.
                largest = gradients[other].abs().max().clamp(min=torch.finfo(gradients.dtype).tiny)
                direction = gradients[other] / largest
                inner_product = gradient @ direction
                if inner_product < 0:
                    gradient -= inner_product / direction.square().sum() * direction
        sizes = [parameter.numel() for parameter in self._parameters]
        self._last = []
        for parameter, grad in zip(self._parameters, projected.sum(0).split(sizes), strict=True):
            parameter.grad = grad.view_as(parameter).to(parameter.dtype, copy=True)
            self._last.append(TensorWeakRef(parameter.grad))


def _check_is_unchanged(gradient: torch.Tensor) -> None:
    if abs(float(gradient) - 1) > 1e-3:
        raise RuntimeError(
            "the loss that `PCGrad` returned must not be scaled, but was multiplied by "
            f"{float(gradient):g}, which would change no gradient. Set the weights of the tasks."
        )
