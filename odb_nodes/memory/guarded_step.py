"""One optimizer step of a loop of one's own, computed whole or in parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from odb_nodes._compat.torch import uncompiled
from odb_nodes.memory.context import GuardContext
from odb_nodes.memory.gradients import (
    average_gradients,
    check_has_all,
    check_is_whole,
    check_no_gradients,
    give_gradients,
    kind_of,
    scale_gradients,
)
from odb_nodes.memory.parts import Part
from odb_nodes.memory.partwise_step import PartwiseStep, Run, StepBatch
from odb_nodes.step_info import StepInfo

LossFn = Callable[[Any], torch.Tensor]


class GuardedStep:
    """The batches of one optimizer step."""

    def __init__(self, context: GuardContext, batches: Sequence[StepBatch]) -> None:
        self._context = context
        self._step = PartwiseStep(context, batches)
        self._is_done = False

    @property
    def is_done(self) -> bool:
        """Whether `backward` was called."""
        return self._is_done

    @property
    def infos(self) -> list[StepInfo]:
        """The `StepInfo` of each batch. Record these in a `Ledger`, after `backward`.

        Then they are without the samples that were left out for want of memory, on any rank.
        """
        return self._step.infos

    def backward(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        *,
        scaler: torch.amp.GradScaler | None = None,
    ) -> torch.Tensor:
        """Compute the gradients of the step.

        Args:
            model: the model, a plain module, DDP or FSDP, whose gradients are `None` or 0.
            loss_fn: batch -> mean loss over its supervised tokens, a tensor without dimensions. It
                is called more than once where memory runs out. It moves the batch to the device.
            scaler: scales the loss for gradients in half precision.

        Returns:
            This rank's share of the loss, without dimensions and without a graph. Its mean over
            ranks is the mean loss over all supervised tokens of the step.

        Raises:
            StepMemoryError: a sample does not fit into memory alone; or memory ran out in a step
                that is not guarded; or whole steps in a row are left out.
            RuntimeError: `backward` was called before; or there are gradients already, which a
                guarded step would lose; or a DDP model has no `RankAligner`.
            TypeError: `loss_fn` returns no loss, or trains parameters that `model` does not have;
                or `model` is not the whole of what is trained together.
            PeerError: another rank failed, or did not come.
        """
        model = uncompiled(model)
        step, kind = self._step, kind_of(model)
        if self._is_done:
            raise RuntimeError("`backward` was called before for this step. Take the next one.")
        self._is_done = True

        if kind == "ddp" and self._context.channel is None and dist.get_world_size() > 1:
            raise RuntimeError(
                "a DDP model needs a `RankAligner` over all of its ranks below the guard, so that "
                "they agree on what is computed in parts. Use `ODBDataLoader`, or put one in."
            )

        context = self._context
        if kind == "local" and model not in context.checked:
            check_is_whole(model, among_ranks=context.channel is not None)

        def run(part: Part, batch: Any) -> torch.Tensor:
            checks = kind != "sharded" and model not in context.checked
            share = self._add(part, batch, loss_fn, scaler, model if checks else None)
            context.checked.add(model)  # Not before: memory may run out in the first part.
            return share

        def run_alone(part: Part, batch: Any) -> torch.Tensor:
            if part.is_whole or part.info.loss_scale:
                return run(part, batch)
            # Its mean over no targets is NaN, and so would be its gradients, whatever the weight.
            return torch.zeros((), device=next(model.parameters()).device)

        if kind == "sharded" or (kind == "ddp" and not self._context.guards(step.infos)):
            return self._compute_together(model, run)
        check_no_gradients(model)
        for number in range(len(step.infos)):
            step.compute(number, model, run_alone)
        left_out, loss = step.agree(), torch.stack(step.losses).sum()
        if step.settle(left_out):
            factor = step.parts.loss_factor(left_out)
            scale_gradients(model, factor)
            loss = loss * factor
        if isinstance(model, DistributedDataParallel):
            average_gradients(model)
        give_gradients(model)  # All samples may have been left out, of all ranks.
        return loss

    def _compute_together(self, model: nn.Module, run: Run) -> torch.Tensor:
        """Compute a step that cannot be taken back."""
        step, limit = self._step, self._context.limit
        most = max(info.most_cost for info in step.infos)
        if limit is not None and most > limit:
            pieces = -(-most // limit)
            step.parts.cut(min(pieces, max(info.all_samples_this_step for info in step.infos)))
        losses, count = [], len(step.parts)
        for number, part in enumerate(step.parts):
            waits = isinstance(model, DistributedDataParallel) and number < count - 1
            with (
                step.together(part),
                model.no_sync() if waits else nullcontext(),  # type: ignore[operator]
            ):
                losses.append(run(part, step.take(part)))
        step.count()
        return torch.stack(losses).sum()

    def _add(
        self, part: Part, batch: Any, loss_fn: LossFn, scaler: Any, checked: nn.Module | None
    ) -> torch.Tensor:
        """Add the gradients of a part, and return its share of the loss."""
        loss = loss_fn(self._context.collate(part) if batch is None else batch)
        if not isinstance(loss, torch.Tensor) or loss.ndim or not loss.requires_grad:
            raise TypeError(
                "`loss_fn` must return the mean loss of the batch, a tensor without dimensions "
                f"that has a graph, but returned {loss!r:.80}."
            )
        if checked is not None:
            check_has_all(checked, loss)
        weight = part.info.loss_scale
        # A mean over no targets is NaN, and NaN times 0 is NaN.
        loss = loss * weight if weight else loss.nan_to_num(0.0, 0.0, 0.0) * 0.0
        (loss if scaler is None else scaler.scale(loss)).backward()
        return loss.detach()
