"""The rolling pool: chooses which waiting samples form the next group."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from odb_nodes._support.arrays import IntArray
from odb_nodes.core.planning.auto_window import budgets_filled
from odb_nodes.core.planning.budget import Limits, TokenBudget
from odb_nodes.core.planning.caps import NO_CAPS, times_of, without_cap_of
from odb_nodes.core.planning.packing import Packing
from odb_nodes.core.planning.runs import LengthRuns
from odb_nodes.core.planning.step_time import StepTime
from odb_nodes.core.planning.table import ORDINALS, PATCHES, TASKS, TOKENS

ANCHORS = 64  # every group holds at least one of this many oldest samples
FORCED_AGE_WINDOWS = 4  # from this age on, in windows, the oldest sample alone is the anchor
MAX_AGE_WINDOWS = 5  # the greatest age of a pooled sample, in windows
REFILLS = 32
"""Parts of a window: a full pool is refilled one part at a time."""
GROWING_SHARE = 0.75
"""Largest share of the pulled samples that waits while a pool grows to its window."""
GROWING_BUDGETS = 2
"""Budgets that the samples of a growing pool fill at least."""
LEAST_REFILLED = 512
"""A smaller window is refilled before each group, so that the choice is large enough."""


class RollingPool:
    """Waiting samples in order of length, from which groups are taken one at a time.

    The pool knows a sample by its ordinal: its number in the stream of samples.

    `LengthRuns` forms padded groups, and `Packing` packed groups. Every group holds an anchor, one
    of the `ANCHORS` oldest samples; all other samples are chosen for efficiency. Once the oldest
    sample is `FORCED_AGE_WINDOWS` windows old, it is the only anchor, and `room` admits no sample
    that would make it older than `MAX_AGE_WINDOWS` windows. This bounds the age of every sample,
    and so the work of a replay.

    After `start_early`, the first group does not wait for `window` samples: the pool grows with
    the number of samples pulled until it holds the window. A growing pool is also refilled in
    parts, so that no further state is needed.

    The pool uses no random numbers: its groups depend on its content alone.
    """

    def __init__(self, budget: TokenBudget, window: int, diversity: float = 0.0) -> None:
        self._budget = budget
        self.window = window
        self._starts_early = False
        self._diversity = diversity
        self._step_time: StepTime | None = None
        self._tail: list[IntArray] | None = None  # remaining groups once the source has ended
        self.limit(Limits.of(budget))
        self.pulled = 0
        """Samples of the stream so far, dropped samples included: the next ordinal."""
        self.caps = NO_CAPS
        """Caps of the next groups, see `use_caps`."""
        self._table: IntArray = np.empty((TASKS + (diversity > 0), 0), dtype=np.int64)
        self._oldest: int | None = None  # the result of `oldest`; `None` if not yet computed
        self._younger_than = 0  # Smaller ordinals were in the pool before.

    def __len__(self) -> int:
        return len(self._table[0])

    @property
    def oldest(self) -> int:
        """Ordinal of the oldest pooled sample; `pulled` if the pool is empty."""
        if not len(self):
            return self.pulled
        if self._oldest is None:
            self._oldest = int(self._table[ORDINALS].min())
        return self._oldest

    def limit(self, limits: Limits) -> None:
        """Form groups under other limits from now on."""
        self._group_budget = limits.group_budget(self._budget)
        self._grouping = grouping_of(self._group_budget, self._diversity, self._step_time)
        self._tail = None

    def aim_by(self, step_time: StepTime | None) -> None:
        """Form groups for the times of caps from now on, if there are caps; `None`: by cost."""
        self._step_time = step_time
        self._grouping = grouping_of(self._group_budget, self._diversity, step_time)

    def start_early(self, starts_early: bool = True) -> None:
        """Grow to the window from the first group on, or wait for the whole window."""
        self._starts_early = starts_early

    def count(self, samples: int) -> None:
        """Count samples of the stream, dropped samples included."""
        self.pulled += samples

    def use_caps(self, caps: IntArray) -> None:
        """Form each of the next groups for a cap of these, (n,) ascending."""
        self.caps = caps

    def resize(self, window: int) -> None:
        """Change the number of samples that wait."""
        self.window = window

    def ordinals(self) -> IntArray:
        """Return the ordinals of the pooled samples, ascending, (n,)."""
        return np.sort(self._table[ORDINALS])

    def offer(self, count: int) -> IntArray:
        """Return the offer for the caps of the next round; see `offered_costs`."""
        return self._grouping.offer(self._table, count)

    @property
    def is_growing(self) -> bool:
        """Whether the pool may hold fewer samples than the window, since few were pulled."""
        return self._starts_early and self.pulled * GROWING_SHARE < self.window

    def room(self) -> int:
        """Return the number of samples that may be added now."""
        # A refill that has begun is finished first, so that a resumed run continues alike.
        window, is_growing, stride = self.window, self.is_growing, 1
        if window >= LEAST_REFILLED or is_growing:
            stride = max(1, window // REFILLS)
        lacking = window - len(self)
        begun = (window - self.pulled) % stride
        if self.pulled < window and not is_growing:
            begun = window - self.pulled
        if lacking < begun:
            room = 0
        elif begun:
            room = begun
        elif is_growing:
            room = stride if lacking >= stride and self._is_small() else 0
        else:
            room = lacking // stride * stride
        return min(room, self.oldest + MAX_AGE_WINDOWS * window - self.pulled)

    def _is_small(self) -> bool:
        if len(self) < self.pulled * GROWING_SHARE:
            return True
        tokens, patches = self._table[TOKENS], self._table[PATCHES]
        return budgets_filled(self._group_budget, tokens, patches) < GROWING_BUDGETS

    def table(self) -> IntArray:
        """Return tokens, ordinals and patches of the pooled samples, by tokens: (3, n) int64.

        With `diversity`, also their tasks: (4, n).
        """
        return self._table

    def add(
        self,
        ordinals: npt.ArrayLike,
        tokens: npt.ArrayLike,
        patches: npt.ArrayLike,
        tasks: npt.ArrayLike = (),
    ) -> None:
        """Put samples into the pool, ordinals ascending: (n,) each.

        tasks: numbers of their tasks, at least 0; needed for `diversity` alone.
        """
        columns = (tokens, ordinals, patches, tasks)[: len(self._table)]
        incoming = np.array(columns, dtype=np.int64)
        if not incoming.shape[1]:
            return
        is_younger = incoming[ORDINALS, 0] >= self._younger_than
        self._younger_than = max(self._younger_than, int(incoming[ORDINALS, -1]) + 1)
        table = np.concatenate((self._table, incoming), axis=1)
        if is_younger:
            # Stable, so that equal lengths stay in order of age; fast, since most is in order.
            order = table[TOKENS].argsort(kind="stable")
        else:  # The samples were in the pool before.
            order = np.lexsort(table[[ORDINALS, TOKENS]])
        self._keep(table.take(order, axis=1))

    def remove(self, ordinals: npt.ArrayLike) -> None:
        """Remove samples, which will be in no group."""
        self._keep(self._table[:, np.isin(self._table[ORDINALS], ordinals, invert=True)])

    def take(self, *, draining: bool = False, largest: bool = False) -> IntArray:
        """Remove the next group, and return the ordinals of its samples, ascending, (n,).

        draining: whether the source has ended. All remaining samples are then partitioned, longest
            first, and the groups are taken in the order of the ordinal of one sample each, so that
            their lengths are mixed.
        largest: whether to take the group of the longest sample, unless the oldest sample is due.
        """
        if not len(self):
            raise IndexError("the pool is empty: there is no group to take.")
        aims = self._step_time is not None and len(self.caps)
        is_tail = draining and not aims  # With caps, the ranks share out the last samples.
        columns = self._next_of_tail(largest) if is_tail else self._choose(largest)
        table, tail = self._table, self._tail
        ordinals: IntArray = np.sort(table[ORDINALS, columns])
        if isinstance(columns, slice):
            parts = (table[:, : columns.start], table[:, columns.stop :])
            self._keep(np.concatenate(parts, axis=1))
        else:
            self._keep(np.delete(table, columns, axis=1))
        self._tail = tail
        return ordinals

    def _keep(self, table: IntArray) -> None:
        self._table, self._tail, self._oldest = table, None, None

    def _choose(self, largest: bool) -> IntArray | slice:
        self._tail = None
        is_forced = self.pulled - self.oldest >= FORCED_AGE_WINDOWS * self.window
        if largest and not is_forced:
            return self._grouping.largest(self._table)
        if self._step_time is not None and len(caps := self._caps_or_own()):
            return self._aim(caps, int(self._table[ORDINALS].argmin()) if is_forced else None)
        youngest_anchor = self.oldest
        if not is_forced:
            anchors = min(ANCHORS, len(self))
            ages = self._table[ORDINALS]
            youngest_anchor = int(np.partition(ages, anchors - 1)[anchors - 1])
        columns = self._grouping.choose(self._table, youngest_anchor, self.caps)
        if len(self.caps):
            cost = self._budget.cost(self._table[TOKENS, columns].tolist())
            self.caps = without_cap_of(self.caps, cost)
        return columns

    def _caps_or_own(self) -> IntArray:
        """Return the caps; before ranks have agreed on caps, a middle cap of this pool."""
        return self.caps if len(self.caps) else self._grouping.offer(self._table, 1)[1:]

    def _aim(self, caps: IntArray, due: int | None) -> IntArray | slice:
        """Return the group for the largest cap, or for the smallest that allows the due sample."""
        index = len(caps) - 1
        if due is not None:
            least = self._grouping.least_cap_time(self._table, due)
            index = min(int(np.searchsorted(times_of(caps), least)), index)
        if len(self.caps):
            self.caps = np.delete(caps, index)
        return self._grouping.aimed(self._table, int(caps[index]), due)

    def _next_of_tail(self, largest: bool) -> IntArray:
        """Return the next group, or the group of the longest sample, of the tail's partition.

        The partition is made once. A restored pool partitions the remaining samples into the same
        remaining groups: see `first_fit`.
        """
        if self._tail is None:
            groups = self._grouping.partition(self._table)
            # In order of their oldest samples, groups of many short samples would come first.
            self._tail = sorted(groups, key=lambda group: -int(group[0]))
        longest = self._table[ORDINALS, -1]
        index = -1
        if largest:
            index = [longest in group for group in self._tail].index(True)
        return np.flatnonzero(np.isin(self._table[ORDINALS], self._tail.pop(index)))


def grouping_of(
    budget: TokenBudget, diversity: float = 0.0, step_time: StepTime | None = None
) -> Packing | LengthRuns:
    """Return what forms the groups of a budget; with `step_time`, for the times of caps."""
    if budget.layout == "packed":
        return Packing(budget, step_time)
    return LengthRuns(budget, diversity, step_time)
