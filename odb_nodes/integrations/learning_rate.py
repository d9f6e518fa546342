"""Learning rates that follow samples instead of steps, for recipes tuned on fixed batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from odb_nodes._support.checks import check_choice, keep_count

__all__ = ["LrScaling", "follow"]

Rule = Literal["linear", "sqrt"]


@dataclass(frozen=True, kw_only=True)
class LrScaling:
    """Scales the learning rate of each optimizer step by its number of samples.

    Args:
        reference_samples: number of samples per optimizer step, over all ranks and micro-steps,
            that the learning rate was tuned for.
        rule: `"linear"` (as for SGD: Goyal et al., 2017) or `"sqrt"` (as for Adam: Malladi et al.,
            2022).

    Raises:
        TypeError, ValueError: a field is not valid.
    """

    reference_samples: int
    rule: Rule = "sqrt"

    def __post_init__(self) -> None:
        keep_count(self, "reference_samples")
        check_choice("rule", self.rule, get_args(Rule))

    def factor(self, samples: int) -> float:
        """Return the learning-rate multiplier for a step of `samples` samples."""
        ratio = samples / self.reference_samples
        return ratio if self.rule == "linear" else math.sqrt(ratio)

    @contextmanager
    def applied(self, optimizer: Any, samples: int) -> Iterator[None]:
        """Scale the learning rates of an optimizer, or a wrapper of one, within a `with` block.

        Args:
            optimizer: has `param_groups`.
            samples: number of samples of this optimizer step: `StepInfo.optimizer_samples`.
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
    """Return a schedule of the same shape whose position is `position()` instead of the step count.

    A schedule made for 1000 steps follows the samples with
    `position=lambda: 1000 * samples_done / total_samples`.

    Args:
        scheduler: a `LambdaLR`, which the result replaces.
        position: a function that returns the current position, in steps of `scheduler`.

    Raises:
        TypeError: `scheduler` is not a `LambdaLR`.
    """
    if not isinstance(scheduler, LambdaLR):
        raise TypeError(
            f"`scheduler` must be a `LambdaLR`, but is a `{type(scheduler).__name__}` instead. "
            "`linear`, `cosine` and `constant_with_warmup` of transformers are."
        )
    return at_positions(scheduler, lambda _: position())


def at_positions(scheduler: LambdaLR, position: Callable[[int], float]) -> LambdaLR:
    """Return a schedule of the same shape whose position after n steps is `position(n)`."""

    def moved(shape: Callable[[Any], float]) -> Callable[[int], float]:
        return lambda step: shape(position(step))

    return LambdaLR(scheduler.optimizer, [moved(shape) for shape in scheduler.lr_lambdas])
