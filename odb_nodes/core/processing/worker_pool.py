"""The interface of a pool of workers; pools in the trainer's process: in place, and threads."""

from __future__ import annotations

import contextlib
import pickle
import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from odb_nodes._support.processes import Owner, start_thread
from odb_nodes.core.processing.chunk import ChunkProcessor, ChunkResult, ChunkTask
from odb_nodes.core.processing.options import WorkerOptions
from odb_nodes.errors import WorkerError

ENDED = "the worker pool was closed or reset."
_STOP_S = 1.0  # for all threads together, since a thread that hangs cannot be stopped


class WorkerPool:
    """Processes chunks, and returns futures of their results. Workers live until `close`."""

    pids: Sequence[int] = ()  # process ids of the workers that are processes of this machine
    exit_reason = ""  # how the first dead worker ended; "" while all live

    def __init__(self) -> None:
        self.owner = Owner()

    def submit(self, task: ChunkTask) -> Future[ChunkResult]:
        """Queue a chunk."""
        raise NotImplementedError

    def dumps(self, value: Any) -> bytes:
        """Pickle a value as `submit` does."""
        return pickle.dumps(value)

    def what_hangs(self, future: Future[ChunkResult], functions: str) -> str:  # noqa: ARG002
        """Return which of these functions of the user hangs, or why else a chunk is not done."""
        return f"{functions} hangs, or needs a longer limit."

    def discard(self) -> None:
        """Skip queued chunks that no worker has begun, since their results are not needed."""

    def close(self) -> None:
        """Stop the workers, in the process that started them; repeatable, from any thread."""


class InlinePool(WorkerPool):
    """Processes each chunk when its result is taken, on the thread that takes it."""

    def __init__(self, processor: ChunkProcessor) -> None:
        super().__init__()
        self._processor = processor

    def submit(self, task: ChunkTask) -> Future[ChunkResult]:
        """Return a future whose `result` processes the chunk."""
        return _Deferred(self._processor, task)


class _Deferred(Future[ChunkResult]):
    def __init__(self, processor: ChunkProcessor, task: ChunkTask) -> None:
        super().__init__()
        self._processor, self._task = processor, task

    def done(self) -> bool:
        return True

    def result(self, timeout: float | None = None) -> ChunkResult:  # noqa: ARG002
        result = self._processor.run(self._task)
        failure = result.failure
        return replace(result, failure=None if failure is None else replace(failure, worker=""))


class ThreadPool(WorkerPool):
    """Daemon threads that take chunks from one queue; a single thread if chunks take turns."""

    def __init__(self, processor: ChunkProcessor, options: WorkerOptions) -> None:
        super().__init__()
        self._processor = processor
        self._closed = False
        self._tasks: queue.SimpleQueue[tuple[ChunkTask, Future[ChunkResult]] | None] = (
            queue.SimpleQueue()
        )
        # If chunks take turns, more threads gain nothing, and a later chunk that hangs could block
        # an earlier one.
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
                    _, future = entry
                    future.set_exception(WorkerError(ENDED))
        if self._closed:
            self._tasks.put(None)  # The loop above may have removed the entry that ends threads.

    def close(self) -> None:
        """Stop the threads. A thread in the user's code stops when that code returns."""
        if not self.owner.is_here:
            return  # A forked child has a copy of the queue, but no threads.
        self._closed = True
        self.discard()
        deadline = time.monotonic() + _STOP_S
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _work(self) -> None:
        while (entry := self._tasks.get()) is not None:
            task, future = entry
            try:
                # A KeyboardInterrupt is raised by an item here: Ctrl-C reaches the main thread.
                future.set_result(self._processor.run(task, (BaseException,)))
            except BaseException as error:
                future.set_exception(error)
        self._tasks.put(None)  # for the next thread
