"""One optimizer step, computed whole or in parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from odb_nodes.alignment.aligned_round import LossRule
from odb_nodes.alignment.exchange import Channel
from odb_nodes.errors import StepMemoryError
from odb_nodes.memory.failures import free_memory, is_out_of_memory
from odb_nodes.memory.gradients import (
    average_gradients,
    check_no_gradients,
    clear_gradients,
    kind_of,
    local_gradients,
    scale_gradients,
)
from odb_nodes.memory.notice import FailureNotice
from odb_nodes.memory.parts import Part, StepParts
from odb_nodes.nodes import GroupCollator
from odb_nodes.planning.group_costs import CostFn
from odb_nodes.sample import Sample, name_of
from odb_nodes.step_info import StepInfo, pop_step_info

OnOom = Literal["split", "skip", "raise"]
LossFn = Callable[[Any], torch.Tensor]

_SHOWN = 8  # keys in an error
_SHRINK = 0.9  # of the cost that did not fit, in an error
_LEAST = 4  # of the limit at least one part in so many is asked for


def _ask_nobody(tokens: int) -> None:
    """Do nothing: there is no `RankAligner`."""


@dataclass(kw_only=True)
class GuardContext:
    """What the steps of a guard have in common.

    Attributes:
        collator: makes batches of samples.
        rule: how the losses of all ranks and micro-steps become one.
        cost: samples -> what computing them at once costs.
        limit: the cost that is known to fit; `None` where none is.
        on_oom, guard_above, shrink: see `OomGuard`.
        ask_for_budget: asks all ranks for a budget of so many tokens, from the next round on.
        channel: to the other ranks; `None` where there are none.
        notice: likewise, for steps that all ranks compute together.
        ooms, split_steps, skipped_samples: see `OomGuard`.
    """

    collator: GroupCollator
    rule: LossRule
    cost: CostFn
    limit: int | None
    on_oom: OnOom
    guard_above: float
    shrink: float | None
    ask_for_budget: Callable[[int], None] = _ask_nobody
    channel: Channel | None = None
    notice: FailureNotice | None = None
    ooms: int = 0
    split_steps: int = 0
    skipped_samples: int = 0

    def __post_init__(self) -> None:
        self.fits = self.limit
        """The cost that is known to fit on this rank."""

    def note(self, failed: Part) -> None:
        """Count that memory ran out, and ask for a smaller budget."""
        self.ooms += 1
        if self.shrink is not None:
            most = failed.cost if self.limit is None else max(failed.cost, self.limit // _LEAST)
            self.fits = max(1, int(self.shrink * most))
            self.ask_for_budget(self.fits)

    @property
    def rank(self) -> int:
        """This rank, of those that share the data."""
        return 0 if self.channel is None else self.channel.rank

    def guards(self, infos: Sequence[StepInfo]) -> bool:
        """Tell whether a step may run out of memory: the same on all ranks."""
        most = max(info.most_cost for info in infos)
        return self.limit is None or most > self.guard_above * self.limit

    def collate(self, part: Part) -> Any:
        """Return the batch of a part."""
        batch = self.collator.collate(part.samples, part.info)
        pop_step_info(batch)
        return batch


class GuardedStep:
    """The batches of one optimizer step.

    Attributes:
        infos: the `StepInfo` of each batch; after `backward`, without the samples that were left
            out for want of memory, on any rank. Record these in a `Ledger`.
    """

    def __init__(self, context: GuardContext, batches: Sequence[tuple[Any, StepInfo]]) -> None:
        self._context = context
        self._batches: list[Any] = [batch for batch, _ in batches]
        self.infos = [info for _, info in batches]
        samples = [context.collator.take_samples(info) for info in self.infos]
        self._parts = StepParts(
            [*zip(samples, self.infos, strict=True)], context.rule, context.cost
        )
        self._is_done = False

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
                that is not guarded.
            RuntimeError: there are gradients already, or `backward` was called before.
            PeerError: another rank failed, or did not come.
        """
        context, kind = self._context, kind_of(model)
        if self._is_done:
            raise RuntimeError("`backward` was called before for this step. Take the next one.")
        self._is_done = True
        if kind == "sharded" or (kind == "ddp" and not context.guards(self.infos)):
            return self._compute_together(model, loss_fn, scaler)
        check_no_gradients(model)
        channel, where = context.channel, self._where
        try:
            with local_gradients(model):
                loss = self._compute_until_it_fits(model, loss_fn, scaler)
        except Exception as error:
            if channel is not None:
                channel.fail(error, where)
            raise
        left_out = own = np.array(self._parts.skipped(), np.int64)
        if channel is not None:
            left_out = channel.gather(own.ravel(), where)[:, : own.size].sum(0).reshape(own.shape)
        if left_out.any():
            factor = self._parts.loss_factor(left_out.tolist())
            scale_gradients(model, factor)
            loss = loss * factor
            self.infos = self._parts.infos(left_out.tolist())
        if isinstance(model, DistributedDataParallel):
            average_gradients(model)
        return loss

    @property
    def _where(self) -> str:
        info = self.infos[0]
        return f"step {info.step} of epoch {info.epoch}"

    def _compute_until_it_fits(
        self, model: nn.Module, loss_fn: LossFn, scaler: Any
    ) -> torch.Tensor:
        context, parts = self._context, self._parts
        tried: set[int] = set()  # samples alone in their part
        while context.fits is not None and parts.halve(context.fits + 1):
            pass
        while True:
            failed: Part | None = None
            losses: list[torch.Tensor] = []
            for part in parts:
                try:
                    losses.append(self._compute(part, loss_fn, scaler))
                except (RuntimeError, MemoryError) as error:
                    if context.on_oom == "raise" or not is_out_of_memory(error):
                        raise
                    free_memory(error)
                    failed = part
                    break
            if failed is None:
                context.split_steps += len(parts) > len(self._batches)
                return torch.stack(losses).sum() if losses else torch.zeros(())
            context.note(failed)
            clear_gradients(model)
            if len(failed.samples) > 1:
                parts.halve(failed.cost)
            elif id(failed.samples[0]) not in tried:  # Memory in pieces is whole again now.
                tried.add(id(failed.samples[0]))
            elif context.on_oom == "skip" or failed.info.is_filler:
                parts.skip(failed)
                context.skipped_samples += not failed.info.is_filler
            else:
                raise StepMemoryError(self._too_large(failed.samples[0]))

    def _compute_together(self, model: nn.Module, loss_fn: LossFn, scaler: Any) -> torch.Tensor:
        """Compute a step that cannot be taken back."""
        limit, most = self._context.limit, max(info.most_cost for info in self.infos)
        if limit is not None and most > limit:
            self._parts.cut(-(-most // limit))
        losses, count, notice = [], len(self._parts), self._context.notice
        for number, part in enumerate(self._parts):
            waits = isinstance(model, DistributedDataParallel) and number < count - 1
            try:
                with (
                    nullcontext() if notice is None else notice.watching(),
                    model.no_sync() if waits else nullcontext(),  # type: ignore[operator]
                ):
                    losses.append(self._compute(part, loss_fn, scaler))
            except Exception as error:
                if self._context.on_oom != "raise" and is_out_of_memory(error):
                    self._context.note(part)
                    text = self._cannot_be_taken_back(part)
                    if notice is not None:
                        notice.give(text)
                    raise StepMemoryError(text) from error
                if notice is not None and (reason := notice.read()) is not None:
                    raise StepMemoryError(reason) from error
                raise
        return torch.stack(losses).sum()

    def _compute(self, part: Part, loss_fn: LossFn, scaler: Any) -> torch.Tensor:
        """Add the gradients of a part, and return its share of the loss."""
        batch, self._batches[part.batch] = self._batches[part.batch], None
        if batch is None or not part.is_whole:  # `loss_fn` may have changed it
            batch = self._context.collate(part)
        loss = loss_fn(batch)
        if not isinstance(loss, torch.Tensor) or loss.ndim or not loss.requires_grad:
            raise TypeError(
                "`loss_fn` must return the mean loss of the batch, a tensor without dimensions "
                f"that has a graph, but returned {loss!r:.80}."
            )
        weight = part.info.loss_scale
        # A mean over no targets is NaN, and NaN times 0 is NaN.
        loss = loss * weight if weight else loss.nan_to_num(0.0, 0.0, 0.0) * 0.0
        (loss if scaler is None else scaler.scale(loss)).backward()
        return loss.detach()

    def _cannot_be_taken_back(self, part: Part) -> str:
        samples, limit, rank = part.samples, self._context.limit, self._context.rank
        most = part.cost if limit is None else min(part.cost, limit)
        keys = [sample.key for sample in samples[:_SHOWN]]
        more = f" and {len(samples) - _SHOWN} more" if len(samples) > _SHOWN else ""
        return (
            f"rank {rank} ran out of memory in {self._where}, with {len(samples)} samples of up to "
            f"{max(sample.tokens for sample in samples)} tokens and "
            f"{sum(sample.patches for sample in samples)} patches (keys {keys}{more}; cost "
            f"{part.cost}). All ranks compute such a step together, so it cannot be taken back. "
            f"Resume from the last checkpoint with a budget of {int(_SHRINK * most)} or less."
        )

    def _too_large(self, sample: Sample) -> str:
        return (
            f"{self._where}, rank {self._context.rank}: a sample{name_of(sample)} with "
            f"{sample.tokens} tokens and {sample.patches} patches does not fit into memory alone. "
            'Shorten it, leave it out (`exclude`, or `on_oom="skip"`), or train with less memory '
            "for each token, such as by `enable_checkpointing`."
        )
