"""Optimizer steps of a `Trainer` that are computed in parts if memory runs out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from odb_nodes._compat.torch import uncompiled
from odb_nodes._compat.torch_distributed import RefusingCollectives
from odb_nodes.core.loader.dataloader import ODBDataLoader
from odb_nodes.core.step_info import StepInfo
from odb_nodes.integrations.huggingface.auto_budget import meter_of
from odb_nodes.integrations.huggingface.loss import LossWeigher, MicroStep
from odb_nodes.training.memory.gradients import (
    check_no_gradients,
    has_collectives,
    overrides_backward,
    scale_gradients,
)
from odb_nodes.training.memory.guard import OomGuard
from odb_nodes.training.memory.guarded_step import ComputePart, GuardedStep, StepBatch
from odb_nodes.training.memory.step_parts import StepPart

GATHERS = (
    "`compute_loss` of `{}` gathers from other ranks, which compute another number of parts if "
    "memory runs out. Leave out `on_oom`; or give `guard_above=1`, so that no step within the "
    "budget is computed in parts."
)

Compute = Callable[[dict[str, Any], MicroStep], torch.Tensor]
"""(batch, its weight) -> its loss; adds its gradients."""


class RunGuard:
    """Computes the optimizer steps of a run, in parts if memory runs out."""

    def __init__(
        self,
        trainer: Any,
        loader: ODBDataLoader,
        losses: LossWeigher,
        model_batch: Callable[[dict[str, Any]], dict[str, Any]],
    ) -> None:
        odb = trainer.odb
        self._trainer, self._losses, self._model_batch = trainer, losses, model_batch
        self.guard = OomGuard(
            loader,
            odb.on_oom,
            guard_above=odb.guard_above,
            shrink=odb.shrink,
            meter=meter_of(trainer.args, odb),
        )
        self._context = self.guard.context
        self._context.collator.keep_samples()
        self._is_connected = self._has_guarded = False
        self.batches: list[dict[str, Any]] = []  # the step's; in the end without skipped samples
        self._step = GuardedStep(self._context, [])
        self._returned: list[torch.Tensor] = []  # the loss of each batch, as `compute` returned it
        self._is_alone = False

    @property
    def infos(self) -> list[StepInfo]:
        """The `StepInfo` of each batch; in the end without skipped samples."""
        return self._step.infos

    def begin_step(self, batches: list[dict[str, Any]], infos: Sequence[StepInfo]) -> None:
        """Begin an optimizer step of these batches."""
        if not self._is_connected:
            self._context.connect("ODBConfig")
            self._is_connected = True
        self.batches = [*batches]
        self._returned = []
        take = self._context.collator.take_samples
        pairs = zip(batches, infos, strict=True)
        step_batches = [StepBatch(batch, take(info), info) for batch, info in pairs]
        self._step = GuardedStep(self._context, step_batches)

    def compute(
        self, model: nn.Module, inputs: dict[str, Any], weight: MicroStep, compute: Compute
    ) -> torch.Tensor:
        """Add the gradients of the next batch of the step, and return its loss."""
        number = len(self._returned)
        step = self._step
        model = uncompiled(model)
        if inputs is not self.batches[number]:
            raise ValueError(
                "`training_step` must get the batches that `get_batch_samples` returned, but "
                f"`{type(self._trainer).__name__}` passes another batch, which parts of the batch "
                "would not match. Change batches in `_prepare_inputs`, or leave out `on_oom`."
            )

        def compute_part(part: StepPart, batch: Any) -> torch.Tensor:
            if batch is not None:
                return compute(batch, weight)
            batch = self._collate(part)
            return compute(batch, self._losses.weigh_part(batch, part.info))

        if number == 0:
            self._is_alone = self._is_computed_alone(model)
            if self._is_alone:
                check_no_gradients(model)
        if self._is_alone:
            loss = self._compute_alone(number, model, compute_part)
        else:
            (part,) = step.parts.of_batch(number)
            with step.computing_together(part):
                loss = compute_part(part, step.take_batch(part))
        self._returned.append(loss)
        if len(self._returned) == len(self.batches) and not self._is_alone:
            step.count_step()
        return loss

    def _is_computed_alone(self, model: nn.Module) -> bool:
        """Return whether this rank computes the step alone, so that it can recompute it."""
        if overrides_backward(model) or has_collectives(model):
            return False
        if self._context.channel is None:
            return True
        return isinstance(model, DistributedDataParallel) and self._context.is_guarded(self.infos)

    def _compute_alone(
        self, number: int, model: nn.Module, compute_part: ComputePart
    ) -> torch.Tensor:
        step: GuardedStep = self._step
        checks: AbstractContextManager[Any] = nullcontext()
        if self._context.channel is not None and not self._has_guarded:
            # Once: the check intercepts each operation of torch.
            checks = RefusingCollectives(GATHERS.format(type(self._trainer).__name__))
        with checks:
            step.compute_alone(number, model, compute_part)
        self._has_guarded = True
        # After each batch: between batches, the `Trainer` may run collectives.
        skipped = step.gather_skipped()
        loss = step.losses[number]
        if number < len(self.batches) - 1:
            return loss
        step.count_step()
        if step.drop_skipped(skipped):
            factor = self._remove_skipped()
            scale_gradients(model, factor)
            # The `Trainer` adds the returned loss to the losses of earlier batches.
            loss = torch.stack(step.losses).sum() * factor - sum(self._returned)
        step.finish_gradients(model)
        return loss

    def _remove_skipped(self) -> float:
        """Remove skipped samples from the batches, and return the factor of the gradients."""
        units = 0
        for part, kept in self._step.parts.skipped_parts():
            units += self._losses.units(self._collate(part), part.info)
            if kept is not None:
                self.batches[part.batch] = self._collate(kept)
        skipped = torch.tensor([units], device=self._trainer.args.device)
        return self._losses.factor_without(int(self._trainer.accelerator.gather(skipped).sum()))

    def _collate(self, part: StepPart) -> dict[str, Any]:
        return self._model_batch(self._context.collate(part))
