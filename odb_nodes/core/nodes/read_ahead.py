"""Node: reads ahead on a thread. Its state does not depend on how far it has read."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from contextlib import suppress
from typing import Any, TypeVar

from torchdata.nodes import BaseNode, Prefetcher

from odb_nodes._compat.torchdata import snapshot_of, thread_of
from odb_nodes._support.processes import Owner
from odb_nodes.core.contract import copy_state, snapshot
from odb_nodes.core.contract.graph import stop_threads
from odb_nodes.core.contract.node import call_member, check_node
from odb_nodes.core.nodes.seeded_collate import DeferredBatch
from odb_nodes.errors import StateError, WorkerError

T = TypeVar("T")

_EXIT_S = 5.0  # limit for all threads to leave their sources before the interpreter ends
_live: weakref.WeakSet[ReadAhead[Any]] = weakref.WeakSet()
# The relay of each thread, by weak reference: a running thread keeps its relay alive.
_threads: weakref.WeakKeyDictionary[threading.Thread, weakref.ref[_Relay[Any]]] = (
    weakref.WeakKeyDictionary()
)


class ReadAhead(BaseNode[T]):
    """Takes items from its source ahead of time, on a thread, by torchdata's `Prefetcher`.

    The state is the state of the source after the item last returned, so a run with read-ahead may
    resume without read-ahead, and vice versa. An error of the source is raised unchanged.

    A `DeferredBatch`, which a `GroupCollator` yields if collating draws random numbers, is collated
    on the thread that calls `next`: the training thread, whose generators it uses.

    The thread starts with the first `next` after a reset. Until then, nothing is read or exchanged
    with other ranks, even if states are saved.
    """

    def __init__(self, source: BaseNode[T], depth: int) -> None:
        super().__init__()
        check_node("source", source)
        call_member(source, "expect_read_ahead")
        self._depth = depth
        self._prefetcher = Prefetcher(_Relay(source), depth)
        self._reads = False
        self._deferred: DeferredBatch | None = None  # taken from the source, not collated yet
        self._owner = Owner()
        _live.add(self)

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        """Begin the next epoch, or go to the position of `initial_state`, a state of the source."""
        super().reset(initial_state)
        self._deferred = None
        source = self._relay.source
        self._prefetcher = Prefetcher(_Relay(source), self._depth)
        self._reads = False
        source.reset(initial_state)

    def next(self) -> T:
        """Return the next item."""
        if not self._reads:
            self._prefetcher.reset(None)
            self._reads = True
            self._owner = Owner()
            _threads[thread_of(self._prefetcher)] = weakref.ref(self._relay)
        self._owner.check("the read-ahead thread")
        item: Any = self._deferred
        if item is None:
            item = self._relay.take(self._prefetcher)
        if isinstance(item, DeferredBatch):
            self._deferred = item  # If collating raises, the next call collates again.
            item = item.collate()
            self._deferred = None
        return item  # type: ignore[no-any-return]

    def get_state(self) -> dict[str, Any]:
        """Return the state of the source after the last item returned."""
        state: dict[str, Any] = copy_state(self._own_snapshot())
        return state

    def _own_snapshot(self) -> dict[str, Any]:
        if self._deferred is not None:
            raise StateError(
                "there is no state after `collate_fn` failed: its group would be lost. Load the "
                "last state saved before."
            )
        if not self._reads:
            return snapshot(self._relay.source)
        return snapshot_of(self._prefetcher)

    @property
    def _relay(self) -> _Relay[T]:
        relay = self._prefetcher.source
        assert isinstance(relay, _Relay)
        return relay


class _Relay(BaseNode[T]):
    """Keeps the error of its source, which torchdata's threads pass on as text, and its end."""

    def __init__(self, source: BaseNode[T]) -> None:
        super().__init__()
        self.source = source
        self._error: BaseException | None = None
        self._has_ended = False
        self._read = 0  # items read by the read-ahead thread
        self._taken = 0  # items taken by the caller's thread

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)  # The source has been reset before.

    def next(self) -> T:
        try:
            item: T = next(self.source)
        except StopIteration:
            self._has_ended = True
            raise
        except BaseException as error:
            self._error = error
            # A SystemExit would end torchdata's thread, and its reader would wait for ever.
            raise RuntimeError(f"the source raised {error!r}.") from error
        self._read += 1
        return item

    def take(self, prefetcher: Prefetcher[T]) -> T:
        """Return the next item of a prefetcher over this relay, on the caller's thread."""
        try:
            item: T = next(prefetcher)
        except StopIteration:
            if self._has_ended and self._taken == self._read:
                raise
            # torchdata's prefetcher also ends when its thread was stopped.
            raise WorkerError(
                "the read-ahead thread was stopped before the end of the epoch, since the graph is "
                "reset or closed."
            ) from None
        except Exception:
            error = self._error
            if error is None:
                raise
            raise error from error.__cause__  # not from torchdata's copy of its text
        self._taken += 1
        return item

    def get_state(self) -> dict[str, Any]:
        return snapshot(self.source)


@atexit.register
def _stop_all() -> None:
    """Stop all threads: a thread inside torch when the interpreter ends aborts the process."""
    deadline = time.monotonic() + _EXIT_S
    for node in list(_live):
        if node._reads and node._owner.is_here:
            with suppress(Exception):
                stop_threads(node, max(0.0, deadline - time.monotonic()))
    for thread, reference in list(_threads.items()):  # including threads of deleted nodes
        relay = reference()
        if thread.is_alive() and relay is not None:
            with suppress(Exception):
                stop_threads(relay, max(0.0, deadline - time.monotonic()))
            thread.join(max(0.0, deadline - time.monotonic()))
