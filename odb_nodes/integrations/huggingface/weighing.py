"""Weighs every batch's loss by its share of the optimizer step, exactly once."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import send_to_device

from odb_nodes._compat import transformers as compat
from odb_nodes.integrations.huggingface.loss import (
    Normalizer,
    count_targets,
    find_normalizer,
    give_targets,
)
from odb_nodes.step_info import StepInfo


@dataclass(kw_only=True)
class MicroStep:
    """A batch on its way through the `Trainer`.

    Attributes:
        info: the `StepInfo` of the batch.
        factor: the multiplier of its loss.
        is_scaled: whether the loss was multiplied.
    """

    info: StepInfo
    factor: float
    is_scaled: bool = False

    def scale(self, result: Any) -> Any:
        """Return what `compute_loss` returned, a loss or (loss, outputs), with the loss scaled."""
        self.is_scaled = True
        if isinstance(result, tuple):
            return (result[0] * self.factor, *result[1:])
        return result * self.factor


class LossWeigher:
    """Makes the gradient of an optimizer step that of the mean over all its targets.

    Either the loss is told the number of targets, `num_items_in_batch`, and divides by it; or it
    is a mean, and is multiplied by the batch's share of the targets. Which one it is, is found out
    at the first step that has targets.

    Args:
        trainer: the trainer that computes the losses.
        shift: whether the first label of a row is no target.
    """

    def __init__(self, trainer: Any, *, shift: bool) -> None:
        self._trainer = trainer
        self._shift = shift
        self._normalizer = Normalizer.UNKNOWN
        self._tells_items = False
        self.waiting: deque[MicroStep] = deque()
        self.active: MicroStep | None = None

    def weigh(self, batches: list[dict[str, Any]], infos: list[StepInfo]) -> torch.Tensor | None:
        """Settle what the loss of each batch of an optimizer step is multiplied by.

        Args:
            batches: the batches of the step; those without targets are given some.
            infos: the `StepInfo` of each batch.

        Returns:
            The `num_items_in_batch` that the `Trainer` is to pass on, or None.

        Raises:
            ValueError: the loss is neither a mean nor divided by `num_items_in_batch`.
        """
        trainer = self._trainer
        counts = [count_targets(batch, shift=self._shift) for batch in batches]
        if None in counts:  # The model makes its own labels: go by the targets of the samples.
            return self._note(infos, [info.loss_scale for info in infos], None)
        known = [
            0 if info.is_filler else count or 0 for count, info in zip(counts, infos, strict=True)
        ]
        ranks = trainer.accelerator.num_processes
        of_ranks = trainer.accelerator.gather(torch.tensor([known], device=trainer.args.device))
        total = of_ranks.sum()
        if self._normalizer is Normalizer.UNKNOWN:
            self._find_normalizer(batches, of_ranks)
        if self._normalizer is Normalizer.TRAINER:
            items = total.clamp(min=1) / compat.num_items_divisor(trainer)
            return self._note(infos, [1.0] * len(infos), items)
        for batch, count in zip(batches, counts, strict=True):
            if not count:
                give_targets(batch)
        targets = max(1, int(total))
        return self._note(infos, [ranks * count / targets for count in known], None)

    def _note(
        self, infos: list[StepInfo], shares: list[float], items: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Note the factor of each batch, which makes up for the `Trainer`'s own division."""
        self._tells_items = items is not None
        divisor = compat.loss_divisor(self._trainer, is_told=self._tells_items)
        self.waiting = deque(
            MicroStep(info=info, factor=0.0 if info.is_filler else share * divisor)
            for info, share in zip(infos, shares, strict=True)
        )
        return items

    @contextmanager
    def computing(self, num_items_in_batch: Any) -> Iterator[None]:
        """Make the next batch of the optimizer step the active one within the block.

        Args:
            num_items_in_batch: what `training_step` was called with.

        Raises:
            ValueError: the loss would be normalized twice, or was not weighed.
        """
        if (num_items_in_batch is not None) != self._tells_items:
            raise ValueError(
                "`num_items_in_batch` must be what `get_batch_samples` returned, but is "
                f"{num_items_in_batch!r} now: the loss would be normalized "
                f"{'not at all' if self._tells_items else 'twice'}. A subclass overrides "
                "`get_batch_samples` or `training_step`: pass on what it was given."
            )
        self.active = micro_step = self.waiting.popleft()
        try:
            yield
        finally:
            self.active = None
        if not micro_step.is_scaled:
            raise ValueError(
                "`compute_loss` must call that of `ODBTrainerMixin`, which weighs the loss, but "
                f"`{type(self._trainer).__name__}` overrides it. Call `super().compute_loss`, or "
                "give dynamic batches to a `Trainer` that has it: `configure_trainer`."
            )

    # --- who normalizes the loss ------------------------------------------------------------------

    def _find_normalizer(self, batches: list[dict[str, Any]], of_ranks: torch.Tensor) -> None:
        """Settle, on all ranks alike, who normalizes the loss.

        Args:
            batches: the batches of an optimizer step.
            of_ranks: (R, S) int64, supervised tokens of each rank and micro-step.

        Raises:
            ValueError: the loss is neither a mean nor divided by `num_items_in_batch`.
        """
        trainer = self._trainer
        if not compat.takes_num_items(trainer):
            self._normalizer = Normalizer.OURS
            return
        # All ranks compute, and the same micro-step: sharded models wait for each other, and only
        # the batches of one step agree on whether they have images.
        with_targets = (of_ranks > 0).sum(dim=0).tolist()
        if not any(with_targets):
            return
        index = with_targets.index(max(with_targets))
        targets = int(of_ranks[trainer.accelerator.process_index, index])
        found = find_normalizer(
            self._loss, batches[index], targets=max(1, targets), shift=self._shift
        )
        if not targets:
            found = Normalizer.UNKNOWN
        said = torch.tensor([int(found)], device=trainer.args.device)
        self._normalizer = Normalizer(int(trainer.accelerator.gather(said).max()))
        if self._normalizer is Normalizer.NEITHER:
            name = "compute_loss_func" if trainer.compute_loss_func is not None else "model"
            raise ValueError(
                f"the loss of `{name}` must be a mean over targets, or their sum divided by "
                "`num_items_in_batch`, but is neither: told two and four times as many items, or "
                "given a sample twice, it does not change as either of those would. It is scaled "
                "twice, or not at all. Divide by `num_items_in_batch`, and by nothing else."
            )

    def _loss(self, batch: Mapping[str, Any], items: int) -> float:
        """Return the loss of a batch without gradients, and leave the generators as they were."""
        trainer = self._trainer
        trainer.model_wrapped.eval()
        device = trainer.args.device
        inputs, told = send_to_device(dict(batch), device), torch.tensor(items, device=device)
        generators = [device] if device.type == "cuda" else []
        with torch.no_grad(), torch.random.fork_rng(generators):
            loss = trainer.compute_loss(trainer.model_wrapped, inputs, num_items_in_batch=told)
            return float(loss)
