"""Runs chunks in processes, threads or actors, or in place, and waits for their results."""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any

from odb_nodes._support.processes import deferred_interrupt, start_thread
from odb_nodes._support.seeds import declares_draws
from odb_nodes._support.user_warning import warn_user
from odb_nodes.core.processing.backlog import Backlog, QueuedChunk
from odb_nodes.core.processing.chunk import (
    ChunkProcessor,
    ChunkResult,
    ChunkTask,
    Failure,
    Pool,
    describe_unread,
)
from odb_nodes.core.processing.options import AUTO, WorkerOptions
from odb_nodes.core.processing.process_pool import ProcessPool
from odb_nodes.core.processing.ray_pool import RayPool
from odb_nodes.errors import WorkerError

_FIRST_ITEMS = 4
_GROUPS_AHEAD = 2  # for each worker
_CHUNK_S = 0.02
_CHUNK_BYTES = 1 << 20
_GROWTH = 2  # from one chunk to the next: the first items may be cheap by chance
_THREADS_STOP_S = 1.0  # for all threads, since one that hangs cannot be stopped
_NEWEST_WEIGHT = 0.25  # of the last chunk in the average bytes of an item


class ChunkFit:
    """Adapts the size of chunks to the time and bytes of their items so far.

    Each chunk costs a message and two pickles, so chunks should not be small. A chunk that takes
    long delays the next batch while other workers are idle. Their size changes no sample.
    """

    def __init__(self, options: WorkerOptions) -> None:
        self._options = options
        self.items = options.nominal_chunk_samples  # items of the next chunk
        self._fits = options.chunk_size == AUTO and options.num_workers > 0
        # Two chunks for each worker: one in process, and one waiting.
        self._chunks = 2 * options.num_workers
        shared = options.samples_ahead // max(1, self._chunks)
        self._most = min(options.most_chunk_samples, max(1, shared))
        if self._fits:
            self.items = min(_FIRST_ITEMS, self._most)
        self._ahead, self._most_bytes = options.samples_ahead, options.in_flight_bytes
        self._items_seen = 0
        self._item_bytes = 0.0
        self._item_s = math.inf  # by the last chunk

    @property
    def items_ahead(self) -> int:
        """Items that may be in flight, beyond the chunk in hand.

        Until the bytes of an item are known, at most twice the items seen so far.
        """
        if self._most_bytes is None:
            return self._ahead
        most: float = 2 * self._items_seen
        if self._item_bytes:
            most = min(most, self._most_bytes / self._item_bytes)
        return min(self._ahead, max(self._chunks * self.items, int(most)))

    def has_room_for_group(self, groups: int, samples: int) -> bool:
        """Tell whether workers get another group while this many groups and samples are in flight.

        Each worker gets one; `in_flight_samples` and `in_flight_bytes` allow or forbid more.
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
        if not self._fits:
            return
        # The smaller of two, since a single chunk may have waited for the processor.
        each_s = min(seconds / items, self._item_s)
        self._item_s = seconds / items
        share = max(each_s / _CHUNK_S, size_bytes / items / _CHUNK_BYTES, 1e-9)
        self.items = int(max(1, min(1 / share, _GROWTH * self.items, self._most)))


class InlinePool(Pool):
    """Processes each chunk when its results are taken, on that thread and in that process."""

    def __init__(self, processor: ChunkProcessor) -> None:
        super().__init__()
        self._processor = processor

    def submit(self, task: ChunkTask) -> Future[ChunkResult]:
        """Return a future whose `result` processes the chunk."""
        return _Deferred(self._processor, task)


class _Deferred(Future[ChunkResult]):
    def __init__(self, processor: ChunkProcessor, task: ChunkTask) -> None:
        super().__init__()
        self._run = partial(processor.run, task)
        self.set_running_or_notify_cancel()

    def done(self) -> bool:
        return True

    def result(self, timeout: float | None = None) -> ChunkResult:  # noqa: ARG002
        result = self._run()
        failure = result.failure
        return replace(result, failure=None if failure is None else replace(failure, worker=""))


class ThreadPool(Pool):
    """Daemon threads that take chunks from one queue; a single thread if chunks take turns."""

    def __init__(self, processor: ChunkProcessor, options: WorkerOptions) -> None:
        super().__init__()
        self._processor = processor
        self._closed = False
        self._tasks: queue.SimpleQueue[tuple[ChunkTask, Future[ChunkResult]] | None] = (
            queue.SimpleQueue()
        )
        # Where chunks take turns, more threads gain nothing, and a later chunk that hangs could
        # block an earlier one.
        count = 1 if processor.takes_turns else options.num_workers
        self._threads: list[threading.Thread] = []
        try:
            for index in range(count):
                self._threads.append(start_thread(f"worker-{index}", self._work))
        except BaseException:
            self.close()
            raise

    def submit(self, task: ChunkTask) -> Future[ChunkResult]:
        """Queue a chunk."""
        future: Future[ChunkResult] = Future()
        self._tasks.put((task, future))
        if self._closed:  # The threads may have ended.
            self.discard()
        return future

    def discard(self) -> None:
        """Skip queued chunks that no thread has begun."""
        with contextlib.suppress(queue.Empty):
            while True:
                entry = self._tasks.get_nowait()
                if entry is not None:
                    entry[1].set_exception(WorkerError("the worker pool was closed or reset."))
        if self._closed:
            self._tasks.put(None)  # The loop above may have removed the entry that ends threads.

    def close(self) -> None:
        """Stop the threads; one that is inside the user's code stops when that returns."""
        if not self.owner.is_here:
            return  # A forked child has a copy of the queue, and none of the threads.
        self._closed = True
        self.discard()
        deadline = time.monotonic() + _THREADS_STOP_S
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _work(self) -> None:
        while (entry := self._tasks.get()) is not None:
            task, future = entry
            try:
                # An item has raised a KeyboardInterrupt here: Ctrl-C reaches the main thread.
                future.set_result(self._processor.run(task, (BaseException,)))
            except BaseException as error:
                future.set_exception(error)
        self._tasks.put(None)  # for the next thread


def start_pool(processor: ChunkProcessor, options: WorkerOptions) -> Pool:
    """Start the workers of these options."""
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
        self._pool: Pool | None = None
        self._finalizer: Callable[[], Any] | None = None
        self._interruption: Future[ChunkResult] = Future()
        self.fit = ChunkFit(options)
        self._backlog: Backlog | None = None  # while items are still to be made again

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

        Here, `set_epoch` is called for the datasets of this process; workers call it for theirs.
        """
        self._processor.forget_epoch()
        if self.options.num_workers and self.options.method != "thread":
            self._processor.tell_epoch(epoch)
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
        """Stop the workers. A forked child only forgets them: they belong to its parent."""
        finalizer, self._finalizer = self._finalizer, None
        self._forget_backlog()
        if self.is_started:
            self._pool = None
        if finalizer is not None:
            with deferred_interrupt():  # A pool that is half closed would wait for dead workers.
                finalizer()

    def discard(self) -> None:
        """Skip the chunks that no worker has begun."""
        self._forget_backlog()
        if self._pool is not None:
            self._pool.discard()

    def backlog(self) -> Backlog | None:
        """Return the queue of chunks, which is kept until it is done; `None` without workers."""
        if self.is_started and self._backlog is None:
            fit = self.fit
            self._backlog = Backlog(self._send, self.options.num_workers, lambda: fit.items)
        return self._backlog

    @property
    def has_backlog(self) -> bool:
        """Whether chunks wait for a worker, or items are still to be made again."""
        return self._backlog is not None

    def _forget_backlog(self) -> None:
        backlog, self._backlog = self._backlog, None
        # A forked child may have inherited a lock that is held.
        if backlog is not None and self._pool is not None and self._pool.owner.is_here:
            backlog.fail(WorkerError("the worker pool was closed or reset."))

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
        """Queue a chunk; an urgent one before those that no worker has yet."""
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
        """Give a chunk to the workers; runs on the thread that finds room for it."""
        if self._pool is None:
            raise WorkerError("the workers were closed.")
        try:
            return self._pool.submit(task)
        except Exception as error:  # of pickling
            raise WorkerError(
                f"{task} cannot be sent to a worker: {type(error).__name__}: {error}. Let the "
                'source yield plain data, or use `method="thread"`.'
            ) from error

    def results(
        self, task: ChunkTask, future: Future[ChunkResult]
    ) -> tuple[list[Sequence[Any]], Failure | None]:
        """Return the good results of a chunk in runs, and the failure that ended it early."""
        pool = self._pool
        limit_s = self.options.timeout_s
        if not future.done():
            if isinstance(future, QueuedChunk) and self._backlog is not None:
                with self._closed_on_failure():
                    self._backlog.hurry(future)
            wait((future, self._interruption), limit_s, return_when=FIRST_COMPLETED)
        self.check()
        if not future.done():
            sent = future.sent if isinstance(future, QueuedChunk) else future
            cause = "the pool was closed."
            if pool is not None:
                functions = self._processor.functions_of(task)
                cause = "all workers are busy."
                if sent is not None:
                    cause = pool.what_hangs(sent, functions)
            raise self._fail(f"no result within {limit_s} s (`timeout_s`) for {task}: {cause}")
        try:
            result = future.result()
            if result.unread and pool is not None:
                raise WorkerError(
                    f"{describe_unread(task, pool.dumps)} cannot be unpickled by a worker: "
                    f'{result.unread}. Let the source yield plain data, or use `method="thread"`.'
                )
        except WorkerError as error:
            raise self._fail(f"no result for {task}: {error}") from error
        self.fit.note(len(task.items), result.seconds, result.size_bytes)
        try:
            return result.runs(), result.failure
        except Exception as error:
            raise self._fail(
                f"the results of {task} cannot be unpickled here: {type(error).__name__}: {error}"
            ) from error

    def _fail(self, message: str) -> WorkerError:
        """Stop the workers: the next `start` makes new ones."""
        self.close()
        return WorkerError(message)


def cannot_collate(collate: Any, options: WorkerOptions) -> str:
    """Return why a worker could not collate the samples that it has processed; "" if it could."""
    if not options.num_workers:
        return ""  # Without workers, the same thread would collate a little later.
    if options.method == "thread" and declares_draws(collate) is not False:
        # Seeding the global generators for a batch would disturb the trainer, which uses them.
        return "`collate_fn` may draw random numbers, for which threads disturb the trainer"
    if options.method == "process" and not (options.forks or _is_picklable(collate)):
        return "`collate_fn` cannot be pickled, as workers need that are not forked"
    return ""


def _is_picklable(function: Any) -> bool:
    """Tell whether a function can be sent to a process that is not forked."""
    try:
        ForkingPickler.dumps(function)
    except Exception:
        return False
    return True
