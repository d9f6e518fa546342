"""A queue of chunks, in which the chunks that the trainer waits for come first."""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

from odb_nodes.core.processing.chunk import ChunkResult, ChunkTask

_DEPTH_S = 0.15  # work that a worker has at most, which an urgent chunk waits for
_NEWEST_WEIGHT = 0.25  # weight of the last chunk in the average time of an item


class QueuedChunk(Future[ChunkResult]):
    """The result of a chunk that may not be sent to a worker yet."""

    def __init__(self, task: ChunkTask) -> None:
        super().__init__()
        self.task = task
        self.sent: Future[ChunkResult] | None = None
        """The future of the worker pool, once the chunk is sent."""


class RestoredItems(ABC):
    """Items of a restored state, which workers process again. Each item has a row number."""

    @property
    @abstractmethod
    def has_unsent(self) -> bool:
        """Whether a row was never sent to the workers."""

    @abstractmethod
    def was_sent(self, row: int) -> bool:
        """Return whether a row was ever sent to the workers."""

    @abstractmethod
    def next_chunk(self, count: int) -> QueuedChunk:
        """Return a chunk of the first `count` rows that were never sent, and note that they are."""

    @abstractmethod
    def chunk_of(self, rows: Sequence[int]) -> QueuedChunk:
        """Return a chunk of these rows, and note that they are sent."""


class Backlog:
    """A queue of chunks, for as long as items of a restored state are not all processed again.

    Workers get chunks in this order: urgent chunks; items of planned steps, in the order of the
    steps; new items; the remaining items of the restored state. Each worker has few chunks at a
    time, so that an urgent chunk waits for few others. The thread that notices the end of a chunk
    sends the next chunk, so workers do not wait for the trainer's thread.

    `lock` guards all attributes, and each `RestoredItems`. No thread waits for a worker while it
    holds the lock.
    """

    def __init__(
        self,
        submit: Callable[[ChunkTask], Future[ChunkResult]],
        num_workers: int,
        chunk_items: Callable[[], int],
    ) -> None:
        self.lock = threading.RLock()
        self._submit = submit
        self._num_workers = num_workers
        self._chunk_items = chunk_items
        self._urgent = deque[QueuedChunk]()
        self._new = deque[QueuedChunk]()
        self._planned = deque[tuple[RestoredItems, int]]()  # rows, in the order of the steps
        self._later = deque[RestoredItems]()
        self._waits_for_new = False  # whether the trainer waits for new, not for planned items
        self._sent_chunks = self._sent_items = 0  # chunks and items that workers have now
        self._item_s: float | None = None  # average time of an item in a worker
        self._error: BaseException | None = None  # the error after which nothing is sent

    @property
    def is_done(self) -> bool:
        """Whether all chunks and items were sent."""
        with self.lock:
            return not (self._urgent or self._planned or self._new or self._later)

    def add(self, task: ChunkTask, *, urgent: bool = False) -> QueuedChunk:
        """Queue a chunk."""
        chunk = QueuedChunk(task)
        with self.lock:
            (self._urgent if urgent else self._new).append(chunk)
            self._waits_for_new = self._waits_for_new and not urgent
            if self._error is not None:
                self.fail(self._error)
        self.send()
        return chunk

    def add_later(self, items: RestoredItems) -> None:
        """Queue all these items after everything else, from the next chunk on."""
        with self.lock:
            self._later.append(items)

    def plan(self, items: RestoredItems, rows: Sequence[int]) -> None:
        """Queue these rows after all planned rows, from the next chunk on.

        Rows that were sent already are skipped.
        """
        with self.lock:
            self._planned += [(items, row) for row in rows]
            self._waits_for_new = False

    def hurry(self, chunk: QueuedChunk) -> None:
        """Note that the trainer now waits for a chunk."""
        with self.lock:
            if chunk.sent is not None or chunk in self._urgent:
                return
            self._waits_for_new = True
        self.send()

    def send(self) -> None:
        """Send chunks to the workers until they have enough."""
        while True:
            chunk: QueuedChunk | None = None
            with self.lock:
                try:
                    chunk = None if self._error is not None else self._next()
                    if chunk is None:
                        return
                    self._sent_chunks += 1
                    self._sent_items += len(chunk.task.items)
                    chunk.sent = sent = self._submit(chunk.task)
                except BaseException as error:  # Even Ctrl-C loses the chunk.
                    if chunk is not None:
                        chunk.set_exception(error)
                    self.fail(error)
                    raise
            sent.add_done_callback(partial(self._note_done, chunk))

    def fail(self, error: BaseException) -> None:
        """Fail all queued chunks with this error, and send nothing more."""
        with self.lock:
            self._error = self._error or error
            waiting = [*self._urgent, *self._new]
            for queue in self._urgent, self._new, self._planned, self._later:
                queue.clear()
        for chunk in waiting:
            chunk.set_exception(self._error)

    def _next(self) -> QueuedChunk | None:
        """Return the next chunk to send; `None` if no chunk waits, or if workers have enough."""
        if self._has_later() and self._is_full():
            return None
        if self._urgent:
            return self._urgent.popleft()
        if self._new and self._waits_for_new:
            return self._new.popleft()
        if (chunk := self._next_planned()) is not None:
            return chunk
        if self._new:
            return self._new.popleft()
        if self._later:
            return self._later[0].next_chunk(self._chunk_items())
        return None

    def _has_later(self) -> bool:
        """Drop the restored items that were sent; return whether other restored items are left."""
        while self._planned and self._planned[0][0].was_sent(self._planned[0][1]):
            self._planned.popleft()
        while self._later and not self._later[0].has_unsent:
            self._later.popleft()
        return bool(self._planned or self._later)

    def _next_planned(self) -> QueuedChunk | None:
        """Return a chunk of the next planned rows, all of the same `RestoredItems`."""
        if not self._planned:
            return None
        items = self._planned[0][0]
        rows: list[int] = []
        while self._planned and self._planned[0][0] is items and len(rows) < self._chunk_items():
            _, row = self._planned.popleft()
            if not items.was_sent(row):
                rows.append(row)
        return items.chunk_of(rows) if rows else None

    def _is_full(self) -> bool:
        if self._item_s is None:
            return self._sent_chunks >= 2 * self._num_workers
        work_s = self._sent_items * self._item_s
        return self._sent_chunks >= self._num_workers and work_s >= _DEPTH_S * self._num_workers

    def _note_done(self, chunk: QueuedChunk, sent: Future[ChunkResult]) -> None:
        error = sent.exception()
        items = len(chunk.task.items)
        with self.lock:
            self._sent_chunks -= 1
            self._sent_items -= items
            if error is None and items:
                each_s = sent.result().seconds / items
                average_s = each_s if self._item_s is None else self._item_s
                self._item_s = average_s + _NEWEST_WEIGHT * (each_s - average_s)
        if error is not None:
            self.fail(error)
            chunk.set_exception(error)
            return
        chunk.set_result(sent.result())
        with contextlib.suppress(Exception):  # `send` has failed the queued chunks with the error.
            self.send()
