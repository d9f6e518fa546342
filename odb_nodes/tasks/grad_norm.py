"""Weights of tasks that follow the norms of their gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist

from odb_nodes._core.checks import check_choice, check_count, check_type
from odb_nodes.alignment.peers import PEER_TIMEOUT_S
from odb_nodes.errors import StateError
from odb_nodes.step_info import StepInfo
from odb_nodes.tasks.task_gradients import TaskGradients
from odb_nodes.tasks.weights import TaskWeights

Rule = Literal["gradnorm", "ratio"]


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
        most_alpha = 2.0 if rule == "ratio" else float("inf")
        _check_within("alpha", alpha, 0.0, most_alpha)
        _check_within("rate", rate, 0.0, 1.0)
        if not 0 < least < 1:
            raise ValueError(f"`least` must be above 0 and below 1, but is {least!r} instead.")
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

        Call it for each batch on each rank, in filler steps and where no change is due, too.

        Args:
            losses: of each token, see `TaskWeights.loss`.
            info: the `StepInfo` of the batch.
            position_ids: of a packed batch.

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

    def step(self) -> None:
        """End an optimizer step: change the weights, if a change is due. All ranks call it.

        Raises:
            PeerError: a rank was lost, or did not come.
            RuntimeError: this rank has not called `observe` for each batch of an optimizer step.
            StateError: the ranks differ in weights, options or states, or end different steps.
        """
        info = self._end(self._settings())
        gradients = self._take(info) if self._is_due else None
        self._steps += 1
        if gradients is None:
            return
        targets_of = info.task_targets
        rows = {task: row for row, task in enumerate(self._weights) if targets_of.get(task)}
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
        self.norms = {task: self._weights[task] * norm for task, norm in measured.items()}
        norms = {task: norm for task, norm in measured.items() if norm}
        if len(norms) > 1:
            moved = self._ratio(norms) if self._rule == "ratio" else self._moved(norms, losses)
            self._weights.set(self._bounded(moved, sum(self._weights[task] for task in norms)))

    @property
    def _is_due(self) -> bool:
        return (self._steps + 1) % self._every == 0

    def _settings(self) -> dict[str, Any]:
        options = {"alpha": self._alpha, "rate": self._rate, "rule": self._rule}
        options |= {"every": self._every, "least": self._least}
        return options | {"steps": self._steps, "first": self._first}

    def state_dict(self) -> dict[str, Any]:
        """Return weights, first losses and the number of the step.

        Raises:
            StateError: it is called within an optimizer step, from its first `observe` to `step`.
        """
        if self._info is not None:
            raise StateError("`GradNorm` has no state within an optimizer step: call `step` first.")
        return {"steps": self._steps, "first": dict(self._first), **self._weights.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a state.

        Raises:
            StateError: it is no state of `GradNorm`.
            ValueError: it is of other tasks.
        """
        try:
            steps, first = state_dict["steps"], state_dict["first"]
            check_count("steps", steps, 0)
            check_type("first", first, Mapping)
        except (KeyError, TypeError, ValueError) as error:
            reason = f"the state has no {error}." if isinstance(error, KeyError) else f"{error}"
            raise StateError(f"{reason} Load what `GradNorm.state_dict` returned.") from error
        self._weights.load_state_dict(state_dict)
        self._steps, self._first = int(steps), dict(first)
        self._begin_step()
        self._meeting.begin()

    def _ratio(self, norms: Mapping[str, float]) -> dict[str, float]:
        pulls = {task: self.norms[task] for task in norms}
        mean = sum(pulls.values()) / len(pulls)
        return {
            task: self._weights[task] * (mean / pull) ** self._alpha for task, pull in pulls.items()
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
            moved[task] = self._weights[task] - self._rate * side * norm / mean_norm
        return moved

    def _bounded(self, weights: dict[str, float], total: float) -> dict[str, float]:
        """Return weights that are `least` or more, and add up to `total`."""
        whole, least = sum(weights.values()), self._least
        clipped = {task: max(one * total / whole, least) for task, one in weights.items()}
        spare = sum(clipped.values()) - least * len(clipped)
        share = (total - least * len(clipped)) / spare if spare > 0 else 0.0
        return {task: least + (one - least) * share for task, one in clipped.items()}


def _check_within(name: str, value: Any, low: float, high: float) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not low <= value < high:
        raise ValueError(f"`{name}` must be at least {low:g} and below {high:g}, but is {value!r}.")
