"""What a training loop needs to know about a step, beside the batch."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

__all__ = ["STEP_INFO_KEY", "StepInfo", "pop_step_info"]

STEP_INFO_KEY = "odb_step_info"


@dataclass(frozen=True, kw_only=True)
class StepInfo:
    """Counts of one step.

    Attributes:
        step: number of the step in its epoch, from 0.
        local_samples: samples of this rank.
        local_targets: supervised tokens of this rank.
        all_samples_this_step: samples of all ranks.
        all_targets: supervised tokens of all ranks.
        loss_scale: multiplies this rank's mean loss over its supervised tokens.
        is_filler: a step without samples of its own, whose loss weighs nothing.
    """

    step: int
    local_samples: int
    local_targets: int
    all_samples_this_step: int
    all_targets: int
    loss_scale: float = 1.0
    is_filler: bool = False


def pop_step_info(batch: MutableMapping[str, Any]) -> StepInfo:
    """Take the `StepInfo` out of a batch, which is then what the model takes.

    Raises:
        KeyError: the batch has none: it was taken out before, or does not come from this library.
    """
    try:
        info: StepInfo = batch.pop(STEP_INFO_KEY)
    except KeyError:
        raise KeyError(
            f"the batch has no `{STEP_INFO_KEY}`: it was popped before, or the batch does not come "
            f"from a `GroupCollator`. Its keys are {sorted(map(str, batch))}."
        ) from None
    return info
