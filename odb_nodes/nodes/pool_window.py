"""How many samples wait in the pool of a bucketer, and what has been pulled to choose it by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from odb_nodes.contract import Count, InRange
from odb_nodes.planning import TokenBudget
from odb_nodes.planning.auto_window import (
    AUTO,
    LEAST_WINDOW,
    MOST_WINDOW,
    PulledLengths,
    WindowSize,
    check_window,
    chosen_window,
    window_before_ranks_agree,
)
from odb_nodes.sample import Sample

_SNAPSHOTS_PER_WINDOW = 4

WindowState = tuple[Annotated[int, InRange(1, MOST_WINDOW)], bool, Count, Count, Count]
"""The samples of an `"auto"` window, whether it is chosen for the epoch, and `PulledLengths`."""


class PoolWindow:
    """How many samples wait in the pool of a bucketer.

    With `"auto"`, a first epoch begins with 128, and a later one with what the one before had. Each
    epoch chooses once, early: a `RankAligner` over the bucketer for all ranks alike; without one,
    the bucketer by the lengths of its own, after the first group. Where a first epoch is short, its
    first round is a large part of it, so each rank has a window of its own until all have chosen.

    Args:
        window: the number of samples, or `"auto"`.
        budget: the budget that groups are formed under.

    Raises:
        TypeError, ValueError: it is neither.
    """

    def __init__(self, window: WindowSize, budget: TokenBudget) -> None:
        self._budget = budget
        self.given = check_window("window", window)
        """The number of samples, or `"auto"`."""
        self.samples = LEAST_WINDOW if self.given == AUTO else self.given
        """The number of samples now."""
        self.follows_ranks = False
        """Whether all ranks choose together."""
        self._pulled = PulledLengths()
        self._is_chosen = self.given != AUTO

    @property
    def is_chosen(self) -> bool:
        """Whether the window stays for the rest of the epoch."""
        return self._is_chosen

    @property
    def snapshot_interval(self) -> int:
        """Samples between two states of the source that are kept."""
        return max(1, self.samples // _SNAPSHOTS_PER_WINDOW)

    def begin_epoch(self) -> None:
        """Choose anew in this epoch, where the window is `"auto"`."""
        self._pulled, self._is_chosen = PulledLengths(), self.given != AUTO

    def note(self, samples: Sequence[Sample]) -> None:
        """Note the lengths of samples that were pulled, as long as they are needed."""
        if not self._is_chosen:
            tokens, patches = [one.tokens for one in samples], [one.patches for one in samples]
            self._pulled = self._pulled.and_of(self._budget, tokens, patches)

    def report(self) -> tuple[int, int]:
        """Return what to choose by; see `PulledLengths.report`."""
        return self._pulled.report(self._budget)

    def choose_alone(self) -> int:
        """Return the window that suits the lengths so far; 0 where it is not to be chosen here."""
        if self._is_chosen or self.follows_ranks:
            return 0
        return chosen_window([self.report()])

    def grow_alone(self, epoch_samples: int | None) -> bool:
        """Let more samples wait until ranks choose, where the epoch is short; tell whether so.

        Args:
            epoch_samples: samples of the epoch of this rank; `None` where that is not known.
        """
        if self._is_chosen or not self.follows_ranks or self.samples > LEAST_WINDOW:
            return False  # Ranks have chosen, at least in the epoch before.
        self.samples = max(window_before_ranks_agree(self.report(), epoch_samples), LEAST_WINDOW)
        return self.samples > LEAST_WINDOW

    def use(self, samples: int) -> None:
        """Let so many samples wait for the rest of the epoch."""
        if self.given == AUTO:
            self.samples, self._is_chosen, self._pulled = samples, True, PulledLengths()

    def save(self) -> WindowState | None:
        """Return the window and what to choose it by; `None` where it is a number."""
        if self.given != AUTO:
            return None
        return self.samples, self._is_chosen, *self._pulled

    def restore(self, state: WindowState | None) -> None:
        """Go to where a state stands."""
        self.begin_epoch()
        if state is not None and self.given == AUTO:
            self.samples, self._is_chosen = state[:2]
            self._pulled = PulledLengths(*state[2:])
