"""Compare batches with what they were planned as, and warn of what would go wrong unseen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from odb_nodes._core.text import counted
from odb_nodes._core.user_warning import warn_user
from odb_nodes.planning import TokenBudget
from odb_nodes.sample import CLASS_KEYS, IGNORE_INDEX
from odb_nodes.sample_block import SampleBlock
from odb_nodes.step_info import StepInfo

_MOST_SHAPES = 4096
_ALL_READ, _READ_EVERY = 64, 16  # shapes whose first batch is read: the first ones, then some
_LEAST_REAL_SHARE = 0.75  # of the tokens of samples; below, the samples hold padding
_SAME_TARGETS = 0.05  # relative difference that a weight may have
_TAKEN = {
    "tokens": "the samples have no labels, so their tokens were",
    "samples": "the samples have one label each, or labels that are fractions, so they were",
}


class BatchChecks:
    """Checks the batches of a graph, and warns once of each kind of mistake.

    Only batches of a shape that has not come before are looked at, and of those few are read, so
    that it costs next to nothing.
    """

    def __init__(self, budget: TokenBudget | None) -> None:
        self._budget = budget
        self._shapes: set[tuple[int, ...]] = set()
        self._said: set[str] = set()
        self._weighs_labels = False  # whether the trainer counts the labels of each batch itself

    def trust_labels(self) -> None:
        """Do not warn of weights: the trainer counts the labels of each batch itself."""
        self._weighs_labels = True

    def check(self, group: SampleBlock, batch: Mapping[str, Any], info: StepInfo) -> None:
        """Warn of what is wrong with a batch."""
        if info.local_samples and not info.optimizer_targets and not info.loss_scale:
            self._check_targets(info)
        ids = batch.get("input_ids", batch.get("inputs_embeds"))
        shape = tuple(ids.shape[:2]) if isinstance(ids, torch.Tensor) and ids.ndim > 1 else ()
        new = bool(shape) and shape not in self._shapes and len(self._shapes) < _MOST_SHAPES
        if new:
            self._shapes.add(shape)
            self._check_shape(group, shape, info)
            seen = len(self._shapes)
            if seen <= _ALL_READ or seen % _READ_EVERY == 0:
                self._check_padding(group, batch, shape)
            if self._is_weighed(info):
                self._check_labels(batch, info, shape)
                self._check_decoder(batch, info, shape)
        if "+" in info.counted and "samples" in info.counted and not self._weighs_labels:
            self._warn(
                "counted",
                f"the targets of step {info.step} are not alike: {info.counted}. Some samples have "
                "one label each, others one per token, so `loss_scale` weighs the latter many "
                "times as much. Give all samples labels of one kind, or let `observe` return an "
                "`Observation` with `targets`.",
            )

    def _check_targets(self, info: StepInfo) -> None:
        """Warn of an optimizer step that trains nothing, unless its samples need no labels."""
        is_observed = "observed" in info.counted and not self._weighs_labels
        if "labels" in info.counted or is_observed:
            self._warn(
                "targets",
                f"no token of the optimizer step at step {info.step} of epoch {info.epoch} is "
                f"supervised, on any rank: it has {counted(info.optimizer_samples, 'sample')} and "
                "0 targets, so its loss is 0 or NaN, and it trains nothing. Targets are the labels "
                f"after the first of a sample that are not {IGNORE_INDEX}, or what `observe` "
                f"returns. If this is so in all steps, see whether all labels are {IGNORE_INDEX}: "
                "what masks them in `process_fn` or the dataset, such as a template of the prompt "
                "that is not found, or answers that are cut off.",
            )

    def _check_shape(self, group: SampleBlock, shape: tuple[int, ...], info: StepInfo) -> None:
        budget, tokens = self._budget, group.lengths
        if budget is None:
            return
        rows, width = shape
        if (cost := budget.batch_cost((rows, width), tokens)) <= budget.tokens:
            return
        planned = budget.cost(tokens)
        if planned > budget.tokens:  # an oversize sample, of which the bucketer has warned
            return
        if info.modalities and not group.patches.any():
            return  # The batch may have a dummy in place of what others have.
        attention = f" (a cost of {cost} with attention)" if cost > rows * width else ""
        self._warn(
            "shape",
            f"a batch of {len(group)} samples has {rows} x {width} = {rows * width} tokens"
            f"{attention}, above the budget of {budget.tokens}; {planned} were planned. Either "
            "`observe` does not return the length in tokens (it must be that of `input_ids`), or "
            "`collate_fn` pads further than to the longest sample (leave out `max_length`, and say "
            "a multiple as `TokenBudget(pad_to_multiple_of=...)`).",
        )

    def _check_padding(
        self, group: SampleBlock, batch: Mapping[str, Any], shape: tuple[int, ...]
    ) -> None:
        mask = batch.get("attention_mask")
        if not isinstance(mask, torch.Tensor) or tuple(mask.shape) != shape:
            return
        tokens = group.lengths
        observed, real = sum(tokens), _count_nonzero(mask)
        # Where `observe` counts what is no token of the batch, such as those that a model makes of
        # an image, that is no padding.
        is_held = max(tokens) <= shape[1] and observed <= shape[0] * shape[1]
        if is_held and real < _LEAST_REAL_SHARE * observed:
            self._warn(
                "padding",
                f"of {observed} tokens of the samples of a batch, `attention_mask` leaves {real}: "
                "the samples are padded already, and padding fills the budget. Tokenize without "
                '`padding="max_length"`; or cut it off in `process_fn`: `n = '
                'sum(sample["attention_mask"])`, then `{key: row[:n] for key, row in '
                "sample.items()}`.",
            )

    def _is_weighed(self, info: StepInfo) -> bool:
        """Return whether the loss of a batch is multiplied by its share of the targets."""
        planned = info.local_targets
        if self._weighs_labels or info.is_filler or not planned:
            return False
        factor = info.loss_scale * info.optimizer_targets / planned
        alone = info.optimizer_targets == planned
        is_exact = abs(factor - round(factor)) <= 1e-6 and info.loss_scale != 1.0
        return is_exact and not alone

    def _check_labels(
        self, batch: Mapping[str, Any], info: StepInfo, shape: tuple[int, ...]
    ) -> None:
        """Warn where the loss of a batch may be a mean over others than the targets counted."""
        labels, planned = batch.get("labels"), info.local_targets
        if info.counted not in _TAKEN:
            return
        if not isinstance(labels, torch.Tensor):
            note = next((key for key in CLASS_KEYS if key in batch), None)
            if info.counted == "samples" and note is not None:
                self._warn(
                    "labels",
                    f"each sample was counted as one target, since it has a number as `{note}` and "
                    "no `labels`. If the loss is a mean over tokens, `loss_scale` weighs batches "
                    f"wrongly: leave `{note}` out in `process_fn`, or give `labels`. If it is one "
                    "over samples, name it `labels`, which ends this warning.",
                )
            return
        if labels.ndim == 1:
            found = len(labels)
        elif tuple(labels.shape) == shape:
            found = int(labels[:, 1:].ne(IGNORE_INDEX).sum())
        else:
            return
        if abs(found - planned) > _SAME_TARGETS * planned:
            self._warn(
                "labels",
                f"a batch has {found} labels in step {info.step}, where {planned} targets "
                f"were counted: {_TAKEN[info.counted]}. `loss_scale`, which weighs this batch "
                "against other ranks and micro-steps, goes by the latter. Make the labels in "
                "`process_fn`, or let `observe` return an `Observation` with the expected number "
                "of `targets`.",
            )

    def _check_decoder(
        self, batch: Mapping[str, Any], info: StepInfo, shape: tuple[int, ...]
    ) -> None:
        """Warn where the first label of a sample, which was not counted, is a target, too."""
        labels, planned = batch.get("labels"), info.local_targets
        if info.counted != "labels" or not isinstance(labels, torch.Tensor) or labels.ndim < 2:
            return
        if "decoder_input_ids" not in batch and tuple(labels.shape[:2]) == shape:
            return
        found = int(labels.ne(IGNORE_INDEX).sum())
        if found == planned:
            return
        self._warn(
            "decoder",
            f"the labels of step {info.step} have a length of their own, {labels.shape[1]} where "
            f"that of `input_ids` is {shape[1]}, as those of an encoder-decoder. It predicts all "
            f"{found} of them, but `loss_scale`, which weighs this batch against other ranks and "
            f"micro-steps, goes by {planned}: without the first label of each sample, which is no "
            "target of a causal model. Count them all: `observe=lambda s: "
            'Observation(len(s["input_ids"]), sum(label != -100 for label in s["labels"]))`.',
        )

    def _warn(self, kind: str, message: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            warn_user(message)


def _count_nonzero(mask: torch.Tensor) -> int:
    """Return how much of a mask is not 0: by numpy, which is many times as fast, where it can."""
    if mask.device.type == "cpu" and not mask.is_floating_point():
        return int(np.count_nonzero(mask.numpy(force=True)))
    return int(mask.ne(0).sum())
