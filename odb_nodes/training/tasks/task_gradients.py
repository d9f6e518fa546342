"""Methods on the gradient of each task over all ranks: GradNorm and PCGrad."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, ClassVar, Literal, get_args

import torch
import torch.distributed as dist
from torch.utils.weak import TensorWeakRef

from odb_nodes._compat.torch import is_dtensor
from odb_nodes._support.checks import (
    check_choice,
    check_count,
    check_integer,
    check_number,
    check_seconds,
    check_type,
    describe,
)
from odb_nodes._support.hashing import hash_ints
from odb_nodes.core.alignment.exchange import Meeting
from odb_nodes.core.alignment.peers import PEER_TIMEOUT_S
from odb_nodes.core.step_info import StepInfo
from odb_nodes.errors import StateError
from odb_nodes.training.tasks.weights import TaskWeights

Rule = Literal["gradnorm", "ratio"]


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
        self._owner, self._meeting = owner, Meeting(owner, process_group, timeout_s, remedy=remedy)
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
        self._info: StepInfo | None = None  # of the last batch
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
                f"`step` after its last, but it came for {_position(info)} after {_position(last)}."
            )
        self._info = info

    def _add(self, losses: torch.Tensor, info: StepInfo, position_ids: torch.Tensor | None) -> None:
        """Add the gradients of a batch; its autograd graph stays usable."""
        self._check_next(info)
        if self._sums is None:
            size, first = self._elements + 1, self._parameters[0]
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
                f"all ranks and in filler steps too, but came after {_position(info)}."
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


class GradNorm(TaskGradients):
    """Moves the weights of tasks so that all tasks train at similar rates.

        weights = TaskWeights({"chat": 1.0, "code": 1.0})
        balance = GradNorm(weights, model.trunk[-1].parameters(), every=10)
        for batch in loader:
            info = pop_step_info(batch)
            losses = ...  # loss of each token, see `TaskWeights.loss`
            balance.observe(losses, info)
            weights.loss(losses, info).backward()
            if info.ends_optimizer_step:
                optimizer.step()
                optimizer.zero_grad()
                balance.step()

    Every `every` optimizer steps it measures the gradient of each task's mean loss with respect to
    the shared parameters, over all ranks and micro-steps. The *pull* of a task is the norm of its
    gradient times its weight. `"gradnorm"` (Chen et al., 2018) moves the weights so that each pull
    approaches the mean pull x (relative inverse rate) ** `alpha`: the rate is above 1 for a task
    whose loss has fallen less than the losses of other tasks since its first measurement.
    `"ratio"` multiplies each weight by (mean pull / pull) ** `alpha`, without regard to the losses.
    Then the weights are scaled to their old sum. A task without targets in the step, or without a
    gradient, keeps its weight; if a loss or gradient is not finite, all tasks do.

    State: the weights, the first measured loss of each task, and the number of the step: plain
    data. There is no state within an optimizer step.

    In the first `step`, and the first after `load_state_dict`, the ranks compare their weights,
    options and states; in each step that measures, their epoch and step.

    Args:
        weights: the weights. They are scaled to add up to the number of tasks.
        shared: parameters that all tasks use, for example of the last common layer. Their
            gradients take memory once for each task.
        every: optimizer steps between two changes.
        alpha: how much to favor tasks that train slowly, at least 0. For `"gradnorm"`, 0 makes all
            pulls equal. For `"ratio"`, below 2, and 0 keeps the weights.
        rate: change of a weight of 1 in one step, for a gradient of average norm; only for
            `"gradnorm"`.
        rule: `"gradnorm"` or `"ratio"`.
        least: smallest weight of a task.
        process_group: the ranks that train together. Default: all ranks of the job.
        timeout_s: seconds to wait in `step` for another rank before it is an error.

    Raises:
        TypeError, ValueError: an argument is not valid, or parameters are sharded.
    """

    option, method = "shared", "observe"

    def __init__(
        self,
        weights: TaskWeights,
        shared: Iterable[torch.nn.Parameter],
        *,
        every: int = 1,
        alpha: float = 1.5,
        rate: float = 0.01,
        rule: Rule = "gradnorm",
        least: float = 0.05,
        process_group: dist.ProcessGroup | None = None,
        timeout_s: float = PEER_TIMEOUT_S,
    ) -> None:
        check_choice("rule", rule, get_args(Rule))
        super().__init__(weights, shared, process_group, timeout_s)
        self._every = check_count("every", every)
        check_number("alpha", alpha, "[0, 2)" if rule == "ratio" else "[0, inf)")
        check_number("rate", rate, "[0, 1)")
        check_number("least", least, "(0, 1)")
        self._alpha, self._rate, self._rule, self._least = alpha, rate, rule, least
        self._steps = 0
        self._first_losses: dict[str, float] = {}  # task -> first measured loss
        self.norms: dict[str, float] = {}
        """Norm of each task's gradient, times its weight, at the last change; for logs."""
        weights.set(self._bounded(dict(weights), len(weights)))

    def observe(
        self, losses: torch.Tensor, info: StepInfo, *, position_ids: torch.Tensor | None = None
    ) -> None:
        """Measure the gradients of a batch, if a change is due. Call it before `backward`.

        Call it for each batch on each rank, in filler steps too. The arguments are as for
        `TaskWeights.loss`.

        Raises:
            RuntimeError: a batch of the optimizer step is missing or comes twice; `step` was not
                called after the previous optimizer step; or `backward` was called before.
            TypeError, ValueError: see `TaskWeights.loss`; or a task does not use the shared
                parameters, or its losses have no graph.
        """
        if self._is_due:
            self._add(losses, info, position_ids)
        else:
            self._check_next(info)

    def loss(
        self, losses: torch.Tensor, info: StepInfo, *, position_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Observe a batch, and return `TaskWeights.loss`."""
        self.observe(losses, info, position_ids=position_ids)
        return self.weights.loss(losses, info, position_ids=position_ids)

    def step(self) -> None:
        """End an optimizer step: change the weights, if a change is due. All ranks call it.

        Raises:
            PeerError: a rank was lost, or did not answer.
            RuntimeError: this rank has not called `observe` for each batch of an optimizer step.
            StateError: the ranks differ in weights, options or states, or end different steps.
        """
        options = {"alpha": self._alpha, "rate": self._rate, "rule": self._rule}
        options |= {"every": self._every, "least": self._least}
        info = self._end_step({**options, "steps": self._steps, "first": self._first_losses})
        gradients = self._sum_over_ranks(info) if self._is_due else None
        self._steps += 1
        if gradients is None:
            return
        targets_of = info.task_targets
        rows = {task: row for row, task in enumerate(self.weights) if targets_of.get(task)}
        if not rows:
            return
        targets = gradients.new_tensor([targets_of[task] for task in rows])
        means = gradients[[*rows.values()]] / targets[:, None]
        if not means.isfinite().all():
            return
        measured = dict(zip(rows, means[:, :-1].norm(dim=1).tolist(), strict=True))
        losses = dict(zip(rows, means[:, -1].tolist(), strict=True))
        for task, loss in losses.items():
            self._first_losses.setdefault(task, loss)
        self.norms = {task: self.weights[task] * norm for task, norm in measured.items()}
        norms = {task: norm for task, norm in measured.items() if norm}
        if len(norms) > 1:
            if self._rule == "ratio":
                moved = self._ratio_weights(norms)
            else:
                moved = self._gradnorm_weights(norms, losses)
            self.weights.set(self._bounded(moved, sum(self.weights[task] for task in norms)))

    @property
    def _is_due(self) -> bool:
        return (self._steps + 1) % self._every == 0

    def state_dict(self) -> dict[str, Any]:
        """Return weights, first losses and the number of the step.

        Raises:
            StateError: it is called within an optimizer step: after `observe`, before `step`.
        """
        if self._info is not None:
            raise StateError("`GradNorm` has no state within an optimizer step: call `step` first.")
        return {"steps": self._steps, "first": dict(self._first_losses), **super().state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a state.

        Raises:
            StateError: it is not a state of `GradNorm`.
            ValueError: it has other tasks.
        """
        try:
            check_type("state_dict", state_dict, Mapping)
            steps = check_count("steps", state_dict.get("steps"), 0)
            first = state_dict.get("first", ())
            check_type("first", first, Mapping)
        except (TypeError, ValueError) as error:
            raise StateError(
                f"{error} Load the result of `GradNorm.state_dict`: a run that was saved with "
                "`TaskWeights` or `PCGrad` can only continue with the same class."
            ) from error
        super().load_state_dict(state_dict)
        self._steps, self._first_losses = steps, dict(first)

    def _ratio_weights(self, norms: Mapping[str, float]) -> dict[str, float]:
        pulls = {task: self.norms[task] for task in norms}
        mean = sum(pulls.values()) / len(pulls)
        return {
            task: self.weights[task] * (mean / pull) ** self._alpha for task, pull in pulls.items()
        }

    def _gradnorm_weights(
        self, norms: Mapping[str, float], losses: Mapping[str, float]
    ) -> dict[str, float]:
        """Return weights after a descent step on the sum of |pull - wanted pull|."""
        inverse_rates = {task: losses[task] / (self._first_losses[task] or 1.0) for task in norms}
        mean_rate = sum(inverse_rates.values()) / len(norms) or 1.0
        mean_pull = sum(self.norms[task] for task in norms) / len(norms)
        mean_norm = sum(norms.values()) / len(norms)
        moved = {}
        for task, norm in norms.items():
            wanted = mean_pull * max(inverse_rates[task] / mean_rate, 0.0) ** self._alpha
            sign = (self.norms[task] > wanted) - (self.norms[task] < wanted)
            moved[task] = self.weights[task] - self._rate * sign * norm / mean_norm
        return moved

    def _bounded(self, weights: dict[str, float], total: float) -> dict[str, float]:
        """Return weights of at least `least` that add up to `total`."""
        total_before, least = sum(weights.values()), self._least
        clipped = {
            task: max(weight * total / total_before, least) for task, weight in weights.items()
        }
        above_least = sum(clipped.values()) - least * len(clipped)
        share = (total - least * len(clipped)) / above_least if above_least > 0 else 0.0
        return {task: least + (weight - least) * share for task, weight in clipped.items()}


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


def _position(info: StepInfo | None) -> str:
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


# --- for trainers ---------------------------------------------------------------------------------

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
