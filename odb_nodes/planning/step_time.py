"""What a step takes: the time that ranks wait for, beside the memory that a budget bounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from odb_nodes._core.checks import MAX_COUNT, check_count, check_number, describe
from odb_nodes.planning.budget import ATTENTION_TOKENS, TokenBudget
from odb_nodes.planning.model_flops import flops_of_config
from odb_nodes.planning.table import IntArray
from odb_nodes.sample import Sample

TimeFn = Callable[[Sequence[Sample]], int]
"""Group -> what a step with it takes, an integer of at least 0 in any unit."""

IMAGE_PATCHES = 1_024  # of an image of 448 x 448 pixels, in patches of 14 x 14


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The time that a step with a group takes, in any unit: of tokens, attention and image patches.

    A `TokenBudget` bounds what a batch takes of memory. Ranks wait for each other, though, by time,
    in which attention grows with the square of a length:

        base + tokens * padded tokens + squares * squared lengths + patches * image patches

    The squared lengths are those of the samples in a packed row, and rows x width^2 of padded rows.
    Planning rounds the terms to whole multiples of `tokens`.

    Args:
        tokens: of each token of a batch, padding included; above 0.
        squares: of each pair of tokens that attend to each other: `tokens / c`, where c is the
            length of a sample that attention takes half of the time for.
        patches: of each image patch, in the encoder.
        base: of a step, whatever its batch.

    Raises:
        TypeError, ValueError: a field is not valid; names it and its value.
    """

    tokens: float = 1.0
    squares: float = 0.0
    patches: float = 0.0
    base: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", check_number("tokens", self.tokens, "(0, inf)"))
        for name in ("squares", "patches", "base"):
            object.__setattr__(self, name, check_number(name, getattr(self, name), "[0, inf)"))

    @classmethod
    def typical(cls, budget: TokenBudget) -> StepTime:
        """Return that of a model whose attention takes half of the time for `attention_tokens`."""
        return cls(squares=1 / (budget.attention_tokens or ATTENTION_TOKENS))

    @property
    def half_at(self) -> float:
        """Length of a sample, in tokens, that attention takes half of the time for."""
        return self.tokens / self.squares if self.squares else math.inf

    @classmethod
    def of_config(
        cls, config: Any, *, causal: bool = True, image_patches: int = IMAGE_PATCHES
    ) -> StepTime:
        """Return the FLOPs of a model, as its configuration has them, in those of a token.

        Counted are the matrix products of all layers: projections with grouped or latent keys,
        plain and gated feed-forwards, the experts that are active, the head over the vocabulary,
        and attention of the tokens that see each other. Backward has twice the FLOPs of each.

        - A layer with a sliding window W counts in `tokens`, as if each token attended to W others.
          In samples shorter than the window that is too much, by the share in their time of what
          a window takes. If no sample can be longer than the window, it counts as a full one.
        - Layers of linear attention, Mamba or convolution count by their linear layers alone.
        - An image encoder counts in `patches`: those of an image attend to each other, or to those
          of their window. An image has as many as `image_size` of the encoder holds, or else
          `image_patches`. Patch embedding and projector, a few per cent of it, are left out.

        Left out as well are audio, adapters, and what takes time without FLOPs: where the times of
        a run are known, fit them.

        Args:
            config: a `PretrainedConfig` of transformers, its `to_dict()`, or any object with its
                fields. Of a composite one, `text_config` and `vision_config` count.
            causal: whether a token attends to those before it alone, which is half of all pairs.
                False for encoders such as BERT, and for kernels that compute all pairs.
            image_patches: patches of an image, on average, for encoders of any size of images.

        Raises:
            TypeError, ValueError: an argument is not valid, a field is missing, or the
                configuration has layers that are not counted; names them.
        """
        patches = check_count("image_patches", image_patches)
        flops = flops_of_config(config, causal=causal, image_patches=patches)
        return cls(squares=flops.square / flops.token, patches=flops.patch / flops.token)

    def extra(self, tokens: IntArray, patches: IntArray) -> IntArray:
        """Return what samples, or padded rows, take beside their tokens, (n,) int64, in tokens."""
        squared = np.square(tokens.astype(np.float64)) * (self.squares / self.tokens)
        encoded = patches * (self.patches / self.tokens)
        whole: IntArray = np.minimum(np.rint(squared) + np.rint(encoded), MAX_COUNT).astype(
            np.int64
        )
        return whole

    @property
    def is_of_tokens(self) -> bool:
        """Whether a step takes as long as its tokens say, so that times level what costs level."""
        return not (self.squares or self.patches)

    def of_group(self, tokens: npt.ArrayLike, patches: npt.ArrayLike, budget: TokenBudget) -> int:
        """Return the time of a group in the layout of a budget, in tokens, rounded.

        Args:
            tokens: lengths of its samples, (n,), one or more.
            patches: image patches of each, (n,).
            budget: whose layout the batch has.
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
        given = [f"{name}={value:g}" for name, value in vars(self).items() if value]
        return f"StepTime({', '.join(given)})"


TYPICAL = StepTime(squares=1 / ATTENTION_TOKENS)
"""That of a model that nothing is known of."""


def check_step_time(step_time: StepTime | TimeFn | None) -> None:
    """Raise a `TypeError` for what says nothing of times."""
    if not (step_time is None or isinstance(step_time, StepTime) or callable(step_time)):
        raise TypeError(
            f"`step_time` must be a `StepTime`, a function or None, but is {describe(step_time)} "
            "instead."
        )


def step_time_of(
    step_time: StepTime | TimeFn | None, budget: TokenBudget | None
) -> StepTime | TimeFn | None:
    """Return what the groups of a step are matched by; `None` for what they cost.

    Packed rows are levelled in time without being asked to: their lengths are mixed nevertheless.
    Padded groups that take equally long have samples of one length.
    """
    if step_time is None and budget is not None and budget.layout == "packed":
        return StepTime.typical(budget)
    return step_time


def known_time(step_time: StepTime | TimeFn | None, budget: TokenBudget) -> StepTime:
    """Return what batches of known shapes are taken to last: that of a typical model by default."""
    return step_time if isinstance(step_time, StepTime) else StepTime.typical(budget)


def aim_of(step_time: StepTime | TimeFn | None) -> StepTime | None:
    """Return the times that groups are formed for; `None` where they are formed by cost alone."""
    if isinstance(step_time, StepTime) and not step_time.is_of_tokens:
        return step_time
    return None
