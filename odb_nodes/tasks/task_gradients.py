"""The gradient of each task, over all ranks and micro-steps of an optimizer step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from odb_nodes._compat.torch import is_dtensor
from odb_nodes._core.checks import check_seconds, check_type, describe
from odb_nodes.alignment.exchange import Meeting
from odb_nodes.errors import StateError
from odb_nodes.step_info import StepInfo
from odb_nodes.tasks.weights import TaskWeights


class TaskGradients:
    """Base of what needs the gradient of each task: adds up those of the sums of losses."""

    option: ClassVar[str]
    """What the parameters are called among the arguments of a subclass."""
    method: ClassVar[str]
    """What adds a batch is called in a subclass."""

    def __init__(
        self,
        weights: TaskWeights,
        parameters: Iterable[torch.nn.Parameter],
        process_group: dist.ProcessGroup | None,
        timeout_s: float,
    ) -> None:
        check_type("weights", weights, TaskWeights, "Pass `TaskWeights(...)`.")
        owner = type(self).__name__
        self._weights, self._parameters = weights, _trained(parameters, self.option)
        self._elements = sum(one.numel() for one in self._parameters)
        self._process_group = process_group
        if process_group is not None:
            remedy = "Pass one of `torch.distributed.new_group`, or None for all ranks of the job."
            check_type("process_group", process_group, dist.ProcessGroup, remedy)
        check_seconds("timeout_s", timeout_s)
        remedy = f"Make `{owner}` with the same weights and options on all of them."
        self._owner, self._meeting = owner, Meeting(owner, process_group, timeout_s, remedy=remedy)
        self._begin_step()

    def _begin_step(self) -> None:
        self._info: StepInfo | None = None  # of the last batch
        self._sums: torch.Tensor | None = None

    def _follow(self, info: StepInfo) -> None:
        """Note the next batch of the optimizer step."""
        check_type("info", info, StepInfo, "Pass `pop_step_info(batch)`.")
        last = self._info
        was_broken_off = (
            last is not None
            and not last.ends_optimizer_step
            and info.micro_step == 0
            and (info.epoch, info.step) != (last.epoch, last.step)
        )
        if was_broken_off:
            self._begin_step()
        elif info.micro_step != (0 if last is None else last.micro_step + 1):
            raise RuntimeError(
                f"`{self.method}` must be called once for each batch of an optimizer step, and "
                f"`step` after its last, but it came for {_place(info)} after {_place(last)}."
            )
        self._info = info

    def _add(self, losses: torch.Tensor, info: StepInfo, position_ids: torch.Tensor | None) -> None:
        """Add the gradients of a batch; its graph is kept."""
        self._follow(info)
        if self._sums is None:
            size, first = self._elements + 1, self._parameters[0]
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
        grads = torch.autograd.grad(total, self._parameters, retain_graph=True, allow_unused=True)
        if all(grad is None for grad in grads):
            raise ValueError(
                f"`{self.option}` must hold parameters that the losses of all tasks depend on, but "
                f"those of {task!r} depend on none of them."
            )
        flat = [
            torch.zeros_like(one).flatten() if grad is None else grad.detach().flatten()
            for one, grad in zip(self._parameters, grads, strict=True)
        ]
        return torch.cat([*flat, total.detach()[None]])

    def _end(self, settings: Mapping[str, Any]) -> StepInfo:
        """End an optimizer step on this rank, and return the `StepInfo` of its last batch."""
        info = self._info
        if info is None or not info.ends_optimizer_step:
            raise RuntimeError(
                f"`step` must come after `{self.method}` of each batch of an optimizer step, on "
                f"all ranks and in filler steps too, but came after {_place(info)}."
            )
        own = {"parameters": len(self._parameters), "elements": self._elements}
        self._meeting.agree({**self._weights.state_dict(), **own, **settings})
        self._info = None
        return info

    def _take(self, info: StepInfo) -> torch.Tensor:
        """Return what was added on all ranks, and begin anew. All ranks call it, after `_end`.

        (tasks, elements of the parameters + 1), at least float32: gradient of a task's sum of
        losses, and in the last column that sum. Tasks are in the order of the weights.
        """
        sums = self._sums
        assert sums is not None
        self._begin_step()
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


def _place(info: StepInfo | None) -> str:
    if info is None:
        return "none"
    place = f"micro-step {info.micro_step} of 0..{info.micro_steps - 1}"
    return f"{place} (step {info.step} of epoch {info.epoch})"


def _trained(parameters: Any, option: str) -> list[torch.nn.Parameter]:
    several = isinstance(parameters, Iterable) and not isinstance(parameters, torch.Tensor)
    given: list[Any] = [*parameters] if several else [None]
    if not all(isinstance(one, torch.Tensor) for one in given):
        raise TypeError(
            f"`{option}` must be parameters, but is {describe(parameters)} instead. Pass "
            "`module.parameters()`, or a list such as `[module.weight]`."
        )
    trained = [one for one in given if one.requires_grad]
    if not trained or len({*map(id, trained)}) < len(trained):
        raise ValueError(
            f"`{option}` must hold a parameter that is trained, and each once, but has "
            f"{len(trained)} that are trained, of which {len({*map(id, trained)})} differ."
        )
    if any(is_dtensor(one) for one in trained):
        raise ValueError(
            f"`{option}` must be whole on each rank, but is sharded. Choose parameters that "
            "FSDP leaves alone."
        )
    return trained
