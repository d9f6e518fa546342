"""GradNorm: moves the weights of tasks so that all train at similar rates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist

from odb_nodes._support.checks import check_choice, check_count, check_number, check_type
from odb_nodes.core.alignment.peers import PEER_TIMEOUT_S
from odb_nodes.core.step_info import StepInfo
from odb_nodes.errors import StateError
from odb_nodes.training.tasks.task_gradients import TaskGradients
from odb_nodes.training.tasks.weights import TaskWeights

Rule = Literal["gradnorm", "ratio"]


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
    options and states. In each step that measures gradients, the ranks compare epoch and step.

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
            StateError: the call is within an optimizer step: after `observe`, before `step`.
        """
        if self._info is not None:
            raise StateError("`GradNorm` has no state within an optimizer step: call `step` first.")
        return {"steps": self._steps, "first": dict(self._first_losses), **super().state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a state.

        Raises:
            StateError: `state_dict` is not a state of `GradNorm`.
            ValueError: the state has other tasks.
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
        self._steps = steps
        self._first_losses = dict(first)

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
        total_before = sum(weights.values())
        least = self._least
        clipped = {
            task: max(weight * total / total_before, least) for task, weight in weights.items()
        }
        above_least = sum(clipped.values()) - least * len(clipped)
        share = (total - least * len(clipped)) / above_least if above_least > 0 else 0.0
        return {task: least + (weight - least) * share for task, weight in clipped.items()}
