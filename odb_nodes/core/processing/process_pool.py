"""Worker processes for chunks, each with a separate socket.

Why not `ProcessPoolExecutor`: its workers share one pipe. If a worker is killed while it writes,
the executor reads half a message, and waits for the other half for ever. At exit, the executor also
finishes all submitted work. Here only the worker holds the far end of its socket, so the death of
the worker always ends the stream.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
import queue
import selectors
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from itertools import count
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext
from multiprocessing.util import Finalize
from typing import Any

from odb_nodes._compat.multiprocessing import Child, start_tracker
from odb_nodes._support.processes import block_interrupt, limit_behind, start_thread
from odb_nodes.core.processing.chunk import ChunkProcessor, ChunkResult, ChunkTask
from odb_nodes.core.processing.options import WorkerOptions
from odb_nodes.core.processing.transport import Pages, Part, dumps, encode, mapped, receive, write
from odb_nodes.core.processing.worker import LastWords, Setup, Stage, TrainerMessage, work
from odb_nodes.core.processing.worker_pool import WorkerPool
from odb_nodes.errors import WorkerError

_DEATH_POLL_S = 1.0  # between two checks whether workers that send nothing are alive
_BEGIN_S = (2.0, 4.0, 8.0, 16.0)  # how long a forked worker may be silent before it is replaced
_STOP_S = 5.0  # for a killed process, or a thread, to end
_END_S = 1.0  # for a process to end after it has closed its socket
_NOW = getattr(socket, "MSG_DONTWAIT", 1)
_PICKLABLE = (
    " The dataset and the functions must be picklable where `start_method` is not "
    '"fork": define them at the top of a module, or use `method="thread"`.'
)
_MAIN = ' Where the start method is not "fork", each worker imports the program\'s main module'
_GUARD = f'{_MAIN}: guard what it does by `if __name__ == "__main__":`.'
_NO_FILE_OF_MAIN = (
    f"{_MAIN}, which came from standard input here: run it from a file, or use "
    '`start_method="fork"` or `method="thread"`.'
)
_DAEMON = (
    " This process is daemonic, as workers of a `DataLoader` or a `multiprocessing.Pool` are, and "
    'may have no children: start it with `daemon=False`, or use `method="thread"`, or no workers.'
)
_FORK_LOCK = (
    " It may wait for ever for a lock that another thread of the trainer held when it was forked, "
    'as while that imports a module: `start_method="forkserver"` avoids that.'
)
_RESUME = " Nothing is lost: load the last state, or iterate again, to continue."
_starting = threading.Lock()  # see `_started`


_Outbox = queue.SimpleQueue[Callable[[], None] | None]


class WorkerFuture(Future[ChunkResult]):
    """The result of a chunk, and the worker that has the chunk."""

    def __init__(self, worker: WorkerProcess) -> None:
        super().__init__()
        self.worker = worker


class WorkerProcess:
    """A worker process, its socket, and the futures of the chunks sent to it, in order."""

    def __init__(
        self, context: BaseContext, index: int, setup: Setup, outbox: _Outbox, limit_s: float
    ) -> None:
        self._index = index
        self._last_words = ""
        self._reason = ""  # why the trainer has killed the worker
        self._ended_idle: bool | None = None  # `None` until the reader has noticed the end
        self._stage = Stage.STARTING
        self._has_answered = False
        self._forked = context.get_start_method() == "fork"
        self._pending: queue.SimpleQueue[WorkerFuture] = queue.SimpleQueue()
        self._outbox = outbox
        self._sending = threading.Lock()
        self._unsent: deque[deque[Any]] = deque()  # messages that the sender has to write
        try:
            self.connection, self.child = _started(context, index, setup, limit_s)
        except Exception as error:
            raise WorkerError(
                f"worker {index} could not be started: {type(error).__name__}: {error}."
                f"{_advice(error, self._forked)}"
            ) from error
        self.pid = self.child.pid
        if setup.part is not None:
            self._send_part(setup.part)

    @property
    def chunks_due(self) -> int:
        """How many chunks were sent and have no result yet."""
        return self._pending.qsize()

    def send(self, message: TrainerMessage) -> WorkerFuture:
        """Send a message. The sender thread sends what does not fit into the socket.

        So a worker that hangs, and does not read its socket, does not block the trainer.
        """
        future = WorkerFuture(self)
        try:
            part = pickle.dumps(message, protocol=5)
            with self._sending:
                if message.task is not None:
                    self._pending.put(future)
                self._send_part(part)
        except BaseException:  # Ctrl-C, for example, may have left half of the message written.
            self.end("the trainer was interrupted while sending it a chunk.")
            raise
        if self.connection.fileno() < 0:
            # The reader has closed the socket, and may have failed the pending futures already.
            self.fail_pending()
        return future

    def _send_part(self, part: Part) -> None:
        buffers = deque(encode([part]))
        if self._unsent or not self._write(buffers, _NOW):
            self._unsent.append(buffers)
            self._outbox.put(self._write_unsent)

    def _write_unsent(self) -> None:
        # The message is removed after it is written, so that later messages queue up behind it.
        self._write(self._unsent[0])
        with self._sending:
            self._unsent.popleft()

    def _write(self, buffers: deque[Any], flags: int = 0) -> bool:
        try:
            return write(self.connection, buffers, flags)
        except OSError:
            return True  # The worker is dead. The reader notices this, and fails the futures.
        except Exception as error:
            self.end(f"the trainer could not send it a chunk: {type(error).__name__}: {error}.")
            return True

    def read(self) -> bool:
        """Read the worker's next message; return whether there was a message."""
        try:
            head, *parts = map(mapped, receive(self.connection))
            self._take(pickle.loads(head), parts)
        except (EOFError, ConnectionError):
            return False
        except Exception as error:
            memory = (
                " The trainer is out of memory: lower `in_flight_bytes`, or `chunk_size`."
                if isinstance(error, MemoryError) and "in_flight_bytes" not in str(error)
                else ""
            )
            cause = f"{type(error).__name__}: {error}".rstrip(": .")
            self.end(f"the trainer could not read its results: {cause}.{memory}")
            return False
        return True

    def _take(self, message: Stage | LastWords | ChunkResult, parts: list[Pages]) -> None:
        if isinstance(message, Stage):
            self._stage = message
        elif isinstance(message, LastWords):
            self._last_words = message.text
        else:
            self._has_answered = True
            self._stage = Stage.READY
            self._pending.get_nowait().set_result(replace(message, results=parts))

    def what_hangs(self) -> str:
        """Return the function or stage that keeps this worker busy."""
        if self._stage is Stage.READY:
            lock = _FORK_LOCK if self._forked and not self._has_answered else ""
            return f"`process_fn` hangs, or needs a longer limit.{lock}"
        if self._stage is Stage.COLLATING:
            return "`collate_fn` hangs, or needs a longer limit."
        if self._stage is Stage.INITIALIZING:
            return (
                f"`worker_init_fn` of worker {self._index} (process {self.pid}) has not returned: "
                "it hangs, or needs a longer limit."
            )
        if self._forked:
            return f"worker {self._index} (process {self.pid}) has not come up.{_FORK_LOCK}"
        return (
            f"worker {self._index} (process {self.pid}) has not come up: importing the program's "
            "modules or unpickling the dataset hangs, or needs a longer limit."
        )

    def end(self, reason: str) -> None:
        """Kill this worker; errors of its pending results give the reason."""
        self._reason = reason
        self.child.kill()

    def mark_dead(self) -> None:
        """Close the socket of this worker, which has died or closed it, and fail its futures."""
        self._ended_idle = self._is_idle()
        self.connection.close()
        self.fail_pending()

    def _is_idle(self) -> bool:
        return self._pending.empty() and self._stage is Stage.READY

    def fail_pending(self) -> None:
        """Fail every future of this worker, which has died or closed its socket."""
        if not self.child.wait_until_ended(_END_S):
            self.child.kill()  # The worker cannot be reached: its socket is closed.
            self.child.wait_until_ended(_STOP_S)
        error = WorkerError(self.exit_reason() + self._advice())
        with contextlib.suppress(queue.Empty):
            while True:
                future = self._pending.get_nowait()
                if not future.done():
                    future.set_exception(error)

    def exit_reason(self) -> str:
        """Return how this worker ended."""
        if self._reason:
            return f"worker process {self.pid} was ended: {self._reason}"
        if self._last_words:
            return f"worker process {self.pid} has ended.{self._last_words}"
        code = self.child.exit_code()
        if code is None:
            how = "died; another part of this program took its exit code."
        elif code < 0:
            cause = "often the out-of-memory killer" if code == -9 else signal.strsignal(-code)
            how = f"was killed by signal {-code}, {cause}."
        else:
            how = f"died with exit code {code}."
        is_idle = self._is_idle() if self._ended_idle is None else self._ended_idle
        idle = " It had nothing to do." if is_idle else ""
        return f"worker process {self.pid} {how}{idle}"

    def _advice(self) -> str:
        if self._last_words and not self._reason:
            return ""  # A new worker would end in the same way.
        code = self.child.exit_code()
        ended_silently = code is not None and code >= 0 and self._stage is Stage.STARTING
        is_of_main = ended_silently and not (self._reason or self._forked)
        return _RESUME + (_advice_on_main() if is_of_main else "")

    def hang_up(self) -> None:
        """End the stream for the reader: a child of the worker may keep the socket open."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


def _started(
    context: BaseContext, index: int, setup: Setup, limit_s: float
) -> tuple[socket.socket, Child]:
    """Start a worker; return the connection to it, and its process."""
    # Workers start one at a time: a worker that is forked between these lines would inherit the far
    # end of this worker's socket and keep it open, which would hide the death of this worker.
    with _starting:
        connection, far_end = socket.socketpair()
        connection.settimeout(None)  # despite `socket.setdefaulttimeout`
        try:
            name = f"odb_nodes-worker-{index}"
            return connection, Child(context, limit_s, name, work, far_end, index, setup)
        except BaseException:
            connection.close()
            raise
        finally:
            far_end.close()


def _advice(error: Exception, forked: bool) -> str:
    """Return advice on an error of starting a worker."""
    if isinstance(error, AssertionError) and multiprocessing.current_process().daemon:
        return _DAEMON
    if limit := limit_behind(error):
        return limit
    if isinstance(error, (EOFError, OSError)):
        return "" if forked else f" It ended, or took too long, before it ran.{_advice_on_main()}"
    if isinstance(error, RuntimeError) and "bootstrapping" in str(error):
        return _GUARD
    return "" if forked else _PICKLABLE


def _advice_on_main() -> str:
    main = sys.modules["__main__"]
    path = str(getattr(main, "__file__", ""))
    if not path and main.__spec__ is None:
        return ""  # Workers of a notebook, for example, do not import the main module.
    return _NO_FILE_OF_MAIN if path.startswith("<") else _GUARD


def kill(workers: list[WorkerProcess]) -> None:
    """Kill these workers, and wait until they have ended."""
    for worker in workers:
        worker.child.kill()
    deadline = time.monotonic() + _STOP_S
    for worker in workers:
        worker.child.wait_until_ended(max(0.0, deadline - time.monotonic()))


class ProcessPool(WorkerPool):
    """Worker processes; one thread reads results, another sends what does not fit into a socket."""

    # Each result reaches its future: a worker answers every chunk, even a skipped chunk, in order,
    # with one message. So the next result belongs to the oldest pending future.
    #
    # Nothing blocks for ever: `submit` never waits for a socket. The sender may block on the full
    # socket of a worker, but a worker reads all messages before each chunk, and the reader takes
    # its results at any time. A worker that hangs blocks the sender until the worker is killed,
    # which breaks the socket.
    #
    # Each future of a dead worker fails: the reader closes the socket, then fails the pending
    # futures. `WorkerProcess.send` adds a future, then checks the socket. A future that the reader
    # misses was added after the socket was closed, so `send` notices, and fails the future.

    def __init__(self, processor: ChunkProcessor, options: WorkerOptions) -> None:
        super().__init__()
        self._generation = 0  # Workers skip chunks of older generations.
        self._sequence = count()
        self._workers: list[WorkerProcess] = []
        self._outbox: _Outbox = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        start = partial(_start_workers, self._workers, processor, options, self._outbox)
        # Workers die with the thread that starts them. If possible, this is the main
        # thread, since few threads should run at a fork; or else the sender, which ends last.
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
        # At exit, multiprocessing sends SIGTERM, which workers ignore, and waits for ever.
        self._at_exit = Finalize(None, kill, args=(self._workers,), exitpriority=10)

    dumps = staticmethod(dumps)

    @property
    def pids(self) -> list[int]:  # type: ignore[override]
        """Process ids of the workers."""
        return [worker.pid for worker in self._workers]

    @property
    def exit_reason(self) -> str:  # type: ignore[override]
        """How the first dead worker ended; "" while all live."""
        dead = (worker.exit_reason() for worker in self._workers if worker.child.has_ended)
        return next(dead, "")

    def submit(self, task: ChunkTask) -> Future[ChunkResult]:
        """Send a chunk to the worker with the fewest chunks; equal workers take turns."""
        first = next(self._sequence) % len(self._workers)
        in_turn = self._workers[first:] + self._workers[:first]
        worker = min(in_turn, key=lambda worker: worker.chunks_due)
        return worker.send(TrainerMessage(self._generation, dumps(task)))

    def what_hangs(self, future: Future[ChunkResult], functions: str) -> str:  # noqa: ARG002
        """Return why a chunk is not done."""
        assert isinstance(future, WorkerFuture)
        return future.worker.what_hangs()

    def discard(self) -> None:
        """Skip queued chunks that no worker has begun."""
        self._generation += 1
        for worker in self._workers:
            worker.send(TrainerMessage(self._generation))

    def close(self) -> None:
        """Kill the workers; wait until they and the threads have ended."""
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


def _start_workers(
    workers: list[WorkerProcess],
    processor: ChunkProcessor,
    options: WorkerOptions,
    outbox: _Outbox,
) -> None:
    context = multiprocessing.get_context(options.start_method)
    if context.get_start_method() != "fork":
        start_tracker()
    setup = Setup(processor, options.worker_init_fn)
    start = partial(WorkerProcess, context, setup=setup, outbox=outbox, limit_s=options.timeout_s)
    for index in range(options.num_workers):
        workers.append(start(index))
    if context.get_start_method() != "fork":
        return
    # A forked worker may wait for ever for a lock that another thread held at the fork. So a worker
    # that sends nothing is replaced.
    deadline = time.monotonic() + options.timeout_s
    for limit_s in _BEGIN_S:
        silent = _silent(workers, min(time.monotonic() + limit_s, deadline))
        if time.monotonic() >= deadline:
            return
        for index in silent:
            kill([workers[index]])
            workers[index].connection.close()
            workers[index] = start(index)


def _silent(workers: list[WorkerProcess], deadline: float) -> list[int]:
    """Return the workers that have sent nothing by the deadline. Returns early if all have."""
    while True:
        connections = {worker.connection: index for index, worker in enumerate(workers)}
        for connection in wait([*connections], 0):
            del connections[connection]  # type: ignore[arg-type]
        remaining_s = deadline - time.monotonic()
        if not connections or remaining_s <= 0:
            return [*connections.values()]
        wait([*connections], remaining_s)


def _settle(future: Future[None], call: Callable[[], None]) -> None:
    try:
        call()
        future.set_result(None)
    except BaseException as error:
        future.set_exception(error)


def _run_sender(outbox: _Outbox) -> None:
    """Make the calls that the trainer must not wait for, in order."""
    block_interrupt()  # Workers that this thread starts inherit the mask, until they ignore SIGINT.
    while (call := outbox.get()) is not None:
        call()


def _read_results(workers: list[WorkerProcess]) -> None:
    """Pass results to their futures until all workers have ended."""
    with selectors.DefaultSelector() as selector:
        try:
            for worker in workers:
                selector.register(worker.connection, selectors.EVENT_READ, worker)
            while alive := selector.get_map():
                ready = [key.data for key, _ in selector.select(_DEATH_POLL_S)]
                for worker in ready:
                    if not worker.read():
                        _bury(selector, worker)
                if ready:
                    continue
                # The stream of a dead worker does not end while its child keeps the socket open.
                for worker in [key.data for key in alive.values()]:
                    if worker.child.has_ended:
                        while wait([worker.connection], 0) and worker.read():
                            pass
                        _bury(selector, worker)
        finally:  # An error in this thread must not leave the trainer waiting.
            for key in [*selector.get_map().values()]:
                key.data.end("the thread that reads results has failed, see above.")
                _bury(selector, key.data)


def _bury(selector: selectors.BaseSelector, worker: WorkerProcess) -> None:
    selector.unregister(worker.connection)
    worker.mark_dead()
