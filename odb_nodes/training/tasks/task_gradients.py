"""The gradient of each task, summed over micro-steps and ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from odb_nodes._compat.torch import is_dtensor
from odb_nodes._support.checks import check_seconds, check_type, describe
from odb_nodes.core.alignment.exchange import Meeting
from odb_nodes.core.step_info import StepInfo
from odb_nodes.errors import StateError
from odb_nodes.training.tasks.weights import TaskWeights


class TaskGradients:
    """Base class: sums the gradient of each task over micro-steps and ranks."""

    needs_gradients = True
    option: ClassVar[str]  # name of the subclass's argument for the parameters, for errors
    method: ClassVar[str]  # name of the subclass's method that adds a batch, for errors
    sets_gradients: ClassVar[bool] = False

    def __init__(
        self,
        weights: TaskWeights,
        parameters: Iterable[torch.nn.Parameter],
        process_group: dist.ProcessGroup | None,
        timeout_s: float,
    ) -> None:
        check_type("weights", weights, TaskWeights, "Pass `TaskWeights(...)`.")
        owner = type(self).__name__
        self.weights = weights
        self._parameters = _checked_parameters(parameters, self.option)
        self._elements = sum(parameter.numel() for parameter in self._parameters)
        self._process_group = process_group
        if process_group is not None:
            remedy = "Pass a `torch.distributed.new_group`, or None for all ranks of the job."
            check_type("process_group", process_group, dist.ProcessGroup, remedy)
        check_seconds("timeout_s", timeout_s)
        remedy = f"Create `{owner}` with the same weights and options on all ranks."
        self._owner = owner
        self._meeting = Meeting(owner, process_group, timeout_s, remedy=remedy)
        self._begin_step()

    def state_dict(self) -> dict[str, Any]:
        """Return the weights."""
        return self.weights.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set the weights from a state; errors are as in `TaskWeights.load_state_dict`."""
        self.weights.load_state_dict({"weights": state_dict.get("weights")})
        self._begin_step()
        self._meeting.begin()

    def check_model(self, model: torch.nn.Module) -> None:
        """Reject parameters that are not the model's; for `PCGrad`, also missing ones."""
        trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
        ours = {id(parameter) for parameter in self._parameters}
        foreign, missing = ours - trained, trained - ours
        if foreign or (missing and self.sets_gradients):
            rule = "all trained parameters" if self.sets_gradients else "trained parameters"
            raise ValueError(
                f"`{self.option}` of `{self._owner}` must be {rule} of the model, a "
                f"`{type(model).__name__}`, but {len(foreign)} of {len(ours)} are not in it, and "
                f"{len(missing)} of {len(trained)} are missing. Take the parameters from the model "
                "that the trainer gets, after adapters were added."
            )

    def _begin_step(self) -> None:
        self._info: StepInfo | None = None  # the last batch's
        self._sums: torch.Tensor | None = None  # (tasks, elements + 1): gradients, sum of losses

    def _check_next(self, info: StepInfo) -> None:
        """Check that a batch is the next one of the optimizer step, and remember it."""
        check_type("info", info, StepInfo, "Pass `pop_step_info(batch)`.")
        last = self._info
        is_abandoned = (
            last is not None
            and not last.ends_optimizer_step
            and info.micro_step == 0
            and (info.epoch, info.step) != (last.epoch, last.step)
        )
        if is_abandoned:
            self._begin_step()
        elif info.micro_step != (0 if last is None else last.micro_step + 1):
            raise RuntimeError(
                f"`{self.method}` must be called once for each batch of an optimizer step, and "
                f"`step` after its last, but it came for {_name_of(info)} after {_name_of(last)}."
            )
        self._info = info

    def _add(self, losses: torch.Tensor, info: StepInfo, position_ids: torch.Tensor | None) -> None:
        """Add the gradients of a batch; its autograd graph stays usable."""
        self._check_next(info)
        if self._sums is None:
            size = self._elements + 1
            first = self._parameters[0]
            dtype = torch.promote_types(first.dtype, torch.float32)  # precise sums of many terms
            self._sums = first.new_zeros((len(self.weights), size), dtype=dtype)
        self.weights.scale(info)  # checks that the targets of all tasks are counted
        sums = self.weights.by_task(losses, info, position_ids=position_ids)
        for row, task in enumerate(self.weights):
            total, targets = sums.get(task, (None, 0))
            if total is not None and (targets or total.requires_grad):
                self._sums[row] += self._gradient(total, task)

    def _gradient(self, total: torch.Tensor, task: str) -> torch.Tensor:
        """Return the gradient of a task's sum of losses, followed by the sum, as one row."""
        if not total.requires_grad:
            raise ValueError(
                f"`losses` must have a graph, but the losses of {task!r} have none: they were "
                "detached, or computed under `torch.no_grad()`."
            )
        grads = torch.autograd.grad(total, self._parameters, retain_graph=True, allow_unused=True)
        if all(grad is None for grad in grads):
            raise ValueError(
                f"`{self.option}` must hold parameters that the losses of all tasks depend on, but "
                f"the losses of {task!r} depend on none of them."
            )
        row = [
            torch.zeros_like(parameter).flatten() if grad is None else grad.detach().flatten()
            for parameter, grad in zip(self._parameters, grads, strict=True)
        ]
        return torch.cat([*row, total.detach()[None]])

    def _end_step(self, settings: Mapping[str, Any]) -> StepInfo:
        """End an optimizer step: compare `settings` between ranks; return its last `StepInfo`."""
        info = self._info
        if info is None or not info.ends_optimizer_step:
            raise RuntimeError(
                f"`step` must come after `{self.method}` of each batch of an optimizer step, on "
                f"all ranks and in filler steps too, but came after {_name_of(info)}."
            )
        sizes = {"parameters": len(self._parameters), "elements": self._elements}
        self._meeting.agree({**self.weights.state_dict(), **sizes, **settings})
        self._info = None
        return info

    def _sum_over_ranks(self, info: StepInfo) -> torch.Tensor:
        """Return the sums over all ranks, (tasks, elements + 1): gradients, and sums of losses."""
        sums = self._sums
        assert sums is not None
        self._begin_step()
        where = f"`{self._owner}.step` of epoch {info.epoch}, step {info.step}"
        rows = self._meeting.gather([info.epoch, info.step], where)
        if (rows != rows[0]).any():
            raise StateError(
                f"all ranks must call `{self._owner}.step` after the same optimizer steps, but are "
                f"at (epoch, step) {[*map(tuple, rows.tolist())]} instead, in the order of the "
                "ranks: a rank has left out a call. Restart all ranks from a checkpoint."
            )
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(sums, group=self._process_group)
        return sums


def _name_of(info: StepInfo | None) -> str:
    if info is None:
        return "none"
    place = f"micro-step {info.micro_step} of 0..{info.micro_steps - 1}"
    return f"{place} (step {info.step} of epoch {info.epoch})"


def _checked_parameters(parameters: Any, option: str) -> list[torch.nn.Parameter]:
    """Check parameters, and return those that are trained."""
    is_list = isinstance(parameters, Iterable) and not isinstance(parameters, torch.Tensor)
    tensors: list[Any] = [*parameters] if is_list else []
    if not is_list or not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        raise TypeError(
            f"`{option}` must be parameters, but is {describe(parameters)} instead. Pass "
            "`module.parameters()`, or a list such as `[module.weight]`."
        )
    trained = [tensor for tensor in tensors if tensor.requires_grad]
    different = len({*map(id, trained)})
    if not trained or different < len(trained):
        raise ValueError(
            f"`{option}` must hold trained parameters, each once, but has {len(trained)} trained "
            f"parameters, of which {different} differ."
        )
    if any(map(is_dtensor, trained)):
        raise ValueError(
            f"`{option}` must be whole on each rank, but is sharded. Choose parameters that "
            "FSDP does not shard."
        )
    return trained
