"""Counting epochs, right at their edges."""

from __future__ import annotations

from odb_nodes.checks import check_count


class EpochCounter:
    """Which epoch a node is in.

    An epoch counts as started from the first call of `next` on, also if that found nothing; only a
    reset after that begins the next one. The flag is part of the state, so a node that is restored
    at the end of an epoch goes on with the next one, not with the old one again.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.started = False
        self._requested: int | None = None

    def advance(self) -> int:
        """Begin an epoch: the requested one, the next one, or this one if it has not started."""
        if self._requested is not None:
            self.epoch, self._requested = self._requested, None
        elif self.started:
            self.epoch += 1
        self.started = False
        return self.epoch

    def request(self, epoch: int) -> None:
        """Make `epoch` the one that the next reset begins."""
        self._requested = check_count("epoch", epoch, 0)

    def restore(self, epoch: int, started: bool) -> None:
        """Go to where a state stands."""
        self.epoch, self.started, self._requested = epoch, started, None
