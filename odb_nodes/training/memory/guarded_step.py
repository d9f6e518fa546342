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
from odb_nodes.training.memory.guard_state import GuardState
from odb_nodes.training.memory.meter import free_memory, is_out_of_memory
from odb_nodes.training.memory.parts import Part, StepParts

LossFn = Callable[[Any], torch.Tensor]
Run = Callable[[Part, Any], torch.Tensor]
"""(part, its batch if the part is whole, else `None`) -> its share of the loss. Adds gradients."""

_MOST_KEYS_SHOWN = 8  # in an error
_RECOMMENDED_SHARE = 0.9  # budget that an error recommends, as a share of the failed cost
_MOST_SKIPPED_SAMPLES = 32  # of whole steps in a row: a step may consist of outliers alone


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

    def __init__(self, guard: GuardState, batches: Sequence[StepBatch]) -> None:
        self._guard = guard
        self.batches: list[Any] = [batch for batch, _, _ in batches]  # `take` removes each
        self.infos = [info for _, _, info in batches]
        self.is_done = False
        self.loss: torch.Tensor | None = None  # the result of `backward`
        planned = [(samples, info) for _, samples, info in batches]
        self.parts = StepParts(planned, guard.rule, guard.cost)
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
        is_alone = kind == "local" or (kind == "ddp" and self._guard.guards(self.infos))
        run = partial(self._add_gradients, model, loss_fn, scaler, is_alone)
        compute = self._compute_alone if is_alone else self._compute_together
        self.loss = compute(model, run)
        return self.loss

    def _begin(self, model: nn.Module, kind: Kind) -> None:
        """Check the call of `backward`."""
        guard = self._guard
        if self.is_done:
            raise RuntimeError("`backward` was called before for this step. Take the next one.")
        self.is_done = True
        if kind == "ddp" and guard.channel is None and dist.get_world_size() > 1:
            raise RuntimeError(
                "a DDP model needs a `RankAligner` over all of its ranks below the guard, so that "
                "they agree on the parts of a step. Use `ODBDataLoader`, or add a `RankAligner`."
            )
        if kind == "local" and guard.channel is not None and not guard.has_checked(model):
            warn_user(
                "several ranks train, but the model of `step.backward` is not in DDP or FSDP: "
                "their weights differ after the first step, unless you average the gradients. "
                "Pass the wrapped model."
            )
        if kind == "sharded":  # It is never recomputed, so no gradient could count twice.
            guard.note_checked(model)

    def _add_gradients(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        scaler: torch.amp.GradScaler | None,
        is_alone: bool,
        part: Part,
        batch: Any,
    ) -> torch.Tensor:
        """Add the gradients of a part; return its share of the loss. See `Run`."""
        weight = part.info.loss_scale
        if is_alone and not (part.is_whole or weight):
            # The mean over no targets is NaN, and so would be its gradients.
            return torch.zeros((), device=_device_of(model))
        loss = loss_fn(self._guard.collate(part) if batch is None else batch)
        if not isinstance(loss, torch.Tensor) or loss.ndim or not loss.requires_grad:
            raise TypeError(
                "`loss_fn` must return the mean loss of the batch, a tensor without dimensions "
                f"that has a graph, but returned {loss!r:.80}."
            )
        if not self._guard.has_checked(model):
            check_has_all(model, loss)
        # A mean over no targets is NaN, and NaN times 0 is NaN.
        loss = loss * weight if weight else loss.nan_to_num(0.0, 0.0, 0.0) * 0.0
        (loss if scaler is None else scaler.scale(loss)).backward()
        self._guard.note_checked(model)  # Not before: memory may run out in the first part.
        return loss.detach()

    def _compute_alone(self, model: nn.Module, run: Run) -> torch.Tensor:
        """Compute the step on this rank alone; then all ranks average their gradients."""
        check_no_gradients(model)
        for number in range(len(self.infos)):
            self.compute(number, model, run)
        left_out = self.agree()
        loss = torch.stack(self.losses).sum()
        if self.settle(left_out):
            factor = self.parts.loss_factor(left_out)
            scale_gradients(model, factor)
            loss = loss * factor
        self.join(model)
        return loss

    def _compute_together(self, model: nn.Module, run: Run) -> torch.Tensor:
        """Compute the step on all ranks together."""
        limit, most = self._guard.limit, max(info.most_cost for info in self.infos)
        if limit is not None and most > limit:
            pieces = -(-most // limit)
            self.parts.cut(min(pieces, max(info.all_samples_this_step for info in self.infos)))
        losses, count = [], len(self.parts)
        for number, part in enumerate(self.parts):
            waits = isinstance(model, DistributedDataParallel) and number < count - 1
            with (
                self.together(part),
                model.no_sync() if waits else nullcontext(),  # type: ignore[operator]
            ):
                losses.append(run(part, self.take(part)))
        self.count()
        return torch.stack(losses).sum()

    # --- the stages of a step, for trainers too ---------------------------------------------------

    def compute(self, number: int, model: nn.Module, run: Run) -> None:
        """Add the gradients of batch `number`, on this rank alone; split batches until it fits."""
        guard, batches = self._guard, range(number, number + 1)
        if number == 0:
            while guard.fitting_cost is not None and self.parts.halve(guard.fitting_cost + 1):
                pass
        try:
            ddp = model if isinstance(model, DistributedDataParallel) else None
            with nullcontext() if ddp is None else without_ddp_sync(ddp):
                while (failed := self._compute_batches(batches, model, run)) is not None:
                    self._make_room(failed)
                    model.zero_grad(set_to_none=True)
                    batches = range(number + 1)
        except Exception as error:
            guard.fail(error, self.where)
            raise

    def agree(self) -> list[tuple[int, int]]:
        """Return the skipped samples and targets of each batch, summed over all ranks."""
        counts = np.array(self.parts.skipped(), np.int64)
        if (channel := self._guard.channel) is not None:
            rows = channel.gather(counts.ravel(), self.where)
            counts = rows[:, : counts.size].sum(0).reshape(counts.shape)
        return [(samples, targets) for samples, targets in counts.tolist()]

    def settle(self, left_out: Sequence[tuple[int, int]]) -> bool:
        """Count the step, remove skipped samples from `infos`, and tell whether there were any.

        Raises a `StepMemoryError` after `_MOST_SKIPPED_SAMPLES` in steps that were skipped whole.
        """
        self.count()
        info = self.infos[0]
        samples, targets = map(sum, zip(*left_out, strict=True))
        if info.optimizer_targets:  # Samples without targets train nothing.
            is_skipped = targets == info.optimizer_targets
        else:
            is_skipped = samples == info.optimizer_samples
        in_a_row = self._guard.samples_skipped_in_a_row(info, is_skipped=is_skipped)
        if in_a_row >= _MOST_SKIPPED_SAMPLES:
            raise StepMemoryError(
                f"{self.where}: none of the last {in_a_row} samples of all ranks fits into memory "
                "alone: whole steps are skipped, and nothing is trained any more. Free memory, or "
                "use less for each token, such as by `enable_checkpointing`."
            )
        if samples:
            self.infos = self.parts.infos(left_out)
        return bool(samples)

    def join(self, model: nn.Module) -> None:
        """Average the gradients over the ranks of a DDP model, once all batches are computed."""
        if isinstance(model, DistributedDataParallel):
            average_gradients(model)
        give_gradients(model)  # All samples of all ranks may have been skipped.

    def count(self) -> None:
        """Count the step, once it is computed."""
        self._guard.note_step(len(self.parts), len(self.batches))

    def take(self, part: Part) -> Any:
        """Return the loader's batch of a part, once: `loss_fn` may change it. Else `None`."""
        batch = self.batches[part.batch]
        self.batches[part.batch] = None
        return batch if part.is_whole else None

    @contextmanager
    def together(self, part: Part) -> Iterator[None]:
        """Within this context, all ranks compute a part together; an error ends all of them."""
        guard, watch = self._guard, self._guard.watch
        if watch is not None:
            watch.enter()
        try:
            with guard.computing(part):
                yield
        except Exception as error:
            if watch is not None:
                watch.leave()
            if guard.on_oom != "raise" and is_out_of_memory(error):
                guard.note_oom(part, "the step cannot be computed")
                reason = self._error_of(part)
                if watch is not None:
                    watch.publish(reason)
                raise reason from error
            guard.raise_published(error)
            raise
        if watch is not None and not runs_ahead():
            watch.leave()

    def _error_of(self, part: Part) -> StepMemoryError:
        """Return the error of a part that ran out of memory while all ranks computed it."""
        samples, limit = part.samples, self._guard.limit
        keys = ", ".join(str(sample.key) for sample in samples[:_MOST_KEYS_SHOWN])
        if len(samples) > _MOST_KEYS_SHOWN:
            keys += f" and {len(samples) - _MOST_KEYS_SHOWN} more"
        most = part.cost if limit is None else min(part.cost, limit)
        return StepMemoryError(
            f"rank {self._guard.rank} ran out of memory in {self.where}, with {len(samples)} "
            f"samples of up to {max(sample.tokens for sample in samples)} tokens and "
            f"{sum(sample.patches for sample in samples)} patches (keys {keys}; cost {part.cost}). "
            "All ranks compute such a step together, so it cannot be recomputed. Resume from the "
            f"last checkpoint with a budget of {int(_RECOMMENDED_SHARE * most)} or less."
        )

    def _compute_batches(self, numbers: range, model: nn.Module, run: Run) -> Part | None:
        """Compute batches; return the part that ran out of memory, or `None`."""
        for number in numbers:
            losses: list[torch.Tensor] = []
            for part in self.parts.of(number):
                try:
                    with self._guard.computing(part):
                        losses.append(run(part, self.take(part)))
                except (RuntimeError, MemoryError) as error:
                    if self._guard.on_oom == "raise" or not is_out_of_memory(error):
                        raise
                    free_memory(error, old_garbage=self._has_failed)
                    self._has_failed = True
                    return part
            if not losses:  # all samples were skipped
                losses = [torch.zeros((), device=_device_of(model))]
            self.losses[number : number + 1] = [torch.stack(losses).sum()]
        return None

    def _make_room(self, failed: Part) -> None:
        """Split or skip what does not fit, or raise an error."""
        guard, sample = self._guard, failed.samples[0]
        if len(failed.samples) > 1:
            guard.note_oom(failed, "batches that cost as much are halved and recomputed")
            self.parts.halve(failed.cost)
        elif id(sample) not in self._retried:  # Freed memory may be in one piece now.
            guard.note_oom(failed, "the step is recomputed, once", shrinks=False)
            self._retried.add(id(sample))
        elif guard.on_oom == "skip" or failed.info.is_filler:
            guard.note_skipped(failed)
            self.parts.skip(failed)
        else:
            guard.note_oom(failed, "the step cannot be computed")
            raise StepMemoryError(
                f"{self.where}, rank {guard.rank}: a sample{name_of(sample)} with {sample.tokens} "
                f"tokens and {sample.patches} patches does not fit into memory alone. Shorten it, "
                'skip it (`exclude`, or `on_oom="skip"`), or train with less memory for each '
                "token, such as by `enable_checkpointing`."
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
