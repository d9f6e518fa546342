"""Epochs of a node: its count of them, and the epoch fields of its state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from odb_nodes._support.checks import check_count
from odb_nodes._support.hashing import hash_ints
from odb_nodes.core.contract.state import NodeState


@dataclass(kw_only=True)
class EpochState(NodeState):
    """The epoch fields in the state of an `EpochNode`.

    Attributes:
        epoch: the number of the epoch, from 0.
        cycle: how often the epoch was begun again.
        started: whether `next` was called in the epoch.
    """

    epoch: int = 0
    cycle: int = 0
    started: bool = False


class EpochCounter:
    """Counts the epochs of a node.

    The first call of `next` starts an epoch, even if the call raises `StopIteration`. Only a reset
    after that call begins the next epoch. If a mixer begins a source again within an epoch, `epoch`
    stays, and `cycle` counts up.
    """

    epoch = cycle = 0
    started = _cycle_requested = False
    _requested: int | None = None

    @property
    def shuffle_key(self) -> int:
        """Seed of the order, 31 bits: the epoch, or a hash of epoch and cycle in a later cycle.

        The seed depends on no earlier epoch, so `set_epoch` gives the same orders in any run.
        """
        return hash_ints(self.epoch, self.cycle) >> 33 if self.cycle else self.epoch

    def advance(self) -> None:
        """Begin the requested epoch, the next epoch, or this epoch if it has not started."""
        if self._cycle_requested:
            self.cycle += 1
        else:
            if self._requested is not None:
                self.epoch = self._requested
                self._requested = None
            elif self.started or self.cycle:
                self.epoch += 1
            self.cycle = 0
        self.started = self._cycle_requested = False

    def start(self) -> None:
        """Note a call of `next`."""
        self.started = True

    def request(self, epoch: int) -> None:
        """Have the next reset begin `epoch`."""
        self._requested = check_count("epoch", epoch, 0)

    def request_cycle(self) -> None:
        """Have the next reset begin this epoch again, in another order."""
        self._cycle_requested = True

    def restore(self, state: EpochState) -> None:
        """Take the epoch of a state."""
        self.epoch = state.epoch
        self.started = state.started
        self.cycle = state.cycle
        self._requested = None
        self._cycle_requested = False

    def save(self) -> dict[str, Any]:
        """Return the fields of an `EpochState`."""
        return {"epoch": self.epoch, "cycle": self.cycle, "started": self.started}
