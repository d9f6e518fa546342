"""A model of the peak memory of a training step, and the budget that follows from it."""

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

from odb_nodes._core.checks import MAX_COUNT, check_count, check_number
from odb_nodes._core.text import markdown_table
from odb_nodes.errors import StateError
from odb_nodes.memory.meter import MOST_BYTES
from odb_nodes.planning import StepTime, TokenBudget

Floats = NDArray[np.float64]

VERSION = 1
SAFETY = 2.0  # times the error of the points, beyond which an unseen shape may lie
LEAST_MARGIN = 0.002  # relative: what an allocator rounds
UNKNOWN_MARGIN = 0.05  # relative, of a fit through all points
CARDS_GIB = (16, 24, 40, 48, 80, 141)
LEAST_TOKENS = 1e-3  # share of the seconds of a fit that its tokens take at least
SMALL_SQUARE = 0.01  # share of the linear part at the widest shape, below which none is declared


class _NoRoomError(ValueError):
    """Not a single token fits."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Peak bytes: a + b*n*L + c*n*L^2 + d*patches for n rows of L tokens.

    Attributes:
        constant_bytes: a, of any batch.
        token_bytes: b, of each token of the batch, padding included.
        square_bytes: c, of each pair of tokens of a row.
        patch_bytes: d, of each image patch.
        margin: a shape that was not measured takes at most 1 + `margin` times its prediction.
        error: largest relative error of the points that the fit was made from.
        points: how many these were.
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

    a is weights, gradients and the optimizer's state, b the activations, c quadratic attention, d
    the vision tower. The points should differ in width and in rows: with one width, b and c cannot
    be told apart. Leave out small batches whose peak is the optimizer's own step: they do not show
    how memory grows.
    """

    def __init__(self) -> None:
        self._points: dict[tuple[int, int, int], int] = {}
        self._fit: Fit | None = None

    def add(self, rows: int, width: int, patches: int, peak_bytes: int) -> None:
        """Add the peak of one step, in place of an older one of the same shape.

        Args:
            rows: rows of the batch.
            width: tokens of each row, padding included.
            patches: image patches of the batch.
            peak_bytes: what the step took at its peak.

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
                f"a fit needs 2 points or more, but there are {len(self._points)}: add what steps "
                "of different shapes take. 8 are good: 2 to 4 widths, each with few and many rows."
            )
        design, peaks = design_of(self._points), np.array([*self._points.values()], np.float64)
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
        """Return the predicted peak of a step, in bytes, without the margin; arguments as of `add`.

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

        It has `attention_tokens` if memory grows with the square of the width; and, if
        patches take memory, `max_patches`, for their mean share in the points. Rows
        that are narrower than all points may take up to 1 / sqrt(`attention_tokens`) more than
        predicted, since costs are integers.

        Args:
            limit_bytes: memory of the device.
            threshold: share of it that may be used, above 0 and at most 1.
            margin: what a batch may take beyond its prediction, relative to it. `None`: the margin
                of the fit.
            options: further fields of the `TokenBudget`, such as `pad_to_multiple_of`; not
                `tokens` and `attention_tokens`, which follow from the points.

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
        own = {"tokens", "attention_tokens"} | options.keys() - {*TokenBudget.__dataclass_fields__}
        if wrong := own & options.keys():
            raise TypeError(
                f"`{min(wrong)}` must not be given: the model finds `tokens` and "
                "`attention_tokens`, and the options are further fields of `TokenBudget`."
            )
        margin = fit.margin if margin is None else check_number("margin", margin, "[0, inf)")
        share = self._patch_share(fit)
        room_bytes = usable_bytes / (1 + margin) - fit.constant_bytes
        attention_tokens, unit_bytes = self._unit_of_cost(fit)
        tokens = (1 - share) * room_bytes / unit_bytes
        if tokens < 1:
            raise _NoRoomError(
                f"a step without a single token is predicted to take {fit.constant_bytes:,.0f} "
                f"bytes, but only {usable_bytes:,.0f} are usable: use a smaller model or "
                "optimizer, shard them, or raise `limit_bytes` or `threshold`."
            )
        if share:
            patches = int(share * room_bytes / fit.patch_bytes)
            options.setdefault("max_patches", max(min(patches, MAX_COUNT), 1))
        most_tokens = min(int(tokens), MAX_COUNT)
        return TokenBudget(most_tokens, attention_tokens=attention_tokens, **options)

    def plan(
        self, limit_bytes: int, *, tokens_per_step: int, world_size: int, **options: Any
    ) -> tuple[TokenBudget, int]:
        """Return the budget of a batch, and how many batches an optimizer step accumulates.

        All ranks' batches of a step together cost `tokens_per_step`, or a little more if it
        cannot be divided. As few batches are accumulated as memory allows.

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
        wanted = check_count("tokens_per_step", tokens_per_step, ranks)
        largest = self.budget(limit_bytes, **options)
        accumulate = ceil(wanted / (ranks * largest.tokens))
        return replace(largest, tokens=ceil(wanted / (ranks * accumulate))), accumulate

    def table(self, cards_gib: float | Sequence[float] = CARDS_GIB, **options: Any) -> str:
        """Return the budgets for cards with so much memory, as a table in Markdown.

        All follow from this one fit. Where not a single token fits, `tokens` is 0.

        Args:
            cards_gib: memory of each card, in GiB.
            options: arguments of `budget`, such as `threshold`.

        Raises:
            TypeError, ValueError: as `budget`, except that no batch fits.
        """
        given = [*cards_gib] if isinstance(cards_gib, Iterable) else [cards_gib]
        if not given or not all(isinstance(one, Real) and one > 0 for one in given):
            raise ValueError(
                f"`cards_gib` must be numbers of GiB above 0, one for each card, but is "
                f"{cards_gib!r} instead."
            )
        self.fit()
        widest = max(width for _, width, _ in self._points)
        of_budgets = ("attention_tokens", "max_patches")
        lines = []
        for card_gib in given:
            line = {"card, GiB": card_gib, "tokens": 0, **dict.fromkeys(of_budgets, 0)}
            line[rows := f"rows of {widest:,}"] = 0
            with suppress(_NoRoomError):
                budget = self.budget(int(card_gib * 2**30), **options)
                line.update((name, getattr(budget, name) or 0) for name in ("tokens", *of_budgets))
                line[rows] = budget.tokens // budget.row_cost(widest)
            lines.append(line)
        unused = [name for name in of_budgets if not any(line[name] for line in lines)]
        return markdown_table(
            [{name: f"{n:,}" for name, n in line.items() if name not in unused} for line in lines]
        )

    def to_json(self) -> str:
        """Return the points as JSON."""
        points = [[*shape, peak_bytes] for shape, peak_bytes in self._points.items()]
        return json.dumps({"version": VERSION, "points": points})

    @classmethod
    def from_json(cls, text: str) -> MemoryModel:
        """Return the model that `to_json` described.

        Raises:
            StateError: it is of another version, incomplete, or holds what no model has.
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
        """Return the mean share of patches in what activations take, of the points with patches."""
        design = design_of(self._points)
        taken = design[design[:, 3] > 0, 1:] * (fit.token_bytes, fit.square_bytes, fit.patch_bytes)
        return float((taken[:, 2] / taken.sum(1)).mean()) if fit.patch_bytes else 0.0

    def _unit_of_cost(self, fit: Fit) -> tuple[int | None, float]:
        """Return `attention_tokens`, and the bytes that a unit of cost under it takes at most."""
        widths = [width for _, width, _ in self._points]
        linear, square = fit.token_bytes, fit.square_bytes
        if square * max(widths) <= SMALL_SQUARE * linear:
            return None, linear + square * max(widths)
        attention_tokens = max(min(round(linear / square), MAX_COUNT), 1)
        # Costs are integers: most is rounded off a little below the root of `attention_tokens`.
        last = max(2 * isqrt(attention_tokens), *widths)
        lengths = np.arange(min(widths), last + 1, dtype=np.int64)
        costs = lengths + lengths * lengths // attention_tokens
        of_lengths = ((linear + square * lengths) * lengths / costs).max()
        return attention_tokens, float(max(of_lengths, square * attention_tokens))


def design_of(shapes: Iterable[tuple[int, int, int]]) -> Floats:
    """Return one, tokens, squared tokens and patches of shapes, (N, 4)."""
    rows, widths, patches = np.array([*shapes], np.float64).reshape(-1, 3).T
    return np.stack((np.ones_like(rows), rows * widths, rows * widths**2, patches), axis=1)


def non_negative_fit(design: Floats, peaks: Floats) -> Floats:
    """Return the non-negative least-squares fit in relative errors, one number for each column."""
    # It is the best of the free fits of all subsets of the columns that have no negative term.
    # (Lawson and Hanson, Solving Least Squares Problems, 1974, find that subset step by step.)
    scale = design.max(axis=0)
    scale[scale == 0] = 1.0
    weighted = design / scale / peaks[:, None]
    best, best_error = np.zeros(design.shape[1]), np.inf
    numbers = range(design.shape[1])
    for subset in chain.from_iterable(combinations(numbers, size + 1) for size in numbers):
        columns = weighted[:, subset]
        solution = np.linalg.pinv(columns, rcond=1e-12) @ np.ones(len(peaks))
        error = float(np.square(columns @ solution - 1).sum())
        # A larger subset, or a later column, has to fit better by more than rounding: where all
        # widths are one, tokens and their squares fit alike, and tokens come first.
        if solution.min() >= 0 and error < best_error * 0.999 - 1e-15:
            best, best_error = np.zeros_like(best), error
            best[list(subset)] = solution / scale[list(subset)]
    return best


def fitted_time(design: Floats, seconds: Floats) -> StepTime:
    """Return what steps take, in seconds, of designs with one, tokens, squares and patches."""
    base, token, square, patch = non_negative_fit(design, seconds).tolist()
    least_s = LEAST_TOKENS * float(seconds.sum() / design[:, 1].sum())
    return StepTime(tokens=max(token, least_s), squares=square, patches=patch, base=base)


def _margin(errors: Floats, terms: int) -> float:
    """Return the margin of a fit of so many terms that is not 0."""
    if len(errors) <= terms:
        return UNKNOWN_MARGIN  # the fit goes through all points: it has no errors to judge it by
    scatter = sqrt(len(errors) / (len(errors) - terms))  # they scatter less about their own fit
    return max(SAFETY * scatter * float(errors.max()), LEAST_MARGIN)
