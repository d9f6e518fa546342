"""The interface of an exchange among ranks, which itself is that of a rank that is alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


class Interrupted(RuntimeError):
    """A wait was given up because the graph is reset or closed."""


class Exchange:
    """An all-gather among ranks; here of one rank, with nobody to wait for.

    The n-th call of one rank meets the n-th call of every other. A call that was interrupted still
    counts: the others receive what it sent, and the next call of the rank meets their next one.
    """

    rank, world_size = 0, 1
    ranks: Sequence[int] = (0,)  # their numbers in the whole job, for errors
    timeout_s = 0.0  # until a call gives up

    def connect(self, size: int) -> None:
        """Connect to the other ranks, whose rows have as many integers; later calls do nothing.

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
        return row[None]

    def publish(self, key: str, text: str) -> None:
        """Leave a text under a key, for ranks that wait for this one elsewhere; raises nothing."""

    def published(self, key: str) -> str | None:  # noqa: ARG002
        """Return the text that a rank has left under a key; `None` while there is none."""
        return None

    def interrupt(self) -> None:
        """Make every call raise until `resume`, one that waits on another thread included."""

    def resume(self) -> None:
        """Take `interrupt` back."""
