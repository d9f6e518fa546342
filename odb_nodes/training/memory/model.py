"""A model of the peak memory of a training step, and the budgets that it implies."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, combinations
from math import ceil, isqrt, sqrt
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from odb_nodes._support.checks import MAX_COUNT, check_count, check_number
from odb_nodes._support.text import markdown_table
from odb_nodes.core.planning import StepTime, TokenBudget
from odb_nodes.errors import StateError
from odb_nodes.training.memory.meter import GIB, MOST_BYTES

Floats = NDArray[np.float64]

VERSION = 1
SAFETY = 2.0  # margin of an unmeasured shape, as a multiple of the error of the points
LEAST_MARGIN = 0.002  # relative: rounding of an allocator
UNKNOWN_MARGIN = 0.05  # relative, for a fit without residuals
CARDS_GIB = (16, 24, 40, 48, 80, 141)
LEAST_TOKENS = 1e-3  # least share of a step's seconds that tokens take in a fit
SMALL_SQUARE = 0.01  # share of the linear part at which the quadratic part is left out


class _NoRoomError(ValueError):
    """A single token does not fit."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The terms of a `MemoryModel`, fitted to its points.

    Attributes:
        constant_bytes: a, of any batch.
        token_bytes: b, of a token of the batch, padding included.
        square_bytes: c, of a pair of tokens of a row.
        patch_bytes: d, of an image patch.
        margin: an unmeasured shape takes at most 1 + `margin` times its prediction.
        error: largest relative error of the fitted points.
        points: number of fitted points.
    """

    constant_bytes: float
    token_bytes: float
    square_bytes: float
    patch_bytes: float
    margin: float
    error: float
    points: int


class MemoryModel:
    """Predicts the peak memory of a training step from the shape of its batch.

    n rows of L tokens, padding included, with p image patches take

        a + b * n * L + c * n * L**2 + d * p bytes:

    a is weights, gradients and the optimizer's state; b the activations; c quadratic attention; d
    the vision tower. The points should differ in width and in rows: a single width cannot separate
    b from c. Leave out small batches whose peak is the optimizer's step: they do not show how
    memory grows with the batch.
    """

    def __init__(self) -> None:
        self._points: dict[tuple[int, int, int], int] = {}
        self._fit: Fit | None = None

    def add(self, rows: int, width: int, patches: int, peak_bytes: int) -> None:
        """Add the peak of a step; it replaces an earlier point of the same shape.

        Args:
            rows: rows of the batch.
            width: tokens of each row, padding included.
            patches: image patches of the batch.
            peak_bytes: peak memory of the step.

        Raises:
            TypeError, ValueError: an argument is not valid.
        """
        sizes = check_count("rows", rows), check_count("width", width)
        shape = (*sizes, check_count("patches", patches, 0))
        self._points[shape] = check_count("peak_bytes", peak_bytes, maximum=MOST_BYTES)
        self._fit = None

    def fit(self) -> Fit:
        """Fit the model to its points: non-negative least squares of their relative errors.

        Returns:
            The coefficients, the margin and the error of the fit.

        Raises:
            ValueError: there are fewer than 2 points.
        """
        if self._fit is not None:
            return self._fit
        if len(self._points) < 2:
            raise ValueError(
                f"a fit needs 2 points or more, but has {len(self._points)}: add peaks of steps of "
                "different shapes. 8 are good: 2 to 4 widths, each with few and many rows."
            )
        design = design_of(self._points)
        peaks = np.array([*self._points.values()], np.float64)
        coefficients = non_negative_fit(design, peaks)
        errors = peaks / (design @ coefficients) - 1
        constant, token, square, patch = coefficients.tolist()
        self._fit = Fit(
            constant_bytes=constant,
            token_bytes=token,
            square_bytes=square,
            patch_bytes=patch,
            margin=_margin(errors, int(np.count_nonzero(coefficients))),
            error=float(np.abs(errors).max()),
            points=len(peaks),
        )
        return self._fit

    def predict(self, rows: int, width: int, patches: int = 0) -> int:
        """Return the predicted peak of a step, in bytes, without the margin. Arguments as in `add`.

        Raises:
            ValueError: there are fewer than 2 points.
        """
        fit = self.fit()
        token_bytes = fit.token_bytes + fit.square_bytes * width
        return ceil(fit.constant_bytes + rows * width * token_bytes + fit.patch_bytes * patches)

    def budget(
        self,
        limit_bytes: int,
        *,
        threshold: float = 0.9,
        margin: float | None = None,
        **options: Any,
    ) -> TokenBudget:
        """Return the largest budget whose batches, with the margin, fit into a share of a limit.

        The budget has `attention_tokens` if memory grows with the square of the width, and
        `max_patches` if patches take memory, for their mean share in the points. Rows narrower than
        all points may take up to 1 / sqrt(`attention_tokens`) more than predicted, since costs are
        integers.

        Args:
            limit_bytes: memory of the device.
            threshold: share of it that may be used, above 0 and at most 1.
            margin: relative error that the prediction of a batch may have. `None`: the margin of
                the fit.
            options: further fields of the `TokenBudget`, such as `pad_to_multiple_of`, except
                `tokens` and `attention_tokens`.

        Raises:
            TypeError, ValueError: an argument is not valid, there are fewer than 2 points, they do
                not show how memory grows, or no batch fits.
        """
        limit_bytes = check_count("limit_bytes", limit_bytes, maximum=MOST_BYTES)
        usable_bytes = limit_bytes * check_number("threshold", threshold, "(0, 1]")
        fit = self.fit()
        if fit.token_bytes == fit.square_bytes == 0:
            raise ValueError(
                f"the {fit.points} points do not show how memory grows with the tokens of a batch: "
                "add points of larger batches."
            )
        allowed = {*TokenBudget.__dataclass_fields__} - {"tokens", "attention_tokens"}
        if wrong := options.keys() - allowed:
            raise TypeError(
                f"`{min(wrong)}` must not be passed: the model determines `tokens` and "
                "`attention_tokens`, and the options are further fields of `TokenBudget`."
            )
        margin = fit.margin if margin is None else check_number("margin", margin, "[0, inf)")
        patch_share = self._patch_share(fit)
        room_bytes = usable_bytes / (1 + margin) - fit.constant_bytes
        attention_tokens, unit_bytes = self._unit_of_cost(fit)
        tokens = (1 - patch_share) * room_bytes / unit_bytes
        if tokens < 1:
            raise _NoRoomError(
                f"a step without a single token is predicted to take {fit.constant_bytes:,.0f} "
                f"bytes, but only {usable_bytes:,.0f} are usable: take a smaller model or "
                "optimizer, shard them, or raise `limit_bytes` or `threshold`."
            )
        if patch_share:
            patches = int(patch_share * room_bytes / fit.patch_bytes)
            options.setdefault("max_patches", max(min(patches, MAX_COUNT), 1))
        most_tokens = min(int(tokens), MAX_COUNT)
        return TokenBudget(most_tokens, attention_tokens=attention_tokens, **options)

    def plan(
        self, limit_bytes: int, *, tokens_per_step: int, world_size: int, **options: Any
    ) -> tuple[TokenBudget, int]:
        """Return the budget of a batch, and the number of batches that a step accumulates.

        The batches of all ranks in an optimizer step cost `tokens_per_step` together, or a little
        more if it cannot be divided. The number of batches is the smallest that memory allows.

        Args:
            limit_bytes: memory of one device.
            tokens_per_step: tokens of an optimizer step over all ranks, as the budget counts them:
                padding included, and what attention adds.
            world_size: number of ranks.
            options: arguments of `budget`.

        Raises:
            TypeError, ValueError: as `budget`, or `tokens_per_step` is below `world_size`.
        """
        ranks = check_count("world_size", world_size)
        least_tokens = check_count("tokens_per_step", tokens_per_step, ranks)
        largest = self.budget(limit_bytes, **options)
        accumulate = ceil(least_tokens / (ranks * largest.tokens))
        return replace(largest, tokens=ceil(least_tokens / (ranks * accumulate))), accumulate

    def table(self, cards_gib: float | Sequence[float] = CARDS_GIB, **options: Any) -> str:
        """Return the budgets for cards of several sizes, as a Markdown table.

        `tokens` is 0 if a single token does not fit.

        Args:
            cards_gib: memory of each card, in GiB.
            options: arguments of `budget`, such as `threshold`.

        Raises:
            TypeError, ValueError: as `budget`, except that no batch fits.
        """
        cards = [*cards_gib] if isinstance(cards_gib, Iterable) else [cards_gib]
        if not cards or not all(
            isinstance(card, Real) and 1 <= card * GIB <= MOST_BYTES for card in cards
        ):
            raise ValueError(
                f"`cards_gib` must be numbers of GiB above 0, one for each card, but is "
                f"{cards_gib!r} instead."
            )
        self.fit()
        widest = max(width for _, width, _ in self._points)
        fields = ("tokens", "attention_tokens", "max_patches")
        lines = []
        for card_gib in cards:
            values = dict.fromkeys(fields, 0)
            rows = 0
            with suppress(_NoRoomError):
                budget = self.budget(int(card_gib * GIB), **options)
                values = {name: getattr(budget, name) or 0 for name in fields}
                rows = budget.tokens // budget.row_cost(widest)
            lines.append({"card, GiB": card_gib, **values, f"rows of {widest:,}": rows})
        unused = [name for name in fields[1:] if not any(line[name] for line in lines)]
        return markdown_table(
            [{name: f"{n:,}" for name, n in line.items() if name not in unused} for line in lines]
        )

    def to_json(self) -> str:
        """Return the points as JSON."""
        points = [[*shape, peak_bytes] for shape, peak_bytes in self._points.items()]
        return json.dumps({"version": VERSION, "points": points})

    @classmethod
    def from_json(cls, text: str) -> MemoryModel:
        """Return the model that `to_json` saved.

        Raises:
            StateError: the text has another version, is incomplete, or has unknown fields.
        """
        model = cls()
        try:
            data = json.loads(text)
            if data["version"] != VERSION:
                raise ValueError(f"its version is {data['version']!r:.40}")
            if unknown := data.keys() - {"version", "points"}:
                raise ValueError(f"it has {min(unknown)!r}")
            for point in data["points"]:
                model.add(*point)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise StateError(
                f"this is no memory model of version {VERSION}: {error}. Calibrate again."
            ) from error
        return model

    def _patch_share(self, fit: Fit) -> float:
        """Return the mean share of patches in activation memory, over the points with patches."""
        design = design_of(self._points)
        with_patches = design[design[:, 3] > 0, 1:]
        terms_bytes = with_patches * (fit.token_bytes, fit.square_bytes, fit.patch_bytes)
        return float((terms_bytes[:, 2] / terms_bytes.sum(1)).mean()) if fit.patch_bytes else 0.0

    def _unit_of_cost(self, fit: Fit) -> tuple[int | None, float]:
        """Return `attention_tokens`, and the most bytes that a unit of cost then takes."""
        widths = [width for _, width, _ in self._points]
        linear, square = fit.token_bytes, fit.square_bytes
        if square * max(widths) <= SMALL_SQUARE * linear:
            return None, linear + square * max(widths)
        attention_tokens = max(min(round(linear / square), MAX_COUNT), 1)
        # Costs are integers: rounding takes most a little below the root of `attention_tokens`.
        last = max(2 * isqrt(attention_tokens), *widths)
        lengths = np.arange(min(widths), last + 1, dtype=np.int64)
        costs = lengths + lengths * lengths // attention_tokens
        most_bytes = ((linear + square * lengths) * lengths / costs).max()
        return attention_tokens, float(max(most_bytes, square * attention_tokens))


def design_of(shapes: Iterable[tuple[int, int, int]]) -> Floats:
    """Return the columns 1, tokens, squared tokens and patches of shapes, (N, 4)."""
    rows, widths, patches = np.array([*shapes], np.float64).reshape(-1, 3).T
    return np.stack((np.ones_like(rows), rows * widths, rows * widths**2, patches), axis=1)


def non_negative_fit(design: Floats, peaks: Floats) -> Floats:
    """Return the coefficients >= 0 of the columns with the least squared relative errors."""
    # The solution is the best unconstrained fit of a subset of columns without a negative term.
    # (Lawson and Hanson, Solving Least Squares Problems, 1974, find that subset step by step.)
    scale = design.max(axis=0)
    scale[scale == 0] = 1.0
    weighted = design / scale / peaks[:, None]
    best = np.zeros(design.shape[1])
    best_error = np.inf
    numbers = range(design.shape[1])
    for subset in chain.from_iterable(combinations(numbers, size + 1) for size in numbers):
        columns = weighted[:, subset]
        solution = np.linalg.pinv(columns, rcond=1e-12) @ np.ones(len(peaks))
        error = float(np.square(columns @ solution - 1).sum())
        # A later subset must fit better by more than rounding: if all widths are equal, tokens and
        # squared tokens fit alike, and tokens come first.
        if solution.min() >= 0 and error < best_error * 0.999 - 1e-15:
            best = np.zeros_like(best)
            best_error = error
            best[list(subset)] = solution / scale[list(subset)]
    return best


def fitted_time(design: Floats, seconds: Floats) -> StepTime:
    """Fit the seconds of steps to the columns of `design_of`."""
    base, token, square, patch = non_negative_fit(design, seconds).tolist()
    least_s = LEAST_TOKENS * float(seconds.sum() / design[:, 1].sum())
    least_s = max(least_s, 2 * max(base, square, patch) / MAX_COUNT)  # what `StepTime` allows
    return StepTime(tokens=max(token, least_s), squares=square, patches=patch, base=base)


def _margin(errors: Floats, terms: int) -> float:
    """Return the margin of a fit with `terms` coefficients above 0."""
    if len(errors) <= terms:
        return UNKNOWN_MARGIN  # The fit goes through all points: it has no residuals.
    scatter = sqrt(len(errors) / (len(errors) - terms))  # Points scatter less around a fit to them.
    return max(SAFETY * scatter * float(errors.max()), LEAST_MARGIN)
