"""The gradient of each task, over all ranks and micro-steps of an optimizer step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist

from odb_nodes._compat.torch import is_dtensor
from odb_nodes.step_info import StepInfo
from odb_nodes.tasks.weights import TaskWeights

__all__ = ["TaskGradients"]


class TaskGradients:
    """Adds up, task by task, the gradients of the sums of losses.

    Args:
        weights: whose tasks they are of.
        parameters: what the gradients are with respect to; those that are not trained are left out.
        option: what `parameters` were given as, for errors.
        process_group: the ranks that train together; `None` for all of the job.

    Attributes:
        parameters: those that are trained.
        targets: task -> its supervised tokens in the optimizer step, over all ranks.

    Raises:
        ValueError: none is trained, or one is sharded.
    """

    def __init__(
        self,
        weights: TaskWeights,
        parameters: Iterable[torch.nn.Parameter],
        option: str,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.parameters = [one for one in parameters if one.requires_grad]
        if not self.parameters:
            raise ValueError(f"`{option}` must hold a parameter that is trained, but holds none.")
        if any(is_dtensor(one) for one in self.parameters):
            raise ValueError(
                f"`{option}` must be whole on each rank, but is sharded. Choose parameters that "
                "FSDP leaves alone."
            )
        self.targets: Mapping[str, int] = {}
        self._weights, self._option = weights, option
        self._process_group = process_group
        self._sums: torch.Tensor | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing was added since the last `take`."""
        return self._sums is None

    def add(self, losses: torch.Tensor, info: StepInfo, position_ids: torch.Tensor | None) -> None:
        """Add the gradients of a batch; its graph is kept.

        Raises:
            ValueError: see `TaskWeights.loss`; or the losses of a task use no parameter.
        """
        if self._sums is None:
            size, first = sum(one.numel() for one in self.parameters) + 1, self.parameters[0]
            dtype = torch.promote_types(first.dtype, torch.float32)  # for sums of many
            self._sums = first.new_zeros((len(self._weights), size), dtype=dtype)
        self._weights.scale(info)  # checks that the targets of all tasks are counted
        self.targets = info.task_targets
        found = self._weights.by_task(losses, info, position_ids=position_ids)
        for row, task in enumerate(self._weights):
            if task in found and (total := found[task][0]).requires_grad:
                grads = torch.autograd.grad(
                    total, self.parameters, retain_graph=True, allow_unused=True
                )
                if all(grad is None for grad in grads):
                    raise ValueError(
                        f"`{self._option}` must hold parameters that the losses of all tasks "
                        f"depend on, but those of {task!r} depend on none of them."
                    )
                flat = [
                    torch.zeros_like(one).flatten() if grad is None else grad.detach().flatten()
                    for one, grad in zip(self.parameters, grads, strict=True)
                ]
                self._sums[row] += torch.cat([*flat, total.detach()[None]])

    def take(self, method: str) -> torch.Tensor:
        """Return what was added on all ranks, and begin anew. All ranks call it.

        Args:
            method: what the caller adds by, for the error.

        Returns:
            (tasks, elements of the parameters + 1), at least float32: gradient of a task's sum of
            losses, and in the last column that sum.

        Raises:
            RuntimeError: nothing was added on this rank.
        """
        sums, self._sums = self._sums, None
        if sums is None:
            raise RuntimeError(
                f"`step` came without `{method}`: call `{method}` for each batch of the optimizer "
                "step, on all ranks and in filler steps too."
            )
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(sums, group=self._process_group)
        return sums

    def clear(self) -> None:
        """Begin anew."""
        self._sums = None
