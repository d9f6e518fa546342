"""Find how many rows of each width fit into memory, in few trials."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, isqrt

from odb_nodes._core.checks import MAX_COUNT
from odb_nodes.memory.failures import ShapeTooLargeError
from odb_nodes.memory.model import MemoryModel
from odb_nodes.memory.trials import Trial, Trials

__all__ = ["Edge", "EdgeSearch"]

TOLERANCE = 0.02  # of the rows that fit: a bracket that is not wider is good enough
LARGEST_LEAP = 8  # times the rows that fit, which the next trial may have at most
FARTHEST = 32  # times the difference of two peaks, to which these tell the edge
STALLED_TOKENS = 2**22  # of a batch that takes no more than the smallest one: nothing grows
LEAST_TRIALS = 2  # of each width: one that fits and one that does not


@dataclass
class Edge:
    """The largest batch of a width that fits, and the smallest one that does not.

    Attributes:
        width: tokens of each row.
        fits: most rows that are known to fit; 0 for none yet.
        fails: fewest rows that have not fitted; `None` for none yet.
    """

    width: int
    fits: int = 0
    fails: int | None = None

    @property
    def step(self) -> int:
        """Rows that a bracket may be wide."""
        return max(ceil(TOLERANCE * self.fits), 1)

    @property
    def most(self) -> int:
        """Rows that a trial may have, so that a budget can hold the batch."""
        return max(MAX_COUNT // self.width - 1, 1)

    @property
    def is_found(self) -> bool:
        """Whether the edge is between two numbers of rows that are close enough."""
        return self.fails is not None and self.fails - self.fits <= self.step


class EdgeSearch:
    """Doubles the rows of each width until they fail, then bisects.

    What has been measured shortens both: the peaks of two batches of a width, or the model of those
    of other widths, say where the edge is, and the next trial is made there.
    """

    def __init__(self, trials: Trials, limit_bytes: int, max_trials: int) -> None:
        self._trials = trials
        self._limit_bytes = limit_bytes
        self._max_trials = max_trials

    def run(self, widths: Sequence[int]) -> list[Edge]:
        """Return the edge of each width, as far as the trials suffice.

        The first trial does not count: in it, the optimizer may only begin to have its state.
        """
        self._try(Edge(widths[0]), 1)
        *between, widest = widths
        outer_first = [widest, *between]
        edges: list[Edge] = []
        for index, width in enumerate(outer_first):
            edge = Edge(width, self._rows_that_fit(width, edges))
            edges.append(edge)
            for_others = LEAST_TRIALS * (len(outer_first) - index - 1)
            self._find(edge, max(self._left() - for_others, min(LEAST_TRIALS, self._left())))
        return [edge for edge in edges if edge.fits or edge.fails]

    def _rows_that_fit(self, width: int, wider: Sequence[Edge]) -> int:
        """Return rows that fit because as many tokens in wider rows do."""
        if self._trials.patches_per_row:
            return 0
        return max(
            (edge.fits * edge.width // width for edge in wider if edge.width > width), default=0
        )

    def model(self) -> MemoryModel:
        """Return a model of the steps that ended, but the first."""
        model = MemoryModel()
        for trial in self._measured():
            model.add(trial.rows, trial.width, trial.patches, trial.peak_bytes)
        return model

    def _measured(self) -> list[Trial]:
        return [trial for trial in self._trials.done[1:] if not trial.error]

    def _left(self) -> int:
        return self._max_trials - len(self._trials.done)

    def _find(self, edge: Edge, most_trials: int) -> Edge:
        for _ in range(most_trials):
            self._try(edge, min(self._next_rows(edge), edge.most))
            if edge.is_found or edge.fits == edge.most:
                break
        return edge

    def _try(self, edge: Edge, rows: int) -> None:
        trial = self._trials.run(rows, edge.width)
        if trial.fits:
            edge.fits = max(edge.fits, rows)
            self._check_growth()
        elif rows > 1:
            edge.fails = rows if edge.fails is None else min(edge.fails, rows)
        else:
            raise ShapeTooLargeError(
                f"a single row of {edge.width} tokens does not fit: "
                f"{trial.reason(self._limit_bytes)}. "
                "Leave longer samples out, enable checkpointing, or shard the model.",
                rows,
                edge.width,
                trial.patches,
            )

    def _check_growth(self) -> None:
        peaks = {trial.rows * trial.width: trial.peak_bytes for trial in self._measured()}
        if len({*peaks.values()}) == 1 and max(peaks) > STALLED_TOKENS:
            raise ValueError(
                f"a batch of {max(peaks):,} tokens takes as much as one of {min(peaks):,}, "
                f"{peaks[max(peaks)]:,} bytes: the meter does not see how memory grows with the "
                "batch, or `train_step` does not use it."
            )

    def _next_rows(self, edge: Edge) -> int:
        expected, leap = self._expected_rows(edge.width)
        if edge.fails is None:
            if expected is None:
                return max(leap * edge.fits, 1)
            return min(max(expected, edge.fits + edge.step), max(LARGEST_LEAP * edge.fits, 1))
        first, last = edge.fits + edge.step, edge.fails - edge.step
        if expected is None or expected < edge.fits or self._is_misled(edge, expected):
            rows = isqrt(edge.fits * edge.fails)
        else:
            rows = min(max(expected, first), last) if first < last else (first + last) // 2
        return min(max(rows, edge.fits + 1), edge.fails - 1)

    def _is_misled(self, edge: Edge, expected: int) -> bool:
        """Tell whether rows were expected to fit again and again, and have not."""
        failed = [one for one in self._trials.done if one.width == edge.width and not one.fits]
        return edge.fails is not None and expected >= edge.fails and len(failed) > 1

    def _expected_rows(self, width: int) -> tuple[int | None, int]:
        """Return how many rows of a width should fit, or None and how far to go without."""
        peaks = {t.rows: t.peak_bytes for t in self._measured() if t.width == width}
        if len(peaks) >= 2:
            fewer, more = sorted(peaks)[-2:]
            room_bytes, difference = self._limit_bytes - peaks[more], peaks[more] - peaks[fewer]
            if difference <= 0 or room_bytes > FARTHEST * difference:
                return None, LARGEST_LEAP
            return more + int(room_bytes * (more - fewer) // difference), 2
        others = {trial.width for trial in self._measured()} - {width}
        return (self._modelled_rows(width) if len(others) >= 2 else None), 2

    def _modelled_rows(self, width: int) -> int | None:
        model = self.model()
        patches = self._trials.patches_per_row
        one, two = (model.predict(rows, width, rows * patches) for rows in (1, 1001))
        row_bytes = (two - one) / 1000
        return 1 + int((self._limit_bytes - one) // row_bytes) if row_bytes > 0 else None
