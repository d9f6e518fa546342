"""Worker processes for chunks, each with a socket of its own.

Why not an executor of the standard library: a worker that is killed while it writes leaves
`ProcessPoolExecutor` reading half a message for ever, since all its workers share one pipe. At exit
it also finishes everything that was submitted first. Here nobody but the worker holds the far end
of its socket, so its death is always seen as the end of the stream.
"""

from __future__ import annotations

import multiprocessing
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import count
from multiprocessing.connection import wait
from multiprocessing.util import Finalize
from operator import attrgetter
from typing import Any

from odb_nodes._core.processes import Owner, block_interrupt
from odb_nodes.processing.chunk import ChunkProcessor, ChunkResult, ChunkTask
from odb_nodes.processing.collate_request import INLINE, BatchResult, CollateRequest
from odb_nodes.processing.columns import StoredChunk, StoredRow
from odb_nodes.processing.limits import start_thread
from odb_nodes.processing.options import WorkerOptions
from odb_nodes.processing.shared_pages import join_parts
from odb_nodes.processing.transport import dumps, mapped, pack, receive
from odb_nodes.processing.worker_process import Answer, WorkerProcess, kill
from odb_nodes.step_info import StepInfo

_DEATH_POLL_S = 1.0  # between two looks of the reader at whether silent workers live
_BEGIN_S = (2.0, 4.0, 8.0, 16.0)  # for a forked worker to begin; the last one is left alone
_STOP_S = 5.0  # for a thread to be gone

_Outbox = queue.SimpleQueue[Callable[[], None] | None]


class ProcessPool:
    """Worker processes that live until `close`; two threads send chunks and read results."""

    # Why each result reaches its future: a worker answers every chunk, in order, with one message,
    # a chunk that is skipped included. So the oldest pending future is that of the next result.
    # Batches are answered in order, too, also within a chunk: their futures have a queue of their
    # own, and a reply says which of both it is.
    #
    # Why nothing blocks for good: `submit` only puts into queues. The sender may block on the full
    # socket of a worker, but a worker reads all that waits before each chunk, between items too
    # where it makes batches, and the reader takes its results at any time. A worker that hangs does
    # block the sender, until it is killed: its socket then breaks, and the sender goes on.
    #
    # Why no future of a dead worker is forgotten: the reader closes the socket, then fails all that
    # is pending. `expect` puts a future, then looks at the socket. A future that comes too late for
    # the reader was put after the socket was closed, so `expect` sees that, and fails it.

    def __init__(self, processor: ChunkProcessor, options: WorkerOptions) -> None:
        self.owner = Owner()
        self._generation = 0  # workers skip chunks of an older one
        self._sequence = count()
        self._workers: list[WorkerProcess] = []
        self._outbox: _Outbox = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        start = partial(_start_workers, self._workers, processor, options)
        # Workers die with the thread that starts them. The main thread does it where it can, since
        # a fork should see few threads; any other one may end before the pool, the sender does not.
        on_main = threading.current_thread() is threading.main_thread()
        try:
            if on_main:
                start()
            self._threads.append(start_thread("sender", _run_sender, self._outbox))
            if not on_main:
                started: Future[None] = Future()
                self._outbox.put(partial(_settle, started, start))
                started.result()
            self._threads.append(start_thread("reader", _read_results, self._workers))
        except BaseException:
            self._outbox.put(None)
            kill(self._workers)
            for worker in self._workers:
                worker.connection.close()
            raise
        self._workers_in_turn = deque(self._workers)
        # At exit, multiprocessing sends SIGTERM, which workers ignore, and waits for ever.
        self._at_exit = Finalize(None, kill, args=(self._workers,), exitpriority=10)

    dumps = staticmethod(dumps)

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return [worker.pid for worker in self._workers]

    @property
    def exit_reason(self) -> str:
        """How the first of the workers has ended that are gone; "" where all live."""
        return next((worker.exit_reason() for worker in self._workers if worker.ended), "")

    def submit(self, task: ChunkTask) -> Future[ChunkResult]:
        """Queue a chunk with the next worker in turn."""
        worker = self._workers[next(self._sequence) % len(self._workers)]
        packed = dumps(task)  # Should it raise, the worker is told the rest by the next message.
        head = worker.message(self._generation, has_task=True)
        answer = worker.expect()
        # A thread sends it: the full socket of a worker that hangs must not block the trainer.
        self._outbox.put(partial(worker.send, [head, packed]))
        return answer

    def make_batch(
        self, data: Sequence[Any], key: int, info: StepInfo | None
    ) -> Future[BatchResult] | None:
        """Have the worker make a batch that has the fewest to make; `None` where none lives."""
        if (worker := self._next_for_batch()) is None:
            return None
        inline = [one for one in data if not isinstance(one, StoredRow)]
        packed = [bytearray(join_parts(pack(inline)))] if inline else []
        rows: list[tuple[int, int]] = []
        chunks: dict[int, StoredChunk] = {}
        places = count()
        for one in data:
            if not isinstance(one, StoredRow):
                rows.append((INLINE, next(places)))
                continue
            rows.append((one.chunk.number, one.row))
            if worker not in one.chunk.workers_holding:
                one.chunk.tell(worker)
                chunks[one.chunk.number] = one.chunk
        request = CollateRequest(rows, [*chunks], bool(inline), key, info)
        parts = [*(chunk.content for chunk in chunks.values()), *packed]
        head = worker.message(self._generation, request)
        answer = worker.expect(batch=True)
        self._outbox.put(partial(worker.send, [head, *parts]))
        return answer

    def _next_for_batch(self) -> WorkerProcess | None:
        """Return the worker with the fewest batches to make; of several, each in turn."""
        self._workers_in_turn.rotate(-1)
        alive = [worker for worker in self._workers_in_turn if not worker.is_marked_dead]
        return min(alive, key=_batches_due, default=None)

    def what_hangs(self, future: Future[ChunkResult]) -> str:
        """Return what keeps a chunk from being done."""
        assert isinstance(future, Answer)
        return future.worker.what_hangs()

    def discard(self) -> None:
        """Skip queued chunks that no worker has begun."""
        self._generation += 1
        for worker in self._workers:
            self._outbox.put(partial(worker.send, [worker.message(self._generation)]))

    def close(self) -> None:
        """Kill the workers and wait until they and the threads are gone."""
        if not self.owner.is_here:
            return
        self._outbox.put(None)
        self._at_exit.cancel()
        kill(self._workers)
        for worker in self._workers:
            worker.hang_up()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_STOP_S)


_batches_due = attrgetter("batches_due")


def _start_workers(
    workers: list[WorkerProcess], processor: ChunkProcessor, options: WorkerOptions
) -> None:
    context = multiprocessing.get_context(options.start_method)
    setup = (processor, options.worker_init_fn)
    for index in range(options.num_workers):
        workers.append(WorkerProcess(context, index, setup))
    # A forked worker may have inherited a lock that a thread held then: another fork may not.
    deadline = time.monotonic() + options.timeout_s
    for limit_s in _BEGIN_S:
        silent = _silent(workers, min(time.monotonic() + limit_s, deadline))
        if time.monotonic() >= deadline:
            return
        for index in silent:
            kill([workers[index]])
            workers[index].connection.close()
            workers[index] = WorkerProcess(context, index, setup)


def _silent(workers: list[WorkerProcess], deadline: float) -> list[int]:
    """Return which forked workers have said nothing by a deadline; at once where all have."""
    while True:
        silent = [index for index, worker in enumerate(workers) if not worker.has_begun()]
        left = deadline - time.monotonic()
        if not silent or left <= 0:
            return silent
        wait([workers[index].connection for index in silent], left)


def _settle(future: Future[None], job: Callable[[], None]) -> None:
    try:
        job()
        future.set_result(None)
    except BaseException as error:
        future.set_exception(error)


def _run_sender(outbox: _Outbox) -> None:
    """Do what the trainer must not wait for, in order."""
    block_interrupt()  # Workers that this thread starts inherit that, until they ignore it.
    while (job := outbox.get()) is not None:
        job()


def _read_results(workers: list[WorkerProcess]) -> None:
    """Hand results to their futures until every worker is gone."""
    alive: dict[Any, WorkerProcess] = {worker.connection: worker for worker in workers}
    try:
        while alive:
            for ready in wait(list(alive), _DEATH_POLL_S) or _dead_in_silence(alive):
                if not _read_message(alive[ready]):
                    alive.pop(ready).mark_dead()
    finally:  # An error in this thread must not leave the trainer waiting.
        for worker in alive.values():
            worker.end("the thread that reads results has failed, see above.")
            worker.mark_dead()


def _read_message(worker: WorkerProcess) -> bool:
    """Read a worker's next message; tell whether there was one."""
    try:
        if worker.ended and not wait([worker.connection], 0):
            return False
        head, *parts = receive(worker.connection)
        worker.take(mapped(head), parts)
    except (EOFError, OSError):
        return False
    except Exception as error:
        memory = (
            " The trainer is out of memory: lower `in_flight_bytes`, or `chunk_size`."
            if isinstance(error, MemoryError) and "in_flight_bytes" not in str(error)
            else ""
        )
        cause = f"{type(error).__name__}: {error}".removesuffix(": ")
        worker.end(f"the trainer could not read its results: {cause}.{memory}")
        return False
    return True


def _dead_in_silence(alive: dict[Any, WorkerProcess]) -> list[Any]:
    """Return the sockets of dead workers, which may be open still: a child of theirs holds them."""
    return [near_end for near_end, worker in alive.items() if worker.ended]
