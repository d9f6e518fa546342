"""Runs chunks with a pool of workers, waits for their results, and adapts their size."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from multiprocessing.reduction import ForkingPickler
from typing import Any

from odb_nodes._support.processes import deferred_interrupt
from odb_nodes._support.seeds import declares_draws
from odb_nodes._support.user_warning import warn_user
from odb_nodes.core.processing.backlog import Backlog, QueuedChunk
from odb_nodes.core.processing.chunk import (
    ChunkProcessor,
    ChunkResult,
    ChunkTask,
    Failure,
    describe_unread,
)
from odb_nodes.core.processing.options import AUTO, WorkerOptions
from odb_nodes.core.processing.process_pool import ProcessPool
from odb_nodes.core.processing.ray_pool import RayPool
from odb_nodes.core.processing.worker_pool import ENDED, InlinePool, ThreadPool, WorkerPool
from odb_nodes.errors import WorkerError

_FIRST_ITEMS = 4
_GROUPS_AHEAD = 2  # groups in flight for each worker
_CHUNK_S = 0.02  # the longest time of a chunk
_CHUNK_BYTES = 1 << 20  # the most bytes of a chunk
_GROWTH = 2  # most growth from one chunk to the next, since the first items may be cheap by chance
_NEWEST_WEIGHT = 0.25  # weight of the last chunk in the average bytes of an item


class ChunkSizer:
    """Adapts the size of chunks to the time and bytes of earlier items.

    Each chunk costs a message and two pickles, so chunks should not be small. A chunk that takes
    long delays the next batch while other workers are idle. Samples do not depend on the size.
    """

    def __init__(self, options: WorkerOptions) -> None:
        self._options = options
        self.items = options.nominal_chunk_samples  # items of the next chunk
        self._adapts = options.chunk_size == AUTO and options.num_workers > 0
        # Two chunks for each worker: one in process, and one waiting.
        self._chunks = 2 * options.num_workers
        share = options.samples_ahead // max(1, self._chunks)
        self._most_items = min(options.most_chunk_samples, max(1, share))
        if self._adapts:
            self.items = min(_FIRST_ITEMS, self._most_items)
        self._items_seen = 0
        self._item_bytes = 0.0
        self._item_s = math.inf  # in the last chunk

    @property
    def items_ahead(self) -> int:
        """Items that may be in flight beyond the current chunk.

        With `in_flight_bytes`, at most twice the items seen so far, whose bytes are an estimate.
        """
        options = self._options
        if options.in_flight_bytes is None:
            return options.samples_ahead
        most: float = 2 * self._items_seen
        if self._item_bytes:
            most = min(most, options.in_flight_bytes / self._item_bytes)
        return min(options.samples_ahead, max(self._chunks * self.items, int(most)))

    def has_room_for_group(self, groups: int, samples: int) -> bool:
        """Return whether workers get another group beside the groups and samples in flight.

        Each worker gets a group; `in_flight_samples` and `in_flight_bytes` allow or forbid more.
        """
        options = self._options
        workers = max(1, options.num_workers)
        if groups < workers or not options.num_workers:
            return groups < workers
        if options.in_flight_samples is not None and samples >= options.in_flight_samples:
            return False
        if options.in_flight_samples is None and groups >= _GROUPS_AHEAD * workers:
            return False
        if options.in_flight_bytes is None or options.method == "thread":
            return True
        bytes_with_next = self._item_bytes * samples * (groups + 1) / groups
        return 0 < bytes_with_next <= options.in_flight_bytes

    def note(self, items: int, seconds: float, size_bytes: int) -> None:
        """Note the items, time and bytes of a chunk."""
        if not items:
            return
        self._items_seen += items
        if size_bytes:
            average = self._item_bytes or size_bytes / items
            self._item_bytes = average + _NEWEST_WEIGHT * (size_bytes / items - average)
        if not self._adapts:
            return
        # The smaller of the times of two chunks, since a chunk may have waited for a CPU.
        item_s = min(seconds / items, self._item_s)
        self._item_s = seconds / items
        share = max(item_s / _CHUNK_S, size_bytes / items / _CHUNK_BYTES, 1e-9)
        self.items = int(max(1, min(1 / share, _GROWTH * self.items, self._most_items)))


def start_pool(processor: ChunkProcessor, options: WorkerOptions) -> WorkerPool:
    """Start workers with these options."""
    if options.num_workers == 0:
        return InlinePool(processor)
    if options.method == "thread":
        return ThreadPool(processor, options)
    if options.method == "ray":
        return RayPool(processor, options)
    return ProcessPool(processor, options)


class ChunkRunner:
    """Runs chunks with workers, which live from `start` to `close`."""

    def __init__(self, processor: ChunkProcessor, options: WorkerOptions, name: str) -> None:
        self._processor, self.options, self._name = processor, options, name
        self._pool: WorkerPool | None = None
        self._finalizer: Callable[[], Any] | None = None
        self._interruption: Future[ChunkResult] = Future()
        self.sizer = ChunkSizer(options)
        self._backlog: Backlog | None = None  # while items of a restored state are unprocessed

    @property
    def is_started(self) -> bool:
        """Whether workers run."""
        return self._pool is not None and not isinstance(self._pool, InlinePool)

    @property
    def pids(self) -> list[int]:
        """Process ids of the worker processes that run now."""
        return [] if self._pool is None else [*self._pool.pids]

    def start(self, epoch: int) -> None:
        """Start the workers for an epoch, unless all run already.

        This calls `set_epoch` of the datasets of this process. Workers call it for their copies.
        """
        self._processor.forget_epoch()
        if self.options.num_workers and self.options.method != "thread":
            self._processor.set_epoch(epoch)
        exit_reason = "" if self._pool is None else self._pool.exit_reason
        if exit_reason:
            self.close()
        if self._pool is None:
            with deferred_interrupt():
                self._pool = start_pool(self._processor, self.options)
                self._finalizer = weakref.finalize(self, self._pool.close)
        if exit_reason:  # Last, since a filter may make it an error.
            warn_user(f"{exit_reason} All workers are started anew.")

    def close(self) -> None:
        """Stop the workers. A forked child only drops the workers, which belong to its parent."""
        finalizer, self._finalizer = self._finalizer, None
        self._forget_backlog()
        if self.is_started:
            self._pool = None
        if finalizer is not None:
            with deferred_interrupt():  # A half-closed pool would wait for dead workers.
                finalizer()

    def discard(self) -> None:
        """Skip the chunks that no worker has begun."""
        self._forget_backlog()
        if self._pool is not None:
            self._pool.discard()

    def backlog(self) -> Backlog | None:
        """Return the queue of chunks, kept until all are sent; `None` without workers."""
        if self.is_started and self._backlog is None:
            sizer = self.sizer
            self._backlog = Backlog(self._send, self.options.num_workers, lambda: sizer.items)
        return self._backlog

    @property
    def has_backlog(self) -> bool:
        """Whether there may be chunks or items that were not sent to workers."""
        return self._backlog is not None

    def _forget_backlog(self) -> None:
        backlog, self._backlog = self._backlog, None
        # In a forked child, the lock of the backlog may be held for ever.
        if backlog is not None and self._pool is not None and self._pool.owner.is_here:
            backlog.fail(WorkerError(ENDED))

    def interrupt(self) -> None:
        """Make `results` raise until `resume`, even if it waits on another thread."""
        if not self._interruption.done():
            self._interruption.set_result(ChunkResult(None, None))

    def resume(self) -> None:
        """Cancel `interrupt`."""
        self._interruption = Future()

    def check(self) -> None:
        """Raise a `WorkerError` after `interrupt`, or if workers belong to another process."""
        self.check_process()
        if self._interruption.done():
            raise WorkerError("processing was interrupted, since the graph is reset or closed.")

    def check_process(self) -> None:
        """Raise a `WorkerError` if workers belong to the process that this one was forked from."""
        if self.is_started and self._pool is not None:
            self._pool.owner.check(f"`{self._name}`")

    def submit(self, task: ChunkTask, *, urgent: bool = False) -> Future[ChunkResult]:
        """Send a chunk to the workers. An urgent chunk precedes chunks that were not sent yet."""
        if self._pool is None:
            raise WorkerError("the workers were closed: reset the node to start them again.")
        if self._backlog is not None and self._backlog.is_done:
            self._backlog = None
        with self._closed_on_failure():
            if self._backlog is not None:
                return self._backlog.add(task, urgent=urgent)
            return self._send(task)

    @contextlib.contextmanager
    def _closed_on_failure(self) -> Iterator[None]:
        """Close the workers if a chunk cannot be sent to them."""
        try:
            yield
        except WorkerError:
            self.close()
            raise

    def _send(self, task: ChunkTask) -> Future[ChunkResult]:
        """Give a chunk to the pool. With a backlog, this may run on any thread."""
        if self._pool is None:
            raise WorkerError("the workers were closed.")
        try:
            return self._pool.submit(task)
        except Exception as error:  # raised by pickling
            raise WorkerError(
                f"{task} cannot be sent to a worker: {type(error).__name__}: {error}. Let the "
                'source yield plain data, or use `method="thread"`.'
            ) from error

    def results(
        self, task: ChunkTask, future: Future[ChunkResult]
    ) -> tuple[list[Sequence[Any]], Failure | None]:
        """Return the results of a chunk in runs, and the failure that ended the chunk early."""
        pool = self._pool  # Another thread may close it meanwhile.
        if not future.done():
            self._wait(future)
        self.check()
        if not future.done():
            raise self._fail(
                f"no result within {self.options.timeout_s} s (`timeout_s`) for {task}: "
                f"{self._what_hangs(pool, task, future)}"
            )
        try:
            result = future.result()
            if result.unread and pool is not None:
                raise WorkerError(
                    f"{describe_unread(task, pool.dumps)} cannot be unpickled by a worker: "
                    f'{result.unread}. Let the source yield plain data, or use `method="thread"`.'
                )
        except WorkerError as error:
            raise self._fail(f"no result for {task}: {error}") from error
        self.sizer.note(len(task.items), result.seconds, result.size_bytes)
        try:
            return result.runs(), result.failure
        except Exception as error:
            raise self._fail(
                f"the results of {task} cannot be unpickled here: {type(error).__name__}: {error}"
            ) from error

    def _wait(self, future: Future[ChunkResult]) -> None:
        """Wait until a chunk is done, `interrupt` is called, or `timeout_s` is over."""
        if isinstance(future, QueuedChunk) and self._backlog is not None:
            with self._closed_on_failure():
                self._backlog.hurry(future)
        futures = (future, self._interruption)
        wait(futures, self.options.timeout_s, return_when=FIRST_COMPLETED)

    def _what_hangs(
        self, pool: WorkerPool | None, task: ChunkTask, future: Future[ChunkResult]
    ) -> str:
        sent = future.sent if isinstance(future, QueuedChunk) else future
        if pool is None:
            return "the pool was closed."
        if sent is None:
            return "all workers are busy."
        return pool.what_hangs(sent, self._processor.functions_of(task))

    def _fail(self, message: str) -> WorkerError:
        """Stop the workers, and return the error to raise. The next `start` makes new workers."""
        self.close()
        return WorkerError(message)


def cannot_collate(collate: Any, options: WorkerOptions) -> str:
    """Return why workers cannot collate the samples that they process; "" if they can."""
    if not options.num_workers:
        return ""  # The same thread processes and collates.
    if options.method == "thread" and declares_draws(collate) is not False:
        # Seeding the global generators for a batch would disturb the trainer, which uses them.
        return "`collate_fn` may draw random numbers, for which threads disturb the trainer"
    if options.method == "process" and not (options.forks or _is_picklable(collate)):
        return "`collate_fn` cannot be pickled, as workers need that are not forked"
    return ""


def _is_picklable(function: Any) -> bool:
    """Return whether a function can be sent to a process that is not forked."""
    try:
        ForkingPickler.dumps(function)
    except Exception:
        return False
    return True
