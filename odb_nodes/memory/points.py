"""Measured peaks, of which a bounded number is kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import log2
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["MAX_POINTS", "Point", "Points"]

MAX_POINTS = 256
CELLS_PER_DOUBLING = 4

Cell = tuple[str, int, int, int]
"""Source, and rounded logarithms of rows, width and patches."""


class Point(NamedTuple):
    """Shape of a batch, and what a step with it took at its peak."""

    source: str
    rows: int
    width: int
    patches: int
    peak_bytes: int

    def cell(self) -> Cell:
        """Return the source and the rounded logarithms of the shape."""
        sizes = (max(size, 1) for size in self[1:4])
        rows, width, patches = (round(CELLS_PER_DOUBLING * log2(size)) for size in sizes)
        return self.source, rows, width, patches


class Points:
    """The newest peak of each shape, at most `MAX_POINTS` of them.

    Where there are more, the oldest one among the most similar shapes goes. So a long run refreshes
    the points near its budget, and does not push out those that a calibration measured elsewhere.
    """

    def __init__(self) -> None:
        self._points: dict[tuple[str, int, int, int], Point] = {}
        self._cells: dict[tuple[str, int, int, int], Cell] = {}
        self._crowds: Counter[Cell] = Counter()

    def __len__(self) -> int:
        return len(self._points)

    def __iter__(self) -> Iterator[Point]:
        return iter(self._points.values())

    def add(self, point: Point) -> None:
        """Keep a point, in place of an older one of the same shape and source."""
        shape = point[:4]
        if shape in self._points:
            self._remove(shape)
        self._points[shape] = point
        self._cells[shape] = point.cell()
        self._crowds[point.cell()] += 1
        if len(self._points) > MAX_POINTS:
            crowded = max(self._crowds, key=self._crowds.__getitem__)
            self._remove(next(one for one, cell in self._cells.items() if cell == crowded))

    def _remove(self, shape: tuple[str, int, int, int]) -> None:
        del self._points[shape]
        cell = self._cells.pop(shape)
        self._crowds[cell] -= 1
        if not self._crowds[cell]:
            del self._crowds[cell]

    def shapes(self) -> NDArray[np.float64]:
        """Return rows, widths and patches: (N, 3)."""
        return np.array([point[1:4] for point in self], dtype=np.float64).reshape(-1, 3)

    def peaks(self) -> NDArray[np.float64]:
        """Return the peaks: (N,) bytes."""
        return np.array([point.peak_bytes for point in self], dtype=np.float64)
