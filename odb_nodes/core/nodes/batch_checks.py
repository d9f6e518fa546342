"""Compare batches with their plan, and warn of mistakes that no error would show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from odb_nodes._support.text import counted
from odb_nodes._support.user_warning import warn_user
from odb_nodes.core.planning import TokenBudget
from odb_nodes.core.sample import CLASS_KEYS, IGNORE_INDEX
from odb_nodes.core.sample_block import SampleBlock
from odb_nodes.core.step_info import StepInfo

_MOST_SHAPES = 4096  # no batch of a further shape is checked
_ALL_READ = 64  # the content of the first batch is read for each of so many shapes
_READ_EVERY = 16  # then for every 16th shape
_LEAST_REAL_SHARE = 0.75  # least unmasked share of a batch's tokens: below, samples hold padding
_SAME_TARGETS = 0.05  # largest relative difference between labels and targets
_COUNTED_AS = {
    "tokens": "the samples have no labels, so their tokens were counted",
    "samples": "the samples have one label each, or fractions as labels, so samples were counted",
}


class BatchChecks:
    """Checks the batches of a graph, and warns once of each kind of mistake.

    Only the first batch of each shape is checked, and the content of few batches is read, so the
    cost is negligible.
    """

    def __init__(self, budget: TokenBudget | None) -> None:
        self._budget = budget
        self._shapes: set[tuple[int, ...]] = set()
        self._warned_of: set[str] = set()
        self._trusts_labels = False

    def trust_labels(self) -> None:
        """Do not warn of weights, because the trainer counts the labels of each batch."""
        self._trusts_labels = True

    def check(self, group: SampleBlock, batch: Mapping[str, Any], info: StepInfo) -> None:
        """Warn of mistakes in a batch."""
        if info.local_samples and not info.optimizer_targets and not info.loss_scale:
            self._check_targets(info)
        ids = batch.get("input_ids", batch.get("inputs_embeds"))
        shape = tuple(ids.shape[:2]) if isinstance(ids, torch.Tensor) and ids.ndim > 1 else ()
        if shape and shape not in self._shapes and len(self._shapes) < _MOST_SHAPES:
            self._shapes.add(shape)
            self._check_shape(group, shape, info)
            seen = len(self._shapes)
            if seen <= _ALL_READ or seen % _READ_EVERY == 0:
                self._check_padding(group, batch, shape)
            if self._is_weighed(info):
                self._check_labels(batch, info, shape)
                self._check_decoder(batch, info, shape)
        if "+" in info.counted and "samples" in info.counted and not self._trusts_labels:
            self._warn(
                "counted",
                f"the targets of step {info.step} are not alike: {info.counted}. Some samples have "
                "one label each, other samples one per token, so `loss_scale` weighs the latter "
                "many times as much. Give all samples labels of one kind, or let `observe` return "
                "an `Observation` with `targets`.",
            )

    def _check_targets(self, info: StepInfo) -> None:
        """Warn of an optimizer step that trains nothing, unless its samples need no labels."""
        is_observed = "observed" in info.counted and not self._trusts_labels
        if "labels" in info.counted or is_observed:
            self._warn(
                "targets",
                f"no token of the optimizer step at step {info.step} of epoch {info.epoch} is "
                f"supervised, on any rank: it has {counted(info.optimizer_samples, 'sample')} and "
                "0 targets, so its loss is 0 or NaN, and it trains nothing. Targets are all labels "
                f"of a sample after the first that are not {IGNORE_INDEX}, or the count that "
                f"`observe` returns. If all steps have 0 targets, all labels may be {IGNORE_INDEX}:"
                " look for the code in `process_fn` or the dataset that masks them, such as a "
                "prompt template that does not match, or truncation that cuts off the answers.",
            )

    def _check_shape(self, group: SampleBlock, shape: tuple[int, ...], info: StepInfo) -> None:
        budget, tokens = self._budget, group.lengths
        if budget is None:
            return
        rows, width = shape
        cost = budget.batch_cost((rows, width), tokens)
        if cost <= budget.tokens:
            return
        planned = budget.cost(tokens)
        if planned > budget.tokens:  # The bucketer has warned of this oversize sample.
            return
        if info.modalities and not group.patches.any():
            return  # Other ranks have images, so this batch may have a dummy image.
        attention = f" (a cost of {cost} with attention)" if cost > rows * width else ""
        self._warn(
            "shape",
            f"a batch of {len(group)} samples has {rows} x {width} = {rows * width} tokens"
            f"{attention}, above the budget of {budget.tokens}; {planned} were planned. Either "
            "`observe` does not return the length of `input_ids`, or `collate_fn` pads beyond the "
            "longest sample (leave out `max_length`, and pass a multiple as "
            "`TokenBudget(pad_to_multiple_of=...)`).",
        )

    def _check_padding(
        self, group: SampleBlock, batch: Mapping[str, Any], shape: tuple[int, ...]
    ) -> None:
        mask = batch.get("attention_mask")
        if not isinstance(mask, torch.Tensor) or tuple(mask.shape) != shape:
            return
        tokens = group.lengths
        observed = sum(tokens)
        unmasked = _count_nonzero(mask)
        # `observe` may count more than the tokens of the batch, such as tokens that a model makes
        # of an image, which are no padding.
        fits_shape = max(tokens) <= shape[1] and observed <= shape[0] * shape[1]
        if fits_shape and unmasked < _LEAST_REAL_SHARE * observed:
            self._warn(
                "padding",
                f"of {observed} tokens of the samples of a batch, `attention_mask` leaves "
                f"{unmasked}: the samples are padded already, and padding fills the budget. "
                'Tokenize without `padding="max_length"`; or cut it off in `process_fn`: `n = '
                'sum(sample["attention_mask"])`, then `{key: row[:n] for key, row in '
                "sample.items()}`.",
            )

    def _is_weighed(self, info: StepInfo) -> bool:
        """Return whether the loss of a batch is multiplied by its share of the targets."""
        planned = info.local_targets
        if self._trusts_labels or info.is_filler or not planned:
            return False
        factor = info.loss_scale * info.optimizer_targets / planned
        is_alone = info.optimizer_targets == planned
        is_exact = abs(factor - round(factor)) <= 1e-6 and info.loss_scale != 1.0
        return is_exact and not is_alone

    def _check_labels(
        self, batch: Mapping[str, Any], info: StepInfo, shape: tuple[int, ...]
    ) -> None:
        """Warn if the loss of a batch may be a mean over other things than its targets."""
        if info.counted not in _COUNTED_AS:
            return
        labels = batch.get("labels")
        if not isinstance(labels, torch.Tensor):
            class_key = next((key for key in CLASS_KEYS if key in batch), None)
            if info.counted == "samples" and class_key is not None:
                self._warn(
                    "labels",
                    f"each sample was counted as one target, because it has a number as "
                    f"`{class_key}` and no `labels`. If the loss is a mean over tokens, "
                    f"`loss_scale` weighs batches wrongly: leave `{class_key}` out in "
                    "`process_fn`, or return `labels`. If the loss is a mean over samples, rename "
                    f"`{class_key}` to `labels`, which ends this warning.",
                )
            return
        if labels.ndim == 1:
            count = len(labels)
        elif tuple(labels.shape) == shape:
            count = int(labels[:, 1:].ne(IGNORE_INDEX).sum())
        else:
            return
        planned = info.local_targets
        if abs(count - planned) > _SAME_TARGETS * planned:
            self._warn(
                "labels",
                f"a batch has {count} labels in step {info.step}, but {planned} targets: "
                f"{_COUNTED_AS[info.counted]}. `loss_scale` weighs this batch against other ranks "
                "and micro-steps by its targets. Make the labels in `process_fn`, or let `observe` "
                "return an `Observation` with the expected number of `targets`.",
            )

    def _check_decoder(
        self, batch: Mapping[str, Any], info: StepInfo, shape: tuple[int, ...]
    ) -> None:
        """Warn if the first label of a sample, which was not counted, is a target."""
        labels = batch.get("labels")
        if info.counted != "labels" or not isinstance(labels, torch.Tensor) or labels.ndim < 2:
            return
        if "decoder_input_ids" not in batch and tuple(labels.shape[:2]) == shape:
            return
        count = int(labels.ne(IGNORE_INDEX).sum())
        planned = info.local_targets
        if count == planned:
            return
        self._warn(
            "decoder",
            f"the labels of step {info.step} have length {labels.shape[1]}, but `input_ids` has "
            f"length {shape[1]}, as for an encoder-decoder. Such a model predicts all {count} "
            "labels, but `loss_scale` weighs this batch against other ranks and micro-steps by "
            f"{planned} targets: without the first label of each sample, which is no target of a "
            "causal model. Count all labels: `observe=lambda s: "
            'Observation(len(s["input_ids"]), sum(label != -100 for label in s["labels"]))`.',
        )

    def _warn(self, kind: str, message: str) -> None:
        if kind not in self._warned_of:
            self._warned_of.add(kind)
            warn_user(message)


def _count_nonzero(mask: torch.Tensor) -> int:
    """Return how many values of a mask are not 0, by numpy if possible, which is faster."""
    if mask.device.type == "cpu" and not mask.is_floating_point():
        return int(np.count_nonzero(mask.numpy(force=True)))
    return int(mask.ne(0).sum())
