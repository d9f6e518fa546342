"""The budget of a group of samples."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import isqrt
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import numpy as np

from odb_nodes._support.arrays import IntArray
from odb_nodes._support.checks import check_choice, check_count

Tokens = TypeVar("Tokens", int, IntArray)

ATTENTION_TOKENS = 12_288
"""Length at which attention costs as much as the rest of a layer: 6 x a width of 2048."""


RowSizes = Literal["any", "even", "friendly"] | int

_FRIENDLY: IntArray = np.array(
    sorted({1 << n for n in range(32)} | {3 << n for n in range(31)}), dtype=np.int64
)


def allowed_rows(rows: IntArray, sizes: RowSizes) -> IntArray:
    """Return, for each of `rows`, (n,), the largest allowed number of rows that is not larger.

    sizes: which numbers are allowed; a number allows its multiples, and `rows` are not below it.
    """
    allowed: IntArray = rows
    if isinstance(sizes, int):
        allowed = rows - rows % sizes
    elif sizes == "even":
        allowed = np.maximum(rows - rows % 2, 1)
    elif sizes == "friendly":
        allowed = _FRIENDLY[np.searchsorted(_FRIENDLY, rows, side="right") - 1]
    return allowed


Layout = Literal["padded", "packed"]
Oversize = Literal["alone", "error", "drop"]
_NAMED_SIZES = ("any", "even", "friendly")
Shape = tuple[int, int]  # rows and width, in tokens, of a batch

SPAN_PER_SHAPE = 6
"""The widest shape of a ladder is this many times the number of shapes as wide as the narrowest.
So shapes lie close together at the wide end, where padding costs most."""


@dataclass(frozen=True)
class TokenBudget:
    """The largest cost of a group: the padded tokens of its batch, rows times width.

    With `attention_tokens`, c, a row costs more than its tokens: a padded group of n rows that are
    w tokens wide costs n * (w + w * w // c). A packed group costs the width of its row, and
    l * l // c for each sample of l tokens.

    Args:
        tokens: the largest cost of a group: padded tokens, and attention.
        max_samples: most samples of a group; `None` for no limit.
        max_patches: most image patches of a group, summed over its samples; `None` for no limit.
        pad_to_multiple_of: tokens; the width of a batch is rounded up to a multiple of this. The
            collate function must pad to the same multiple.
        layout: `"padded"`, one row per sample, as wide as the longest. `"packed"`, all samples in
            one row.
        oversize: what to do with a sample that exceeds the budget on its own. `"alone"`: its
            group holds nothing else; `"drop"`: it is left out; both warn once and count. `"error"`
            raises.
        shapes: most shapes that batches may have, for compiled models. Each group is rounded up to
            a shape of `shape_ladder()`, which decides its cost. Only an oversize sample that is
            `"alone"` has another shape. `None`: any shape.
        attention_tokens: length of a row, in tokens, at which the quadratic part of a step
            (attention) costs as much as the linear part, in time or memory, whichever `tokens`
            bounds. `None`: attention costs nothing.
        row_sizes: numbers of rows that padded batches may have, if kernels are slow for other
            numbers. `"any"`; `"even"`: 1 and all even numbers; `"friendly"`: 2**n and 3 * 2**n.
            Other numbers occur only where `RankAligner` splits a group, and under `max_patches` at
            the end of an epoch.
            A number k, together with `shapes`: all batches have a multiple of k rows, as the
            stages of a pipeline need for k micro-batches.

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
    attention_tokens: int | None = None
    row_sizes: RowSizes = "any"

    def __post_init__(self) -> None:
        for name in ("tokens", "pad_to_multiple_of"):
            object.__setattr__(self, name, check_count(name, getattr(self, name)))
        for name in ("max_samples", "max_patches", "shapes", "attention_tokens"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, check_count(name, value))
        check_choice("layout", self.layout, get_args(Layout))
        check_choice("oversize", self.oversize, get_args(Oversize))
        if isinstance(self.row_sizes, str):
            check_choice("row_sizes", self.row_sizes, _NAMED_SIZES)
        else:
            object.__setattr__(self, "row_sizes", check_count("row_sizes", self.row_sizes))
        self._check_fields_together()

    def _check_fields_together(self) -> None:
        if self.pad_to_multiple_of > self.tokens:
            raise ValueError(
                f"`pad_to_multiple_of` must be at most `tokens` ({self.tokens}), "
                f"but is {self.pad_to_multiple_of} instead."
            )
        if not self.capacity:
            raise ValueError(
                f"`tokens` must be at least {self.smallest_cost}, the cost of the smallest batch "
                f"with `attention_tokens={self.attention_tokens}` and "
                f"`row_sizes={self.row_sizes!r}`, but is {self.tokens} instead."
            )
        if self.layout == "packed" and self.row_sizes != "any":
            raise ValueError(
                f'`row_sizes` must be "any" where `layout` is "packed", whose batches have one '
                f"row, but is {self.row_sizes!r} instead. Leave it out."
            )
        if isinstance(self.row_sizes, int) and (self.shapes is None or self.oversize == "alone"):
            raise ValueError(
                f"`row_sizes` may be a number ({self.row_sizes}) only with `shapes` and with "
                '`oversize` "drop" or "error", since other batches have any number of rows, but '
                f"`shapes` is {self.shapes} and `oversize` {self.oversize!r} instead."
            )
        if self.max_samples is not None and self.max_samples < self.fewest_rows:
            raise ValueError(
                f"`max_samples` must be at least `row_sizes` ({self.row_sizes}), "
                f"but is {self.max_samples} instead."
            )

    @classmethod
    def of(cls, budget: int | TokenBudget, name: str = "budget") -> TokenBudget:
        """Return `budget`, or a budget of that number of padded tokens.

        Raises:
            TypeError, ValueError: `budget` is neither; the error calls it `name`.
        """
        if isinstance(budget, str) and budget == "auto":
            raise TypeError(
                f'`{name}` must be an integer or a `TokenBudget`, but is "auto", which only '
                "`ODBConfig` takes. Pass the result of `odb_nodes.memory.find_budget`."
            )
        return budget if isinstance(budget, TokenBudget) else cls(check_count(name, budget))

    @property
    def capacity(self) -> int:
        """Longest sample, in tokens, that is not oversize: a multiple of `pad_to_multiple_of`."""
        longest = self.longest_within(self.tokens // self.fewest_rows)
        return longest // self.pad_to_multiple_of * self.pad_to_multiple_of

    @property
    def fewest_rows(self) -> int:
        """The smallest number of rows of a batch: 1, or `row_sizes` where that is a number."""
        return self.row_sizes if isinstance(self.row_sizes, int) else 1

    @property
    def smallest_cost(self) -> int:
        """The smallest cost of a batch."""
        return self.fewest_rows * self.row_cost(self.pad_to_multiple_of)

    def shape(self, tokens: Sequence[int]) -> Shape:
        """Return rows and width of the batch of a group.

        Args:
            tokens: lengths of its samples.

        Raises:
            ValueError: `tokens` is empty.
        """
        if not len(tokens):
            raise ValueError("`tokens` must have the length of one sample or more, but is empty.")
        packed = self.layout == "packed"
        longest = sum(tokens) if packed else max(tokens)
        rows = 1 if packed else len(tokens)
        return fit_shape(rows, longest, self.shape_ladder(), self.pad_to_multiple_of)

    def padded_tokens(self, tokens: Sequence[int]) -> int:
        """Return the tokens of the batch of a group, padding included: see `shape`."""
        rows, width = self.shape(tokens)
        return rows * width

    def cost(self, tokens: Sequence[int]) -> int:
        """Return the cost of a group: the tokens of its batch, see `shape`, and attention."""
        return self.batch_cost(self.shape(tokens), tokens)

    def batch_cost(self, shape: Shape, tokens: Sequence[int]) -> int:
        """Return the cost of a batch of any shape.

        Args:
            shape: its rows and width.
            tokens: lengths of its samples, which attend only to themselves in a packed row.
        """
        rows, width = shape
        if self.layout == "packed":
            c = self.attention_tokens
            attention = 0 if c is None else sum([length * length // c for length in tokens])
            return rows * width + attention
        return rows * self.row_cost(width)

    def row_cost(self, width: Tokens) -> Tokens:
        """Return the cost of a row: its width in tokens, and attention, rounded down.

        Args:
            width: width of a row, in tokens, or of several rows, (n,) int64.
        """
        c = self.attention_tokens
        return width if c is None else width + width * width // c

    def longest_within(self, cost: int) -> int:
        """Return the width of the widest row that costs at most `cost`; 0 if all rows cost more."""
        if (c := self.attention_tokens) is None:
            return cost
        # The largest n with n + n * n // c <= cost, that is n * n + c * n < c * (cost + 1).
        return (isqrt(c * c + 4 * (c * (cost + 1) - 1)) - c) // 2

    def shape_ladder(self) -> tuple[Shape, ...]:
        """Return the shapes that batches may have, from the narrowest up; none without `shapes`.

        The widths grow by about a constant factor, from 1 / (6 * `shapes`) of the widest, and are
        adjusted so that whole rows fill the budget. A shape has as many rows as the budget holds,
        or the next smaller number in `row_sizes`.
        """
        if self.shapes is None:
            return ()
        if self.layout == "packed":
            return ((1, self.capacity),)
        return _ladder(self, self.shapes)

    def width(self, tokens: int) -> int:
        """Return the width of a batch whose longest row has `tokens` tokens."""
        return fit_shape(1, tokens, self.shape_ladder(), self.pad_to_multiple_of)[1]

    def is_oversize(self, tokens: int, patches: int = 0) -> bool:
        """Return whether one sample exceeds the budget on its own."""
        return tokens > self.capacity or (
            self.max_patches is not None and patches > self.max_patches
        )

    def limit_of(self, tokens: int) -> str:
        """Return, for an error, the limit that an oversize sample of this length exceeds."""
        if tokens <= self.capacity:
            return f"`max_patches` is {self.max_patches}"
        limit = f"`tokens` is {self.tokens}"
        if self.attention_tokens is not None:
            return (
                f"{limit}, the cost of a row of {self.capacity} with "
                f"`attention_tokens={self.attention_tokens}`"
            )
        if self.capacity == self.tokens:
            return limit
        rows = f"{self.fewest_rows} rows, " if self.fewest_rows > 1 else ""
        multiple = f"multiples of {self.pad_to_multiple_of}"
        return f"{limit}, so a sample may have {self.capacity} ({rows}{multiple})"

    def fingerprint(self) -> dict[str, Any]:
        """Return the fields, which decide the groups."""
        return {**vars(self)}


def fit_shape(rows: int, longest_tokens: int, ladder: Sequence[Shape], multiple: int) -> Shape:
    """Return the narrowest shape of a ladder that is wide enough.

    If no shape is, or the ladder is empty: `rows`, and the width rounded up to `multiple`.
    """
    index = bisect_left(ladder, longest_tokens, key=lambda shape: shape[1])
    if index == len(ladder):
        return rows, round_up(longest_tokens, multiple)
    return ladder[index]


def round_up(tokens: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is not below `tokens`."""
    return -(-tokens // multiple) * multiple


@lru_cache(maxsize=64)
def _ladder(budget: TokenBudget, shapes: int) -> tuple[Shape, ...]:
    factor = (SPAN_PER_SHAPE * shapes) ** (-1 / max(shapes - 1, 1))
    steps = (max(int(budget.capacity * factor**step), 1) for step in range(1, shapes))
    narrower = {_filling_width(budget, step, 1 / factor) for step in steps}
    widths = sorted({budget.capacity, *narrower})  # the widest holds every sample that fits
    limit = budget.tokens if budget.max_samples is None else budget.max_samples
    most = [min(budget.tokens // budget.row_cost(width), limit) for width in widths]
    rows = allowed_rows(np.array(most), budget.row_sizes)
    return tuple(zip(rows.tolist(), widths, strict=True))


def _filling_width(budget: TokenBudget, tokens: int, factor: float) -> int:
    """Return the width near `tokens` of which whole rows fill the budget, or else `tokens`.

    A width just above such a width would leave almost a whole row unused. Near is less than half
    the way to the next width, which is `factor` times as wide, so that widths stay apart.
    """
    multiple = budget.pad_to_multiple_of
    width = round_up(tokens, multiple)
    most = max(budget.fewest_rows, round(budget.tokens / budget.row_cost(width)))
    rows = int(allowed_rows(np.array([most]), budget.row_sizes)[0])
    filling = budget.longest_within(budget.tokens // rows)
    filling = max(filling // multiple, 1) * multiple
    return filling if max(filling / width, width / filling) ** 2 <= factor else width


class Limits(NamedTuple):
    """The fields of a `TokenBudget` that bound a group, and a sample."""

    tokens: int  # the cost of a group
    max_samples: int | None
    max_patches: int | None
    sample_tokens: int  # the cost, and the patches, that make a sample oversize if it has more
    sample_patches: int | None

    @classmethod
    def of(cls, budget: TokenBudget) -> Limits:
        """Return the limits of a budget."""
        tokens, patches = budget.tokens, budget.max_patches
        return cls(tokens, budget.max_samples, patches, tokens, patches)

    def tightened(self, other: Limits) -> Limits:
        """Return the tighter limit of each pair."""
        return Limits(*map(_tighter, self, other))  # type: ignore[arg-type]

    def group_budget(self, budget: TokenBudget) -> TokenBudget:
        """Return the budget of groups; its `tokens` allow at least the smallest batch."""
        tokens = max(self.tokens, budget.smallest_cost)
        return replace(
            budget, tokens=tokens, max_samples=self.max_samples, max_patches=self.max_patches
        )

    def sample_budget(self, budget: TokenBudget) -> TokenBudget:
        """Return the budget that decides which samples are oversize."""
        return replace(budget, tokens=self.sample_tokens, max_patches=self.sample_patches)


def _tighter(first: int | None, second: int | None) -> int | None:
    return min((limit for limit in (first, second) if limit is not None), default=None)
