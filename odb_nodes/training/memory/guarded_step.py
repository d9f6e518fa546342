"""An optimizer step that is computed in parts if memory runs out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from odb_nodes._compat.torch import uncompiled, without_ddp_sync
from odb_nodes._support.user_warning import warn_user
from odb_nodes.core.sample import Sample, name_of
from odb_nodes.core.step_info import StepInfo
from odb_nodes.errors import StepMemoryError
from odb_nodes.training.memory.gradients import (
    Kind,
    average_gradients,
    check_has_all,
    check_no_gradients,
    give_gradients,
    kind_of,
    scale_gradients,
)
from odb_nodes.training.memory.guard_context import GuardContext
from odb_nodes.training.memory.meter import free_memory, is_out_of_memory
from odb_nodes.training.memory.step_parts import StepPart, StepParts

LossFn = Callable[[Any], torch.Tensor]
ComputePart = Callable[[StepPart, Any], torch.Tensor]
"""(part, its batch if the part is whole, else `None`) -> its share of the loss. Adds gradients."""

_MOST_KEYS_SHOWN = 8  # keys that an error lists
_RECOMMENDED_SHARE = 0.9  # budget that an error recommends, as a share of the failed cost
_MOST_SKIPPED_SAMPLES = 32  # in steps in a row that were skipped whole: one may be all outliers


class StepBatch(NamedTuple):
    """A batch of an optimizer step, with its samples."""

    batch: Any
    samples: list[Sample]
    info: StepInfo


class GuardedStep:
    """The batches of one optimizer step.

    Attributes:
        infos: the `StepInfo` of each batch. Record them in a `Ledger` after `backward`, which takes
            out the samples that any rank has skipped.
        is_done: whether `backward` was called.
    """

    def __init__(self, context: GuardContext, batches: Sequence[StepBatch]) -> None:
        self._context = context
        self.batches: list[Any] = [batch for batch, _, _ in batches]  # `take_batch` removes each
        self.infos = [info for _, _, info in batches]
        self.is_done = False
        self.loss: torch.Tensor | None = None  # the result of `backward`
        planned = [(samples, info) for _, samples, info in batches]
        self.parts = StepParts(planned, context.rule, context.cost)
        self.losses: list[torch.Tensor] = []  # this rank's share, of each computed batch
        self._retried: set[int] = set()  # ids of samples that have failed alone once
        self._has_failed = False

    def backward(
        self, model: nn.Module, loss_fn: LossFn, *, scaler: torch.amp.GradScaler | None = None
    ) -> torch.Tensor:
        """Compute the gradients of the step.

        Args:
            model: a plain module, DDP or FSDP, whose gradients are `None` or 0.
            loss_fn: moves a batch to the device and returns the mean loss over its supervised
                tokens, a tensor without dimensions. Called more than once if memory runs out.
            scaler: scales the loss for gradients in half precision.

        Returns:
            This rank's share of the loss, without dimensions and without a graph. Its mean over
            ranks is the mean loss over all supervised tokens of the step.

        Raises:
            StepMemoryError: a sample does not fit into memory alone; memory ran out in a step that
                is not guarded; or whole steps in a row were skipped.
            RuntimeError: `backward` was called before; the model has gradients already, which a
                guarded step would lose; or a DDP model has no `RankAligner`.
            TypeError: `loss_fn` returns no loss, or trains parameters outside of `model`; or
                `model` cannot be computed in parts.
            PeerError: another rank failed, or did not answer.
        """
        model = uncompiled(model)
        kind = kind_of(model)
        self._begin(model, kind)
        is_alone = kind == "local" or (kind == "ddp" and self._context.is_guarded(self.infos))
        compute_part = partial(self._add_gradients, model, loss_fn, scaler, is_alone)
        compute = self._compute_step_alone if is_alone else self._compute_step_together
        self.loss = compute(model, compute_part)
        return self.loss

    def _begin(self, model: nn.Module, kind: Kind) -> None:
        """Check the call of `backward`."""
        context = self._context
        if self.is_done:
            raise RuntimeError("`backward` was called before for this step. Take the next one.")
        self.is_done = True
        if kind == "ddp" and context.channel is None and dist.get_world_size() > 1:
            raise RuntimeError(
                "a DDP model needs a `RankAligner` over all of its ranks below the guard, so that "
                "they agree on the parts of a step. Use `ODBDataLoader`, or add a `RankAligner`."
            )
        if kind == "local" and context.channel is not None and model not in context.checked_models:
            warn_user(
                "several ranks train, but the model of `step.backward` is not in DDP or FSDP: "
                "their weights differ after the first step, unless you average the gradients. "
                "Pass the wrapped model."
            )
        if kind == "sharded":  # It is never recomputed, so no gradient could count twice.
            context.checked_models.add(model)

    def _add_gradients(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        scaler: torch.amp.GradScaler | None,
        is_alone: bool,
        part: StepPart,
        batch: Any,
    ) -> torch.Tensor:
        """Add the gradients of a part; return its share of the loss. See `ComputePart`."""
        weight = part.info.loss_scale
        if is_alone and not (part.is_whole or weight):
            # A mean over no targets is NaN, and would make all gradients NaN.
            return torch.zeros((), device=_device_of(model))
        loss = loss_fn(self._context.collate(part) if batch is None else batch)
        if not isinstance(loss, torch.Tensor) or loss.ndim or not loss.requires_grad:
            raise TypeError(
                "`loss_fn` must return the mean loss of the batch, a tensor without dimensions "
                f"that has a graph, but returned {loss!r:.80}."
            )
        if model not in self._context.checked_models:
            check_has_all(model, loss)
        # A mean over no targets is NaN, and NaN times 0 is NaN.
        loss = loss * weight if weight else loss.nan_to_num(0.0, 0.0, 0.0) * 0.0
        (loss if scaler is None else scaler.scale(loss)).backward()
        # Not before: memory may run out in the first part.
        self._context.checked_models.add(model)
        return loss.detach()

    def _compute_step_alone(self, model: nn.Module, compute_part: ComputePart) -> torch.Tensor:
        """Compute the step on this rank alone; then all ranks average their gradients."""
        check_no_gradients(model)
        for number in range(len(self.infos)):
            self.compute_alone(number, model, compute_part)
        skipped = self.gather_skipped()
        loss = torch.stack(self.losses).sum()
        self.count_step()
        if self.drop_skipped(skipped):
            factor = self.parts.loss_factor(skipped)
            scale_gradients(model, factor)
            loss = loss * factor
        self.finish_gradients(model)
        return loss

    def _compute_step_together(self, model: nn.Module, compute_part: ComputePart) -> torch.Tensor:
        """Compute the step on all ranks together."""
        limit = self._context.limit
        most = max(info.most_cost for info in self.infos)
        if limit is not None and most > limit:
            pieces = -(-most // limit)
            self.parts.cut(min(pieces, max(info.all_samples_this_step for info in self.infos)))
        losses = []
        count = len(self.parts)
        for number, part in enumerate(self.parts):
            waits = isinstance(model, DistributedDataParallel) and number < count - 1
            with (
                self.computing_together(part),
                model.no_sync() if waits else nullcontext(),  # type: ignore[operator]
            ):
                losses.append(compute_part(part, self.take_batch(part)))
        self.count_step()
        return torch.stack(losses).sum()

    # --- the stages of a step, for trainers too ---------------------------------------------------

    def compute_alone(self, number: int, model: nn.Module, compute_part: ComputePart) -> None:
        """Add the gradients of batch `number`, on this rank alone; split batches until it fits."""
        context = self._context
        batches = range(number, number + 1)
        if number == 0:
            while context.fitting_cost is not None and self.parts.halve(context.fitting_cost + 1):
                pass
        try:
            ddp = model if isinstance(model, DistributedDataParallel) else None
            with nullcontext() if ddp is None else without_ddp_sync(ddp):
                while (failed := self._compute_batches(batches, model, compute_part)) is not None:
                    self._make_room(failed)
                    model.zero_grad(set_to_none=True)
                    batches = range(number + 1)
        except Exception as error:
            context.fail(error, self.where)
            raise

    def gather_skipped(self) -> list[tuple[int, int]]:
        """Return the skipped samples and targets of each batch, summed over all ranks."""
        counts = np.array(self.parts.skipped(), np.int64)
        if (channel := self._context.channel) is not None:
            rows = channel.gather(counts.ravel(), self.where)
            counts = rows[:, : counts.size].sum(0).reshape(counts.shape)
        return [(samples, targets) for samples, targets in counts.tolist()]

    def drop_skipped(self, skipped: Sequence[tuple[int, int]]) -> bool:
        """Remove skipped samples from `infos`, and tell whether any rank has skipped some.

        Raises a `StepMemoryError` after `_MOST_SKIPPED_SAMPLES` in steps that were skipped whole.
        """
        info = self.infos[0]
        samples, targets = map(sum, zip(*skipped, strict=True))
        if info.optimizer_targets:  # Samples without targets train nothing.
            is_skipped = targets == info.optimizer_targets
        else:
            is_skipped = samples == info.optimizer_samples
        in_a_row = self._context.count_skipped_in_a_row(info, is_skipped=is_skipped)
        if in_a_row >= _MOST_SKIPPED_SAMPLES:
            raise StepMemoryError(
                f"{self.where}: none of the last {in_a_row} samples of all ranks fits into memory "
                "alone: whole steps are skipped, and nothing is trained any more. Free memory, or "
                "use less for each token, such as by `enable_checkpointing`."
            )
        if samples:
            self.infos = self.parts.infos(skipped)
        return bool(samples)

    def finish_gradients(self, model: nn.Module) -> None:
        """Average the gradients of all batches over the ranks of a DDP model."""
        if isinstance(model, DistributedDataParallel):
            average_gradients(model)
        give_gradients(model)  # All samples of all ranks may have been skipped.

    def count_step(self) -> None:
        """Count the step, once it is computed."""
        self._context.note_step(len(self.parts), len(self.batches))

    def take_batch(self, part: StepPart) -> Any:
        """Return the loader's batch of a part, once: `loss_fn` may change it. Else `None`."""
        batch = self.batches[part.batch]
        self.batches[part.batch] = None
        return batch if part.is_whole else None

    @contextmanager
    def computing_together(self, part: StepPart) -> Iterator[None]:
        """Within this context, all ranks compute a part together; an error ends all ranks."""
        context, watch = self._context, self._context.watch
        if watch is not None:
            watch.enter()
        try:
            with context.computing(part):
                yield
        except Exception as error:
            if watch is not None:
                watch.leave()
            if context.on_oom != "raise" and is_out_of_memory(error):
                context.note_oom(part, "the step cannot be computed")
                reason = self._error_of(part)
                if watch is not None:
                    watch.publish(reason)
                raise reason from error
            context.raise_published(error)
            raise
        if watch is not None and not runs_ahead():
            watch.leave()

    def _error_of(self, part: StepPart) -> StepMemoryError:
        """Return the error of a part that ran out of memory while all ranks computed it."""
        samples, limit = part.samples, self._context.limit
        keys = ", ".join(str(sample.key) for sample in samples[:_MOST_KEYS_SHOWN])
        if len(samples) > _MOST_KEYS_SHOWN:
            keys += f" and {len(samples) - _MOST_KEYS_SHOWN} more"
        most = part.cost if limit is None else min(part.cost, limit)
        return StepMemoryError(
            f"rank {self._context.rank} ran out of memory in {self.where}, with {len(samples)} "
            f"samples of up to {max(sample.tokens for sample in samples)} tokens and "
            f"{sum(sample.patches for sample in samples)} patches (keys {keys}; cost {part.cost}). "
            "All ranks compute such a step together, so it cannot be recomputed. Resume from the "
            f"last checkpoint with a budget of {int(_RECOMMENDED_SHARE * most)} or less."
        )

    def _compute_batches(
        self, numbers: range, model: nn.Module, compute_part: ComputePart
    ) -> StepPart | None:
        """Compute batches; return the part that ran out of memory, or `None`."""
        for number in numbers:
            losses: list[torch.Tensor] = []
            for part in self.parts.of_batch(number):
                try:
                    with self._context.computing(part):
                        losses.append(compute_part(part, self.take_batch(part)))
                except (RuntimeError, MemoryError) as error:
                    if self._context.on_oom == "raise" or not is_out_of_memory(error):
                        raise
                    free_memory(error, old_garbage=self._has_failed)
                    self._has_failed = True
                    return part
            if not losses:  # all samples were skipped
                losses = [torch.zeros((), device=_device_of(model))]
            self.losses[number : number + 1] = [torch.stack(losses).sum()]
        return None

    def _make_room(self, failed: StepPart) -> None:
        """Split or skip what does not fit, or raise an error."""
        context = self._context
        sample = failed.samples[0]
        if len(failed.samples) > 1:
            context.note_oom(failed, "batches that cost as much are halved and recomputed")
            self.parts.halve(failed.cost)
        elif id(sample) not in self._retried:  # Freed memory may be in one piece now.
            context.note_oom(failed, "the step is recomputed, once", shrinks=False)
            self._retried.add(id(sample))
        elif context.on_oom == "skip" or failed.info.is_filler:
            context.note_oom(failed, "the sample is skipped, and the step is recomputed")
            context.skipped_samples += not failed.info.is_filler
            self.parts.skip(failed)
        else:
            context.note_oom(failed, "the step cannot be computed")
            raise StepMemoryError(
                f"{self.where}, rank {context.rank}: a sample{name_of(sample)} with "
                f"{sample.tokens} tokens and {sample.patches} patches does not fit into memory "
                'alone. Shorten it, skip it (`exclude`, or `on_oom="skip"`), or train with less '
                "memory for each token, such as by `enable_checkpointing`."
            )

    @property
    def where(self) -> str:
        """The step, for error texts."""
        return f"step {self.infos[0].step} of epoch {self.infos[0].epoch}"


def _device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def runs_ahead() -> bool:
    """Tell whether collectives return before they are done, as on a GPU."""
    return bool(torch.cuda.is_initialized())
