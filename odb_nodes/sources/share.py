"""Which numbers of an order that all ranks have in common one rank takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from odb_nodes.contract import EpochState

Numbers = npt.NDArray[np.int64]

_NONE: Numbers = np.empty(0, np.int64)


@dataclass(kw_only=True)
class ShareState(EpochState):
    """The part of a source's state that says what its rank takes of the epoch.

    Attributes:
        done: samples of the epoch that this rank stands for, and that come before all of these:
            they were read when the job had another number of ranks.
        start: the first number of those that are dealt out in turn.
        extra: numbers below that are this rank's, too, ascending, as bytes.
    """

    done: int = 0
    start: int = 0
    extra: bytes | None = None


class Share:
    """The numbers that a rank takes: some that are named, then every `world_size`-th one."""

    def __init__(self, rank: int, world_size: int, state: ShareState | None = None) -> None:
        self._rank, self._world_size = rank, world_size
        self.done = 0 if state is None else state.done
        """Samples that come before all of these."""
        self._start = 0 if state is None else state.start
        self._extra: Numbers = _NONE
        if state is not None and state.extra is not None:
            self._extra = np.frombuffer(state.extra, "<i8").astype(np.int64)

    def put_into(self, state: ShareState) -> None:
        """Let a state say what this rank takes."""
        state.done, state.start = self.done, self._start
        state.extra = self._extra.astype("<i8").tobytes() or None

    def count(self, size: int) -> int:
        """Return how many samples this rank stands for, where there are `size` numbers."""
        named = int(np.searchsorted(self._extra, size))
        return self.done + named + len(range(self._start + self._rank, size, self._world_size))

    def at(self, first: int, stop: int) -> Numbers:
        """Return the numbers of the samples `first`..`stop - 1`, none of which is `done`."""
        first, stop = first - self.done, stop - self.done
        named = self._extra[first:stop]
        turns = np.arange(max(first - len(self._extra), 0), max(stop - len(self._extra), 0))
        return np.concatenate((named, self._start + self._rank + turns * self._world_size))

    def after(self, samples: int) -> Left:
        """Return what is left once so many samples are read, those that are `done` included."""
        read = max(0, samples - self.done)
        turns = max(0, read - len(self._extra))
        first = self._start + self._rank + turns * self._world_size
        return Left(self._extra[read:], first - self._rank)


class Left(NamedTuple):
    """What a rank has not read of an epoch.

    Attributes:
        named: numbers that are named, ascending, (n,) int64.
        start: from which number on it takes every `world_size`-th one, less its rank.
    """

    named: Numbers
    start: int


def dealt(left: Sequence[Left], world_size: int, size: int) -> list[ShareState]:
    """Deal what is left of an epoch to another number of ranks.

    What none of the ranks has come to is dealt out in turn. What comes before that, since some
    ranks have read less than others, is named.
    """
    start = max(one.start for one in left)
    behind = [np.arange(one.start + rank, start + rank, len(left)) for rank, one in enumerate(left)]
    named = np.sort(np.concatenate([*behind, *(one.named for one in left)]))
    named = named[: int(np.searchsorted(named, size))]
    return [
        ShareState(start=start, extra=named[rank::world_size].astype("<i8").tobytes() or None)
        for rank in range(world_size)
    ]
