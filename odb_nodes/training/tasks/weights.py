"""The loss of a step as a weighted mean over tasks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from numbers import Real
from typing import Any

import torch

from odb_nodes._support.checks import check_named, check_type, describe
from odb_nodes.core.step_info import StepInfo
from odb_nodes.errors import StateError


class TaskWeights(Mapping[str, float]):
    """Weights the losses of tasks exactly, over all ranks and micro-steps.

        weights = TaskWeights({"chat": 1.0, "code": 0.5})
        loader = ODBDataLoader(dataset, token_budget=8192, tasks=[*weights])
        for batch in loader:
            info = pop_step_info(batch)
            losses = cross_entropy(logits.transpose(1, 2), labels, reduction="none")  # (B, T)
            weights.loss(losses, info).backward()

    The loss of an optimizer step is the sum of weight x loss over its supervised tokens, divided by
    the sum of weight x targets. A factor common to all weights changes nothing. With equal weights
    it is the mean over all supervised tokens. Do not multiply it by `StepInfo.loss_scale`.

    The weights may change between two optimizer steps, in the same way on all ranks; see
    `GradNorm`. The ranks do not compare their weights: different weights give a wrong gradient
    without an error.

    Args:
        weights: name of the task -> its weight, above 0. Iteration is in the order of the names.

    Raises:
        TypeError, ValueError: a weight is not a number above 0, or a name is not a string.
    """

    needs_gradients = False

    def __init__(self, weights: Mapping[str, float]) -> None:
        check_type("weights", weights, Mapping, 'Pass weights such as {"chat": 1.0, "code": 0.5}.')
        if not weights:
            raise ValueError("`weights` must name a task, but are empty.")
        check_named("weights", weights)
        # Sorted: the order of a dict made from a set differs between ranks.
        self._weights = {name: _weight(name, weights[name]) for name in sorted(weights)}

    def __getitem__(self, task: str) -> float:
        return self._weights[task]

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._weights})"

    @property
    def weights(self) -> TaskWeights:
        """The weights themselves, as in `GradNorm.weights` and `PCGrad.weights`."""
        return self

    def check_model(self, model: torch.nn.Module) -> None:
        """Do nothing: weights without gradients fit any model."""

    def step(self) -> None:
        """Do nothing: these weights do not depend on gradients."""

    def set(self, weights: Mapping[str, float]) -> None:
        """Change weights, between two optimizer steps and in the same way on all ranks.

        Raises:
            TypeError, ValueError: a weight is not above 0, or a task is new.
        """
        check_type("weights", weights, Mapping, 'Pass weights such as {"chat": 2.0}.')
        if unknown := [name for name in weights if name not in self._weights]:
            raise ValueError(f"{unknown} must be among the tasks, which are {[*self]}.")
        self._weights |= {name: _weight(name, weight) for name, weight in weights.items()}

    def loss(
        self, losses: torch.Tensor, info: StepInfo, *, position_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return this rank's loss of a batch. Call `backward` on it, without further scaling.

        Its mean over ranks, summed over the micro-steps, has the gradient of the weighted mean.

        Args:
            losses: losses of the tokens, (B, T), 0 for unsupervised tokens, as with
                `reduction="none"`; or sums for each sample, (B,). Include rows of padding.
            info: the `StepInfo` of the batch.
            position_ids: (1, T), for a packed batch. `losses` may lack the first or the last
                token, (1, T - 1), as after a shift by hand.

        Raises:
            TypeError: an argument has the wrong type.
            ValueError: a shape is wrong, or the loader does not count the targets of the tasks.
        """
        sums = self.by_task(losses, info, position_ids=position_ids)
        if info.is_filler:
            return (losses * 0.0).sum()
        weighted = [self._weights[task] * total for task, (total, _) in sums.items()]
        return torch.stack(weighted).sum() * self.scale(info)

    def scale(self, info: StepInfo) -> float:
        """Return the factor of this rank's sum of weight x loss; 0 without targets.

        Raises:
            ValueError: the loader does not count the targets of the tasks, or the step has fewer
                targets of a task than this rank.
        """
        self._check_tasks(info)
        counted = sum(info.task_targets.values())
        if counted != info.optimizer_targets:
            raise ValueError(
                f"the tasks {[*info.task_targets]} have {counted} of the {info.optimizer_targets} "
                "supervised tokens of the step. Pass `tasks=[*weights]` to the loader."
            )
        for task, targets in info.local_task_targets.items():
            if targets > info.task_targets.get(task, 0):
                raise ValueError(
                    f"this rank has {targets} supervised tokens of the task {task!r} in step "
                    f"{info.step}, but all ranks together have {info.task_targets.get(task, 0)}. A "
                    "sample must have the same task and targets each time that it is observed: "
                    "resume with the `observe` function of the saved run."
                )
        total = sum(self[task] * targets for task, targets in info.task_targets.items() if targets)
        return info.world_size / total if total else 0.0

    def by_task(
        self, losses: torch.Tensor, info: StepInfo, *, position_ids: torch.Tensor | None = None
    ) -> dict[str, tuple[torch.Tensor, int]]:
        """Return task -> (sum of its losses, number of its supervised tokens) of a batch.

        Arguments and errors are as for `loss`. Pass the result to
        `Monitor.step(loss_by_source=...)`. It is empty for a filler step; the sums keep the graph.
        """
        check_type("losses", losses, torch.Tensor)
        check_type("info", info, StepInfo, "Pass `pop_step_info(batch)`.")
        check_type("position_ids", position_ids, torch.Tensor | None)
        if info.is_filler:
            return {}
        self._check_tasks(info)
        sums = _sums_of_samples(losses, len(info.row_tasks), position_ids)
        tasks = [*dict.fromkeys(info.row_tasks)]
        # `index_add` would add in varying order on a GPU, with varying rounding.
        has_task = torch.tensor([[name == task for name in info.row_tasks] for task in tasks])
        totals = torch.where(has_task.to(sums.device), sums, 0).sum(1).unbind()
        targets = info.local_task_targets
        return {task: (total, targets[task]) for task, total in zip(tasks, totals, strict=True)}

    def state_dict(self) -> dict[str, Any]:
        """Return the weights, as plain data."""
        return {"weights": dict(self._weights)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set the weights from a state.

        Raises:
            StateError: `state_dict` is not a state of `TaskWeights`.
            ValueError: the state has other tasks.
        """
        weights = state_dict.get("weights")
        if not isinstance(weights, Mapping):
            raise StateError(
                "the state has no `weights`: load the `state_dict()` of an object of this class."
            )
        if "first" in state_dict:
            raise StateError(
                "the state is of a `GradNorm`, whose weights move: continue with a `GradNorm`, or "
                "set the weights of the state, `state_dict['weights']`."
            )
        if {*weights} != {*self}:
            raise ValueError(
                f"the state has weights of the tasks {[*weights]}, but this object of {[*self]}."
            )
        self.set(weights)

    def _check_tasks(self, info: StepInfo) -> None:
        unknown = {*info.row_tasks, *info.task_targets} - {*self}
        if unknown:
            raise ValueError(
                f"the tasks {sorted(unknown)} have no weight: `TaskWeights` has only {[*self]}."
            )


def _weight(name: str, weight: Any) -> float:
    is_number = isinstance(weight, Real) and not isinstance(weight, bool)
    try:
        value = float(weight) if is_number else math.nan
    except OverflowError:
        value = math.inf
    if not 0 < value < math.inf:
        raise ValueError(
            f"the weight of task {name!r} must be a number above 0, but is {describe(weight)} "
            "instead. To leave a task out, leave out its data."
        )
    return value


def _sums_of_samples(
    losses: torch.Tensor, samples: int, position_ids: torch.Tensor | None
) -> torch.Tensor:
    """Return the sum of the losses of each sample, (samples,)."""
    if position_ids is None:
        has_all_rows = losses.ndim in (1, 2) and len(losses) >= samples
        # Under a budget with `shapes`, rows of padding follow the samples. Their losses are 0.
        if not has_all_rows or (len(losses) > samples and losses[samples:].any()):
            raise ValueError(
                f"`losses` must be of {samples} samples, ({samples}, T) or ({samples},), and 0 in "
                f"rows of padding behind them, but have the shape {tuple(losses.shape)}. For a "
                "packed batch, pass its `position_ids`."
            )
        losses = losses[:samples]
        return losses.sum(1) if losses.ndim == 2 else losses
    width = position_ids.shape[-1]
    # (4, 1, T) has the positions of the text in row 0.
    position_ids = position_ids.reshape(-1, width)[: len(position_ids)]
    if position_ids.shape != (1, width) or losses.shape not in ((1, width), (1, width - 1)):
        raise ValueError(
            "`position_ids` and `losses` must be (1, T), the latter also (1, T - 1), but have the "
            f"shapes {tuple(position_ids.shape)} and {tuple(losses.shape)}."
        )
    # After a shift, the loss of a sample's first token is in the sample before. It is 0: a first
    # token is not supervised.
    row = losses[0]
    numbers = (position_ids[0] == 0).cumsum(0) - 1  # number of each token's sample
    numbers = numbers[: len(row)].clamp(max=samples - 1)
    return row.new_zeros(samples).index_add(0, numbers, row)
