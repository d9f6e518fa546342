"""Weighs the loss of each batch by its share of the optimizer step, exactly once."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from accelerate.utils import send_to_device

from odb_nodes._compat import transformers as compat
from odb_nodes._core.user_warning import warn_user
from odb_nodes.collate.check_packing import MOST_LEAK, leak, mixing_error, pretrained
from odb_nodes.integrations.huggingface.samples import has_pairs
from odb_nodes.sample import IGNORE_INDEX
from odb_nodes.step_info import StepInfo

SAME = 5e-2  # relative tolerance of a mean that stays the same; leaves room for half precision

LABELS, TARGETS, SAMPLES, HAS_LABELS = range(4)  # what ranks tell each other, of each micro-step


@dataclass(kw_only=True)
class MicroStep:
    """A batch on its way through the `Trainer`."""

    info: StepInfo
    items: torch.Tensor | None  # the `num_items_in_batch` that its loss is told: its own targets
    factor: float  # of its loss, a mean over the batch
    is_scaled: bool = False

    def scale(self, result: Any) -> Any:
        """Return what `compute_loss` returned, a loss or (loss, outputs), with the loss scaled."""
        self.is_scaled = True
        if isinstance(result, tuple):
            return (result[0] * self.factor, *result[1:])
        return result * self.factor


class LossWeigher:
    """Makes the gradient of an optimizer step that of the mean over all its targets or samples.

    A loss that takes `num_items_in_batch` is told the targets of its own batch. So each loss is a
    mean over its batch, whether it divides by that number or not, and is multiplied by the share
    of the batch in the step.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._unit = LABELS  # what the loss of the optimizer step is a mean over
        self._total = self._ranks = 1  # how many of these all ranks have
        self._packs = trainer.odb_budget.layout == "packed"  # until it is tried
        is_known = trainer.odb.loss_is is not None or not compat.takes_num_items(trainer)
        self._is_checked = self._packs or is_known
        self._is_warned = False
        self.waiting: deque[MicroStep | None] = deque()
        """Of the batches to come; `None` of one that only fills up the optimizer step."""
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

    def weigh(self, batches: list[dict[str, Any]], infos: list[StepInfo], fills: int = 0) -> None:
        """Settle the weights of the batches of a step, before which come some that fill it up.

        Batches without targets are given some, which weigh nothing, where a mean would be NaN.
        """
        trainer, device = self._trainer, self._trainer.args.device
        counts = [self._targets(batch) for batch in batches]
        mine = [
            [
                0 if info.is_filler else count or 0,
                info.local_targets,
                info.local_samples,
                count is not None,
            ]
            for count, info in zip(counts, infos, strict=True)
        ]
        # (R, S, 4), one message: ranks decide alike, whatever their own batches are.
        of_ranks = trainer.accelerator.gather(torch.tensor([mine], device=device))
        self._unit = unit = self._unit_of(of_ranks[..., HAS_LABELS] > 0)
        self._ranks, self._total = len(of_ranks), max(1, int(of_ranks[..., unit].sum()))
        if self._packs:
            self._check_packing(batches, of_ranks[..., SAMPLES])
        elif unit == LABELS and not self._is_checked:
            self._check(batches, of_ranks[..., LABELS])
        steps = zip(batches, infos, mine, strict=True)
        weights = [self._micro_step(batch, info, own[unit]) for batch, info, own in steps]
        self.waiting = deque([*[None] * fills, *weights])

    def weigh_part(self, batch: dict[str, Any], info: StepInfo) -> MicroStep:
        """Return the weight of a part of a batch of the optimizer step, and give it targets."""
        return self._micro_step(batch, info, self.units(batch, info))

    def units(self, batch: dict[str, Any], info: StepInfo) -> int:
        """Return how many a batch has of what the loss of the optimizer step is a mean over."""
        if self._unit == LABELS:
            return self._targets(batch) or 0
        return info.local_targets if self._unit == TARGETS else info.local_samples

    def factor_without(self, units: int) -> float:
        """Return what a loss is multiplied by where the mean is over so many less, on all ranks."""
        rest = self._total - units
        return self._total / rest if rest > 0 else 0.0

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

    def _targets(self, batch: Mapping[str, Any]) -> int | None:
        return count_targets(batch, shift=self._shift, names=self._trainer.label_names or ())

    def _micro_step(self, batch: dict[str, Any], info: StepInfo, units: int) -> MicroStep:
        """Return the weight of a batch, which makes up for the scale that the `Trainer` gives."""
        trainer, items, targets = self._trainer, None, self._targets(batch)
        # The `Trainer` tells nothing of labels by other names.
        is_told = self._unit == LABELS and bool({"labels", "shift_labels"} & {*batch})
        if is_told and compat.takes_num_items(trainer):
            items = torch.tensor(max(1, targets or 0), device=trainer.args.device)
        if self._unit != SAMPLES and targets == 0:
            give_targets(batch)  # A sample without targets is one, and its loss is its own.
        share = 0.0 if info.is_filler else units * self._ranks / self._total
        scale = compat.loss_scale(trainer, is_told=items is not None)
        return MicroStep(info=info, items=items, factor=share / scale)

    def _unit_of(self, has_labels: torch.Tensor) -> int:
        """Return which of the counts the loss is a mean over."""
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

    # --- whether the loss is a mean ---------------------------------------------------------------

    def _check(self, batches: list[dict[str, Any]], of_ranks: torch.Tensor) -> None:
        """Reject a loss that changes where a sample is given twice; of_ranks (R, S) are targets."""
        trainer = self._trainer
        # All ranks compute, and the same micro-step: sharded models wait for each other, and only
        # the batches of one step agree on whether they have images.
        with_targets = (of_ranks > 0).sum(dim=0)
        if not with_targets.any():
            return
        self._is_checked = True
        # Ranks have batches of one kind. Of images no sample can be cut out: each loss is computed
        # all the same, since other ranks may wait in the model.
        once = twice = self._sample_of(batch := batches[int(with_targets.argmax())])
        if once is not None:
            twice = {key: torch.cat((value, value)) for key, value in once.items()}
        first, second = (self._loss_of(batch if one is None else one) for one in (once, twice))
        changes = abs(first - second) > SAME * max(abs(first), abs(second))
        own = torch.tensor([changes], device=trainer.args.device)
        if trainer.accelerator.gather(own).any():
            name = "compute_loss_func" if trainer.compute_loss_func is not None else "model"
            raise ValueError(
                f"the loss of `{name}` must be a mean over targets, or their sum divided by "
                f"`num_items_in_batch`, but is neither: given a sample twice, it is {second:.4g} "
                f"in place of {first:.4g}. It is scaled twice, or not at all. Divide by "
                "`num_items_in_batch`, and by nothing else. Or, if it is a mean after all, give "
                '`loss_is="token_mean"` or `"sample_mean"` to the `ODBConfig`.'
            )

    def _check_packing(self, batches: list[dict[str, Any]], of_ranks: torch.Tensor) -> None:
        """Reject a model in which the samples of a row see each other; of_ranks (R, S) samples."""
        several = (of_ranks > 1).any(dim=0)
        if not several.any() or pretrained(self._trainer.model) is None:
            return
        self._packs = False  # All ranks compute the same micro-step, once.
        batch = batches[int(several.to(torch.uint8).argmax())]
        found = leak(self._trainer.model, batch, lambda: self._loss_of(batch)) or 0.0
        own = torch.tensor([found > MOST_LEAK], device=self._trainer.args.device)
        if self._trainer.accelerator.gather(own).any():
            raise mixing_error(self._trainer.model)

    def _sample_of(self, batch: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return a batch of one sample that has targets, where a batch has a row for each."""
        if not all(isinstance(value, torch.Tensor) and value.ndim for value in batch.values()):
            return None
        rows = {len(value) for value in batch.values()}
        for row in range(rows.pop()) if len(rows) == 1 else ():
            sample = {key: value[row : row + 1] for key, value in batch.items()}
            if self._targets(sample):
                return sample
        return None

    def _loss_of(self, batch: Mapping[str, Any]) -> float:
        """Return a loss without gradients, and leave torch's generators as they were."""
        trainer, device = self._trainer, self._trainer.args.device
        model = trainer.model_wrapped
        model.eval()  # The `Trainer` sets it to training at each step.
        items = torch.tensor(max(1, self._targets(batch) or 0), device=device)
        inputs = send_to_device(dict(batch), device)
        generators = [device] if device.type == "cuda" else []
        with torch.no_grad(), torch.random.fork_rng(generators):
            return float(trainer.compute_loss(model, inputs, num_items_in_batch=items))


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
