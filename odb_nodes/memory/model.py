"""A model of the peak memory of a training step, and the budget that follows from it."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import asdict, fields, replace
from math import ceil, isfinite
from typing import Any

import numpy as np

from odb_nodes._core.checks import check_count, check_type
from odb_nodes.errors import StateError
from odb_nodes.memory.accuracy import Accuracy, StepErrors
from odb_nodes.memory.budgets import budget_of, mean_patch_share
from odb_nodes.memory.fitting import Fit, fit_peaks
from odb_nodes.memory.meter import check_bytes, check_share
from odb_nodes.memory.points import Point, Points
from odb_nodes.planning import TokenBudget

__all__ = ["MemoryModel"]

VERSION = 1
KEPT_ERRORS = 1024
LEAST_OF_SOURCE = 4  # points of a source, for a factor of its own


class MemoryModel:
    """Predicts the peak memory of a training step from the shape of its batch.

    n rows of L tokens, padding included, with p image patches take

        max(floor, a + b * n * L + c * n * L**2 + d * p) bytes:

    a is weights, gradients and the optimizer's state, b the activations, c attention where it is
    quadratic, d the vision tower, and the floor the optimizer's own step. The points should differ
    in width and in rows: where all have one width, b and c cannot be told apart.

    Add points as they are measured, also those of a run's own steps, and call `fit` now and then.
    It keeps 256 points and the errors of the last 1024 predictions, however long the run is.
    """

    def __init__(self) -> None:
        self._points = Points()
        self._errors: deque[tuple[str, float]] = deque(maxlen=KEPT_ERRORS)
        self._fit: Fit | None = None
        self._factors: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"MemoryModel({len(self._points)} points, {self._fit})"

    @property
    def is_fitted(self) -> bool:
        """Whether there is a fit, so that predictions are compared with what is added."""
        return self._fit is not None

    def add(self, rows: int, width: int, patches: int, peak_bytes: int, source: str = "") -> None:
        """Add the peak of one step.

        Where there is a fit, its prediction is compared with the peak first: see `accuracy`.

        Args:
            rows: rows of the batch.
            width: tokens of each row, padding included.
            patches: image patches of the batch.
            peak_bytes: what the step took at its peak.
            source: where the samples come from; the peaks of a source with 4 points or more are
                predicted with a factor of its own. `""` for none.

        Raises:
            TypeError, ValueError: an argument is not valid.
        """
        point = _checked_point(source, rows, width, patches, peak_bytes)
        if self._fit is not None:
            predicted = self.predict(rows, width, patches, source)
            self._errors.append((source, peak_bytes / predicted - 1))
        self._points.add(point)

    def fit(self) -> Fit:
        """Fit the model to its points: non-negative least squares of their relative errors.

        Returns:
            The coefficients, the margin and the error of the fit.

        Raises:
            ValueError: there are fewer than 2 points.
        """
        if len(self._points) < 2:
            raise ValueError(
                f"a fit needs 2 points or more, but there are {len(self._points)}: add what steps "
                "of different shapes take. 8 are good: 2 to 4 widths, each with few and many rows."
            )
        shapes, peaks = self._points.shapes(), self._points.peaks()
        self._fit = fit_peaks(shapes, peaks)
        ratios = peaks / self._fit.predict(shapes)
        sources = np.array([point.source for point in self._points])
        self._factors = {
            str(source): float(np.median(ratios[sources == source]))
            for source in np.unique(sources)
            if source and np.count_nonzero(sources == source) >= LEAST_OF_SOURCE
        }
        return self._fit

    def predict(self, rows: int, width: int, patches: int = 0, source: str = "") -> int:
        """Return the predicted peak of a step, in bytes, without the margin.

        Args:
            rows: rows of the batch.
            width: tokens of each row, padding included.
            patches: image patches of the batch.
            source: where the samples come from, as told to `add`.

        Raises:
            ValueError: there are fewer than 2 points.
        """
        shape = np.array([[rows, width, patches]], dtype=np.float64)
        return ceil(float(self._fitted().predict(shape)[0]) * self._factors.get(source, 1.0))

    def accuracy(self) -> Accuracy:
        """Return how far off the fit is from its points, and its predictions from what came then.

        Raises:
            ValueError: there are fewer than 2 points.
        """
        fit = self._fitted()
        by_source: dict[str, list[float]] = {}
        for source, error in self._errors:
            by_source.setdefault(source, []).append(error)
        return Accuracy(
            points=fit.points,
            fit_error=fit.error,
            margin=fit.margin,
            steps=StepErrors.of([error for _, error in self._errors], fit.margin),
            by_source={
                source: StepErrors.of(errors, fit.margin)
                for source, errors in sorted(by_source.items())
                if source
            },
        )

    def budget(
        self,
        limit_bytes: int,
        *,
        threshold: float = 0.9,
        margin: float | None = None,
        patch_share: float | None = None,
        **options: Any,
    ) -> TokenBudget:
        """Return the largest budget whose batches, with the margin, fit into a share of a limit.

        It has `attention_tokens` where memory grows with the square of the width, and
        `max_patches` where patches take memory. Rows that are narrower than all points may take up
        to 1 / sqrt(`attention_tokens`) more than predicted, since costs are integers.

        Args:
            limit_bytes: memory of the device.
            threshold: share of it that may be used, above 0 and at most 1.
            margin: what a batch may take beyond its prediction, relative to it. `None`: the margin
                of the fit.
            patch_share: share of the memory for activations that patches get, at least 0 and below
                1; above 0 only where points have patches. `None`: as in those, on average.
            options: further fields of the `TokenBudget`, such as `pad_to_multiple_of`; not
                `tokens` and `attention_tokens`, which follow from the points.

        Raises:
            TypeError, ValueError: an argument is not valid, there are fewer than 2 points, they do
                not show how memory grows, or no batch fits.
        """
        usable_bytes = check_bytes("limit_bytes", limit_bytes) * check_share("threshold", threshold)
        fit = self._fitted()
        shapes = self._points.shapes()
        if margin is not None:
            fit = replace(fit, margin=_number(margin, 0.0, "margin"))
        if patch_share is None:
            patch_share = mean_patch_share(fit, shapes)
        elif not 0 <= patch_share < 1:
            raise ValueError(
                f"`patch_share` must be at least 0 and below 1, but is {patch_share!r} instead."
            )
        elif patch_share and not shapes[:, 2].any():
            raise ValueError(
                f"`patch_share` must be 0 or None where no point has patches, but is {patch_share} "
                "instead. Add points with patches."
            )
        return budget_of(
            fit,
            usable_bytes=usable_bytes,
            widths=(int(shapes[:, 1].min()), int(shapes[:, 1].max())),
            patch_share=patch_share,
            **options,
        )

    def plan(
        self, limit_bytes: int, *, tokens_per_step: int, world_size: int, **options: Any
    ) -> tuple[TokenBudget, int]:
        """Return the budget of a batch, and how many batches an optimizer step accumulates.

        All ranks' batches of a step together cost `tokens_per_step`, or a little more where it
        cannot be divided; as few are accumulated as memory allows.

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

    def to_json(self) -> str:
        """Return the model with its points, fit and errors as JSON."""
        return json.dumps(
            {
                "version": VERSION,
                "points": list(self._points),
                "errors": list(self._errors),
                "factors": self._factors,
                "fit": self._fit and asdict(self._fit),
            }
        )

    @classmethod
    def from_json(cls, text: str) -> MemoryModel:
        """Return the model that `to_json` described.

        Raises:
            StateError: it is of another version, incomplete, or holds what no model has.
        """
        try:
            data = json.loads(text)
            if not isinstance(data, dict):
                raise ValueError(f"it must be a JSON object, but is {data!r:.40} instead")
            if data.pop("version", None) != VERSION:
                raise ValueError(f"its version must be {VERSION}")
            points, errors, factors = data.pop("points"), data.pop("errors"), data.pop("factors")
            fit = data.pop("fit")
            if data:
                raise ValueError(f"it has unknown fields {sorted(data)}")
            model = cls()
            for point in points:
                model._points.add(_checked_point(*point))
            model._errors.extend((_text(source), _number(error)) for source, error in errors)
            model._factors = {_text(key): _number(value) for key, value in factors.items()}
            model._fit = None if fit is None else _checked_fit(fit)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise StateError(
                f"this is no memory model of version {VERSION}: {error}. Calibrate again."
            ) from error
        return model

    def _fitted(self) -> Fit:
        return self.fit() if self._fit is None else self._fit


def _checked_point(
    source: object, rows: object, width: object, patches: object, peak_bytes: object
) -> Point:
    return Point(
        _text(source),
        check_count("rows", rows),
        check_count("width", width),
        check_count("patches", patches, 0),
        check_bytes("peak_bytes", peak_bytes),
    )


def _checked_fit(values: dict[str, Any]) -> Fit:
    names = [field.name for field in fields(Fit)]
    if sorted(values) != sorted(names):
        raise ValueError(f"its fit must have the fields {names}, but has {sorted(values)}")
    points = check_count("points", values.pop("points"), 2)
    return Fit(points=points, **{name: _number(value, 0.0) for name, value in values.items()})


def _text(value: object) -> str:
    check_type("source", value, str)
    return str(value)


def _number(value: Any, least: float = -1.0, name: str = "number") -> float:
    check_type(name, value, int | float)
    if not isfinite(value) or value < least:
        raise ValueError(f"`{name}` must be finite and at least {least}, but is {value!r} instead.")
    return float(value)
