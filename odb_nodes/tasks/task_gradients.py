"""The gradient of each task, over all ranks and micro-steps of an optimizer step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from odb_nodes._compat.torch import is_dtensor, is_freed_graph
from odb_nodes._core.checks import check_seconds, check_type, describe
from odb_nodes.alignment.exchange import Meeting
from odb_nodes.errors import StateError
from odb_nodes.step_info import StepInfo
from odb_nodes.tasks.weights import TaskWeights

__all__ = ["TaskGradients"]


class TaskGradients:
    """Adds up, task by task, the gradients of the sums of losses.

    Attributes:
        parameters: those that are trained.
        info: of the last batch of the optimizer step; `None` before the first.
    """

    def __init__(
        self,
        weights: TaskWeights,
        parameters: Iterable[torch.nn.Parameter],
        names: tuple[str, str, str],
        process_group: dist.ProcessGroup | None,
        timeout_s: float,
    ) -> None:
        check_type("weights", weights, TaskWeights, "Pass `TaskWeights(...)`.")
        owner, self._option, self._method = names
        self.parameters = _trained(parameters, self._option)
        self._elements = sum(one.numel() for one in self.parameters)
        self.info: StepInfo | None = None
        self._weights, self._process_group = weights, process_group
        if process_group is not None:
            remedy = "Pass one of `torch.distributed.new_group`, or None for all ranks of the job."
            check_type("process_group", process_group, dist.ProcessGroup, remedy)
        check_seconds("timeout_s", timeout_s)
        remedy = f"Make `{owner}` with the same weights and options on all of them."
        self._owner, self._meeting = owner, Meeting(owner, process_group, timeout_s, remedy=remedy)
        self._sums: torch.Tensor | None = None

    def follow(self, info: StepInfo) -> None:
        """Note the next batch of the optimizer step."""
        check_type("info", info, StepInfo, "Pass `pop_step_info(batch)`.")
        last, method = self.info, self._method
        if last is not None and (info.epoch, info.step) == (last.epoch, last.step):
            raise RuntimeError(
                f"`{method}` must be called once for each batch, but was called twice for step "
                f"{info.step} of epoch {info.epoch}."
            )
        if last is not None and last.ends_optimizer_step:
            raise RuntimeError(
                f"`{method}` came for step {info.step} of epoch {info.epoch}, but `step` not after "
                f"step {last.step}, which ended an optimizer step. Call `step` where "
                "`info.ends_optimizer_step`."
            )
        expected = 0 if last is None else last.micro_step + 1
        if info.micro_step not in (0, expected):
            raise RuntimeError(
                f"`{method}` must be called for each batch of an optimizer step, but came for "
                f"micro-step {info.micro_step} of step {info.step} where {expected} was next."
            )
        if info.micro_step == 0:  # also where an optimizer step was broken off
            self.clear()
        self.info = info

    def add(self, losses: torch.Tensor, info: StepInfo, position_ids: torch.Tensor | None) -> None:
        """Add the gradients of a batch; its graph is kept."""
        self.follow(info)
        if self._sums is None:
            size, first = self._elements + 1, self.parameters[0]
            dtype = torch.promote_types(first.dtype, torch.float32)  # for sums of many
            self._sums = first.new_zeros((len(self._weights), size), dtype=dtype)
        self._weights.scale(info)  # checks that the targets of all tasks are counted
        found = self._weights.by_task(losses, info, position_ids=position_ids)
        for row, task in enumerate(self._weights):
            total, targets = found.get(task, (None, 0))
            if total is not None and (targets or total.requires_grad):
                self._sums[row] += self._gradient(total, task)

    def _gradient(self, total: torch.Tensor, task: str) -> torch.Tensor:
        """Return the gradient of a task's sum of losses, and that sum, as one row."""
        if not total.requires_grad:
            raise ValueError(
                f"`losses` must have a graph, but those of {task!r} have none: they were detached, "
                "or computed under `torch.no_grad()`."
            )
        try:
            grads = torch.autograd.grad(
                total, self.parameters, retain_graph=True, allow_unused=True
            )
        except RuntimeError as error:
            if not is_freed_graph(error):
                raise
            raise RuntimeError(
                f"`{self._method}` must come before `backward` of the same losses, which frees "
                f"their graph, but came after it for those of {task!r}. Call "
                f"`{self._method}(losses, info)` first."
            ) from error
        if all(grad is None for grad in grads):
            raise ValueError(
                f"`{self._option}` must hold parameters that the losses of all tasks depend on, "
                f"but those of {task!r} depend on none of them."
            )
        flat = [
            torch.zeros_like(one).flatten() if grad is None else grad.detach().flatten()
            for one, grad in zip(self.parameters, grads, strict=True)
        ]
        return torch.cat([*flat, total.detach()[None]])

    def end(self, settings: Mapping[str, Any]) -> StepInfo:
        """End an optimizer step on this rank, and return the `StepInfo` of its last batch."""
        info, method = self.info, self._method
        if info is None:
            raise RuntimeError(
                f"`step` came without `{method}`: call `{method}` for each batch of the optimizer "
                "step, on all ranks and in filler steps too."
            )
        if not info.ends_optimizer_step:
            raise RuntimeError(
                f"`step` came where `{method}` was last called for micro-step {info.micro_step} of "
                f"{info.micro_steps} of an optimizer step, numbered from 0: it was not called for "
                f"the micro-steps after it, or `step` came too early. Call `{method}` for each "
                "batch, and `step` where `info.ends_optimizer_step`."
            )
        own = {"parameters": len(self.parameters), "elements": self._elements}
        self._meeting.agree({**self._weights.state_dict(), **own, **settings})
        self.info = None
        return info

    def take(self, info: StepInfo) -> torch.Tensor:
        """Return what was added on all ranks, and begin anew. All ranks call it, after `end`.

        Returns:
            (tasks, elements of the parameters + 1), at least float32: gradient of a task's sum of
            losses, and in the last column that sum. Tasks are in the order of the weights.
        """
        sums, self._sums = self._sums, None
        assert sums is not None
        self._meet(info)
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(sums, group=self._process_group)
        return sums

    def _meet(self, info: StepInfo) -> None:
        """Make sure that all ranks end the same step."""
        where = f"`{self._owner}.step` of epoch {info.epoch}, step {info.step}"
        rows = self._meeting.gather([info.epoch, info.step], where)
        if (rows != rows[0]).any():
            raise StateError(
                f"all ranks must call `{self._owner}.step` after the same optimizer steps, but are "
                f"at (epoch, step) {[*map(tuple, rows.tolist())]} instead, in the order of the "
                "ranks: one has left a call out. Restart all ranks from a checkpoint."
            )

    def begin(self) -> None:
        """Begin anew, also with comparing what must be equal on all ranks."""
        self.clear()
        self._meeting.begin()

    def clear(self) -> None:
        """Drop what was added."""
        self._sums = self.info = None


def _trained(parameters: Any, option: str) -> list[torch.nn.Parameter]:
    """Return those that are trained."""
    remedy = "Pass `module.parameters()`, or a list such as `[module.weight]`."
    check_type(option, parameters, Iterable, remedy)
    if isinstance(parameters, torch.Tensor):
        raise TypeError(f"`{option}` must be several parameters, but is one tensor. {remedy}")
    given = [*parameters]
    for one in given:
        if not isinstance(one, torch.Tensor):
            raise TypeError(f"`{option}` must hold parameters, but holds {describe(one)}. {remedy}")
    trained = [one for one in given if one.requires_grad]
    if not trained:
        raise ValueError(f"`{option}` must hold a parameter that is trained, but holds none.")
    if len({*map(id, trained)}) < len(trained):
        raise ValueError(f"`{option}` must hold each parameter once, but holds one of them twice.")
    if any(is_dtensor(one) for one in trained):
        raise ValueError(
            f"`{option}` must be whole on each rank, but is sharded. Choose parameters that "
            "FSDP leaves alone."
        )
    return trained
