"""The groups of one rank: which samples wait, under which limits, and which form the next group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from odb_nodes.planning.auto_window import (
    AUTO,
    LEAST_WINDOW,
    PulledLengths,
    WindowSize,
    check_window,
    chosen_window,
    window_before_ranks_agree,
)
from odb_nodes.planning.budget import Limits, TokenBudget
from odb_nodes.planning.caps import NO_CAPS
from odb_nodes.planning.pool import RollingPool
from odb_nodes.planning.table import IntArray

WindowState = tuple[int, bool, int, int, int]
"""The samples of an `"auto"` window, whether it is chosen for the epoch, and `PulledLengths`."""


class RoundSettings(NamedTuple):
    """What the groups of a round are formed under, agreed on by all ranks one round before."""

    max_tokens: int = 0  # the `tokens` of the budget that a rank has asked for; 0 for none
    caps: Sequence[int] = ()  # what each group may cost, ascending; see `planning.caps`
    window: int = 0  # samples of an `"auto"` window; 0 for as many as before
    is_last: bool = False  # the round is the last one, of all that is left, which ranks share out

    def to_state(self) -> tuple[int, list[int], int, bool]:
        """Return the settings as plain data."""
        return self.max_tokens, [*self.caps], self.window, self.is_last


class PoolReport(NamedTuple):
    """What the pool of a rank tells the other ranks."""

    offer: IntArray = NO_CAPS  # what it offers for the caps of the next round, see `offered_costs`
    # what an `"auto"` window is chosen by, see `PulledLengths.report`
    lengths: tuple[int, int] = (0, 0)


class GroupPlanner:
    """Forms groups from a `RollingPool`. It holds no samples' data and pulls nothing itself.

    The caller adds as many samples as there is `room` for, and takes groups, until it says by
    `ended` that there are no more samples.

    An `"auto"` window begins a first epoch with 128 samples, and a later one with the window of the
    epoch before. Each epoch chooses once: ranks together in their first round, or this rank alone
    after its first group. Where ranks choose together and the epoch is short, whose first round is
    a large part of it, each rank first has a window of its own.
    """

    def __init__(
        self,
        budget: TokenBudget,
        window: WindowSize,
        dearest_first: int = 0,
        diversity: float = 0.0,
        epoch_samples: Callable[[], int | None] = lambda: None,
    ) -> None:
        self.budget = budget
        self.limits = Limits.of(budget)
        """What groups are formed under now: the limits of the budget, or lower ones."""
        self.given_window = check_window("window", window)
        # Samples that wait now.
        self.window = LEAST_WINDOW if self.given_window == AUTO else self.given_window
        self.follows_ranks = False  # whether ranks choose an `"auto"` window together, by `use`
        self._dearest_first, self._diversity = dearest_first, diversity
        self._epoch_samples = epoch_samples
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """Empty the pool; limits and window stay as they are."""
        self.lengths = PulledLengths()
        self.window_is_chosen = self.given_window != AUTO
        self.pool = RollingPool(self.budget, self.window, self._diversity)
        self.pool.limit(self.limits)
        self.ended = False
        self.dearest_groups = 0

    def restart(self, limits: Limits | None, window: WindowState | None) -> None:
        """Empty the pool; the window is one of a state, the limits too, or those of the budget."""
        self.limits = limits or Limits.of(self.budget)
        if window is not None and self.given_window == AUTO:
            self.window = window[0]
        self.begin_epoch()
        if window is not None and self.given_window == AUTO:
            self.window_is_chosen, self.lengths = window[1], PulledLengths(*window[2:])

    def window_state(self) -> WindowState | None:
        """Return the window and what it is chosen by; `None` where it is a number."""
        if self.given_window != AUTO:
            return None
        return self.window, self.window_is_chosen, *self.lengths

    @property
    def is_dearest(self) -> bool:
        """Whether the next group is one of the longest samples."""
        return self.dearest_groups < self._dearest_first

    def lower_limits(self, limits: Limits) -> None:
        """Form groups under lower limits from now on."""
        self.limits = self.limits.tightened(limits)
        self.pool.limit(self.limits)

    def use(self, settings: RoundSettings, caps: Sequence[int] = ()) -> None:
        """Form groups under the settings of a round, further ones by these caps, one each."""
        if settings.max_tokens and settings.max_tokens < self.limits.tokens:
            self.lower_limits(self.limits._replace(tokens=settings.max_tokens))
        if settings.window:
            self._use_window(settings.window)
        self.pool.caps = np.array(caps, dtype=np.int64)

    def report(self, groups: int) -> PoolReport:
        """Return what the other ranks are told, for caps of so many groups; 0 for no caps."""
        offer = NO_CAPS if self.ended or not groups else self.pool.offer(groups)
        return PoolReport(offer, self.lengths.report(self.budget))

    def room(self) -> int:
        """Return how many samples may be added now; 0 or less where the pool is full."""
        room = 0 if self.ended else self.pool.room()
        if room <= 0 and not self.ended and self._grows():
            room = self.pool.room()
        return room

    def add(
        self,
        ordinals: npt.ArrayLike,
        tokens: npt.ArrayLike,
        patches: npt.ArrayLike,
        tasks: npt.ArrayLike = (),
    ) -> None:
        """Add samples that were pulled; see `RollingPool.add`."""
        self.pool.add(ordinals, tokens, patches, tasks)
        if not self.window_is_chosen:
            self.lengths = self.lengths.and_of(self.budget, tokens, patches)

    def choose_window_alone(self) -> None:
        """Choose an `"auto"` window by the lengths so far, unless ranks choose it together."""
        if not (self.window_is_chosen or self.follows_ranks):
            self._use_window(chosen_window([self.lengths.report(self.budget)]))

    def next_group(self) -> IntArray:
        """Return the ordinals of the next group of a pool that is not empty, ascending."""
        dearest = self.is_dearest
        group = self.pool.take(draining=self.ended, dearest=dearest)
        self.dearest_groups += dearest
        return group

    def _use_window(self, samples: int) -> None:
        if samples and self.given_window == AUTO:
            self.window, self.window_is_chosen = samples, True
            self.lengths = PulledLengths()
            self.pool.window = samples

    def _grows(self) -> bool:
        """Let more samples wait until ranks choose, where the epoch is short."""
        if self.window_is_chosen or not self.follows_ranks or self.window > LEAST_WINDOW:
            return False  # Ranks have chosen, at least in the epoch before.
        report = self.lengths.report(self.budget)
        self.window = max(window_before_ranks_agree(report, self._epoch_samples()), LEAST_WINDOW)
        self.pool.window = self.window
        return self.window > LEAST_WINDOW
