"""The interface of an exchange among ranks, and the exchange of a rank that is alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


class Interrupted(RuntimeError):
    """A wait was given up because the graph is reset or closed."""


@runtime_checkable
class Exchange(Protocol):
    """An all-gather among ranks.

    The n-th call of one rank meets the n-th call of every other. A call that was interrupted still
    counts: the others receive what it sent, and the next call of the rank meets their next one.

    Attributes:
        rank: this process's rank, in `range(world_size)`.
        world_size: number of ranks that take part.
        ranks: the ranks' numbers in the whole job, for errors.
        timeout_s: seconds until a call gives up.
    """

    rank: int
    world_size: int
    ranks: Sequence[int]
    timeout_s: float

    def connect(self, size: int) -> None:
        """Connect to the other ranks; later calls do nothing.

        Args:
            size: integers in a row of this rank, the same on all ranks.

        Raises:
            PeerError: a rank did not come within `timeout_s`.
            StateError: a rank came with another size.
        """

    def all_gather(self, row: IntArray) -> IntArray:
        """Return the rows of all ranks: (n,) int64 -> (world_size, n) int64.

        Raises:
            PeerError: a rank was lost, or did not come within `timeout_s`.
            Interrupted: `interrupt` was called.
        """

    def publish(self, key: str, text: str) -> None:
        """Leave a text under a key, for ranks that wait for this one elsewhere; raises nothing."""

    def published(self, key: str) -> str | None:
        """Return the text that a rank has left under a key; `None` while there is none."""

    def interrupt(self) -> None:
        """Make every call raise until `resume`, one that waits on another thread included."""

    def resume(self) -> None:
        """Take `interrupt` back."""


class LocalExchange:
    """One rank, with nobody to wait for."""

    def __init__(self) -> None:
        self.rank, self.world_size, self.timeout_s = 0, 1, 0.0
        self.ranks: Sequence[int] = (0,)

    def connect(self, size: int) -> None:
        """Do nothing."""

    def all_gather(self, row: IntArray) -> IntArray:
        """Return (1, n)."""
        return row[None]

    def publish(self, key: str, text: str) -> None:
        """Do nothing: nobody reads it."""

    def published(self, key: str) -> str | None:  # noqa: ARG002
        """Return `None`."""
        return None

    def interrupt(self) -> None:
        """Do nothing: no call ever waits."""

    def resume(self) -> None:
        """Do nothing."""
