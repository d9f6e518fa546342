"""Counting epochs, right at their edges."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeVar

from odb_nodes._core.checks import MAX_COUNT, check_count
from odb_nodes._core.hashing import hash_ints
from odb_nodes.contract.fields import InRange
from odb_nodes.contract.node import StatefulNode
from odb_nodes.contract.state import NodeState
from odb_nodes.sample import ItemKey

__all__ = ["EpochCounter", "EpochNode", "EpochState"]

T = TypeVar("T")

_EpochNumber = Annotated[int, InRange(0, MAX_COUNT)]


@dataclass(kw_only=True)
class EpochState(NodeState):
    """The part of the state of an `EpochNode` that says which epoch it is in.

    Attributes:
        epoch: the number of the epoch, from 0.
        cycle: how often it was begun again.
        started: `next` was called in it.
    """

    epoch: _EpochNumber = 0
    cycle: _EpochNumber = 0
    started: bool = False


S = TypeVar("S", bound=EpochState)


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

    def restore(self, state: EpochState) -> None:
        """Go to where a state stands."""
        self.epoch, self.started, self.cycle = state.epoch, state.started, state.cycle
        self._requested, self._again = None, False


class EpochNode(StatefulNode[T, S]):
    """A node that counts epochs: one that draws its order, or random numbers, from their number.

    Its `STATE` derives from `EpochState`, whose fields it fills in itself: `save` leaves them out.
    By the time `begin_epoch` and `restore` are called, `_epochs` stands where they begin.
    """

    STATE: ClassVar[type[Any]] = EpochState
    _STATE_BASE = EpochState

    def __init__(self) -> None:
        super().__init__()
        self._epochs = EpochCounter()

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the one that the next reset without a state begins."""
        self._epochs.request(epoch)

    def begin_cycle(self) -> None:
        """Make the next reset without a state begin this epoch again, in another order."""
        self._epochs.request_cycle()

    def _begin(self) -> None:
        self._epochs.advance()
        super()._begin()

    def _restore(self, state: S) -> None:
        self._epochs.restore(state)
        super()._restore(state)

    def _next(self) -> T:
        self._epochs.started = True
        return super()._next()

    def _next_items(self, count: int) -> tuple[list[T], list[ItemKey | None]]:
        self._epochs.started = True
        return super()._next_items(count)

    def _values_of(self, saved: S) -> dict[str, Any]:
        counter = self._epochs
        where = {"epoch": counter.epoch, "cycle": counter.cycle, "started": counter.started}
        return {**super()._values_of(saved), **where}
