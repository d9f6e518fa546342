"""Worker processes for chunks, each with a socket of its own.

Why not an executor of the standard library: a worker that is killed while it writes leaves
`ProcessPoolExecutor` reading half a message for ever, since all its workers share one pipe. At exit
it also finishes everything that was submitted first. Here nobody but the worker holds the far end
of its socket, so its death is always seen as the end of the stream.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import pickle
import queue
import signal
import socket
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from itertools import count
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext
from multiprocessing.util import Finalize
from typing import Any

import torch

from odb_nodes.errors import WorkerError
from odb_nodes.processing.chunk import ChunkProcessor, ChunkResult, ChunkTask
from odb_nodes.processing.options import WorkerOptions
from odb_nodes._core.signals import ignore_interrupt
from odb_nodes.processing.transport import receive, send

_PARENT_POLL_S = 1.0  # between two looks of a worker at whether the trainer lives
_DEATH_POLL_S = 1.0  # between two looks of the reader at whether silent workers live
_STOP_S = 5.0  # for a killed process or a thread to be gone
_GUARD = (
    ' Where the start method is not "fork", each worker imports the program\'s main module: guard '
    'what it does by `if __name__ == "__main__":`.'
)
_starting = threading.Lock()  # see `_WorkerProcess`


class ProcessPool:
    """Worker processes that live until `close`; two threads send chunks and read results.

    Args:
        processor: what the workers apply to each chunk.
        options: number of workers, and how they start.

    Raises:
        WorkerError: a worker could not be started.
    """

    # Why each result reaches its future: a worker answers every chunk, in order, with one message,
    # a chunk that is skipped included. So the oldest pending future is that of the next message.
    #
    # Why nothing blocks for good: `submit` only puts into queues. The sender may block on the full
    # socket of a worker, but a worker reads all that waits before each chunk, and the reader takes
    # its results at any time. A worker that hangs does block the sender, until it is killed: its
    # socket then breaks, and the sender goes on.
    #
    # Why no future of a dead worker is forgotten: the reader closes the socket, then fails all that
    # is pending. `expect` puts a future, then looks at the socket. A future that comes too late for
    # the reader was put after the socket was closed, so `expect` sees that, and fails it.

    def __init__(self, processor: ChunkProcessor, options: WorkerOptions) -> None:
        context = multiprocessing.get_context(options.start_method)
        self._generation = 0  # workers skip chunks of an older one
        self._sequence = count()
        self._workers: list[_WorkerProcess] = []
        try:
            for index in range(options.num_workers):
                by_signal = threading.current_thread() is threading.main_thread()
                setup = (processor, options.worker_init_fn, by_signal)
                self._workers.append(_WorkerProcess(context, index, setup))
        except BaseException:
            _kill(self._workers)
            for worker in self._workers:
                worker.connection.close()
            raise
        # At exit, multiprocessing sends SIGTERM, which workers ignore, and waits for ever.
        self._at_exit = Finalize(None, _kill, args=(self._workers,), exitpriority=10)
        self._outbox: queue.SimpleQueue[tuple[_WorkerProcess, bytes] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=target, args=args, name=f"odb_nodes-{name}", daemon=True)
            for name, target, args in (
                ("sender", _send_tasks, (self._outbox,)),
                ("reader", _read_results, (self._workers,)),
            )
        ]
        for thread in self._threads:
            thread.start()

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return [worker.process.pid or 0 for worker in self._workers]

    def submit(self, task: ChunkTask) -> Future[ChunkResult]:
        """Queue a chunk with the next worker in turn."""
        worker = self._workers[next(self._sequence) % len(self._workers)]
        message = pickle.dumps((self._generation, task), protocol=5)
        future = worker.expect()
        # A thread sends it: the full socket of a worker that hangs must not block the trainer.
        self._outbox.put((worker, message))
        return future

    def discard(self) -> None:
        """Skip queued chunks that no worker has begun."""
        self._generation += 1
        message = pickle.dumps((self._generation, None), protocol=5)
        for worker in self._workers:
            self._outbox.put((worker, message))

    def close(self) -> None:
        """Kill the workers and wait until they and the threads are gone."""
        self._outbox.put(None)
        self._at_exit.cancel()
        _kill(self._workers)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_STOP_S)


class _WorkerProcess:
    """One worker process, its socket, and the futures of the chunks sent to it, in order."""

    def __init__(self, context: BaseContext, index: int, setup: tuple[Any, ...]) -> None:
        # The system reports an exit code once: a second thread that asks meanwhile gets None.
        self._reaping = threading.Lock()
        self.last_words = ""
        # Shown if the worker dies before its first answer.
        self.hint = "" if context.get_start_method() == "fork" else _GUARD
        self.pending: queue.SimpleQueue[Future[ChunkResult]] = queue.SimpleQueue()
        # One at a time: a sibling that is forked between these lines would inherit the far end and
        # keep it open, so the death of this worker would not be seen.
        with _starting:
            self.connection, far_end = socket.socketpair()
            self.connection.settimeout(None)  # whatever `socket.setdefaulttimeout` says
            try:
                self.process = context.Process(  # type: ignore[attr-defined]
                    target=_work,
                    args=(far_end, index, *setup),
                    name=f"odb_nodes-worker-{index}",
                    daemon=True,
                )
                self.process.start()
            except Exception as error:
                self.connection.close()
                raise WorkerError(
                    f"worker {index} could not be started: {type(error).__name__}: {error}. The "
                    "dataset and the functions must be picklable where `start_method` is not "
                    '"fork": define them at the top of a module, or use `method="thread"`.'
                    f"{self.hint}"
                ) from error
            finally:
                far_end.close()

    def expect(self) -> Future[ChunkResult]:
        """Return a future for the next chunk sent to this worker."""
        future: Future[ChunkResult] = Future()
        self.pending.put(future)
        if self.connection.fileno() < 0:
            # The reader has closed it and may already have failed what was pending before.
            self.fail_pending()
        return future

    def fail_pending(self) -> None:
        """Fail every future of this dead worker."""
        with self._reaping:
            self.process.join(_STOP_S)
            code = self.process.exitcode
        killed = code is not None and code < 0
        cause = " (negative: killed by that signal; -9 is often out of memory)" if killed else ""
        error = WorkerError(
            f"worker process {self.process.pid} died with exit code {code}{cause}. Nothing is "
            "lost: load the last state, or iterate again, to go on."
            f"{self.last_words or ('' if killed else self.hint)}"
        )
        while True:
            try:
                future = self.pending.get_nowait()
            except queue.Empty:
                return
            if not future.done():
                future.set_exception(error)


def _kill(workers: list[_WorkerProcess]) -> None:
    for worker in workers:
        worker.process.kill()
    for worker in workers:
        worker.process.join(_STOP_S)


def _send_tasks(outbox: queue.SimpleQueue[tuple[_WorkerProcess, bytes] | None]) -> None:
    while (entry := outbox.get()) is not None:
        worker, message = entry
        # An error means that the worker is gone. The reader sees that too, and fails its futures.
        with contextlib.suppress(OSError):
            send(worker.connection, [message])


def _read_results(workers: list[_WorkerProcess]) -> None:
    """Hand results to their futures until every worker is gone."""
    alive: dict[Any, _WorkerProcess] = {worker.connection: worker for worker in workers}
    while alive:
        for ready in wait(list(alive), _DEATH_POLL_S) or _dead_in_silence(alive):
            worker = alive[ready]
            try:
                if worker.process.exitcode is not None and not wait([worker.connection], 0):
                    raise EOFError
                head, *results = receive(worker.connection)
            except (EOFError, OSError):
                del alive[ready]
                worker.connection.close()
                worker.fail_pending()
                continue
            outcome = pickle.loads(head)
            worker.hint = ""
            if isinstance(outcome, str):
                worker.last_words = f" Its `worker_init_fn` raised:\n{outcome}"
            else:
                worker.pending.get_nowait().set_result(ChunkResult(results, outcome))


def _dead_in_silence(alive: dict[Any, _WorkerProcess]) -> list[Any]:
    """Return the sockets of dead workers, which may be open still: a child of theirs holds them."""
    return [near_end for near_end, worker in alive.items() if worker.process.exitcode is not None]


def _work(
    connection: socket.socket,
    index: int,
    processor: ChunkProcessor,
    worker_init_fn: Callable[[int], None] | None,
    by_signal: bool,
) -> None:
    """Process chunks until the trainer closes the socket or dies."""
    ignore_interrupt()
    # SIGTERM is the trainer's as well: when preempted, it may want to finish its step and save.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _die_with_parent(by_signal)
    connection.settimeout(None)
    torch.set_num_threads(1)
    if worker_init_fn is not None:
        try:
            worker_init_fn(index)
        except BaseException:
            send(connection, [pickle.dumps(traceback.format_exc())])
            return
    waiting: deque[tuple[int, ChunkTask]] = deque()
    newest = 0
    try:
        while True:
            # Everything that has come is read first: the newest generation decides what is stale.
            while not waiting or wait([connection], 0):
                newest, task = pickle.loads(*receive(connection))
                if task is not None:
                    waiting.append((newest, task))
            generation, task = waiting.popleft()
            stale = generation != newest
            result = ChunkResult([], None) if stale else processor.run_packed(task)
            send(connection, [pickle.dumps(result.failure), *result.results])
    except (EOFError, OSError):
        return


def _die_with_parent(by_signal: bool) -> None:
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    if by_signal and sys.platform == "linux":
        # Works even while a library holds the GIL. The system sends it when the thread that
        # started this process ends, so only if that is the main thread (`by_signal`).
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _exit_with_parent() -> None:
    """End this process soon after the trainer's, however that ended."""
    parent, parent_pid = multiprocessing.parent_process(), os.getppid()
    while parent is not None and not wait([parent.sentinel], _PARENT_POLL_S):
        if os.getppid() != parent_pid:
            break
    os._exit(1)
