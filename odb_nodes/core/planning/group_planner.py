"""The groups of a rank: which samples wait, under which limits, and which form the next group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from odb_nodes._support.arrays import IntArray
from odb_nodes.core.planning.auto_window import (
    AUTO,
    EARLY_EPOCH_WINDOWS,
    LEAST_WINDOW,
    PoolCheck,
    PulledLengths,
    WindowSize,
    WindowStart,
    check_window,
    chosen_window,
    window_before_ranks_agree,
)
from odb_nodes.core.planning.budget import Limits, TokenBudget
from odb_nodes.core.planning.caps import NO_CAPS
from odb_nodes.core.planning.facts import Facts, FactsByOrdinal
from odb_nodes.core.planning.pool import RollingPool
from odb_nodes.core.planning.step_time import StepTime

WindowState = tuple[int, bool, int, int, int]
"""The samples of an `"auto"` window, whether it is chosen for the epoch, and `PulledLengths`."""


class RoundSettings(NamedTuple):
    """Settings for the groups of a round, on which ranks agree in the previous round."""

    max_tokens: int = 0  # the lowest `tokens` of the budget that a rank has requested; 0: none
    caps: Sequence[int] = ()  # a cap for each group, ascending; see `planning.caps`
    window: int = 0  # samples of an `"auto"` window; 0: the window stays as it is
    is_last: bool = False  # whether the round is the last: ranks share out all remaining samples

    def to_state(self) -> tuple[int, list[int], int, bool]:
        """Return the settings as plain data."""
        return self.max_tokens, [*self.caps], self.window, self.is_last


class PoolReport(NamedTuple):
    """The report of a rank about its pool to the other ranks."""

    offer: IntArray = NO_CAPS  # decides the caps of the next round: see `offered_costs`
    lengths: tuple[int, int] = (0, 0)  # decides an `"auto"` window: see `PulledLengths.report`


class GroupPlanner:
    """Forms groups from a `RollingPool`, of the facts of samples alone.

    The caller adds samples while there is `room`, takes groups, and calls `end` after the last
    sample.

    An `"auto"` window begins a first epoch with 128 samples, and a later epoch with the previous
    window. The window is chosen once in an epoch: by all ranks in their first round, or by this
    rank alone after its first group. In a short epoch, of which the first round is a large part,
    each rank first chooses a window alone.

    `window_start`: with `"full"`, the first group of an epoch waits for the whole window; with
    `"early"`, the pool grows to the window, see `RollingPool`; with `"auto"`, the pool grows if the
    epoch is known to be long, and no groups of the longest samples come first. The first group
    always waits for the 128 samples that an `"auto"` window begins with.
    """

    def __init__(
        self,
        budget: TokenBudget,
        window: WindowSize,
        largest_first: int = 0,
        diversity: float = 0.0,
        epoch_samples: Callable[[], int | None] = lambda: None,
        check: PoolCheck | None = None,
        window_start: WindowStart = "auto",
    ) -> None:
        self.budget = budget
        self.limits = Limits.of(budget)
        """The present limits of groups: the limits of the budget, or lower limits."""
        self.window_option = check_window("window", window)
        window = LEAST_WINDOW if self.window_option == AUTO else self.window_option
        self._follows_ranks = False
        self._step_time: StepTime | None = None
        self._largest_first, self._diversity = largest_first, diversity
        self.epoch_samples = epoch_samples
        """Returns the number of samples of the epoch, or `None` if it is unknown."""
        self._check, self._window_start = check, window_start
        self.begin_epoch(window)

    def follow_ranks(self, step_time: StepTime | None = None) -> None:
        """Let the ranks choose an `"auto"` window, by `use`, and form groups for times."""
        self._follows_ranks, self._step_time = True, step_time
        self.pool.aim_by(step_time)

    @property
    def window(self) -> int:
        """Number of samples that wait."""
        return self.pool.window

    def begin_epoch(self, window: int | None = None) -> None:
        """Empty the pool. The limits stay. Default of `window`: the present window."""
        self.lengths = PulledLengths()
        self.window_is_chosen = self.window_option != AUTO
        self.pool = RollingPool(self.budget, window or self.window, self._diversity)
        self.pool.limit(self.limits)
        self.pool.aim_by(self._step_time)
        self._facts = FactsByOrdinal()
        self.ended = False
        self.largest_groups = 0

    def restore(
        self,
        waiting: Facts,
        *,
        pulled: int,
        ended: bool,
        limits: Limits | None,
        window: WindowState | None,
        caps: IntArray,
        largest_groups: int,
    ) -> None:
        """Continue from a saved position, with the samples that wait, by ordinal.

        limits: `None` for the limits of the budget; window: a result of `window_state`.
        """
        self.limits = limits or Limits.of(self.budget)
        is_auto = window is not None and self.window_option == AUTO
        self.begin_epoch(window[0] if window is not None and is_auto else None)
        if window is None:
            self.add(waiting, pulled)
        else:  # `PulledLengths` has these samples already.
            self.pool.count(pulled)
            self._put(waiting)
            if is_auto:
                self.window_is_chosen = window[1]
                self.lengths = PulledLengths(*window[2:])
        self.pool.use_caps(caps)
        self.ended, self.largest_groups = ended, largest_groups

    def window_state(self) -> WindowState | None:
        """Return the state of an `"auto"` window; `None` if the window is a number."""
        if self.window_option != AUTO:
            return None
        return self.window, self.window_is_chosen, *self.lengths

    @property
    def is_largest(self) -> bool:
        """Whether the next group is formed of the longest samples."""
        return self.largest_groups < self._largest_first

    @property
    def is_done(self) -> bool:
        """Whether the epoch has no more groups."""
        return self.ended and not len(self.pool)

    @property
    def group_budget(self) -> TokenBudget:
        """The budget under the present limits."""
        return self.limits.group_budget(self.budget)

    def lower_limits(self, limits: Limits) -> None:
        """Form groups under lower limits from now on."""
        self.limits = self.limits.tightened(limits)
        self.pool.limit(self.limits)

    def use(self, settings: RoundSettings, caps: Sequence[int] = ()) -> None:
        """Form groups under the settings of a round, each for one of these caps."""
        if settings.max_tokens and settings.max_tokens < self.limits.tokens:
            self.lower_limits(self.limits._replace(tokens=settings.max_tokens))
        if settings.window:
            self._use_window(settings.window)
        self.pool.use_caps(np.array(caps, dtype=np.int64))

    def report(self, groups: int) -> PoolReport:
        """Return the report to the other ranks, with offers for `groups` caps."""
        offer = NO_CAPS if self.ended or not groups else self.pool.offer(groups)
        return PoolReport(offer, self.lengths.report(self.budget))

    def samples_left(self) -> int | None:
        """Return the number of samples that are in no group yet; `None` if it is unknown."""
        length = self.pool.pulled if self.ended else self.epoch_samples()
        return None if length is None else len(self.pool) + max(0, length - self.pool.pulled)

    def room(self) -> int:
        """Return how many samples may be added now; 0 or less if the pool is full."""
        if self.ended:
            return 0
        if self.pool.pulled < 2 * self.window:  # Later, the pool has grown.
            self.pool.start_early(self._starts_early())
        room = self.pool.room()
        if room <= 0 and self._grows():
            self.pool.start_early(self._starts_early())
            room = self.pool.room()
        return room

    def add(self, facts: Facts, pulled: int) -> None:
        """Add samples, ordinals ascending; `pulled`: their number, with samples left out."""
        self.pool.count(pulled)
        self._put(facts)
        if not self.window_is_chosen:
            self.lengths = self.lengths.plus(self.budget, facts.tokens, facts.patches)

    def put_back(self, facts: Facts) -> None:
        """Put samples of groups back into the pool. Their ordinals, and so their age, stay."""
        self._put(facts.take(np.argsort(facts.ordinal)))

    def remove(self, ordinals: IntArray) -> None:
        """Remove samples from the pool; they will be in no group."""
        self.pool.remove(ordinals)

    def end(self) -> None:
        """Note that the epoch has no more samples."""
        self.ended = True

    def choose_window_alone(self) -> None:
        """Choose an `"auto"` window by the lengths so far, unless all ranks choose together."""
        if not (self.window_is_chosen or self._follows_ranks):
            self._use_window(chosen_window([self.lengths.report(self.budget)]))

    def next_group(self) -> Facts:
        """Return the next group of a pool that is not empty, oldest sample first."""
        largest = self.is_largest
        group = self._facts.take(self.pool.take(draining=self.ended, largest=largest))
        self.largest_groups += largest
        is_chosen_freely = self.window_is_chosen and not (self.ended or largest)
        if is_chosen_freely and not self.pool.is_growing and self._check is not None:
            self._check.note(group.lengths, self.window)
        return group

    def _put(self, facts: Facts) -> None:
        self._facts.add(facts, self.pool.oldest)
        self.pool.add(facts.ordinal, facts.tokens, facts.patches, facts.task)

    def _use_window(self, samples: int) -> None:
        if samples and self.window_option == AUTO:
            self.window_is_chosen = True
            self.lengths = PulledLengths()
            self.pool.resize(samples)

    def _starts_early(self) -> bool:
        begins_small = self.window_option == AUTO and self.window <= LEAST_WINDOW
        if self._window_start != "auto" or begins_small:
            return self._window_start == "early" and not begins_small
        samples = self.epoch_samples()
        is_long = samples is not None and samples >= EARLY_EPOCH_WINDOWS * self.window
        return is_long and not self._largest_first

    def _grows(self) -> bool:
        """If the epoch is short, enlarge the window until ranks choose; return whether it grew."""
        if self.window_is_chosen or not self._follows_ranks or self.window > LEAST_WINDOW:
            return False  # Ranks have chosen, at least in the previous epoch.
        report = self.lengths.report(self.budget)
        samples = window_before_ranks_agree(report, self.epoch_samples())
        self.pool.resize(max(samples, LEAST_WINDOW))
        return self.window > LEAST_WINDOW


class UserGroups:
    """Replaces a `GroupPlanner` if a node of the user forms the groups."""

    def __init__(self, lower_tokens: Callable[[int], None] = lambda _: None) -> None:
        self._lower_tokens = lower_tokens  # lowers the budget of the user's node
        self._group: Facts | None = None
        self.ended = False

    def follow_ranks(self, step_time: StepTime | None = None) -> None:
        """Do nothing: there is no window, and no group is formed here."""

    @property
    def is_done(self) -> bool:
        """Whether the epoch has no more groups."""
        return self.ended and self._group is None

    def room(self) -> int:
        """Return how many groups `give` may take now: 1 or 0."""
        return int(self._group is None and not self.ended)

    def give(self, group: Facts) -> None:
        """Take up the next group."""
        self._group = group

    def end(self) -> None:
        """Note that there are no more groups."""
        self.ended = True

    def go_on(self) -> None:
        """Note that there are more groups, since the node has taken samples back."""
        self.ended = False

    def next_group(self) -> Facts:
        """Return the group that was given."""
        assert self._group is not None
        group, self._group = self._group, None
        return group

    def use(self, settings: RoundSettings, caps: Sequence[int] = ()) -> None:  # noqa: ARG002
        """Have the node form smaller groups, if ranks have agreed on lower `max_tokens`."""
        if settings.max_tokens:
            self._lower_tokens(settings.max_tokens)

    def report(self, groups: int) -> PoolReport:  # noqa: ARG002
        """Return an empty report."""
        return PoolReport()
