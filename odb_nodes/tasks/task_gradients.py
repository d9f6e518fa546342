"""The gradient of each task over all ranks: weights that follow its norm, or conflicts resolved."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, ClassVar, Literal, get_args

import torch
import torch.distributed as dist
from torch.utils.weak import TensorWeakRef

from odb_nodes._compat.torch import is_dtensor
from odb_nodes._core.checks import (
    check_choice,
    check_count,
    check_integer,
    check_number,
    check_seconds,
    check_type,
    describe,
)
from odb_nodes._core.hashing import hash_ints
from odb_nodes.alignment.exchange import Meeting
from odb_nodes.alignment.peers import PEER_TIMEOUT_S
from odb_nodes.errors import StateError
from odb_nodes.step_info import StepInfo
from odb_nodes.tasks.weights import TaskWeights

Rule = Literal["gradnorm", "ratio"]


class TaskGradients:
    """Base of what needs the gradient of each task: adds up those of the sums of losses."""

    needs_gradients = True
    option: ClassVar[str]  # what the parameters are called among the arguments of a subclass
    method: ClassVar[str]  # what adds a batch is called there
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
        self.weights, self._parameters = weights, _trained(parameters, self.option)
        self._elements = sum(one.numel() for one in self._parameters)
        self._process_group = process_group
        if process_group is not None:
            remedy = "Pass one of `torch.distributed.new_group`, or None for all ranks of the job."
            check_type("process_group", process_group, dist.ProcessGroup, remedy)
        check_seconds("timeout_s", timeout_s)
        remedy = f"Make `{owner}` with the same weights and options on all of them."
        self._owner, self._meeting = owner, Meeting(owner, process_group, timeout_s, remedy=remedy)
        self._begin_step()

    def state_dict(self) -> dict[str, Any]:
        """Return the weights."""
        return self.weights.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set the weights to those of a state; raises what that of `TaskWeights` raises."""
        self.weights.load_state_dict({"weights": state_dict.get("weights")})
        self._begin_step()
        self._meeting.begin()

    def check_model(self, model: torch.nn.Module) -> None:
        """Reject parameters of another model; for `PCGrad`, also those of a part of it."""
        trained = {id(one) for one in model.parameters() if one.requires_grad}
        given = {id(one) for one in self._parameters}
        others = given ^ trained if self.sets_gradients else given - trained
        if others:
            which = "all that is trained of" if self.sets_gradients else "parameters of"
            raise ValueError(
                f"`{self.option}` of `{self._owner}` must be {which} the model, a "
                f"`{type(model).__name__}`, but {len(others & given)} of {len(given)} are not of "
                f"it, and {len(trained - given)} of {len(trained)} are missing. Make it of the "
                "model as the trainer gets it, after adapters were added."
            )

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
            self._sums = first.new_zeros((len(self.weights), size), dtype=dtype)
        self.weights.scale(info)  # checks that the targets of all tasks are counted
        found = self.weights.by_task(losses, info, position_ids=position_ids)
        for row, task in enumerate(self.weights):
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
        self._meeting.agree({**self.weights.state_dict(), **own, **settings})
        self._info = None
        return info

    def _take(self, info: StepInfo) -> torch.Tensor:
        """Return what all ranks added, (tasks, elements + 1): gradients, and sums of losses."""
        sums = self._sums
        assert sums is not None
        self._begin_step()
        where = f"`{self._owner}.step` of epoch {info.epoch}, step {info.step}"
        rows = self._meeting.gather([info.epoch, info.step], where)
        if (rows != rows[0]).any():
            raise StateError(
                f"all ranks must call `{self._owner}.step` after the same optimizer steps, but are "
                f"at (epoch, step) {[*map(tuple, rows.tolist())]} instead, in the order of the "
                "ranks: one has left a call out. Restart all ranks from a checkpoint."
            )
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(sums, group=self._process_group)
        return sums


class GradNorm(TaskGradients):
    """Moves the weights of tasks so that all of them train at like rates.

        weights = TaskWeights({"chat": 1.0, "code": 1.0})
        balance = GradNorm(weights, model.trunk[-1].parameters(), every=10)
        for batch in loader:
            info = pop_step_info(batch)
            losses = ...  # of each token, see `TaskWeights.loss`
            balance.observe(losses, info)
            weights.loss(losses, info).backward()
            if info.ends_optimizer_step:
                optimizer.step()
                optimizer.zero_grad()
                balance.step()

    At every `every`-th optimizer step, the gradient of each task's mean loss, over all ranks and
    micro-steps, with respect to the shared parameters, is measured; its norm, times the task's
    weight, is what the task pulls with. `"gradnorm"` (Chen et al., 2018) moves each weight towards
    the mean pull x (relative inverse rate) ** `alpha`, where a task whose loss has fallen less than
    those of others, since the first step that measured it, has a rate above 1. `"ratio"` multiplies
    each weight by (mean pull / pull) ** `alpha`, whatever the losses. Weights then add up to what
    they did. A task without targets in the step, or without a gradient, keeps its weight; all do
    where a loss or gradient of the step is not finite.

    State: the weights, the loss of each task in the first step that measured it, and the number of
    the step: plain data. There is none within an optimizer step.

    In the first `step`, also after `load_state_dict`, the ranks compare their weights, options and
    states; in each that measures, where they stand.

    Args:
        weights: the weights, which add up to the number of tasks from now on.
        shared: parameters that all tasks use, such as those of the last common layer. Their
            gradients are kept once for each task.
        every: optimizer steps between two changes.
        alpha: how much tasks that train slowly are favored; 0 makes all pulls alike. Not below 0.
            For `"ratio"` below 2; 0 leaves the weights as they are.
        rate: by how much of itself a weight of 1 changes at once, for a gradient of average norm;
            for `"gradnorm"` alone.
        rule: `"gradnorm"` or `"ratio"`.
        least: smallest weight; the largest is that which leaves `least` to each other task.
        process_group: the ranks that train together. Default: all of the job.
        timeout_s: seconds until a rank that does not come to `step` is an error on the others.

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
        self._first: dict[str, float] = {}
        self.norms: dict[str, float] = {}
        """Norm of each task's gradient, times its weight, at the last change; to be logged."""
        weights.set(self._bounded(dict(weights), len(weights)))

    def observe(
        self, losses: torch.Tensor, info: StepInfo, *, position_ids: torch.Tensor | None = None
    ) -> None:
        """Measure the gradients of a batch, before its `backward`, if a change is due.

        Call it for each batch on each rank, in filler steps and where no change is due, too. It
        takes the arguments of `TaskWeights.loss`.

        Raises:
            RuntimeError: a batch of the optimizer step was left out or comes twice, or `step` did
                not follow the optimizer step before; or it comes after `backward`.
            TypeError, ValueError: see `TaskWeights.loss`; or a task does not use the shared
                parameters, or its losses have no graph.
        """
        if self._is_due:
            self._add(losses, info, position_ids)
        else:
            self._follow(info)

    def loss(
        self, losses: torch.Tensor, info: StepInfo, *, position_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Observe a batch, and return `TaskWeights.loss`."""
        self.observe(losses, info, position_ids=position_ids)
        return self.weights.loss(losses, info, position_ids=position_ids)

    def step(self) -> None:
        """End an optimizer step: change the weights, if a change is due. All ranks call it.

        Raises:
            PeerError: a rank was lost, or did not come.
            RuntimeError: this rank has not called `observe` for each batch of an optimizer step.
            StateError: the ranks differ in weights, options or states, or end different steps.
        """
        options = {"alpha": self._alpha, "rate": self._rate, "rule": self._rule}
        options |= {"every": self._every, "least": self._least}
        info = self._end({**options, "steps": self._steps, "first": self._first})
        gradients = self._take(info) if self._is_due else None
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
            self._first.setdefault(task, loss)
        self.norms = {task: self.weights[task] * norm for task, norm in measured.items()}
        norms = {task: norm for task, norm in measured.items() if norm}
        if len(norms) > 1:
            moved = self._ratio(norms) if self._rule == "ratio" else self._moved(norms, losses)
            self.weights.set(self._bounded(moved, sum(self.weights[task] for task in norms)))

    @property
    def _is_due(self) -> bool:
        return (self._steps + 1) % self._every == 0

    def state_dict(self) -> dict[str, Any]:
        """Return weights, first losses and the number of the step.

        Raises:
            StateError: it is called within an optimizer step, from its first `observe` to `step`.
        """
        if self._info is not None:
            raise StateError("`GradNorm` has no state within an optimizer step: call `step` first.")
        return {"steps": self._steps, "first": dict(self._first), **super().state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a state.

        Raises:
            StateError: it is no state of `GradNorm`.
            ValueError: it is of other tasks.
        """
        try:
            check_type("state_dict", state_dict, Mapping)
            steps = check_count("steps", state_dict.get("steps"), 0)
            check_type("first", first := state_dict.get("first", ()), Mapping)
        except (TypeError, ValueError) as error:
            raise StateError(
                f"{error} Load what `GradNorm.state_dict` returned: a run that was saved with "
                "`TaskWeights` or `PCGrad` goes on with these alone."
            ) from error
        super().load_state_dict(state_dict)
        self._steps, self._first = steps, dict(first)

    def _ratio(self, norms: Mapping[str, float]) -> dict[str, float]:
        pulls = {task: self.norms[task] for task in norms}
        mean = sum(pulls.values()) / len(pulls)
        return {
            task: self.weights[task] * (mean / pull) ** self._alpha for task, pull in pulls.items()
        }

    def _moved(self, norms: Mapping[str, float], losses: Mapping[str, float]) -> dict[str, float]:
        """Return weights after a step down the sum of |pull - wanted pull|."""
        left = {task: losses[task] / (self._first[task] or 1.0) for task in norms}
        mean_left = sum(left.values()) / len(left) or 1.0
        mean_pull = sum(self.norms[task] for task in norms) / len(norms)
        mean_norm = sum(norms.values()) / len(norms)
        moved = {}
        for task, norm in norms.items():
            wanted = mean_pull * max(left[task] / mean_left, 0.0) ** self._alpha
            side = (self.norms[task] > wanted) - (self.norms[task] < wanted)
            moved[task] = self.weights[task] - self._rate * side * norm / mean_norm
        return moved

    def _bounded(self, weights: dict[str, float], total: float) -> dict[str, float]:
        """Return weights that are `least` or more, and add up to `total`."""
        whole, least = sum(weights.values()), self._least
        clipped = {task: max(one * total / whole, least) for task, one in weights.items()}
        spare = sum(clipped.values()) - least * len(clipped)
        share = (total - least * len(clipped)) / spare if spare > 0 else 0.0
        return {task: least + (one - least) * share for task, one in clipped.items()}


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
        self._last: list[Callable[[], Any]] = []  # references to the gradients that were set last

    def backward(
        self, losses: torch.Tensor, info: StepInfo, *, position_ids: torch.Tensor | None = None
    ) -> None:
        """Add the gradients of a batch; call it on each rank, in filler steps too.

        It takes the arguments of `TaskWeights.loss`.

        Raises:
            RuntimeError: a batch of the optimizer step was left out or comes twice, or `step` did
                not follow the optimizer step before.
            TypeError, ValueError: see `TaskWeights.loss`; or a task uses none of the parameters, or
                its losses have no graph.
        """
        self._add(losses, info, position_ids)

    def loss(
        self, losses: torch.Tensor, info: StepInfo, *, position_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Add the gradients of a batch, and return a loss whose own backward adds none."""
        self.backward(losses, info, position_ids=position_ids)
        loss = self.weights.loss(losses, info, position_ids=position_ids).detach().requires_grad_()
        loss.register_hook(_check_is_unchanged)
        return loss

    def step(self) -> None:
        """End an optimizer step: set `grad` of all parameters. All ranks call it.

        Raises:
            PeerError: a rank was lost, or did not come.
            RuntimeError: this rank has not called `backward` for each batch of an optimizer step;
                or a parameter has a gradient of another loss.
            StateError: the ranks differ in weights or seed, or end different steps.
        """
        last_set = self._last or [lambda: None] * len(self._parameters)
        for one, last in zip(self._parameters, last_set, strict=True):
            if one.grad is not None and one.grad is not last() and one.grad.any():
                raise RuntimeError(
                    "a parameter has a gradient before `PCGrad.step`, which sets the gradients of "
                    "the losses it was given, and only these. Add the other loss, such as a "
                    "regularizer, to the losses of the tasks; or call `zero_grad` before it."
                )
        info = self._end({"seed": self._seed})
        sums = self._take(info)
        factors = sums.new_tensor([*self.weights.values()])
        scale = self.weights.scale(info) / info.world_size  # 1 / sum of weight x targets
        own = sums[:, :-1] * factors[:, None] * scale
        rng = random.Random(hash_ints(self._seed, info.epoch, info.step))
        free = own.clone()
        for row, gradient in enumerate(free):
            others = [other for other in range(len(own)) if other != row]
            rng.shuffle(others)
            for other in others:
                # Its direction alone: squares of a small gradient are 0 in float32.
                largest = own[other].abs().max().clamp(min=torch.finfo(own.dtype).tiny)
                direction = own[other] / largest
                if (conflict := gradient @ direction) < 0:
                    gradient -= conflict / direction.square().sum() * direction
        sizes, self._last = [one.numel() for one in self._parameters], []
        for one, grad in zip(self._parameters, free.sum(0).split(sizes), strict=True):
            one.grad = new = grad.view_as(one).to(one.dtype, copy=True)
            self._last.append(TensorWeakRef(new))


def _check_is_unchanged(gradient: torch.Tensor) -> None:
    if abs(float(gradient) - 1) > 1e-3:
        raise RuntimeError(
            "the loss must be returned as `PCGrad` gave it, but was multiplied by "
            f"{float(gradient):g}, which would change no gradient. Set the weights of the tasks."
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


# --- for trainers ---------------------------------------------------------------------------------

AnyWeights = TaskWeights | GradNorm | PCGrad


def check_task_weights(value: object) -> None:
    """Raise a `TypeError` unless `value` weighs the losses of tasks, or is None."""
    remedy = 'Pass `TaskWeights({"chat": 1.0, "code": 0.5})`, or a `GradNorm` or `PCGrad` of some.'
    check_type("task_weights", value, AnyWeights | None, remedy)


def task_names(tasks: AnyWeights, given: Collection[str] | None) -> list[str]:
    """Return the names that a loader needs; raise a `ValueError` if it was given others."""
    names = [*tasks.weights]
    if given and {*given} != {*names}:
        raise ValueError(
            f"`tasks` must be those of `task_weights`, {names}, but are {[*given]}. Leave them out."
        )
    return names
