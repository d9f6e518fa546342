"""Learning rates for users who come from fixed batches: by samples instead of by steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from odb_nodes._core.checks import check_count

__all__ = ["LrScaling", "follow"]

Rule = Literal["linear", "sqrt"]


@dataclass(frozen=True, kw_only=True)
class LrScaling:
    """Scales the learning rate of each optimizer step by its number of samples.

    Args:
        reference_samples: of the optimizer step that the learning rate was tuned for, over all
            ranks and micro-steps.
        rule: `"linear"` (as for SGD: Goyal et al., 2017) or `"sqrt"` (as for Adam: Malladi et al.,
            2022).

    Raises:
        TypeError, ValueError: a field is not what is said above.
    """

    reference_samples: int
    rule: Rule = "sqrt"

    def __post_init__(self) -> None:
        check_count("reference_samples", self.reference_samples)
        if self.rule not in get_args(Rule):
            raise ValueError(f"`rule` must be one of {get_args(Rule)}, but is {self.rule!r}.")

    def factor(self, samples: int) -> float:
        """Return what the learning rate of an optimizer step of so many samples is times."""
        ratio = samples / self.reference_samples
        return ratio if self.rule == "linear" else math.sqrt(ratio)

    @contextmanager
    def applied(self, optimizer: Any, samples: int) -> Iterator[None]:
        """Scale the learning rates of an optimizer within a `with` block.

        Args:
            optimizer: of torch, or a wrapper with its `param_groups`.
            samples: of this optimizer step: `StepInfo.optimizer_samples`.
        """
        before = [group["lr"] for group in optimizer.param_groups]
        factor = self.factor(samples)
        for group, lr in zip(optimizer.param_groups, before, strict=True):
            group["lr"] = lr * factor
        try:
            yield
        finally:
            for group, lr in zip(optimizer.param_groups, before, strict=True):
                group["lr"] = lr


def follow(scheduler: LRScheduler, position: Callable[[], float]) -> LambdaLR:
    """Return a scheduler of the same shape that stands where `position` says, not where it counts.

    So a schedule made for 1000 steps follows the samples with
    `position=lambda: 1000 * samples_done / samples_in_all`.

    Args:
        scheduler: a `LambdaLR`; it is not to be used any more.
        position: -> where to stand, in the scheduler's steps.

    Raises:
        TypeError: `scheduler` is no `LambdaLR`.
    """
    if not isinstance(scheduler, LambdaLR):
        raise TypeError(
            "a schedule by samples needs a `LambdaLR`, as `linear`, `cosine` and "
            f"`constant_with_warmup` are, but got `{type(scheduler).__name__}` instead."
        )

    def followed(shape: Callable[[Any], float]) -> Callable[[int], float]:
        return lambda _: shape(position())

    return LambdaLR(scheduler.optimizer, [followed(shape) for shape in scheduler.lr_lambdas])
