"""Counting epochs, right at their edges."""

from __future__ import annotations

from odb_nodes._core.checks import check_count
from odb_nodes._core.hashing import hash_ints


class EpochCounter:
    """Which epoch a node is in.

    An epoch counts as started from the first call of `next` on, also if that found nothing; only a
    reset after that begins the next one. The flag is part of the state, so a node that is restored
    at the end of an epoch goes on with the next one, not with the old one again.

    A mixer may begin a source again within an epoch: the epoch stays, and `cycle` counts.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.cycle = 0
        self.started = False
        self._requested: int | None = None
        self._again = False

    @property
    def shuffle_key(self) -> int:
        """What the order is drawn from, 31 bits: the epoch; in a later cycle a number of its own.

        It depends on nothing before the epoch, so `set_epoch` gives the same orders in any run.
        """
        return hash_ints(self.epoch, self.cycle) >> 33 if self.cycle else self.epoch

    def advance(self) -> None:
        """Begin an epoch: the requested one, the next one, or this one if it has not started.

        After `request_cycle`, begin the next cycle of this one.
        """
        if self._again:
            self.cycle += 1
        else:
            if self._requested is not None:
                self.epoch, self._requested = self._requested, None
            elif self.started or self.cycle:
                self.epoch += 1
            self.cycle = 0
        self.started = self._again = False

    def request(self, epoch: int) -> None:
        """Make `epoch` the one that the next reset begins."""
        self._requested = check_count("epoch", epoch, 0)

    def request_cycle(self) -> None:
        """Make the next reset begin this epoch again, in another order."""
        self._again = True

    def restore(self, epoch: int, started: bool, cycle: int = 0) -> None:
        """Go to where a state stands."""
        self.epoch, self.started, self.cycle = epoch, started, cycle
        self._requested, self._again = None, False
