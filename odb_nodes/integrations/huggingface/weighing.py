"""Weighs every batch's loss by its share of the optimizer step, exactly once."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from odb_nodes._compat import transformers as compat
from odb_nodes.integrations.huggingface.loss import (
    Normalizer,
    count_targets,
    find_normalizer,
    give_targets,
)
from odb_nodes.integrations.huggingface.probing import loss_of, twin_of
from odb_nodes.step_info import StepInfo

_LABELS, _TARGETS, _SAMPLES, _HAS_LABELS, _IS_TOLD = range(5)  # what ranks tell each other
_BY_NAME = {
    "divided": Normalizer.TRAINER,
    "token_mean": Normalizer.OURS,
    "sample_mean": Normalizer.OURS,
}


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
    is a mean, and is multiplied by the batch's share of what the mean is over: its targets, or its
    samples. Which one it is, `ODBConfig.loss_is` says, or the first step that has targets shows.

    Args:
        trainer: the trainer that computes the losses; its model may come later.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._loss_is = trainer.odb.loss_is
        self._normalizer = _BY_NAME.get(self._loss_is, Normalizer.UNKNOWN)
        self._tells_items = False
        self._is_warned = False
        self.waiting: deque[MicroStep] = deque()
        self.active: MicroStep | None = None

    @cached_property
    def _shift(self) -> bool:
        """Whether the first label of a row is no target."""
        given: bool | None = self._trainer.odb.shift_labels
        return compat.shifts_labels(self._trainer.model) if given is None else given

    def weigh(self, batches: list[dict[str, Any]], infos: list[StepInfo]) -> torch.Tensor | None:
        """Settle what the loss of each batch of an optimizer step is multiplied by.

        Args:
            batches: the batches of the step; those without targets are given some.
            infos: the `StepInfo` of each batch.

        Returns:
            The `num_items_in_batch` that the `Trainer` is to pass on, or None.

        Raises:
            ValueError: the loss is neither a mean nor divided by `num_items_in_batch`, or only some
                of the batches have labels.
        """
        trainer = self._trainer
        names = compat.label_names(trainer)
        counts = [count_targets(batch, shift=self._shift, names=names) for batch in batches]
        is_told = [{"labels", "shift_labels"} & {*batch} for batch in batches]
        mine = [
            [
                0 if info.is_filler else count or 0
                for count, info in zip(counts, infos, strict=True)
            ],
            [info.local_targets for info in infos],
            [info.local_samples for info in infos],
            [int(count is not None) for count in counts],
            [int(bool(told)) for told in is_told],
        ]
        # One message, on all ranks alike: they decide the same, whatever their own batches are.
        device = trainer.args.device
        of_ranks = trainer.accelerator.gather(torch.tensor([mine], device=device))
        over = self._over(of_ranks)
        if over is not _LABELS or not self._is_divided(batches, of_ranks):
            for batch, count in zip(batches, counts, strict=True):
                if count == 0:
                    give_targets(batch)
            share = len(of_ranks) / max(1, int(of_ranks[:, over].sum()))
            self._note(infos, [count * share for count in mine[over]], None)
            return None
        items = of_ranks[:, over].sum().clamp(min=1) / compat.num_items_divisor(trainer)
        return self._note(infos, [1.0] * len(infos), items)

    def _over(self, of_ranks: torch.Tensor) -> int:
        """Return which of the counts a mean loss is over.

        Args:
            of_ranks: (R, 5, S) int64, the counts of each rank and micro-step.
        """
        if self._loss_is == "sample_mean":
            return _SAMPLES
        has_labels = of_ranks[:, _HAS_LABELS].bool()
        if has_labels.all():
            return _LABELS
        if has_labels.any():
            raise ValueError(
                "all batches of an optimizer step must have labels, or none, but only some have. "
                "Give `loss_is` to the `ODBConfig`: what the loss of each batch is a mean over."
            )
        if self._loss_is == "divided":
            raise ValueError(
                '`loss_is` must not be "divided" where the batches have no `labels`, which '
                "`num_items_in_batch` counts."
            )
        if self._loss_is is not None:
            return _TARGETS
        self._warn_once()
        return _SAMPLES

    def _warn_once(self) -> None:
        """Warn that nothing shows what the loss is a mean over."""
        if self._is_warned or self._trainer.args.process_index:
            return
        self._is_warned = True
        warnings.warn(
            "the batches have no labels (`label_names` of the arguments are "
            f"{compat.label_names(self._trainer)}), so that each loss is taken for a mean over "
            'the samples of its batch. If it is, give `loss_is="sample_mean"` to the `ODBConfig`. '
            'If it is a mean over tokens, give `loss_is="token_mean"`, and their numbers by '
            "`observe`.",
            stacklevel=2,
        )

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

    def _is_divided(self, batches: list[dict[str, Any]], of_ranks: torch.Tensor) -> bool:
        """Return whether the loss of batches with labels is divided by what it is told."""
        if not of_ranks[:, _IS_TOLD].all():  # The `Trainer` tells nothing where there are others.
            return False
        if self._normalizer is Normalizer.UNKNOWN:
            self._find_normalizer(batches, of_ranks[:, _LABELS])
        return self._normalizer is Normalizer.TRAINER

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
        probe = partial(loss_of, twin_of(trainer))
        found = find_normalizer(probe, batches[index], targets=max(1, targets), shift=self._shift)
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
                "twice, or not at all. Divide by `num_items_in_batch`, and by nothing else. Or "
                "give `loss_is` to the `ODBConfig`, if it is a mean after all."
            )
