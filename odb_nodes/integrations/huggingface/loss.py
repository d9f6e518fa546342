"""Finds out what a loss is: divided by the number of targets that it is told, or a mean."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch

from odb_nodes.sample import IGNORE_INDEX

SAME = 1e-4  # relative tolerance of "unchanged"; a normalized loss would halve instead
INVERSE = 5e-2  # relative tolerance of "inversely proportional"; leaves room for half precision


class Normalizer(enum.IntEnum):
    """Who divides the loss by the supervised tokens of all ranks and micro-steps."""

    UNKNOWN = 0  # until a batch has supervised tokens
    TRAINER = 1  # the model or `compute_loss_func`, by `num_items_in_batch`
    OURS = 2  # the loss is a mean, and is weighed by its share of the targets
    NEITHER = 3  # the loss is neither: an error


def labels_of(batch: Mapping[str, Any], names: Sequence[str] = ()) -> torch.Tensor | None:
    """Return the labels of a batch: `shift_labels`, `labels`, or the first of `names` it has."""
    for name in ("shift_labels", "labels", *names):
        if isinstance(labels := batch.get(name), torch.Tensor):
            return labels
    return None


def count_targets(
    batch: Mapping[str, Any], *, shift: bool, names: Sequence[str] = ()
) -> int | None:
    """Return over how many targets a mean loss of the batch is, or None where it has no labels."""
    labels = labels_of(batch, names)
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


def sample_with_targets(batch: Mapping[str, Any], *, shift: bool) -> dict[str, Any] | None:
    """Return a batch of one sample that has targets."""
    rows = {len(v) for v in batch.values() if isinstance(v, torch.Tensor) and v.ndim}
    if len(rows) != 1 or not all(isinstance(v, torch.Tensor) and v.ndim for v in batch.values()):
        return None
    for row in range(rows.pop()):
        sample = {key: value[row : row + 1] for key, value in batch.items()}
        if count_targets(sample, shift=shift):
            return sample
    return None


def find_normalizer(
    loss_of: Callable[[Mapping[str, Any], int], float],
    batch: Mapping[str, Any],
    *,
    targets: int,
    shift: bool,
) -> Normalizer:
    """Find out whether a loss is divided by the number of targets that it is told."""
    sample = sample_with_targets(batch, shift=shift)
    one, two, four = (loss_of(sample or batch, targets * times) for times in (1, 2, 4))
    # Always computed, so that all ranks make the same number of collective calls.
    again = batch if sample is None else {key: torch.cat((v, v)) for key, v in sample.items()}
    twice = loss_of(again, targets)
    size = max(abs(one), abs(two), abs(four))
    if abs(one - two) <= SAME * size and abs(two - four) <= SAME * size:
        # A mean does not change where its sample comes twice; a sum doubles.
        is_mean = sample is None or abs(twice - one) <= INVERSE * size
        return Normalizer.OURS if is_mean else Normalizer.NEITHER
    # The loss is a / n + b for n targets told, where b may be the loss of a router: the first
    # difference is a / 2n, the second a / 4n. With its sample twice, a sum becomes 2a / n + b.
    share = 2 * (one - two)
    is_inverse = abs(share - 4 * (two - four)) <= INVERSE * abs(share)
    is_sum = sample is None or abs(twice - one - share) <= INVERSE * abs(share)
    return Normalizer.TRAINER if is_inverse and is_sum else Normalizer.NEITHER
