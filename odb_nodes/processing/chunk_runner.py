"""Runs chunks in processes, threads or actors, or in place, and waits for their results."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from odb_nodes._core.processes import Owner, deferred_interrupt
from odb_nodes._core.user_warning import warn_user
from odb_nodes.errors import WorkerError
from odb_nodes.processing.chunk import (
    ChunkProcessor,
    ChunkResult,
    ChunkTask,
    Failure,
    describe_unread,
)
from odb_nodes.processing.collate_request import BatchMaker, BatchResult
from odb_nodes.processing.columns import StoredChunk
from odb_nodes.processing.limits import is_picklable
from odb_nodes.processing.options import AUTO, WorkerOptions
from odb_nodes.processing.process_pool import ProcessPool
from odb_nodes.processing.ray_pool import RayPool
from odb_nodes.processing.shared_pages import CAN_SHARE
from odb_nodes.processing.thread_pool import ThreadPool
from odb_nodes.processing.transport import unpack
from odb_nodes.sample_block import SampleBlock
from odb_nodes.step_info import StepInfo

_FIRST_ITEMS = 4
_CHUNK_S = 0.02
_CHUNK_BYTES = 1 << 20
_GROWTH = 2  # from one chunk to the next: the first items may be cheap by chance
_NEWS = 0.25  # weight of the last chunk in what an item is taken to have


class ChunkFit:
    """Fits chunks to the time and the bytes that their items have taken so far.

    A chunk costs a message and two pickles, whatever is in it; one that takes long keeps the next
    batch waiting, while other workers are idle. What is in a chunk decides nothing else.
    """

    def __init__(self, options: WorkerOptions) -> None:
        self.items = options.nominal_chunk_samples
        """Items of the next chunk."""
        self._fits = options.chunk_size == AUTO and options.num_workers > 0
        # Two for each worker: one that it processes, and one that waits for it.
        self._chunks = 2 * options.num_workers
        shared = options.samples_ahead // max(1, self._chunks)
        self._most = min(options.most_chunk_samples, max(1, shared))
        if self._fits:
            self.items = min(_FIRST_ITEMS, self._most)
        self._ahead, self._most_bytes = options.samples_ahead, options.in_flight_bytes
        self._items_seen = 0
        self._item_bytes = 0.0

    @property
    def items_ahead(self) -> int:
        """Items that may be in flight, beyond the chunk in hand.

        There are few before it is known what they have: twice as many as have come.
        """
        if self._most_bytes is None:
            return self._ahead
        most: float = 2 * self._items_seen
        if self._item_bytes:
            most = min(most, self._most_bytes / self._item_bytes)
        return min(self._ahead, max(self._chunks * self.items, int(most)))

    def note(self, items: int, seconds: float, size_bytes: int) -> None:
        """Note what a chunk has taken."""
        if not items:
            return
        self._items_seen += items
        if size_bytes:
            known = self._item_bytes or size_bytes / items
            self._item_bytes = known + _NEWS * (size_bytes / items - known)
        if not self._fits:
            return
        share = max(seconds / _CHUNK_S, size_bytes / _CHUNK_BYTES, 1e-9)
        self.items = int(max(1, min(items / share, _GROWTH * self.items, self._most)))


class WorkerPool(Protocol):
    """Processes chunks in parallel and returns the results in futures.

    Attributes:
        owner: the process that the workers belong to.
    """

    owner: Owner

    def submit(self, task: ChunkTask) -> Future[ChunkResult]:
        """Queue a chunk."""

    def what_hangs(self, future: Future[ChunkResult]) -> str:
        """Return what keeps a chunk from being done, and what to do."""

    def discard(self) -> None:
        """Skip queued chunks that no worker has begun: nobody waits for them any more."""

    def close(self) -> None:
        """Stop the workers; may be called again, and from any thread. Only the owner's does."""


def start_pool(processor: ChunkProcessor, options: WorkerOptions) -> WorkerPool:
    """Start the workers that `options` ask for."""
    if options.method == "thread":
        return ThreadPool(processor, options)
    if options.method == "ray":
        return RayPool(processor, options)
    return ProcessPool(processor, options)


class Submitted(NamedTuple):
    """A chunk on its way; without a future it is processed when its results are asked for."""

    task: ChunkTask
    future: Future[ChunkResult] | None


class ChunkRunner:
    """Runs chunks with the workers that options ask for. They live from `start` to `close`."""

    def __init__(self, processor: ChunkProcessor, options: WorkerOptions, name: str) -> None:
        self._processor, self._options, self._name = processor, options, name
        self._pool: WorkerPool | None = None
        self._finalizer: Callable[[], Any] | None = None
        self._interruption: Future[ChunkResult] = Future()
        self._fit = ChunkFit(options)

    @property
    def chunk_items(self) -> int:
        """Items that the next chunk should have."""
        return self._fit.items

    @property
    def items_ahead(self) -> int:
        """Items that may be in flight, beyond the chunk in hand."""
        return self._fit.items_ahead

    @property
    def is_started(self) -> bool:
        """Whether workers run."""
        return self._pool is not None

    @property
    def timeout_s(self) -> float:
        """Seconds to wait for a worker before it is an error."""
        return self._options.timeout_s

    @property
    def pids(self) -> list[int]:
        """Process ids of the worker processes that run now."""
        return self._pool.pids if isinstance(self._pool, ProcessPool) else []

    def start(self) -> None:
        """Start the workers, unless all run already, or there are to be none."""
        exit_reason = self._pool.exit_reason if isinstance(self._pool, ProcessPool) else ""
        if exit_reason:
            self.close()
        if self._pool is None and self._options.num_workers > 0:
            with deferred_interrupt():
                self._pool = start_pool(self._processor, self._options)
                self._finalizer = weakref.finalize(self, self._pool.close)
        if exit_reason:  # Last, since a filter may make it an error.
            warn_user(f"{exit_reason} All workers are started anew.")

    def close(self) -> None:
        """Stop the workers. A forked child forgets them: they go on for who started them."""
        finalizer, self._pool, self._finalizer = self._finalizer, None, None
        if finalizer is not None:
            with deferred_interrupt():  # Half closed, it would wait for workers that are gone.
                finalizer()

    def discard(self) -> None:
        """Skip the chunks that no worker has begun."""
        if self._pool is not None:
            self._pool.discard()

    def interrupt(self) -> None:
        """Make `results` raise, also where it waits on another thread, until `resume`."""
        if not self._interruption.done():
            self._interruption.set_result(ChunkResult(None, None))

    def resume(self) -> None:
        """Take `interrupt` back."""
        self._interruption = Future()

    def check(self) -> None:
        """Raise a `WorkerError` where the workers are another process's, or after `interrupt`."""
        self.check_process()
        if self._interruption.done():
            raise WorkerError("processing was interrupted, since the graph is reset or closed.")

    def check_process(self) -> None:
        """Raise a `WorkerError` where the workers belong to the process that this was forked from.

        Where there are none, do nothing.
        """
        if self._pool is not None:
            self._pool.owner.check(f"`{self._name}`")

    def submit(self, task: ChunkTask) -> Submitted:
        """Queue a chunk."""
        if self._pool is not None:
            try:
                return Submitted(task, self._pool.submit(task))
            except Exception as error:  # of pickling
                raise self._fail(
                    f"{task} cannot be sent to a worker: {type(error).__name__}: {error}. Let the "
                    'source yield plain data, or use `method="thread"`.'
                ) from error
        if self._options.num_workers == 0:
            return Submitted(task, None)
        raise WorkerError("the workers were closed: reset the node to start them again.")

    def results(self, submitted: Submitted) -> tuple[list[Sequence[Any]], Failure | None]:
        """Return the good results of a chunk in runs, and the failure that ended it early."""
        task, future = submitted
        if future is None:
            self.check()
            result = self._processor.run(task)
            return result.results, result.failure
        pool = self._pool
        waiting, limit_s = (future, self._interruption), self._options.timeout_s
        wait(waiting, limit_s, return_when=FIRST_COMPLETED)
        self.check()
        if not future.done():
            cause = self._pool.what_hangs(future) if self._pool else "the pool was closed."
            raise self._fail(f"no result within {limit_s} s (`timeout_s`) for {task}: {cause}")
        try:
            result = future.result()
            if isinstance(pool, ThreadPool):
                self._fit.note(len(task.items), result.seconds, 0)
                return result.results, result.failure
            if result.unread and isinstance(pool, (ProcessPool, RayPool)):
                raise WorkerError(
                    f"{describe_unread(task, pool.dumps)} cannot be unpickled by a worker: "
                    f'{result.unread}. Let the source yield plain data, or use `method="thread"`.'
                )
            stored = result.content
            parts = result.results if stored is None else [*result.results, stored]
            self._fit.note(len(task.items), result.seconds, sum(map(len, parts)))
            runs: list[Sequence[Any]] = unpack(result.results)
            return runs if stored is None else _stored(runs, stored), result.failure
        except WorkerError as error:
            raise self._fail(f"no result for {task}: {error}") from error
        except Exception as error:
            raise self._fail(
                f"the results of {task} cannot be unpickled here: {type(error).__name__}: {error}"
            ) from error

    def make_batch(
        self, data: Sequence[Any], key: int, info: StepInfo | None
    ) -> Future[BatchResult] | None:
        """Have a worker make a batch; `None` where no worker process lives. See `ProcessPool`."""
        if not isinstance(self._pool, ProcessPool):
            return None
        return self._pool.make_batch(data, key, info)

    def cannot_make_batches(self, collate: Any) -> str:
        """Return why workers could not make batches by a function; "" where they could."""
        options = self._options
        if not options.num_workers or options.method != "process":
            return "there are no worker processes"
        if not CAN_SHARE:
            return "this system does not hand files of memory to other processes"
        if not (options.forks or is_picklable(collate)):
            return "`collate_fn` cannot be pickled, as workers need that are not forked"
        return ""

    def keep_data_for(self, maker: BatchMaker) -> None:
        """From the next start on, leave the data of samples where workers make batches of them."""
        self._processor = replace(self._processor, maker=maker)

    def _fail(self, message: str) -> WorkerError:
        """Stop the workers: the next `start` makes new ones."""
        self.close()
        return WorkerError(message)


def _stored(runs: list[Sequence[Any]], content: Any) -> list[Sequence[Any]]:
    """Return runs whose samples find their data in a chunk, with its content."""
    samples = sum(len(run) for run in runs if isinstance(run, SampleBlock))
    chunk, found, first = StoredChunk(content, samples), list[Sequence[Any]](), 0
    for run in runs:
        if isinstance(run, SampleBlock):
            found.append(run.with_data(chunk, first))
            first += len(run)
        else:
            found.append(run)
    return found
