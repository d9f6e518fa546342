"""The loss of each sample of a batch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import cross_entropy

from odb_nodes.sample import IGNORE_INDEX

__all__ = ["RowLosses", "row_losses"]


class RowLosses(NamedTuple):
    """Losses of the samples of a batch, in the order of `StepInfo.keys`.

    Attributes:
        sums: (n,) float, the sum of the losses over the supervised tokens of each sample, with
            gradients. What is beyond the samples of the batch does not count.
        targets: (n,) int64, the number of these tokens.
    """

    sums: torch.Tensor
    targets: torch.Tensor


def row_losses(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    position_ids: torch.Tensor | None = None,
    shift: bool = True,
) -> RowLosses:
    """Return the loss of each sample of a batch of a language model; waits for no device.

    `losses.sums.sum() / max(info.local_targets, 1)` is the mean loss of the batch, with its
    gradient: nothing needs to be computed twice.

    Args:
        logits: (B, T, vocabulary) float.
        labels: (B, T) int64; -100 where there is no target.
        position_ids: (1, T) int64, those of a packed batch, which begin at 0 in each sample.
        shift: whether the logits of a token predict the label of the next one.

    Raises:
        ValueError: the shapes do not go together.
    """
    if logits.ndim != 3 or logits.shape[:2] != labels.shape:
        raise ValueError(
            "`logits` must be (B, T, vocabulary) for `labels` of (B, T), but are "
            f"{tuple(logits.shape)} for {tuple(labels.shape)} instead."
        )
    if shift:
        logits, labels = logits[:, :-1], labels[:, 1:]
    losses = cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="none"
    ).view(labels.shape)
    is_target = labels.ne(IGNORE_INDEX)
    if position_ids is None:
        return RowLosses(losses.sum(1), is_target.sum(1))
    # As many as there are tokens, since how many there are is known on the device alone.
    sample = position_ids[0].eq(0).cumsum(0)[-labels.shape[1] :] - 1
    sums = losses.new_zeros(position_ids.shape[1]).index_add(0, sample, losses[0])
    targets = torch.zeros_like(position_ids[0]).index_add(0, sample, is_target[0].long())
    return RowLosses(sums, targets)
