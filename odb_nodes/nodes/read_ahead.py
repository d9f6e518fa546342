"""Node: reads ahead on a thread, without a trace in the state."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from contextlib import suppress
from typing import Any, TypeVar

from torchdata.nodes import BaseNode, Prefetcher

from odb_nodes._compat.torchdata import snapshot_of, thread_of
from odb_nodes._core.processes import Owner
from odb_nodes.contract import copy_state, snapshot
from odb_nodes.contract.graph import stop_threads
from odb_nodes.contract.node import call_member, check_node
from odb_nodes.errors import StateError, WorkerError
from odb_nodes.nodes.seeded_collate import DeferredBatch

T = TypeVar("T")

_EXIT_S = 5.0  # for all threads to be out of their sources before the interpreter ends
_live: weakref.WeakSet[ReadAhead[Any]] = weakref.WeakSet()
# By weak references to what the threads read from: they hold it themselves as long as they run.
_threads: weakref.WeakKeyDictionary[threading.Thread, weakref.ref[_Relay[Any]]] = (
    weakref.WeakKeyDictionary()
)


class ReadAhead(BaseNode[T]):
    """Takes items from its source ahead of time, on a thread: torchdata's `Prefetcher`, plainer.

    Its state is the source's, as of the item that was last taken, so a run that read ahead may
    resume without, and the other way round. An error of the source is raised as it is.

    A `DeferredBatch`, which a `GroupCollator` yields where collating draws random numbers, is
    collated on the thread that calls `next`: the trainer's, whose generators it borrows.

    The thread begins with the first `next` after a reset: an iterator that is only asked for its
    state reads nothing, and meets no other rank.
    """

    def __init__(self, source: BaseNode[T], depth: int) -> None:
        super().__init__()
        check_node("source", source)
        call_member(source, "expect_read_ahead")
        self._depth = depth
        self._prefetcher = Prefetcher(_Relay(source), depth)
        self._reads = False
        self._deferred: DeferredBatch | None = None  # taken, and not collated yet
        self._owner = Owner()
        _live.add(self)

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        """Begin the next epoch, or go to where `initial_state`, the source's, stands."""
        super().reset(initial_state)
        self._deferred = None
        source = self._relay.source
        self._prefetcher, self._reads = Prefetcher(_Relay(source), self._depth), False
        source.reset(initial_state)

    def next(self) -> T:
        """Return the next item."""
        if not self._reads:
            self._prefetcher.reset(None)
            self._reads, self._owner = True, Owner()
            _threads[thread_of(self._prefetcher)] = weakref.ref(self._relay)
        self._owner.check("the read-ahead thread")
        item: Any = self._deferred
        if item is None:
            item = self._relay.take(self._prefetcher)
        if isinstance(item, DeferredBatch):
            self._deferred = item  # Should it raise, the next call collates it again.
            item = item.collate()
            self._deferred = None
        taken: T = item
        return taken

    def get_state(self) -> dict[str, Any]:
        """Return the source's state after the last item that was taken."""
        state: dict[str, Any] = copy_state(self._snapshot_of_own())
        return state

    def _snapshot_of_own(self) -> dict[str, Any]:
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
    """Keeps the error of its source, which torchdata's threads hand on as text, and its end."""

    def __init__(self, source: BaseNode[T]) -> None:
        super().__init__()
        self.source = source
        self._error: BaseException | None = None
        self._has_ended = False
        self._given = self._taken = 0  # items, by its own thread and by the reader's

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
            # torchdata's thread would die of a SystemExit, and leave its reader waiting for ever.
            raise RuntimeError(f"the source raised {error!r}.") from error
        self._given += 1
        return item

    def take(self, prefetcher: Prefetcher[T]) -> T:
        """Return the next item that a prefetcher has taken from here, on the reader's thread."""
        try:
            item: T = next(prefetcher)
        except StopIteration:
            if self._has_ended and self._taken == self._given:
                raise
            # To torchdata's prefetcher, a thread that was stopped has ended its data.
            raise WorkerError(
                "the read-ahead thread was stopped before the end of the epoch, since the graph is "
                "reset or closed."
            ) from None
        except Exception:
            if (error := self._error) is not None:
                raise error from error.__cause__  # and not from its copy in another message
            raise
        self._taken += 1
        return item

    def get_state(self) -> dict[str, Any]:
        return snapshot(self.source)


@atexit.register
def _stop_all() -> None:
    """Get all threads out of torch: one that is inside at the very end aborts the process."""
    deadline = time.monotonic() + _EXIT_S
    for node in list(_live):
        if node._reads and node._owner.is_here:
            with suppress(Exception):
                stop_threads(node, max(0.0, deadline - time.monotonic()))
    for thread, reads in list(_threads.items()):  # of nodes that are gone: nobody waits for those
        if thread.is_alive() and (relay := reads()) is not None:
            with suppress(Exception):
                stop_threads(relay, max(0.0, deadline - time.monotonic()))
            thread.join(max(0.0, deadline - time.monotonic()))
