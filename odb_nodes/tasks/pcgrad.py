"""Gradients of tasks without what they have against each other."""

from __future__ import annotations

import random
from collections.abc import Iterable

import torch
import torch.distributed as dist

from odb_nodes._core.checks import check_integer
from odb_nodes._core.hashing import hash_ints
from odb_nodes.alignment.peers import PEER_TIMEOUT_S
from odb_nodes.step_info import StepInfo
from odb_nodes.tasks.task_gradients import TaskGradients
from odb_nodes.tasks.weights import TaskWeights


class PCGrad(TaskGradients):
    """Projects the gradient of each task onto the normal plane of those that it conflicts with.

        conflicts = PCGrad(weights, model.parameters())
        for batch in loader:
            info = pop_step_info(batch)
            losses = ...  # of each token, see `TaskWeights.loss`
            conflicts.backward(losses, info)  # in place of `weights.loss(losses, info).backward()`
            if info.ends_optimizer_step:
                conflicts.step()
                optimizer.step()

    Two gradients conflict where their inner product is negative (Yu et al., 2020). The gradients
    are those of all ranks and micro-steps, each times the weight of its task. Where none conflict,
    their sum is the gradient of `TaskWeights.loss`. The order of the other tasks is drawn from
    `seed`, epoch and step, so there is no state, and all ranks have the same. In the first `step`
    they compare weights and seed, in each where they stand.

    Args:
        weights: the weights of the tasks.
        parameters: all that is trained. Their gradients are kept once for each task.
        seed: seed of the order.
        process_group: the ranks that train together. Default: all of the job. DDP is not needed;
            it does nothing here.
        timeout_s: seconds until a rank that does not come to `step` is an error on the others.

    Raises:
        TypeError, ValueError: an argument is not valid, none of the parameters is trained, or one
            is sharded.
    """

    option, method = "parameters", "backward"

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

    def backward(
        self, losses: torch.Tensor, info: StepInfo, *, position_ids: torch.Tensor | None = None
    ) -> None:
        """Add the gradients of a batch; call it on each rank, in filler steps too.

        Args:
            losses: of each token, see `TaskWeights.loss`.
            info: the `StepInfo` of the batch.
            position_ids: of a packed batch.

        Raises:
            RuntimeError: a batch of the optimizer step was left out or comes twice, or `step` did
                not follow the optimizer step before.
            TypeError, ValueError: see `TaskWeights.loss`; or a task uses none of the parameters, or
                its losses have no graph.
        """
        self._add(losses, info, position_ids)

    def step(self) -> None:
        """End an optimizer step: set `grad` of all parameters. All ranks call it.

        Raises:
            PeerError: a rank was lost, or did not come.
            RuntimeError: this rank has not called `backward` for each batch of an optimizer step.
            StateError: the ranks differ in weights or seed, or end different steps.
        """
        info = self._end({"seed": self._seed})
        sums = self._take(info)
        factors = sums.new_tensor([*self._weights.values()])
        scale = self._weights.scale(info) / info.world_size  # 1 / sum of weight x targets
        own = sums[:, :-1] * factors[:, None] * scale
        rng = random.Random(hash_ints(self._seed, info.epoch, info.step))
        free = own.clone()
        for row, gradient in enumerate(free):
            others = [other for other in range(len(own)) if other != row]
            rng.shuffle(others)
            for other in others:
                if (conflict := gradient @ own[other]) < 0:
                    gradient -= conflict / own[other].square().sum() * own[other]
        sizes = [one.numel() for one in self._parameters]
        for one, grad in zip(self._parameters, free.sum(0).split(sizes), strict=True):
            one.grad = grad.view_as(one).to(one.dtype, copy=True)
