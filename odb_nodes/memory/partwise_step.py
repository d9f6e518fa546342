"""The batches of one optimizer step, each computed whole, or in parts where memory runs out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from odb_nodes.errors import StepMemoryError
from odb_nodes.memory.context import GuardContext
from odb_nodes.memory.failures import free_memory, is_out_of_memory
from odb_nodes.memory.gradients import clear_gradients, local_gradients
from odb_nodes.memory.parts import Part, StepParts
from odb_nodes.sample import Sample, name_of
from odb_nodes.step_info import StepInfo

Run = Callable[[Part, Any], torch.Tensor]
"""Adds the gradients of a part, and returns its share of the loss. Its arguments are the part, and
its batch as it was yielded; `None` where it is to be collated."""

_SHOWN = 8  # keys in an error
_SHRINK = 0.9  # of the cost that did not fit, in an error
_LEFT_OUT = 32  # samples in a row; outliers alone fill a step now and then, being of like length

# What is done where memory ran out, as the log has it.
_HALVE = "batches that cost as much are halved, and the step is computed again"
_TRY_AGAIN = "the step is computed again, since memory may have been in pieces"
_LEAVE_OUT = "the sample is left out, and the step is computed again"
_RAISE = "the step cannot be computed"


class StepBatch(NamedTuple):
    """A batch of an optimizer step as it was yielded, with its samples."""

    batch: Any
    samples: list[Sample]
    info: StepInfo


class PartwiseStep:
    """The batches of an optimizer step, which are computed in order.

    Attributes:
        infos: the `StepInfo` of each batch; after `settle`, without the samples that were left out.
        parts: the parts that the batches are computed in.
        losses: this rank's share of the loss of each batch that is computed.
    """

    def __init__(self, context: GuardContext, batches: Sequence[StepBatch]) -> None:
        self._context = context
        self._batches: list[Any] = [one.batch for one in batches]
        self.infos = [one.info for one in batches]
        self.parts = StepParts(
            [(one.samples, one.info) for one in batches], context.rule, context.cost
        )
        self.losses: list[torch.Tensor] = []
        self._tried: set[int] = set()  # samples alone in their part
        self._has_failed = False
        if batches and context.run_meter is not None:
            context.run_meter.begin_step()

    @property
    def where(self) -> str:
        """The step, as errors name it."""
        info = self.infos[0]
        return f"step {info.step} of epoch {info.epoch}"

    def compute(self, number: int, model: nn.Module, run: Run) -> None:
        """Add the gradients of a batch to those of the batches before it, on this rank alone.

        Where memory runs out, all gradients are cleared, each batch that costs as much as what has
        failed is halved, and the step is computed again from its first batch; so until it fits.
        """
        context, again = self._context, range(number, number + 1)
        if number == 0:
            while context.fits is not None and self.parts.halve(context.fits + 1):
                pass
        try:
            with local_gradients(model):
                while (failed := self._failing(again, model, run)) is not None:
                    remedy = self._remedy(failed)
                    context.note(failed, remedy, shrinks=remedy != _TRY_AGAIN)
                    clear_gradients(model)
                    self._make_room(failed, remedy)
                    again = range(number + 1)
        except Exception as error:
            context.fail(error, self.where)
            raise

    def agree(self) -> list[tuple[int, int]]:
        """Return samples and targets that were left out of each batch, on all ranks together."""
        own = np.array(self.parts.skipped(), np.int64)
        if (channel := self._context.channel) is not None:
            rows = channel.gather(own.ravel(), self.where)
            own = rows[:, : own.size].sum(0).reshape(own.shape)
        return [(samples, targets) for samples, targets in own.tolist()]

    def count(self) -> None:
        """Count the step, which is computed."""
        self._context.split_steps += len(self.parts) > len(self._batches)

    def settle(self, left_out: Sequence[tuple[int, int]]) -> bool:
        """End the step: count it, and correct what is known of its batches."""
        self.count()
        is_changed = any(samples for samples, _ in left_out)
        self._check_trains(left_out)
        if is_changed:
            self.infos = self.parts.infos(left_out)
        return is_changed

    def _check_trains(self, left_out: Sequence[tuple[int, int]]) -> None:
        """Raise a `StepMemoryError` where whole steps are left out, one after the other."""
        context, info = self._context, self.infos[0]
        samples, targets = map(sum, zip(*left_out, strict=True))
        if info.optimizer_targets:  # Samples without targets train nothing, and are not computed.
            is_whole = targets == info.optimizer_targets
        else:
            is_whole = samples == info.optimizer_samples
        context.left_out = context.left_out + info.optimizer_samples if is_whole else 0
        if context.left_out >= _LEFT_OUT:
            raise StepMemoryError(
                f"{self.where}: none of the last {context.left_out} samples of all ranks fits into "
                "memory alone, so that whole steps are left out and nothing is trained any more. "
                "Free memory that something else holds, or train with less for each token, such as "
                "by `enable_checkpointing`."
            )

    def take(self, part: Part) -> Any:
        """Return the batch of a part as it was yielded, once; `None` where there is none."""
        batch, self._batches[part.batch] = self._batches[part.batch], None
        return batch if part.is_whole else None  # What was computed before may have changed it.

    @contextmanager
    def together(self, part: Part) -> Iterator[None]:
        """Within this context all ranks compute a part, which cannot be taken back."""
        notice = self._context.notice
        if notice is not None:
            if notice.told is not None:
                notice.leave()
                raise notice.told
            notice.enter()
        try:
            with self._context.measuring(part):
                yield
            if not runs_ahead():
                self._context.leave()
        except Exception as error:
            self._context.leave()
            if self._context.on_oom != "raise" and is_out_of_memory(error):
                self._context.note(part, _RAISE)
                reason = StepMemoryError(self._cannot_be_taken_back(part))
                if notice is not None:
                    notice.give(reason)
                raise reason from error
            self._context.raise_told(error)
            raise

    def _failing(self, numbers: range, model: nn.Module, run: Run) -> Part | None:
        """Compute some batches; return the part that memory ran out in, if there is one."""
        nothing = torch.zeros((), device=next(model.parameters()).device)
        for number in numbers:
            losses: list[torch.Tensor] = []
            for part in self.parts.of(number):
                try:
                    with self._context.measuring(part):
                        losses.append(run(part, self.take(part)))
                except (RuntimeError, MemoryError) as error:
                    if self._context.on_oom == "raise" or not is_out_of_memory(error):
                        raise
                    free_memory(error, old_garbage=self._has_failed)
                    self._has_failed = True
                    return part
            self.losses[number : number + 1] = [torch.stack(losses).sum() if losses else nothing]
        return None

    def _remedy(self, failed: Part) -> str:
        if len(failed.samples) > 1:
            return _HALVE
        if id(failed.samples[0]) not in self._tried:  # Memory in pieces is whole again now.
            return _TRY_AGAIN
        is_dispensable = self._context.on_oom == "skip" or failed.info.is_filler
        return _LEAVE_OUT if is_dispensable else _RAISE

    def _make_room(self, failed: Part, remedy: str) -> None:
        if remedy == _HALVE:
            self.parts.halve(failed.cost)
        elif remedy == _TRY_AGAIN:
            self._tried.add(id(failed.samples[0]))
        elif remedy == _LEAVE_OUT:
            self.parts.skip(failed)
            self._context.skipped_samples += not failed.info.is_filler
        else:
            raise StepMemoryError(self._too_large(failed.samples[0]))

    def _cannot_be_taken_back(self, part: Part) -> str:
        samples, limit, rank = part.samples, self._context.limit, self._context.rank
        most = part.cost if limit is None else min(part.cost, limit)
        keys = [sample.key for sample in samples[:_SHOWN]]
        more = f" and {len(samples) - _SHOWN} more" if len(samples) > _SHOWN else ""
        return (
            f"rank {rank} ran out of memory in {self.where}, with {len(samples)} samples of up to "
            f"{max(sample.tokens for sample in samples)} tokens and "
            f"{sum(sample.patches for sample in samples)} patches (keys {keys}{more}; cost "
            f"{part.cost}). All ranks compute such a step together, so it cannot be taken back. "
            f"Resume from the last checkpoint with a budget of {int(_SHRINK * most)} or less."
        )

    def _too_large(self, sample: Sample) -> str:
        return (
            f"{self.where}, rank {self._context.rank}: a sample{name_of(sample)} with "
            f"{sample.tokens} tokens and {sample.patches} patches does not fit into memory alone. "
            'Shorten it, leave it out (`exclude`, or `on_oom="skip"`), or train with less memory '
            "for each token, such as by `enable_checkpointing`."
        )


def runs_ahead() -> bool:
    """Tell whether collectives may be waited for only after the calls that begin them: on a GPU."""
    return bool(torch.cuda.is_initialized())
