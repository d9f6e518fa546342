"""Node: reads ahead on a thread. Its state does not depend on how far it has read."""

from __future__ import annotations

import atexit
import time
import weakref
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Generic, NamedTuple, TypeVar

from torchdata.nodes import BaseNode

from odb_nodes._compat.torchdata import join
from odb_nodes._support.checks import check_count
from odb_nodes._support.processes import Owner, start_thread
from odb_nodes.core.contract import copy_state, snapshot
from odb_nodes.core.contract.graph import stop_threads
from odb_nodes.core.contract.node import call_member, check_node
from odb_nodes.core.nodes.seeded_collate import DeferredBatch
from odb_nodes.errors import StateError, WorkerError

T = TypeVar("T")

_RESET_S = 60.0  # limit for the thread to leave its source at a reset without a `Loader`
_DELETED_S = 0.5  # limit for that when its node is deleted
_EXIT_S = 5.0  # limit for all threads to leave their sources before the interpreter ends


class ReadAhead(BaseNode[T]):
    """Takes items from its source ahead of time, on a thread.

    The state is the state of the source after the item last returned, so a run with read-ahead may
    resume without read-ahead, and vice versa. An error of the source is raised unchanged.

    A `DeferredBatch`, which a `GroupCollator` yields if collating draws random numbers, is collated
    on the thread that calls `next`: the training thread, whose generators it uses.

    The thread starts with the first `next` after a reset. Until then, nothing is read or exchanged
    with other ranks, even if states are saved.

    Args:
        source: any node.
        depth: number of items that are kept ready.

    Raises:
        TypeError, ValueError: an argument is not valid.
    """

    _reader: _Reader[T] | None = None

    def __init__(self, source: BaseNode[T], depth: int) -> None:
        super().__init__()
        check_node("source", source)
        call_member(source, "expect_read_ahead")
        self.source = source
        self._depth = check_count("depth", depth)
        self._deferred: DeferredBatch | None = None  # taken from the source, not collated yet

    @property
    def has_workers(self) -> bool:
        """Whether the thread was started since the last reset."""
        return self._reader is not None

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        """Begin the next epoch, or go to the position of `initial_state`, a state of the source."""
        super().reset(initial_state)
        self.interrupt()
        self.join_threads(_RESET_S)
        self._reader = self._deferred = None
        self.source.reset(initial_state)

    def next(self) -> T:
        """Return the next item."""
        if self._reader is None:
            self._reader = _Reader(self.source, self._depth)
        self._reader.owner.check("the read-ahead thread")
        item: Any = self._deferred
        if item is None:
            item = self._reader.take()
        if isinstance(item, DeferredBatch):
            self._deferred = item  # If collating raises, the next call collates again.
            item = item.collate()
            self._deferred = None
        return item  # type: ignore[no-any-return]

    def get_state(self) -> dict[str, Any]:
        """Return the state of the source after the last item returned."""
        state: dict[str, Any] = copy_state(self._own_snapshot())
        return state

    def interrupt(self) -> None:
        """Make the thread stop before its next item, and a `next` that waits raise."""
        if self._reader is not None:
            self._reader.stop()

    close = interrupt

    def __del__(self) -> None:
        """Stop the thread, and wait a moment: it keeps the nodes below from being freed."""
        self.interrupt()
        with suppress(TimeoutError):
            self.join_threads(_DELETED_S)

    def join_threads(self, timeout_s: float) -> None:
        """Wait until the thread, which was interrupted, has left the source."""
        if self._reader is not None:
            join([self._reader.thread], timeout_s, self)

    def _own_snapshot(self) -> dict[str, Any]:
        if self._deferred is not None:
            raise StateError(
                "there is no state after `collate_fn` failed: its group would be lost. Load the "
                "last state saved before."
            )
        return snapshot(self.source) if self._reader is None else self._reader.state


class _Item(NamedTuple):
    """An item, and the state of its source after it."""

    value: Any
    state: dict[str, Any]


class _Reader(Generic[T]):
    """Reads up to `depth` items of a node on a thread, until its end, an error or `stop`."""

    def __init__(self, source: BaseNode[T], depth: int) -> None:
        self.state = snapshot(source)  # after the item that was taken last
        self.owner = Owner()
        self._source = source
        # A garbage collection may call `stop` within a method of a queue: these allow it.
        self._room: SimpleQueue[None] = SimpleQueue()
        self._results: SimpleQueue[_Item | BaseException | None] = SimpleQueue()
        self._read = self._taken = 0  # items, each counted by one thread
        self._has_ended = self._is_stopped = False
        for _ in range(depth):
            self._room.put(None)
        self.thread = start_thread("read-ahead", self._run)
        _readers.add(self)

    def take(self) -> T:
        """Return the next item, on the caller's thread."""
        result = None if self._is_stopped else self._results.get()
        if isinstance(result, _Item):
            self._taken += 1
            self._room.put(None)
            self.state = result.state
            item: T = result.value
            return item
        self._is_stopped = True
        if result is not None:
            raise result
        if self._has_ended and self._taken == self._read:
            raise StopIteration
        raise WorkerError(
            "the read-ahead thread was stopped before the end of the epoch: its source raised, or "
            "the graph is reset or closed."
        )

    def stop(self) -> None:
        """End the thread before its next item, and wake both threads where they wait."""
        self._is_stopped = True
        self._room.put(None)
        self._results.put(None)

    def stop_at_exit(self, deadline: float) -> None:
        """Stop the thread, and the waits of its source."""
        self.stop()
        with suppress(Exception):
            stop_threads(self._source, max(0.0, deadline - time.monotonic()))
        self.thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        may_have_more = True
        while may_have_more:
            self._room.get()
            may_have_more = not self._is_stopped and self._read_next()

    def _read_next(self) -> bool:
        """Read an item, and return whether there may be more. No name holds it afterwards."""
        try:
            item = _Item(next(self._source), snapshot(self._source))
        except StopIteration:
            self._has_ended = True
            self._results.put(StopIteration())
            return False
        except BaseException as error:
            self._results.put(error)
            return False
        self._read += 1
        self._results.put(item)
        return True


_readers: weakref.WeakSet[_Reader[Any]] = weakref.WeakSet()  # A running thread keeps its reader.


@atexit.register
def _stop_all() -> None:
    """Stop all threads: a thread inside torch when the interpreter ends aborts the process."""
    deadline = time.monotonic() + _EXIT_S
    for reader in list(_readers):
        if reader.thread.is_alive():
            reader.stop_at_exit(deadline)
