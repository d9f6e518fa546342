"""Worker processes for chunks, each with a socket of its own.

Why not an executor of the standard library: a worker that is killed while it writes leaves
`ProcessPoolExecutor` reading half a message for ever, since all its workers share one pipe. At exit
it also finishes everything that was submitted first. Here nobody but the worker holds the far end
of its socket, so its death is always seen as the end of the stream.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import queue
import selectors
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from itertools import count
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any

from odb_nodes._compat.multiprocessing import bounded_start, keep_from_forks, start_tracker
from odb_nodes._core.processes import block_interrupt, limit_behind, start_thread
from odb_nodes.errors import WorkerError
from odb_nodes.processing.chunk import ChunkProcessor, ChunkResult, ChunkTask, Pool
from odb_nodes.processing.columns import StoredChunk, StoredRow
from odb_nodes.processing.options import WorkerOptions
from odb_nodes.processing.transport import (
    NO_FILE,
    Lease,
    PageFile,
    Pages,
    Part,
    SharedFiles,
    dumps,
    encode,
    join_parts,
    mapped,
    pack,
    receive,
    write,
)
from odb_nodes.processing.worker import (
    INLINE,
    BatchResult,
    CollateRequest,
    LastWords,
    Message,
    Reply,
    Setup,
    Stage,
    WorkerCrash,
    work,
)
from odb_nodes.step_info import StepInfo

_DEATH_POLL_S = 1.0  # between two looks of the reader at whether silent workers live
_BEGIN_S = (2.0, 4.0, 8.0, 16.0)  # for a forked worker to begin; the last one is left alone
_STOP_S = 5.0  # for a killed process, or a thread, to be gone
_END_S = 1.0  # for a process that has closed its socket to end by itself
_LONGEST_POLL_S = 0.02
_FROM_OUTSIDE = {getattr(signal, name, None) for name in ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP")}
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
_ON = " Nothing is lost: load the last state, or iterate again, to go on."
_starting = threading.Lock()  # see `_started`


class Answer(Future[Any]):
    """A `ChunkResult` or a `BatchResult`, and which worker owes it."""

    def __init__(self, worker: WorkerProcess) -> None:
        super().__init__()
        self.worker = worker


class WorkerProcess:
    """One worker process, its socket, and the futures of the chunks sent to it, in order."""

    def __init__(
        self, context: BaseContext, index: int, setup: Setup, outbox: _Outbox, limit_s: float
    ) -> None:
        self._index = index
        self._last_words = ""
        self._reason = ""  # why the trainer has ended it
        self._owed = ""  # what it had to do beside samples when it ended
        self._stage = Stage.STARTING
        self._has_answered = False
        self._forked = context.get_start_method() == "fork"
        self._pending: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._batches: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._forgotten: deque[int] = deque()
        self.forget = self._forgotten.append
        """Takes the number of a chunk that no further batch is made of."""
        self._free: deque[int] = deque()  # of its files
        self._files = SharedFiles(self._free.append)
        self._sending = threading.Lock()
        self._unsent: deque[deque[Any]] = deque()  # messages that the sender has to write
        self.leases: dict[int, Lease | None] = {}
        """Of the chunks that it may read, by their numbers."""
        try:
            self.connection, self._child = _started(context, index, setup, limit_s)
        except Exception as error:
            raise WorkerError(
                f"worker {index} could not be started: {type(error).__name__}: {error}."
                f"{_advice(error, self._forked)}"
            ) from error
        self.pid = self._child.pid
        if setup.part is not None:
            self._send(outbox, [setup.part])

    def has_begun(self) -> bool:
        """Tell whether a forked worker has said something, or has ended."""
        return not self._forked or bool(wait([self.connection], 0))

    @property
    def ended(self) -> bool:
        """Whether the process is gone."""
        return self._child.ended

    @property
    def is_marked_dead(self) -> bool:
        """Whether it is known to be gone."""
        return self.connection.fileno() < 0

    @property
    def chunks_due(self) -> int:
        """How many chunks it has yet to process."""
        return self._pending.qsize()

    @property
    def batches_due(self) -> int:
        """How many batches it has yet to make."""
        return self._batches.qsize()

    def tell(
        self,
        outbox: _Outbox,
        generation: int,
        task: bytes | None = None,
        request: CollateRequest | None = None,
        parts: Sequence[Part] = (),
    ) -> Answer:
        """Send a message, as far as the worker has room for it; the sender sends the rest.

        So a worker that hangs, and does not read its socket, does not block the trainer.
        """
        answer = Answer(self)
        try:
            forgotten, free = _taken(self._forgotten), _taken(self._free)
            head = pickle.dumps(Message(generation, task, request, forgotten, free), protocol=5)
            with self._sending:
                if task is not None or request is not None:
                    (self._batches if task is None else self._pending).put(answer)
                self._send(outbox, [head, *parts])
        except BaseException:  # Ctrl-C, say: nobody knows how much is written.
            self.end("the trainer was interrupted while it gave it work.")
            raise
        if self.is_marked_dead:
            # The reader has closed it and may already have failed what was pending before.
            self.fail_pending()
        return answer

    def _send(self, outbox: _Outbox, parts: Sequence[Part]) -> None:
        waiting = deque(encode(parts))
        if self._unsent or not self._write(waiting, _NOW):
            self._unsent.append(waiting)
            outbox.put(self._write_unsent)

    def _write_unsent(self) -> None:
        # Only then it goes: whoever comes meanwhile shall wait behind it.
        self._write(self._unsent[0])
        with self._sending:
            self._unsent.popleft()

    def _write(self, waiting: deque[Any], flags: int = 0) -> bool:
        try:
            return write(self.connection, waiting, flags)
        except OSError:
            return True  # The worker is gone. The reader sees that too, and fails its futures.
        except Exception as error:
            self.end(f"the trainer could not send it a chunk: {type(error).__name__}: {error}.")
            return True

    def read(self) -> bool:
        """Read the worker's next message; tell whether there was one."""
        try:
            head, *parts = receive(self.connection)
            self._take(pickle.loads(mapped(head)), parts)
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

    def _take(self, message: Stage | LastWords | Reply, parts: list[Pages | PageFile]) -> None:
        if isinstance(message, Stage):
            self._stage = message
        elif isinstance(message, LastWords):
            self._last_words = message.text
        else:
            self._take_reply(message, parts)

    def _take_reply(self, reply: Reply, parts: list[Pages | PageFile]) -> None:
        for number in reply.dropped:
            lease = self.leases.pop(max(number, ~number), None)
            if number < 0 and lease is not None:
                lease.retire()
        self._files.drop(reply.gone)
        content = self._content_of(reply, parts)
        if isinstance(reply.result, ChunkResult):
            self._has_answered, self._stage = True, Stage.READY
            chunk = replace(reply.result, results=[*map(mapped, parts)], content=content)
            self._pending.get_nowait().set_result(chunk)
        else:
            self._batches.get_nowait().set_result(replace(reply.result, content=content))

    def _content_of(self, reply: Reply, parts: list[Pages | PageFile]) -> Any:
        """Return the content of a reply, and take it out of its parts."""
        if reply.content_bytes < 0:
            return None
        content: Any = None if reply.is_known else parts.pop()
        if reply.file == NO_FILE:
            return content
        if isinstance(reply.result, ChunkResult) and not reply.result.is_stored:
            return self._files.open(reply.file, content, reply.content_bytes)
        content.lease = Lease(reply.file, self._files.give_back)
        return content.pages() if content.is_one_of_many else content

    def what_hangs(self) -> str:
        """Return what this worker is busy with."""
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
        """Kill this worker, and tell those who wait for its results why."""
        self._reason = reason
        self.kill()

    def mark_dead(self) -> None:
        """Close the socket of this worker, which has died or closed it, and fail its futures."""
        self._owed = self._what_is_owed()
        self._files.close()
        self.connection.close()
        self.fail_pending()

    def _what_is_owed(self) -> str:
        batches = self.batches_due
        if not self._pending.empty():
            return f" It had batches to make, too ({batches})." if batches else ""
        if batches:
            return f" It had batches to make ({batches})."
        # One that has not come up dies by itself: whether it had work already is chance.
        return " It had nothing to do." if self._stage is Stage.READY else ""

    def fail_pending(self) -> None:
        """Fail every future of this worker, which has died or closed its socket."""
        if not self.wait_until_ended(_END_S):
            self.kill()  # Nobody hears it any more.
            self.wait_until_ended(_STOP_S)
        how, code = self.exit_reason(), self._child.exit_code()
        has_crashed = code is not None and -code not in _FROM_OUTSIDE
        chunk_error = WorkerError(how + self._how_to_go_on())
        batch_error = (WorkerCrash if has_crashed else WorkerError)(how)
        for pending, error in (self._pending, chunk_error), (self._batches, batch_error):
            with contextlib.suppress(queue.Empty):
                while True:
                    future = pending.get_nowait()
                    if not future.done():
                        future.set_exception(error)

    def exit_reason(self) -> str:
        """Return how this worker has ended."""
        if self._reason:
            return f"worker process {self.pid} was ended: {self._reason}"
        if self._last_words:  # It has ended itself, and would again.
            return f"worker process {self.pid} has ended.{self._last_words}"
        code = self._child.exit_code()
        if code is None:
            how = "died; another part of this program took its exit code."
        elif code < 0:
            cause = "often the out-of-memory killer" if code == -9 else signal.strsignal(-code)
            how = f"was killed by signal {-code}, {cause}."
        else:
            how = f"died with exit code {code}."
        return f"worker process {self.pid} {how}{self._owed}"

    def _how_to_go_on(self) -> str:
        if self._last_words and not self._reason:
            return ""  # It would end again.
        code = self._child.exit_code()
        unheard = code is not None and code >= 0 and self._stage is Stage.STARTING
        is_of_main = unheard and not (self._reason or self._forked)
        return _ON + (_advice_on_main() if is_of_main else "")

    def kill(self) -> None:
        """End the process, and do not wait for it."""
        self._child.kill()

    def wait_until_ended(self, timeout_s: float) -> bool:
        """Wait for the process to end; tell whether it did in time."""
        return self._child.wait_until_ended(timeout_s)

    def hang_up(self) -> None:
        """Make the reader see the end of the socket, which a child of the worker may hold open."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


class _Child:
    """A child process, which several threads may end and ask how it has ended."""

    def __init__(self, process: BaseProcess) -> None:
        self._process, self._exit_code = process, process.exitcode
        assert process.pid is not None
        self.pid = process.pid
        self._released = False
        # The system reports an exit code once: a second thread that asks meanwhile gets None.
        # Re-entrant, since a signal handler of the trainer may close the loader.
        self._reaping = threading.RLock()

    @property
    def ended(self) -> bool:
        """Whether the process is gone."""
        return self.exit_code() is not None or not _exists(self.pid)

    def exit_code(self) -> int | None:
        """Return how it has ended; `None` where it has not, or nobody can know."""
        with self._reaping:
            if not self._released:
                self._exit_code = self._process.exitcode
            return self._exit_code

    def kill(self) -> None:
        """End the process, and do not wait for it."""
        with self._reaping:
            if not self._released:
                self._process.kill()

    def wait_until_ended(self, timeout_s: float) -> bool:
        """Wait for the process to end; tell whether it did in time.

        Not by `Process.join`, which waits for a pipe to be closed that a child of the worker holds
        as well, and without a limit for a worker that has closed that pipe itself.
        """
        deadline, pause_s = time.monotonic() + timeout_s, 0.0005
        while not self.ended:
            if time.monotonic() > deadline:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_POLL_S)
        self._release()
        return True

    def _release(self) -> None:
        """Close the files of a process that has ended: somebody may keep an error that has it."""
        if self.exit_code() is not None:
            with self._reaping:
                if not self._released:
                    self._process.close()
                self._released = True


def _started(
    context: BaseContext, index: int, setup: Setup, limit_s: float
) -> tuple[socket.socket, _Child]:
    """Return a worker that was started, and the connection to it."""
    # One at a time: a sibling that is forked between these lines would inherit the far end and
    # keep it open, so the death of this worker would not be seen.
    with _starting:
        connection, far_end = socket.socketpair()
        connection.settimeout(None)  # whatever `socket.setdefaulttimeout` says
        try:
            process = context.Process(  # type: ignore[attr-defined]
                target=work,
                args=(far_end, index, setup),
                name=f"odb_nodes-worker-{index}",
                daemon=True,
            )
            with bounded_start(context, limit_s):
                process.start()
            keep_from_forks(process)
            return connection, _Child(process)
        except BaseException:
            connection.close()
            raise
        finally:
            far_end.close()


def _advice(error: Exception, forked: bool) -> str:
    """Return what to do about an error of starting a worker."""
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
        return ""  # a notebook, say, whose workers import nothing of it
    return _NO_FILE_OF_MAIN if path.startswith("<") else _GUARD


def _taken(waiting: deque[int]) -> list[int]:
    taken: list[int] = []
    with contextlib.suppress(IndexError):
        while True:
            taken.append(waiting.popleft())
    return taken


def kill(workers: list[WorkerProcess]) -> None:
    """End all of these workers, and wait until they are gone."""
    for worker in workers:
        worker.kill()
    deadline = time.monotonic() + _STOP_S
    for worker in workers:
        worker.wait_until_ended(max(0.0, deadline - time.monotonic()))


def _exists(pid: int) -> bool:
    if sys.platform == "win32":  # There, signal 0 is Ctrl-C.
        return True
    try:
        os.kill(pid, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True


_Outbox = queue.SimpleQueue[Callable[[], None] | None]


class ProcessPool(Pool):
    """Worker processes; one thread reads results, another sends what does not fit into a socket."""

    # Why each result reaches its future: a worker answers every chunk, in order, with one message,
    # a chunk that is skipped included. So the oldest pending future is that of the next result.
    # Batches are answered in order, too, also within a chunk: their futures have a queue of their
    # own, and a reply says which of both it is.
    #
    # Why nothing blocks for good: `submit` never waits for a socket. The sender may block on the
    # full one of a worker, but a worker reads all that waits before each chunk, between items too
    # where it makes batches, and the reader takes its results at any time. A worker that hangs does
    # block the sender, until it is killed: its socket then breaks, and the sender goes on.
    #
    # Why no future of a dead worker is forgotten: the reader closes the socket, then fails all that
    # is pending. `tell` puts a future, then looks at the socket. A future that comes too late for
    # the reader was put after the socket was closed, so `tell` sees that, and fails it.

    def __init__(self, processor: ChunkProcessor, options: WorkerOptions) -> None:
        super().__init__()
        self._generation = 0  # workers skip chunks of an older one
        self._sequence = count()
        self._workers: list[WorkerProcess] = []
        self._outbox: _Outbox = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        start = partial(_start_workers, self._workers, processor, options, self._outbox)
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
    def pids(self) -> list[int]:  # type: ignore[override]
        """Process ids of the workers."""
        return [worker.pid for worker in self._workers]

    @property
    def exit_reason(self) -> str:  # type: ignore[override]
        """How the first of the workers has ended that are gone; "" where all live."""
        return next((worker.exit_reason() for worker in self._workers if worker.ended), "")

    def submit(self, task: ChunkTask) -> Future[ChunkResult]:
        """Queue a chunk with the worker that has the fewest; of several, with each in turn."""
        first = next(self._sequence) % len(self._workers)
        in_turn = self._workers[first:] + self._workers[:first]
        worker = min(in_turn, key=lambda one: one.chunks_due)
        return worker.tell(self._outbox, self._generation, dumps(task))

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
        return worker.tell(self._outbox, self._generation, None, request, parts)

    def _next_for_batch(self) -> WorkerProcess | None:
        """Return the worker with the fewest batches to make; of several, each in turn."""
        self._workers_in_turn.rotate(-1)
        alive = [worker for worker in self._workers_in_turn if not worker.is_marked_dead]
        return min(alive, key=lambda one: one.batches_due, default=None)

    def what_hangs(self, future: Future[ChunkResult], functions: str) -> str:  # noqa: ARG002
        """Return what keeps a chunk from being done."""
        assert isinstance(future, Answer)
        return future.worker.what_hangs()

    def discard(self) -> None:
        """Skip queued chunks that no worker has begun."""
        self._generation += 1
        for worker in self._workers:
            worker.tell(self._outbox, self._generation)

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
    # A forked worker may have inherited a lock that a thread held then: another fork may not.
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
    with selectors.DefaultSelector() as selector:
        try:
            for worker in workers:
                selector.register(worker.connection, selectors.EVENT_READ, worker)
            while alive := selector.get_map():
                ready = [key.data for key, _ in selector.select(_DEATH_POLL_S)]
                # A child of a dead worker may hold its socket open.
                silent = () if ready else [key.data for key in alive.values() if key.data.ended]
                for worker in ready:
                    if not worker.read():
                        _bury(selector, worker)
                for worker in silent:
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
