"""Fit what a step of training takes at its peak to the shape of its batch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from math import sqrt

import numpy as np
from numpy.typing import NDArray

__all__ = ["COLUMNS", "Fit", "fit_peaks", "non_negative_fit"]

Floats = NDArray[np.float64]

COLUMNS = 4  # one, tokens, squared tokens, patches
FLOOR_SPREAD = 0.002  # relative: peaks of different shapes that differ by less are the floor
CLEARLY = 4.0  # times that errors must shrink for leaving out a single point as the floor
SAFETY = 2.0  # times the error of the points, beyond which an unseen shape may lie
LEAST_MARGIN = 0.002  # relative: what an allocator rounds
UNKNOWN_MARGIN = 0.05  # relative


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Peak bytes: max(floor, a + b*n*L + c*n*L^2 + d*patches) for n rows of L tokens.

    Attributes:
        constant_bytes: a, of any batch.
        token_bytes: b, of each token of the batch, padding included.
        square_bytes: c, of each pair of tokens of a row.
        patch_bytes: d, of each image patch.
        floor_bytes: what a step takes whatever its batch: that of the optimizer. 0 if not seen.
        margin: a shape that was not measured takes at most 1 + `margin` times its prediction.
        error: largest relative error of the points that the fit was made from.
        points: how many these were.
    """

    constant_bytes: float
    token_bytes: float
    square_bytes: float
    patch_bytes: float
    floor_bytes: float
    margin: float
    error: float
    points: int

    def predict(self, shapes: Floats) -> Floats:
        """Return the peaks of shapes, without the margin: (N,) bytes.

        Args:
            shapes: (N, 3) rows, width in tokens, patches.
        """
        coefficients = np.array(
            (self.constant_bytes, self.token_bytes, self.square_bytes, self.patch_bytes)
        )
        peaks: Floats = np.maximum(_design(shapes) @ coefficients, self.floor_bytes)
        return peaks


def fit_peaks(shapes: Floats, peaks: Floats) -> Fit:
    """Return the fit with the smallest relative errors whose terms are not negative.

    Points at the floor are left out: as many of the lowest peaks as are about equal although their
    shapes differ, and above what the others tell; one alone where these agree much better.
    """
    order = np.argsort(peaks, kind="stable")
    design, peaks = _design(shapes[order]), peaks[order]
    at_floor = _points_at_floor(design, peaks)
    coefficients = non_negative_fit(design[at_floor:], peaks[at_floor:])
    floor = float(peaks[at_floor - 1]) if at_floor else 0.0
    fitted = np.maximum(design @ coefficients, floor)
    errors = peaks / fitted - 1
    used = int(np.count_nonzero(coefficients))
    constant, token, square, patch = coefficients.tolist()
    return Fit(
        constant_bytes=constant,
        token_bytes=token,
        square_bytes=square,
        patch_bytes=patch,
        floor_bytes=floor,
        margin=_margin(float(errors.max()), len(peaks) - at_floor, used),
        error=float(np.abs(errors).max()),
        points=len(peaks),
    )


def _margin(largest_under: float, points: int, used: int) -> float:
    """Return the margin of a fit of `used` terms to so many points."""
    if points <= used:
        return UNKNOWN_MARGIN  # the fit goes through all points: it has no errors to judge it by
    scatter = sqrt(points / (points - used))  # points scatter less about a fit that they made
    return max(SAFETY * scatter * largest_under, LEAST_MARGIN)


def _design(shapes: Floats) -> Floats:
    rows, widths, patches = shapes.T
    tokens = rows * widths
    return np.stack((np.ones_like(tokens), tokens, tokens * widths, patches), axis=1)


def _points_at_floor(design: Floats, peaks: Floats) -> int:
    """Return how many of the lowest peaks are at the floor; the points are sorted by peak."""
    level = int(np.searchsorted(peaks, peaks[0] * (1 + FLOOR_SPREAD), side="right"))
    if len(peaks) - level < 2:
        return 0  # nothing would show how memory grows
    without = _errors(design, peaks, level)
    excess = without[:level].max()
    if excess <= FLOOR_SPREAD:
        return 0
    if len(np.unique(design[:level], axis=0)) > 1:
        return level
    if len(peaks) - level < COLUMNS:
        return 0
    with_all = np.abs(_errors(design, peaks, 0)).max()
    others = np.abs(without[level:]).max()
    return level if CLEARLY * others < min(excess, with_all) else 0


def _errors(design: Floats, peaks: Floats, left_out: int) -> Floats:
    fitted = design @ non_negative_fit(design[left_out:], peaks[left_out:])
    return peaks / np.maximum(fitted, 1.0) - 1


def non_negative_fit(design: Floats, peaks: Floats) -> Floats:
    """Return the non-negative least-squares fit in relative errors, (4,)."""
    # It is the best of the free fits of all subsets of the columns that have no negative term.
    # (Lawson and Hanson, Solving Least Squares Problems, 1974, find that subset step by step.)
    scale = design.max(axis=0)
    scale[scale == 0] = 1.0
    weighted = np.column_stack((design / scale / peaks[:, None], np.ones(len(peaks))))
    reduced = np.asarray(
        np.linalg.qr(weighted, mode="r")
    )  # as many points as columns, the same errors
    target = reduced[:, COLUMNS]
    best, best_error = np.zeros(COLUMNS), np.inf
    for size in range(1, COLUMNS + 1):
        subsets = np.array(list(combinations(range(COLUMNS), size)))
        parts = reduced[:, subsets].swapaxes(0, 1)
        solutions = np.linalg.pinv(parts, rcond=1e-12) @ target
        errors = np.square(np.einsum("spc,sc->sp", parts, solutions) - target).sum(axis=1)
        errors[solutions.min(axis=1) < 0] = np.inf
        # Of subsets that fit alike, as all do in one width, the first: tokens before their squares.
        first = int(np.argmax(errors <= errors.min() * 1.001 + 1e-12))
        # Columns that tell nothing apart shrink the error by no more than rounding.
        if errors[first] < best_error * 0.999 - 1e-15:
            best, best_error = np.zeros(COLUMNS), float(errors[first])
            best[subsets[first]] = solutions[first] / scale[subsets[first]]
    return best
