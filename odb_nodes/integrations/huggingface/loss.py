"""One normalisation of the loss, the `Trainer`'s own or ours, and never both."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from transformers import PreTrainedModel
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

from odb_nodes.sample import IGNORE_INDEX
from odb_nodes.step_info import StepInfo

SAME = 1e-4  # relative; a loss that is normalised halves instead
INVERSE = 5e-2  # relative; leaves room for half precision


class Normalizer(enum.IntEnum):
    """Who divides the loss by the supervised tokens of all ranks and micro-steps."""

    UNKNOWN = 0  # until a batch has supervised tokens
    TRAINER = 1  # the model or `compute_loss_func`, by `num_items_in_batch`
    OURS = 2  # the loss is a mean, and is weighed by its share
    NEITHER = 3  # it is neither


@dataclass(kw_only=True)
class MicroStep:
    """A batch on its way through the `Trainer`.

    Attributes:
        info: of the step.
        factor: what its loss is multiplied by.
        is_scaled: the loss was.
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


def base_model(model: Any) -> Any:
    """Return what is within the wrappers of sharding, of compilation and of adapters."""
    model = extract_model_from_parallel(model, keep_torch_compile=False)
    get_base_model = getattr(model, "get_base_model", None)  # of adapters
    return model if get_base_model is None else get_base_model()


def shifts_labels(model: Any) -> bool:
    """Whether position i of a model predicts label i + 1, so that the first label is no target."""
    base = base_model(model)
    if getattr(getattr(base, "config", None), "is_encoder_decoder", False):
        return False
    if not isinstance(base, PreTrainedModel):
        return True
    return LOSS_MAPPING.get(getattr(base, "loss_type", None) or "") is ForCausalLMLoss


def count_targets(batch: Mapping[str, Any], *, shift: bool) -> int | None:
    """Return how many targets a batch has, or `None` where its labels do not say.

    Args:
        batch: with `labels`, (B, T), (B,) or of any other shape; or `shift_labels`.
        shift: the first label of a row is no target.
    """
    labels = batch.get("shift_labels")
    if labels is None:
        labels = batch.get("labels")
        if shift and isinstance(labels, torch.Tensor) and labels.ndim > 1:
            labels = labels[..., 1:]
    return int(labels.ne(IGNORE_INDEX).sum()) if isinstance(labels, torch.Tensor) else None


def give_targets(batch: MutableMapping[str, Any]) -> None:
    """Make the mean over the targets of a batch that has none finite; it is to weigh nothing."""
    for key in ("labels", "shift_labels"):
        if isinstance(labels := batch.get(key), torch.Tensor):
            batch[key] = torch.zeros_like(labels)


def sample_with_targets(batch: Mapping[str, Any], *, shift: bool) -> dict[str, Any] | None:
    """Return a batch of one sample that has targets, or `None` where samples cannot be told apart.

    They can where all tensors have one row per sample.
    """
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
    """Find out whether a loss is divided by the number of targets that it is told.

    Args:
        loss_of: batch, number of targets -> loss, always the same for the same.
        batch: with targets.
        targets: to tell; also two and four times as many.
        shift: the first label of a row is no target.
    """
    sample = sample_with_targets(batch, shift=shift)
    one, two, four = (loss_of(sample or batch, targets * times) for times in (1, 2, 4))
    # Computed in any case: all ranks compute as often, as their collectives need.
    again = batch if sample is None else {key: torch.cat((v, v)) for key, v in sample.items()}
    twice = loss_of(again, targets)
    size = max(abs(one), abs(two), abs(four))
    if abs(one - two) <= SAME * size and abs(two - four) <= SAME * size:
        is_mean = sample is None or abs(twice - one) <= INVERSE * size
        return Normalizer.OURS if is_mean else Normalizer.NEITHER
    # a / n + b, where b is for instance the loss of a router
    share = 2 * (one - two)
    is_inverse = abs(share - 4 * (two - four)) <= INVERSE * abs(share)
    is_sum = sample is None or abs(twice - one - share) <= INVERSE * abs(share)
    return Normalizer.TRAINER if is_inverse and is_sum else Normalizer.NEITHER
