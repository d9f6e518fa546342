"""The rolling pool: which of the waiting samples form the next group."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from odb_nodes.planning.budget import TokenBudget

T = TypeVar("T")
IntArray = NDArray[np.int64]

ANCHORS = 64
"""Every group holds at least one of this many oldest samples."""
STEP_COST_SHARE = 0.1
"""Fixed cost of a step, as a share of the budget: what makes fuller groups worth some padding."""
FORCED_AGE_WINDOWS = 4
"""From this age on, in windows, the oldest sample alone is the anchor."""
MAX_AGE_WINDOWS = 5
"""No pooled sample gets older than this, in windows."""

# Rows of the table: one column per pooled sample, in order of (tokens, ordinal).
_TOKENS, _ORDINALS, _PATCHES = range(3)


class RollingPool(Generic[T]):
    """Waiting samples in order of length, from which groups are cut one at a time.

    A group is a contiguous run in order of length. Of all full runs that hold one of the oldest
    `ANCHORS` samples, the pool takes the one with the most real tokens for its padded tokens plus
    the fixed cost of a step. So every step serves an old sample, and which one is left to
    efficiency. Once the oldest is `FORCED_AGE_WINDOWS` windows old, it alone is the anchor; and
    `room` lets nothing in that would make it older than `MAX_AGE_WINDOWS` windows. That bounds the
    age of every sample for any lengths, and bounds the work of a replay with it.

    The pool uses no random numbers, and what it does depends only on what is in it.

    Args:
        budget: what a group may cost.
        window: samples; how many wait in the pool.
    """

    def __init__(self, budget: TokenBudget, window: int) -> None:
        self._budget = budget
        self._window = window
        self.pulled = 0
        """Samples of the stream so far, dropped ones included: the ordinal of the next. The caller
        counts them."""
        self._items: dict[int, T] = {}  # ordinal -> item, oldest first: ordinals only grow
        self._table: IntArray = np.empty((3, 0), dtype=np.int64)

    def __len__(self) -> int:
        return len(self._items)

    @property
    def oldest(self) -> int:
        """Ordinal of the oldest pooled sample; `pulled` where the pool is empty."""
        return next(iter(self._items), self.pulled)

    def room(self) -> int:
        """Return how many samples may come in now."""
        youngest_allowed = self.oldest + MAX_AGE_WINDOWS * self._window
        return min(self._window - len(self._items), youngest_allowed - self.pulled)

    def table(self) -> IntArray:
        """Return tokens, ordinals and patches of the pooled samples: (3, n) int64, by tokens."""
        return self._table

    def items(self) -> dict[int, T]:
        """Return the pooled items by ordinal, oldest first. The pool's own dict: read only."""
        return self._items

    def add(
        self,
        items: Sequence[T],
        tokens: Sequence[int],
        patches: Sequence[int],
        ordinals: Sequence[int],
    ) -> None:
        """Put samples into the pool, each with a larger ordinal than any before it."""
        if not items:
            return
        self._items.update(zip(ordinals, items, strict=True))
        incoming = np.array((tokens, ordinals, patches), dtype=np.int64)
        table = np.concatenate((self._table, incoming), axis=1)
        # Stable, so that equal lengths stay in order of age; fast, since most is in order already.
        self._table = table.take(table[_TOKENS].argsort(kind="stable"), axis=1)

    def take(self, *, draining: bool = False) -> list[T]:
        """Remove and return the next group, oldest sample first.

        Args:
            draining: the source has ended. What is left is then cut longest first, which needs the
                fewest groups, and goes out in order of the oldest sample of each.

        Raises:
            IndexError: the pool is empty.
        """
        if not self._items:
            raise IndexError("the pool is empty: there is no group to take.")
        first, last = self._tail_run() if draining else self._best_run()
        ordinals = sorted(self._table[_ORDINALS, first : last + 1].tolist())
        self._table = np.concatenate(
            (self._table[:, :first], self._table[:, last + 1 :]), axis=1, dtype=np.int64
        )
        return [self._items.pop(ordinal) for ordinal in ordinals]

    def _best_run(self) -> tuple[int, int]:
        tokens, ordinals, _ = self._table
        first, last, widths = self._runs()
        total = np.concatenate(([0], np.cumsum(tokens)))
        real = total[1:] - total[first]
        score = real / ((last + 1 - first) * widths + STEP_COST_SHARE * self._budget.tokens)

        anchors = np.concatenate(([0], np.cumsum(ordinals <= self._youngest_anchor())))
        score[anchors[1:] == anchors[first]] = -1.0
        best = int(score.argmax())
        return int(first[best]), best

    def _runs(self) -> tuple[IntArray, IntArray, IntArray]:
        """Return first, last and width of the longest run that ends at each pooled sample."""
        tokens, _, patches = self._table
        budget = self._budget
        multiple = budget.pad_to_multiple_of
        widths = tokens if multiple == 1 else -(-tokens // multiple) * multiple
        # An oversize sample fits no group: it gets one of its own.
        capacities = np.maximum(budget.tokens // widths, 1)
        if budget.max_samples is not None:
            np.minimum(capacities, budget.max_samples, out=capacities)
        last = np.arange(len(tokens))
        first = np.maximum(last + 1 - capacities, 0)
        if budget.max_patches is not None:
            total = np.concatenate(([0], np.cumsum(patches)))
            fits = np.searchsorted(total, total[1:] - budget.max_patches, side="left")
            first = np.maximum(first, np.minimum(fits, last))
        return first, last, widths

    def _youngest_anchor(self) -> int:
        if self.pulled - self.oldest >= FORCED_AGE_WINDOWS * self._window:
            return self.oldest
        return next(islice(self._items, min(ANCHORS, len(self._items)) - 1, None))

    def _tail_run(self) -> tuple[int, int]:
        """Return the group of the oldest sample in the partition that starts at the longest."""
        oldest = int((self._table[_ORDINALS] == self.oldest).argmax())
        starts = self._runs()[0].tolist()
        last = len(starts) - 1
        while starts[last] > oldest:
            last = starts[last] - 1
        return starts[last], last
