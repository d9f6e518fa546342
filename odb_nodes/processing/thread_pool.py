"""Threads that process chunks."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from concurrent.futures import Future

from odb_nodes._core.processes import Owner
from odb_nodes.errors import WorkerError
from odb_nodes.processing.chunk import ChunkProcessor, ChunkResult, ChunkTask
from odb_nodes.processing.limits import start_thread
from odb_nodes.processing.options import WorkerOptions

_STOP_S = 1.0  # for all of them: nobody can stop a thread that hangs


class ThreadPool:
    """Daemon threads that take chunks from one queue; a single thread if chunks are seeded."""

    def __init__(self, processor: ChunkProcessor, options: WorkerOptions) -> None:
        self.owner = Owner()
        self._processor = processor
        self._closed = False
        self._tasks: queue.SimpleQueue[tuple[ChunkTask, Future[ChunkResult]] | None] = (
            queue.SimpleQueue()
        )
        # Seeded chunks take turns with the global generators, so several threads would gain
        # nothing, and a later chunk that hangs could hold up an earlier one.
        count = options.num_workers if processor.seed is None else 1
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
        if self._closed:  # perhaps no thread is left to take it
            self.discard()
        return future

    def what_hangs(self, future: Future[ChunkResult]) -> str:  # noqa: ARG002
        """Return what keeps a chunk from being done."""
        return "`process_fn` hangs, or needs a longer limit."

    def discard(self) -> None:
        """Skip queued chunks that no thread has begun."""
        with contextlib.suppress(queue.Empty):
            while True:
                entry = self._tasks.get_nowait()
                if entry is not None:
                    entry[1].set_exception(WorkerError("the worker pool was closed or reset."))
        if self._closed:
            self._tasks.put(None)  # the loop may have taken the one that ends the threads

    def close(self) -> None:
        """Stop the threads; one that is inside the user's code stops when that returns."""
        if not self.owner.is_here:
            return  # A forked child has a copy of the queue, and none of the threads.
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
                # A KeyboardInterrupt in a thread is the item's: Ctrl-C comes to the main thread.
                future.set_result(self._processor.run(task, (BaseException,)))
            except BaseException as error:
                future.set_exception(error)
        self._tasks.put(None)  # for the next thread
