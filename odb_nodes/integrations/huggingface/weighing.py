"""Weighs every batch's loss by its share of the optimizer step, exactly once."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from odb_nodes._compat import transformers as compat
from odb_nodes._core.user_warning import warn_user
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
        self._normalizer = _BY_NAME.get(trainer.odb.loss_is, Normalizer.UNKNOWN)
        self._tells_items = False
        self._unit = _LABELS  # what a mean loss of the optimizer step is over
        self._total = 1  # of these, on all ranks
        self._share = 0.0  # weight of one of them
        self._is_warned = False
        self.waiting: deque[MicroStep] = deque()
        self.active: MicroStep | None = None

    @cached_property
    def _loss_is(self) -> str | None:
        """What the configuration says of the loss, or else what is known of it."""
        given: str | None = self._trainer.odb.loss_is
        reduction = None if given else compat.ctc_reduction(self._trainer)
        if reduction is None:
            return given
        if reduction != "mean":
            raise ValueError(
                '`ctc_loss_reduction` of the config of the model must be "mean", but is '
                f"{reduction!r}: a sum is no mean, and is not divided by `num_items_in_batch`. Set "
                '`model.config.ctc_loss_reduction = "mean"`.'
            )
        return "sample_mean"

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
            ValueError: the loss is neither a mean nor divided by `num_items_in_batch`, such as a
                sum of CTC, or only some of the batches have labels.
        """
        trainer = self._trainer
        counts = [self._targets(batch) for batch in batches]
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
        self._unit = over = self._over(of_ranks)
        self._total = max(1, int(of_ranks[:, over].sum()))
        self._share = len(of_ranks) / self._total
        self._tells_items = over is _LABELS and self._is_divided(batches, of_ranks)
        self.waiting = deque(map(self._micro_step, infos, mine[over]))
        if self._tells_items:
            items: torch.Tensor = of_ranks[:, over].sum().clamp(min=1)
            return items / compat.num_items_divisor(trainer)
        if over is not _SAMPLES:  # A sample without targets is one, and its loss is its own.
            for batch, count in zip(batches, counts, strict=True):
                if count == 0:
                    give_targets(batch)
        return None

    def weigh_part(self, batch: dict[str, Any], info: StepInfo) -> MicroStep:
        """Return the weight of a part of a batch of the optimizer step.

        Args:
            batch: the batch of the part; where its loss is a mean over no targets, it is given
                some.
            info: the `StepInfo` of the part.
        """
        units = self.units(batch, info)
        is_over_samples = self._unit is _SAMPLES
        if not (self._tells_items or is_over_samples) and self._targets(batch) == 0:
            give_targets(batch)
        return self._micro_step(info, units)

    def units(self, batch: dict[str, Any], info: StepInfo) -> int:
        """Return how many a batch has of what the loss of the optimizer step is a mean over."""
        if self._unit is _LABELS:
            return self._targets(batch) or 0
        return info.local_targets if self._unit is _TARGETS else info.local_samples

    def factor_without(self, units: int) -> float:
        """Return what a loss is multiplied by where the mean is over so many less, on all ranks."""
        rest = self._total - units
        return self._total / rest if rest > 0 else 0.0

    def _targets(self, batch: dict[str, Any]) -> int | None:
        names = compat.label_names(self._trainer)
        return count_targets(batch, shift=self._shift, names=names)

    def _micro_step(self, info: StepInfo, units: int) -> MicroStep:
        """Return the weight of a batch, which makes up for the `Trainer`'s own division."""
        divisor = compat.loss_divisor(self._trainer, is_told=self._tells_items)
        share = 1.0 if self._tells_items else units * self._share
        return MicroStep(info=info, factor=0.0 if info.is_filler else share * divisor)

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
        warn_user(
            "the batches have no labels (`label_names` of the arguments are "
            f"{compat.label_names(self._trainer)}), so that each loss is taken for a mean over "
            'the samples of its batch. If it is, give `loss_is="sample_mean"` to the `ODBConfig`. '
            'If it is a mean over tokens, give `loss_is="token_mean"`, and their numbers by '
            "`observe`."
        )

    def next(self, num_items_in_batch: Any) -> MicroStep:
        """Return the weight of the next batch of the optimizer step.

        Args:
            num_items_in_batch: what `training_step` was called with.

        Raises:
            ValueError: the loss would be normalized twice, or not at all.
        """
        if (num_items_in_batch is not None) != self._tells_items:
            raise ValueError(
                "`num_items_in_batch` must be what `get_batch_samples` returned, but is "
                f"{num_items_in_batch!r} now: the loss would be normalized "
                f"{'not at all' if self._tells_items else 'twice'}. A subclass overrides "
                "`get_batch_samples` or `training_step`: pass on what it was given."
            )
        return self.waiting.popleft()

    @contextmanager
    def computing(self, micro_step: MicroStep) -> Iterator[None]:
        """Make a batch the active one within the block.

        Raises:
            ValueError: its loss was not weighed.
        """
        self.active = micro_step
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
                "twice, or not at all. Divide by `num_items_in_batch`, and by nothing else. Or, if "
                'it is a mean after all, give `loss_is="token_mean"` or `"sample_mean"` to the '
                "`ODBConfig`."
            )
