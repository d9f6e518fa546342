"""An exchange of ranks inside of one process, each on a thread: to make steps of a job again."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np

from odb_nodes._support.arrays import IntArray
from odb_nodes.core.alignment.exchange.base import Exchange, Interrupted
from odb_nodes.errors import PeerError, StateError


class InProcessHub:
    """Where the ranks of one process meet."""

    def __init__(self, world_size: int, timeout_s: float = 60.0) -> None:
        self.world_size = world_size
        self.timeout_s = timeout_s
        self.changed = threading.Condition()
        self.sizes: dict[int, int] = {}
        self.calls: dict[int, dict[int, IntArray]] = {}  # number of the call -> rank -> row
        self.collected: dict[int, int] = {}  # number of the call -> ranks that are done with it

    def exchange(self, rank: int) -> Exchange:
        """Return the exchange of one rank."""
        return _InProcessExchange(self, rank)


class _InProcessExchange(Exchange):
    """The exchange of one rank, see `Exchange`."""

    def __init__(self, hub: InProcessHub, rank: int) -> None:
        self.rank, self.world_size, self.timeout_s = rank, hub.world_size, hub.timeout_s
        self.ranks: Sequence[int] = range(hub.world_size)
        self._hub = hub
        self._calls = 0
        self._connected = self._interrupted = False

    def connect(self, size: int) -> None:
        """Meet the other ranks."""
        hub = self._hub
        if self._connected:
            return
        with hub.changed:
            hub.sizes[self.rank] = size
            hub.changed.notify_all()
            self._wait_for(hub.sizes)
            if len(set(hub.sizes.values())) > 1:
                raise StateError(f"the ranks have messages of different sizes: {hub.sizes}.")
        self._connected = True

    def publish(self, key: str, text: str) -> None:
        raise NotImplementedError

    def published(self, key: str) -> str | None:
        raise NotImplementedError

    def all_gather(self, row: IntArray) -> IntArray:
        """Return the rows of all ranks."""
        if self._interrupted:
            raise Interrupted("the exchange was interrupted.")
        hub, call = self._hub, self._calls
        self._calls += 1
        with hub.changed:
            rows = hub.calls.setdefault(call, {})
            rows[self.rank] = row.copy()
            hub.changed.notify_all()
            try:
                self._wait_for(rows)
                return np.stack([rows[rank] for rank in range(self.world_size)])
            finally:
                hub.collected[call] = hub.collected.get(call, 0) + 1
                if hub.collected[call] == self.world_size:
                    del hub.collected[call], hub.calls[call]

    def interrupt(self) -> None:
        """Make every call raise until `resume`."""
        with self._hub.changed:
            self._interrupted = True
            self._hub.changed.notify_all()

    def resume(self) -> None:
        """Take `interrupt` back."""
        self._interrupted = False

    def _wait_for(self, present: dict[int, object] | dict[int, IntArray] | dict[int, int]) -> None:
        deadline = time.monotonic() + self.timeout_s
        while len(present) < self.world_size:
            if self._interrupted:
                raise Interrupted("the exchange was interrupted.")
            self._hub.changed.wait(max(0.0, deadline - time.monotonic()))
            missing = sorted({*range(self.world_size)} - {*present})
            if missing and time.monotonic() >= deadline:
                raise PeerError(f"no message from rank {missing} within {self.timeout_s} s.")
