"""Weighs the loss of each batch by its share of the optimizer step."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch.nn.functional import cross_entropy

from odb_nodes._compat import transformers as compat
from odb_nodes._compat.accelerate import gathering_rows
from odb_nodes._support.user_warning import warn_user
from odb_nodes.core.collate.check_packing import MOST_LEAK, leak, mixing_error, pretrained
from odb_nodes.core.sample import IGNORE_INDEX
from odb_nodes.core.step_info import StepInfo
from odb_nodes.integrations.huggingface.samples import has_pairs
from odb_nodes.training.tasks.trainer_options import AnyWeights

TOLERANCE = 5e-2  # relative difference of two equal losses, in half precision

LABELS, TARGETS, SAMPLES, HAS_LABELS = range(4)  # columns that ranks gather for each micro-step


@dataclass(kw_only=True)
class MicroStep:
    """A batch on its way through the `Trainer`."""

    info: StepInfo
    items: torch.Tensor | None  # `num_items_in_batch` of the loss: the targets of this batch
    factor: float  # multiplies the loss, a mean over the batch
    tasks: AnyWeights | None = None  # weigh the losses of its tokens
    is_scaled: bool = False

    def scale(self, loss: torch.Tensor, position_ids: Any) -> torch.Tensor:
        """Return the weighed loss."""
        self.is_scaled = True
        if self.tasks is None:
            return loss * self.factor
        if loss.ndim == 0:
            raise ValueError(
                "`compute_loss` must return the loss of each token, (B, T), or the sum of each "
                "sample, (B,), with `task_weights`, but returned a single number. Give the "
                "trainer a `compute_loss_func` that returns them."
            )
        is_packed = len(loss) != len(self.info.row_tasks) and not self.info.is_filler
        if not is_packed:
            position_ids = None
        return self.tasks.loss(loss, self.info, position_ids=position_ids) * self.factor


class LossWeigher:
    """Weighs losses so that a step minimizes the mean over all of its targets, or samples.

    The loss of each batch is a mean over that batch, times the batch's share of the step.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._unit = LABELS  # the column whose mean is the loss of the optimizer step
        self._total = 1  # units of all ranks in the step
        self._ranks = 1
        self.tasks = trainer.odb.task_weights
        self._packs = trainer.odb_budget.layout == "packed"  # False once it is checked
        is_declared = trainer.odb.loss_is is not None or not compat.takes_num_items(trainer)
        self._is_checked = self._packs or is_declared
        self._is_warned = False
        self.waiting: deque[MicroStep | None] = deque()
        """The batches to come of the step; `None` for a copy that fills up the step."""
        self.active: MicroStep | None = None

    @cached_property
    def _loss_is(self) -> str | None:
        """`loss_is` of the configuration, or else the kind that the model implies."""
        trainer = self._trainer
        declared: str | None = trainer.odb.loss_is
        reduction = None if declared else compat.ctc_reduction(trainer)
        if reduction not in (None, "mean"):
            raise ValueError(
                '`ctc_loss_reduction` of the config of the model must be "mean", but is '
                f"{reduction!r}: a sum is neither a mean nor divided by `num_items_in_batch`. Set "
                '`model.config.ctc_loss_reduction = "mean"`.'
            )
        is_of_samples = reduction == "mean" or (declared is None and has_pairs(trainer))
        return "sample_mean" if is_of_samples else declared

    # --- an optimizer step ------------------------------------------------------------------------

    def weigh(self, batches: list[dict[str, Any]], infos: list[StepInfo], fills: int = 0) -> None:
        """Set the weights of the batches of a step, which `fills` copies precede."""
        trainer, device = self._trainer, self._trainer.args.device
        counts = [self._targets(batch) for batch in batches]
        rows = [
            [
                0 if info.is_filler else count or 0,
                info.local_targets,
                info.local_samples,
                count is not None,
            ]
            for count, info in zip(counts, infos, strict=True)
        ]
        # (R, S, 4): all ranks decide from the same counts.
        rank_counts = trainer.accelerator.gather(torch.tensor([rows], device=device))
        if self._packs:
            self._check_packing(batches, rank_counts[..., SAMPLES])
        self.waiting = deque([None] * fills)
        if self.tasks is not None:
            self.waiting.extend(map(self._task_step, batches, infos))
            return
        self._unit = unit = self._unit_of(rank_counts[..., HAS_LABELS] > 0)
        self._ranks = len(rank_counts)
        self._total = max(1, int(rank_counts[..., unit].sum()))
        if unit == LABELS and not self._is_checked:
            self._check_mean(batches, rank_counts[..., LABELS])
        self.waiting.extend(map(self._micro_step, batches, infos, [row[unit] for row in rows]))

    def weigh_part(self, batch: dict[str, Any], info: StepInfo) -> MicroStep:
        """Return the weight of a batch of the step, or of a part, and give it targets."""
        if self.tasks is not None:
            return self._task_step(batch, info)
        return self._micro_step(batch, info, self.units(batch, info))

    def units(self, batch: dict[str, Any], info: StepInfo) -> int:
        """Return how many units of the step's mean a batch has: targets or samples."""
        if self._unit == LABELS:
            return self._targets(batch) or 0
        return info.local_targets if self._unit == TARGETS else info.local_samples

    def factor_without(self, units: int) -> float:
        """Return the factor of losses once all ranks together have skipped `units` units."""
        kept = self._total - units
        return self._total / kept if kept > 0 else 0.0

    @contextmanager
    def computing(self, micro_step: MicroStep) -> Iterator[None]:
        """Within the block, `compute_loss` applies the weight of this micro-step."""
        self.active = micro_step
        try:
            with gathering_rows(self._trainer.accelerator):
                yield
        finally:
            self.active = None
        if not micro_step.is_scaled:
            raise ValueError(
                "`compute_loss` must call `super().compute_loss`, in which `ODBTrainerMixin` "
                f"weighs the loss, but `{type(self._trainer).__name__}` overrides it without that "
                "call. Add it, or pass a `Trainer` with this method to `configure_trainer`."
            )

    def _targets(self, batch: Mapping[str, Any]) -> int | None:
        names = self._trainer.label_names or ()
        return count_targets(batch, shift=shifts(self._trainer), names=names)

    def _micro_step(self, batch: dict[str, Any], info: StepInfo, units: int) -> MicroStep:
        """Return the weight of a batch, which undoes the scale of the `Trainer`."""
        trainer = self._trainer
        items = None
        targets = self._targets(batch)
        # The `Trainer` passes no `num_items_in_batch` for labels under other names.
        has_items = self._unit == LABELS and bool({"labels", "shift_labels"} & {*batch})
        if has_items and compat.takes_num_items(trainer):
            items = torch.tensor(max(1, targets or 0), device=trainer.args.device)
        if self._unit != SAMPLES and targets == 0:
            give_targets(batch)
        share = 0.0 if info.is_filler else units * self._ranks / self._total
        scale = compat.loss_scale(trainer, has_items=items is not None)
        return MicroStep(info=info, items=items, factor=share / scale)

    def _task_step(self, batch: dict[str, Any], info: StepInfo) -> MicroStep:
        targets = self._targets(batch)
        if targets not in (None, info.local_targets) and not info.is_filler:
            raise ValueError(
                f"the batch of step {info.step} has {targets} supervised tokens, but its samples "
                f"have {info.local_targets}, which `task_weights` use. Let `observe` return "
                "`Observation(tokens, targets, task=...)`, and the collator keep the labels."
            )
        scale = compat.loss_scale(self._trainer, has_items=False)
        return MicroStep(info=info, items=None, factor=1 / scale, tasks=self.tasks)

    def _unit_of(self, has_labels: torch.Tensor) -> int:
        """Return the column of counts that the loss is a mean over."""
        if self._loss_is == "sample_mean":
            return SAMPLES
        if has_labels.all():
            return LABELS
        if has_labels.any():
            raise ValueError(
                "all batches of an optimizer step must have labels, or none, but only some have. "
                "Give `loss_is` to the `ODBConfig`."
            )
        if self._loss_is == "divided":
            raise ValueError(
                '`loss_is` must not be "divided" if the batches have no `labels`, which '
                "`num_items_in_batch` counts."
            )
        if self._loss_is == "token_mean":
            return TARGETS
        if not (self._is_warned or self._trainer.args.process_index):
            self._is_warned = True
            warn_user(
                "the batches have no labels (`label_names` of the arguments are "
                f"{list(self._trainer.label_names or ())}), so each loss is assumed to be a mean "
                'over the samples of its batch. If it is, give `loss_is="sample_mean"` to the '
                '`ODBConfig`. If it is a mean over tokens, give `loss_is="token_mean"`, and let '
                "`observe` count these."
            )
        return SAMPLES

    # --- whether the loss is a mean ---------------------------------------------------------------

    def _check_mean(self, batches: list[dict[str, Any]], rank_counts: torch.Tensor) -> None:
        """Reject a loss that differs for a repeated sample; rank_counts (R, S) are targets."""
        trainer = self._trainer
        # All ranks compute the same micro-step: sharded models need each other, and batches of the
        # same step agree on whether they have images.
        with_targets = (rank_counts > 0).sum(dim=0)
        if not with_targets.any():
            return
        self._is_checked = True
        batch = batches[int(with_targets.argmax())]
        sample = self._sample_of(batch)
        if sample is None:  # No sample can be cut out, but other ranks may wait in the model.
            once = twice = batch
        else:
            once = sample
            twice = {key: torch.cat((value, value)) for key, value in sample.items()}
        first, second = self._loss_of(once), self._loss_of(twice)
        changes = abs(first - second) > TOLERANCE * max(abs(first), abs(second))
        if trainer.accelerator.gather(torch.tensor([changes], device=trainer.args.device)).any():
            name = "compute_loss_func" if trainer.compute_loss_func is not None else "model"
            raise ValueError(
                f"the loss of `{name}` must be a mean over targets, or their sum divided by "
                f"`num_items_in_batch`, but is neither: for a sample twice, it is {second:.4g} "
                f"instead of {first:.4g}. It is scaled twice, or not at all. Divide by "
                "`num_items_in_batch`, and by nothing else. Or, if it is a mean after all, give "
                '`loss_is="token_mean"` or `"sample_mean"` to the `ODBConfig`.'
            )

    def _check_packing(self, batches: list[dict[str, Any]], rank_counts: torch.Tensor) -> None:
        """Reject a model that mixes the samples of a row; rank_counts (R, S) are samples."""
        several = (rank_counts > 1).any(dim=0)
        if not several.any() or pretrained(self._trainer.model) is None:
            return
        self._packs = False  # All ranks compute the same micro-step, once.
        batch = batches[int(several.to(torch.uint8).argmax())]
        change = leak(self._trainer.model, batch, lambda: self._loss_of(batch)) or 0.0
        leaks = torch.tensor([not change <= MOST_LEAK], device=self._trainer.args.device)
        if self._trainer.accelerator.gather(leaks).any():
            raise mixing_error(self._trainer.model)

    def _sample_of(self, batch: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return a batch of the first sample with targets; `None` unless each sample has a row."""
        if not all(isinstance(value, torch.Tensor) and value.ndim for value in batch.values()):
            return None
        rows = {len(value) for value in batch.values()}
        for row in range(rows.pop()) if len(rows) == 1 else ():
            sample = {key: value[row : row + 1] for key, value in batch.items()}
            if self._targets(sample):
                return sample
        return None

    def _loss_of(self, batch: Mapping[str, Any]) -> float:
        """Return a loss without gradients; torch's generators do not advance."""
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
    """Return the number of targets of a batch; `None` if it has no labels."""
    values = (batch.get(name) for name in ("shift_labels", "labels", *names))
    labels = next((value for value in values if isinstance(value, torch.Tensor)), None)
    if labels is None:
        return None
    if labels.is_floating_point():  # a regression, or several labels per sample
        return labels.numel()
    ids = batch.get("input_ids")
    is_per_token = labels.ndim > 1 and (ids is None or labels.shape == ids.shape)
    if shift and is_per_token and "shift_labels" not in batch:
        labels = labels[..., 1:]
    return int(labels.ne(IGNORE_INDEX).sum())


def shifts(trainer: Any) -> bool:
    """Return whether the first label of a row is no target."""
    declared: bool | None = trainer.odb.shift_labels
    if declared is None:
        declared = compat.smoother_shifts(trainer)
    return compat.shifts_labels(trainer.model) if declared is None else declared


def token_losses(trainer: Any, outputs: Any, labels: Any, **_: Any) -> torch.Tensor:
    """Return the cross entropy of each label, (B, T), or (B, T - 1) if labels are shifted."""
    logits = outputs.get("logits") if isinstance(outputs, Mapping) else None
    if logits is None or labels is None or labels.is_floating_point():
        raise ValueError(
            "`compute_loss_func` must be given with `task_weights` if the model does not "
            "return the `logits` of integer `labels`. It returns the loss of each token, "
            "(B, T), 0 where it is not supervised, or the sum of each sample, (B,)."
        )
    if labels.ndim > 1 and shifts(trainer):
        logits, labels = logits[:, :-1], labels[:, 1:]
    return cross_entropy(
        logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32)),
        labels.flatten(),
        reduction="none",
        label_smoothing=trainer.args.label_smoothing_factor,
    ).view_as(labels)


def give_targets(batch: MutableMapping[str, Any]) -> None:
    """Give a batch without targets some: its loss has weight 0, but must not be NaN."""
    for key in ("labels", "shift_labels"):
        if isinstance(labels := batch.get(key), torch.Tensor):
            batch[key] = torch.zeros_like(labels)
