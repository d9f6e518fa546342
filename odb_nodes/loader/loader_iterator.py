"""One epoch of a `Loader`: takes items of a graph, and knows where it stands."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from torchdata.nodes import BaseNode

from odb_nodes.contract import Count, NodeState, SourceState, snapshot
from odb_nodes.contract.graph import blame_sources
from odb_nodes.errors import SampleError

T = TypeVar("T")


@dataclass(kw_only=True)
class LoaderState(NodeState):
    """Where a `Loader` stands.

    Attributes:
        root: the state of the graph.
        num_yielded: items yielded in the epoch.
        ended: the end of the epoch was seen.
        next_epoch: the epoch that was asked for by `set_epoch`, and has not begun.
        next_weights: the weights that were set by `set_weights` for an epoch that has not begun.
        left: the epoch was left, by `set_epoch` or an `iter` that failed: the next one follows.
    """

    root: SourceState
    num_yielded: Count
    ended: bool
    next_epoch: int | None = None
    next_weights: dict[str, float] = field(default_factory=dict)
    left: bool


@contextmanager
def held(lock: threading.RLock) -> Iterator[None]:
    """Hold the lock of an iterator or a loader.

    Raises:
        RuntimeError: another thread holds it.
    """
    if not lock.acquire(blocking=False):
        raise RuntimeError(
            "another thread is inside of `next` or `iter` of this loader: one thread must take all "
            "items. To use several, hand the items on by a `queue.Queue`."
        )
    try:
        yield
    finally:
        lock.release()


class LoaderIterator(Iterator[T]):
    """One epoch of a graph, or the rest of one.

    Args:
        root: last node of the graph.
        check: raises if the graph has gone on without this iterator, or belongs to another process.
        suspend: closes the graph, and keeps the position of this iterator for the next `iter()`.
        num_yielded: items yielded before in the epoch.
        ended: the end of the epoch was seen.
        had_items: an epoch before had items, so that one without any is an error.
    """

    def __init__(
        self,
        root: BaseNode[T],
        check: Callable[[LoaderIterator[T]], None],
        suspend: Callable[[], None],
        num_yielded: int,
        ended: bool,
        had_items: bool,
    ) -> None:
        self._root, self._check, self._suspend = root, check, suspend
        self._num_yielded = num_yielded
        self._ended = ended
        self._had_items = had_items
        self._state: LoaderState | None = None  # as long as it is the present one
        self.touched = False  # so that the next `iter()` begins an epoch
        self._left = False  # by `set_epoch`, and not taken up again
        self.taking = threading.RLock()
        """Held by the thread that is inside of `next`, or begins another epoch."""

    def leave(self) -> None:
        """Make the next `iter()` begin an epoch, unless this one is taken up again."""
        self.touched = self._left = True
        self._state = None

    def state(self) -> LoaderState:
        """Return where this iterator stands. Shared: not to be changed or given away."""
        if self._state is None:
            self._state = LoaderState(
                root=snapshot(self._root),
                num_yielded=self._num_yielded,
                ended=self._ended,
                left=self._left,
            )
        return self._state

    def __next__(self) -> T:
        self._check(self)
        with held(self.taking):
            return self._take()

    def _take(self) -> T:
        if self._left:
            self._left, self._state = False, None
        self.touched = True
        if self._ended:
            raise StopIteration
        try:
            self.state()  # Should the graph raise, this is where it is taken up again.
            item: T = next(self._root)
        except StopIteration:
            self._check(self)
            if self._had_items and not self._num_yielded:
                self._suspend()
                raise SampleError(
                    f"the epoch has no item, but one before had some. {blame_sources(self._root)}"
                ) from None
            self._ended, self._state = True, None
            raise
        except BaseException:
            self._check(self)
            self._suspend()
            raise
        self._num_yielded, self._state = self._num_yielded + 1, None
        return item
