"""The time of a step, which ranks wait for, beside the memory that a budget bounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from odb_nodes._support.arrays import IntArray
from odb_nodes._support.checks import MAX_COUNT, check_count, check_number, describe
from odb_nodes.core.planning.budget import ATTENTION_TOKENS, TokenBudget
from odb_nodes.core.planning.model_flops import flops_of_config
from odb_nodes.core.sample import Sample

TimeFn = Callable[[Sequence[Sample]], int]
"""Group -> time of a step with it, an integer of at least 0 in any unit."""

_TOKEN_TIMES = "(0, 1e100]"  # so that sums over a batch are finite
IMAGE_PATCHES = 1_024  # patches of 14 x 14 pixels in an image of 448 x 448


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The time that a step with a group takes, in any unit: of tokens, attention and image patches.

    A `TokenBudget` bounds the memory of a batch. But ranks wait for each other by time, in which
    attention grows with the square of a length:

        base + tokens * padded tokens + squares * squared lengths + patches * image patches

    The squared lengths are summed over the samples of a packed row, and over the rows of a padded
    batch, by their width. Planning rounds the terms to whole multiples of `tokens`.

    Args:
        tokens: time of each token of a batch, padding included; above 0.
        squares: time of each pair of tokens that attend to each other: `tokens / c`, where c is the
            length of a sample for which attention takes half of the time.
        patches: time of each image patch, in the encoder.
        base: time of a step that does not depend on the batch.

    Raises:
        TypeError, ValueError: a field is not valid; names it and its value.
    """

    tokens: float = 1.0
    squares: float = 0.0
    patches: float = 0.0
    base: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", check_number("tokens", self.tokens, _TOKEN_TIMES))
        for name in ("squares", "patches", "base"):
            value = check_number(name, getattr(self, name), "[0, inf)")
            if value / self.tokens > MAX_COUNT:
                raise ValueError(
                    f"`{name}` must be at most {MAX_COUNT} times `tokens` ({self.tokens:g}), but "
                    f"is {value:g} instead. Give both in the same unit."
                )
            object.__setattr__(self, name, value)

    @classmethod
    def typical(cls, budget: TokenBudget) -> StepTime:
        """Return the times of a model whose attention takes half at `attention_tokens`."""
        return cls(squares=1 / (budget.attention_tokens or ATTENTION_TOKENS))

    @property
    def half_at(self) -> float:
        """Length of a sample, in tokens, for which attention takes half of the time."""
        return self.tokens / self.squares if self.squares else math.inf

    @classmethod
    def of_config(
        cls, config: Any, *, causal: bool = True, image_patches: int = IMAGE_PATCHES
    ) -> StepTime:
        """Return the FLOPs of a model by its configuration, in units of a token's FLOPs.

        Counted are the matrix products of all layers: projections with grouped or latent keys,
        plain and gated feed-forwards, the experts that are active, the head over the vocabulary,
        and attention of the tokens that see each other. Backward has twice the FLOPs of each.

        - A layer with a sliding window W counts in `tokens`, as if each token attended to W others.
          For samples shorter than the window that is too much. If no sample can be longer than the
          window, the layer counts as one with full attention.
        - Layers of linear attention, Mamba or convolution count by their linear layers alone.
        - An image encoder counts in `patches`. The patches of an image attend to each other, or
          within their window. `image_size` of the encoder, or else `image_patches`, gives their
          number. Patch embedding and projector, a few per cent of the encoder, are left out.

        Audio, adapters, and work without FLOPs are left out as well: if the times of a run are
        known, fit them.

        Args:
            config: a `PretrainedConfig` of transformers, its `to_dict()`, or any object with its
                fields. Of a composite configuration, `text_config` and `vision_config`
                count.
            causal: whether a token attends only to earlier tokens, which is half of all pairs.
                False for encoders such as BERT, and for kernels that compute all pairs.
            image_patches: average patches of an image, for encoders that take images of any size.

        Raises:
            TypeError, ValueError: an argument is not valid, a field is missing, or the
                configuration has layers that are not counted; names them.
        """
        patches = check_count("image_patches", image_patches)
        flops = flops_of_config(config, causal=causal, image_patches=patches)
        return cls(squares=flops.square / flops.token, patches=flops.patch / flops.token)

    def extra(self, tokens: IntArray, patches: IntArray) -> IntArray:
        """Return the time of samples or padded rows beside their tokens, in tokens, (n,) int64."""
        squared = np.square(tokens.astype(np.float64)) * (self.squares / self.tokens)
        encoded = patches * (self.patches / self.tokens)
        extra: IntArray = np.minimum(np.rint(squared) + np.rint(encoded), MAX_COUNT).astype(
            np.int64
        )
        return extra

    @property
    def is_of_tokens(self) -> bool:
        """Whether the time of a step follows from its tokens alone."""
        return not (self.squares or self.patches)

    def of_group(self, tokens: npt.ArrayLike, patches: npt.ArrayLike, budget: TokenBudget) -> int:
        """Return the time of a group in the layout of a budget, in tokens, rounded.

        Args:
            tokens: lengths of its samples, (n,), one or more.
            patches: image patches of its samples, (n,).
            budget: has the layout of the batch.
        """
        lengths = np.asarray(tokens, np.int64)
        rows, width = budget.shape(lengths.tolist())
        attending = lengths if budget.layout == "packed" else np.full(rows, width)
        squared = int(self.extra(attending, np.zeros_like(attending)).sum())
        encoded = round(int(np.sum(patches)) * (self.patches / self.tokens))
        return min(rows * width + squared + encoded + round(self.base / self.tokens), MAX_COUNT)

    def seconds_of(self, padded: Any, squares: Any, patches: Any = 0) -> Any:
        """Return the times of batches in the unit of the fields."""
        return self.base + self.tokens * padded + self.squares * squares + self.patches * patches

    def __str__(self) -> str:
        terms = [f"{name}={value:g}" for name, value in vars(self).items() if value]
        return f"StepTime({', '.join(terms)})"


TYPICAL = StepTime(squares=1 / ATTENTION_TOKENS)
"""Times that are assumed for an unknown model."""


def check_step_time(step_time: StepTime | TimeFn | None) -> None:
    """Raise a `TypeError` unless `step_time` is a `StepTime`, a function or None."""
    if not (step_time is None or isinstance(step_time, StepTime) or callable(step_time)):
        raise TypeError(
            f"`step_time` must be a `StepTime`, a function or None, but is {describe(step_time)} "
            "instead."
        )


def step_time_of(
    step_time: StepTime | TimeFn | None, budget: TokenBudget | None
) -> StepTime | TimeFn | None:
    """Return the time by which groups are matched; `None`: groups are matched by cost.

    By default, packed rows are levelled in time, since their lengths stay mixed. Padded groups of
    equal time would have samples of equal length.
    """
    if step_time is None and budget is not None and budget.layout == "packed":
        return StepTime.typical(budget)
    return step_time


def aim_of(step_time: StepTime | TimeFn | None) -> StepTime | None:
    """Return the times that groups are formed for; `None` if they are formed by cost alone."""
    if isinstance(step_time, StepTime) and not step_time.is_of_tokens:
        return step_time
    return None
