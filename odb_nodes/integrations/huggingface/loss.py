"""Weighs the loss of each batch by its share of the optimizer step, exactly once."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from accelerate.utils import send_to_device

from odb_nodes._compat import transformers as compat
from odb_nodes._core.user_warning import warn_user
from odb_nodes.integrations.huggingface.samples import has_pairs
from odb_nodes.sample import IGNORE_INDEX
from odb_nodes.step_info import StepInfo

SAME = 1e-4  # relative tolerance of "unchanged"; a divided loss would halve instead
INVERSE = 5e-2  # relative tolerance of "inversely proportional"; leaves room for half precision

LABELS, TARGETS, SAMPLES, TOLD = range(4)  # what ranks tell each other, of each micro-step


class LossKind(enum.IntEnum):
    """What the loss of a batch is."""

    UNKNOWN = 0  # until a batch has supervised tokens
    DIVIDED = 1  # a sum, divided by `num_items_in_batch`
    MEAN = 2  # over the batch: it is weighed by its share of what it is a mean over
    OTHER = 3  # an error


_GIVEN = {"divided": LossKind.DIVIDED, "token_mean": LossKind.MEAN, "sample_mean": LossKind.MEAN}


@dataclass(kw_only=True)
class MicroStep:
    """A batch on its way through the `Trainer`, and the multiplier of its loss."""

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
    """Makes the gradient of an optimizer step that of the mean over all its targets or samples.

    A loss that takes `num_items_in_batch` is told the targets of all ranks and micro-steps, and
    divides by them. Any other is a mean, and is multiplied by the batch's share of what that is
    over. Models may take `**kwargs` and ignore them, so the first step checks it, once.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._kind = _GIVEN.get(trainer.odb.loss_is, LossKind.UNKNOWN)
        self._tells_items = False
        self._unit = LABELS  # what a mean loss of the optimizer step is over
        self._total = 1  # of these, on all ranks
        self._ranks = 1
        self._is_warned = False
        self.waiting: deque[MicroStep] = deque()
        self.active: MicroStep | None = None

    @cached_property
    def _loss_is(self) -> str | None:
        """What the configuration says of the loss, or else what is known of it."""
        trainer = self._trainer
        given: str | None = trainer.odb.loss_is
        reduction = None if given else compat.ctc_reduction(trainer)
        if reduction not in (None, "mean"):
            raise ValueError(
                '`ctc_loss_reduction` of the config of the model must be "mean", but is '
                f"{reduction!r}: a sum is no mean, and is not divided by `num_items_in_batch`. Set "
                '`model.config.ctc_loss_reduction = "mean"`.'
            )
        is_of_samples = reduction == "mean" or (given is None and has_pairs(trainer))
        return "sample_mean" if is_of_samples else given

    @cached_property
    def _shift(self) -> bool:
        """Whether the first label of a row is no target."""
        given: bool | None = self._trainer.odb.shift_labels
        return compat.shifts_labels(self._trainer.model) if given is None else given

    # --- an optimizer step ------------------------------------------------------------------------

    def weigh(self, batches: list[dict[str, Any]], infos: list[StepInfo]) -> torch.Tensor | None:
        """Settle the weight of each batch, and return the `num_items_in_batch` to be told, if any.

        Batches without targets are given some, which weigh nothing, where a mean would be NaN.
        """
        trainer, device = self._trainer, self._trainer.args.device
        counts = [self._targets(batch) for batch in batches]
        mine = [
            [
                0 if info.is_filler else count or 0,
                info.local_targets,
                info.local_samples,
                0 if count is None else 1 + bool({"labels", "shift_labels"} & {*batch}),
            ]
            for batch, count, info in zip(batches, counts, infos, strict=True)
        ]
        # (R, S, 4), one message: ranks decide alike, whatever their own batches are.
        of_ranks = trainer.accelerator.gather(torch.tensor([mine], device=device))
        self._unit = unit = self._unit_of(of_ranks[..., TOLD] > 0)
        self._ranks, self._total = len(of_ranks), max(1, int(of_ranks[..., unit].sum()))
        # The `Trainer` tells nothing of labels by other names.
        if unit == LABELS and bool((of_ranks[..., TOLD] == 2).all()):
            self._tells_items = self._is_divided(batches, of_ranks[..., LABELS])
        else:
            self._tells_items = False
        self.waiting = deque(
            self._micro_step(info, own[unit]) for info, own in zip(infos, mine, strict=True)
        )
        if self._tells_items:
            total = torch.tensor(self._total, device=device)
            return total / compat.num_items_divisor(trainer)
        if unit != SAMPLES:  # A sample without targets is one, and its loss is its own.
            for batch, count in zip(batches, counts, strict=True):
                if count == 0:
                    give_targets(batch)
        return None

    def weigh_part(self, batch: dict[str, Any], info: StepInfo) -> MicroStep:
        """Return the weight of a part of a batch of the optimizer step, and give it targets."""
        units = self.units(batch, info)
        if not self._tells_items and self._unit != SAMPLES and self._targets(batch) == 0:
            give_targets(batch)
        return self._micro_step(info, units)

    def units(self, batch: dict[str, Any], info: StepInfo) -> int:
        """Return how many a batch has of what the loss of the optimizer step is a mean over."""
        if self._unit == LABELS:
            return self._targets(batch) or 0
        return info.local_targets if self._unit == TARGETS else info.local_samples

    def factor_without(self, units: int) -> float:
        """Return what a loss is multiplied by where the mean is over so many less, on all ranks."""
        rest = self._total - units
        return self._total / rest if rest > 0 else 0.0

    def next(self, num_items_in_batch: Any) -> MicroStep:
        """Return the weight of the next batch, whose `training_step` was told so many items."""
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
        """Within the block, `compute_loss` weighs its loss by that of a batch."""
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

    def _targets(self, batch: dict[str, Any]) -> int | None:
        return count_targets(batch, shift=self._shift, names=self._trainer.label_names or ())

    def _micro_step(self, info: StepInfo, units: int) -> MicroStep:
        """Return the weight of a batch, which makes up for the `Trainer`'s own division."""
        share = 1.0 if self._tells_items else units * self._ranks / self._total
        divisor = compat.loss_divisor(self._trainer, is_told=self._tells_items)
        return MicroStep(info=info, factor=0.0 if info.is_filler else share * divisor)

    def _unit_of(self, has_labels: torch.Tensor) -> int:
        """Return which of the counts a mean loss is over."""
        if self._loss_is == "sample_mean":
            return SAMPLES
        if has_labels.all():
            return LABELS
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
        if self._loss_is == "token_mean":
            return TARGETS
        if not (self._is_warned or self._trainer.args.process_index):
            self._is_warned = True
            warn_user(
                "the batches have no labels (`label_names` of the arguments are "
                f"{list(self._trainer.label_names or ())}), so that each loss is taken for a mean "
                'over the samples of its batch. If it is, give `loss_is="sample_mean"` to the '
                '`ODBConfig`. If it is a mean over tokens, give `loss_is="token_mean"`, and their '
                "numbers by `observe`."
            )
        return SAMPLES

    # --- what the loss is -------------------------------------------------------------------------

    def _is_divided(self, batches: list[dict[str, Any]], of_ranks: torch.Tensor) -> bool:
        """Return whether the loss divides by what it is told; of_ranks (R, S) are the targets."""
        if self._kind == LossKind.UNKNOWN:
            if compat.takes_num_items(self._trainer):
                self._check(batches, of_ranks)
            else:
                self._kind = LossKind.MEAN
        return self._kind == LossKind.DIVIDED

    def _check(self, batches: list[dict[str, Any]], of_ranks: torch.Tensor) -> None:
        """Compute a loss for several numbers of items, on all ranks alike."""
        trainer = self._trainer
        # All ranks compute, and the same micro-step: sharded models wait for each other, and only
        # the batches of one step agree on whether they have images.
        with_targets = (of_ranks > 0).sum(dim=0)
        if not with_targets.any():
            return
        index = int(with_targets.argmax())
        targets = int(of_ranks[trainer.accelerator.process_index, index])
        found = loss_kind(self._loss_of, batches[index], targets=max(1, targets), shift=self._shift)
        own = torch.tensor([found if targets else LossKind.UNKNOWN], device=trainer.args.device)
        self._kind = LossKind(int(trainer.accelerator.gather(own).max()))
        if self._kind == LossKind.OTHER:
            name = "compute_loss_func" if trainer.compute_loss_func is not None else "model"
            raise ValueError(
                f"the loss of `{name}` must be a mean over targets, or their sum divided by "
                "`num_items_in_batch`, but is neither: told another number of items, or given a "
                "sample twice, it does not change as either of those would. It is scaled "
                "twice, or not at all. Divide by `num_items_in_batch`, and by nothing else. Or, if "
                'it is a mean after all, give `loss_is="token_mean"` or `"sample_mean"` to the '
                "`ODBConfig`."
            )

    def _loss_of(self, batch: Mapping[str, Any], items: int) -> float:
        """Return a loss without gradients, and leave torch's generators as they were."""
        trainer, device = self._trainer, self._trainer.args.device
        model = trainer.model_wrapped
        model.eval()  # The `Trainer` sets it to training at each step.
        inputs, told = send_to_device(dict(batch), device), torch.tensor(items, device=device)
        generators = [device] if device.type == "cuda" else []
        with torch.no_grad(), torch.random.fork_rng(generators):
            return float(trainer.compute_loss(model, inputs, num_items_in_batch=told))


def loss_kind(
    loss_of: Callable[[Mapping[str, Any], int], float],
    batch: Mapping[str, Any],
    *,
    targets: int,
    shift: bool,
) -> LossKind:
    """Find out what a loss is, by three of them.

    A sum that is divided is a / n + b for n items, where b may be the loss of a router. Twice as
    many items take a / 2n off, and its samples given twice add a / n. A mean changes by neither.
    """
    sample = sample_with_targets(batch, shift=shift)
    given, items = sample or batch, 2 * targets
    base, fewer = loss_of(given, items), loss_of(given, 2 * items)
    if sample is None:  # half the items do as well, but not for a sum that nothing divides
        more = loss_of(given, targets)
    else:
        more = loss_of({key: torch.cat((value, value)) for key, value in sample.items()}, items)
    share, size = 2 * (base - fewer), max(abs(base), abs(fewer))
    is_mean = abs(base - fewer) <= SAME * size
    if abs(more - base - share) > INVERSE * (size if is_mean else abs(share)):
        return LossKind.OTHER
    return LossKind.MEAN if is_mean else LossKind.DIVIDED


def sample_with_targets(batch: Mapping[str, Any], *, shift: bool) -> dict[str, Any] | None:
    """Return a batch of one sample that has targets, where a batch has a row for each."""
    if not all(isinstance(value, torch.Tensor) and value.ndim for value in batch.values()):
        return None
    rows = {len(value) for value in batch.values()}
    for row in range(rows.pop()) if len(rows) == 1 else ():
        sample = {key: value[row : row + 1] for key, value in batch.items()}
        if count_targets(sample, shift=shift):
            return sample
    return None


def count_targets(
    batch: Mapping[str, Any], *, shift: bool, names: Sequence[str] = ()
) -> int | None:
    """Return over how many targets a mean loss of the batch is, or None where it has no labels."""
    given = (batch.get(name) for name in ("shift_labels", "labels", *names))
    labels = next((one for one in given if isinstance(one, torch.Tensor)), None)
    if labels is None:
        return None
    if labels.is_floating_point():  # a regression, or several labels per sample
        return labels.numel()
    ids = batch.get("input_ids")
    is_per_token = labels.ndim > 1 and (ids is None or labels.shape == ids.shape)
    if shift and is_per_token and "shift_labels" not in batch:
        labels = labels[..., 1:]
    return int(labels.ne(IGNORE_INDEX).sum())


def give_targets(batch: MutableMapping[str, Any]) -> None:
    """Give a batch without targets some, so that its mean loss, weighed by 0, is not NaN."""
    for key in ("labels", "shift_labels"):
        if isinstance(labels := batch.get(key), torch.Tensor):
            batch[key] = torch.zeros_like(labels)
