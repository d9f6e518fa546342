"""What one group of samples may cost."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

from odb_nodes._core.checks import check_choice, check_count

Layout = Literal["padded", "packed"]
Oversize = Literal["alone", "error", "drop"]
Shape = tuple[int, int]
"""Rows and width, in tokens, of a batch."""

LADDER_SPAN = 512
"""The widest shape of a ladder is this many times as wide as the narrowest."""


@dataclass(frozen=True)
class TokenBudget:
    """What a group may cost: the rows times the width of the batch that it becomes.

    Args:
        tokens: most tokens of a group, padding included.
        max_samples: most samples of a group; `None` for no limit.
        max_patches: most image patches of a group, summed over its samples; `None` for no limit.
        pad_to_multiple_of: tokens; the width of a batch is rounded up to a multiple of this. The
            collate function must pad to the same multiple.
        layout: `"padded"`, a row per sample, as wide as the longest. `"packed"`, all samples one
            after the other in one row.
        oversize: what becomes of a sample that exceeds the budget on its own: `"alone"` gives it a
            group of its own (with one warning and a count), `"error"` raises, `"drop"` leaves it
            out (with one warning and a count).
        shapes: most shapes that batches may have, for compiled models: each group is then rounded
            up to one of `shape_ladder()`, and costs that much. Only an oversize sample that is
            `"alone"` has another shape. `None`: any shape.

    Raises:
        TypeError, ValueError: a field is not valid; names it and its value.
    """

    tokens: int
    max_samples: int | None = None
    max_patches: int | None = None
    pad_to_multiple_of: int = 1
    layout: Layout = "padded"
    oversize: Oversize = "alone"
    shapes: int | None = None

    def __post_init__(self) -> None:
        for name in ("tokens", "max_samples", "max_patches", "pad_to_multiple_of", "shapes"):
            value = getattr(self, name)
            if value is not None or name in ("tokens", "pad_to_multiple_of"):
                object.__setattr__(self, name, check_count(name, value))
        check_choice("layout", self.layout, get_args(Layout))
        check_choice("oversize", self.oversize, get_args(Oversize))
        if self.pad_to_multiple_of > self.tokens:
            raise ValueError(
                f"`pad_to_multiple_of` must be at most `tokens` ({self.tokens}), "
                f"but is {self.pad_to_multiple_of} instead."
            )

    @classmethod
    def of(cls, budget: int | TokenBudget, name: str = "budget") -> TokenBudget:
        """Return `budget` itself, or a budget of that many padded tokens.

        Raises:
            TypeError, ValueError: it is neither; names it `name`.
        """
        return budget if isinstance(budget, TokenBudget) else cls(check_count(name, budget))

    @property
    def capacity(self) -> int:
        """Widest row of a group, in tokens: `tokens` rounded down to `pad_to_multiple_of`."""
        return self.tokens // self.pad_to_multiple_of * self.pad_to_multiple_of

    def shape(self, tokens: Sequence[int]) -> Shape:
        """Return rows and width of the batch of a group.

        Args:
            tokens: lengths of its samples, one or more.
        """
        packed = self.layout == "packed"
        longest = sum(tokens) if packed else max(tokens)
        rows = 1 if packed else len(tokens)
        return fit_shape(rows, longest, self.shape_ladder(), self.pad_to_multiple_of)

    def cost(self, tokens: Sequence[int]) -> int:
        """Return what a group of samples of these lengths costs: tokens, padding included."""
        rows, width = self.shape(tokens)
        return rows * width

    def shape_ladder(self) -> tuple[Shape, ...]:
        """Return the shapes that batches may have, from the narrowest up; none without `shapes`.

        The widths go up by a constant factor, and each has as many rows as the budget holds.
        """
        if self.shapes is None:
            return ()
        if self.layout == "packed":
            return ((1, self.capacity),)
        return _ladder(self.tokens, self.pad_to_multiple_of, self.max_samples, self.shapes)

    def width(self, tokens: int) -> int:
        """Return how wide a batch is whose longest row has `tokens` tokens."""
        return fit_shape(1, tokens, self.shape_ladder(), self.pad_to_multiple_of)[1]

    def is_oversize(self, tokens: int, patches: int = 0) -> bool:
        """Tell whether one sample exceeds the budget on its own."""
        return tokens > self.capacity or (
            self.max_patches is not None and patches > self.max_patches
        )

    def limit_of(self, tokens: int) -> str:
        """Return, for an error, which limit a sample exceeds on its own.

        Args:
            tokens: tokens of the sample; where these fit, it is the patches that do not.
        """
        if tokens <= self.capacity:
            return f"`max_patches` is {self.max_patches}"
        multiple = self.pad_to_multiple_of
        rounded = f", in multiples of {multiple} {self.capacity}"
        return f"`tokens` is {self.tokens}{rounded if self.capacity < self.tokens else ''}"


def fit_shape(rows: int, longest_tokens: int, ladder: Sequence[Shape], multiple: int) -> Shape:
    """Return the narrowest shape of a ladder that is wide enough.

    Where none is, or there is no ladder: as many rows, and the width rounded up to `multiple`.
    """
    index = bisect_left(ladder, longest_tokens, key=_width)
    if index == len(ladder):
        return rows, round_up(longest_tokens, multiple)
    return ladder[index]


def round_up(tokens: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is not below `tokens`."""
    return -(-tokens // multiple) * multiple


def _width(shape: Shape) -> int:
    return shape[1]


@lru_cache(maxsize=64)
def _ladder(tokens: int, multiple: int, max_samples: int | None, shapes: int) -> tuple[Shape, ...]:
    widest = tokens // multiple * multiple
    factor = LADDER_SPAN ** (-1 / max(shapes - 1, 1))
    steps = (max(int(widest * factor**step), 1) for step in range(shapes))
    widths = sorted({round_up(step, multiple) for step in steps})
    limit = tokens if max_samples is None else max_samples
    return tuple((min(tokens // width, limit), width) for width in widths)
