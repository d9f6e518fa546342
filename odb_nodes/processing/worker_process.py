"""One worker process, as the trainer sees it."""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext
from typing import Any

from odb_nodes._compat.multiprocessing import keep_from_forks
from odb_nodes.errors import WorkerError
from odb_nodes.processing.chunk import ChunkResult
from odb_nodes.processing.collate_request import CollateRequest
from odb_nodes.processing.limits import limit_behind
from odb_nodes.processing.messages import Message, Reply
from odb_nodes.processing.shared_pages import NO_FILE, Lease, PageFile, Pages
from odb_nodes.processing.transport import Part, mapped, send
from odb_nodes.processing.worker import FarEnd, LastWords, Stage, work

__all__ = ["Answer", "WorkerProcess", "kill"]

_STOP_S = 5.0  # for a killed process to be gone
_END_S = 1.0  # for one that has closed its socket to end by itself
_LONGEST_POLL_S = 0.02
_PICKLABLE = (
    " The dataset and the functions must be picklable where `start_method` is not "
    '"fork": define them at the top of a module, or use `method="thread"`.'
)
_GUARD = (
    ' Where the start method is not "fork", each worker imports the program\'s main module: guard '
    'what it does by `if __name__ == "__main__":`.'
)
_FORK_LOCK = (
    " It may wait for ever for a lock that another thread of the trainer held when it was forked, "
    'as while that imports a module: `start_method="forkserver"` avoids that.'
)
_ON = " Nothing is lost: load the last state, or iterate again, to go on."
_starting = threading.Lock()  # see `_start`


class Answer(Future[Any]):
    """A `ChunkResult` or a `BatchResult`, and which worker owes it."""

    def __init__(self, worker: WorkerProcess) -> None:
        super().__init__()
        self.worker = worker


class WorkerProcess:
    """One worker process, its socket, and the futures of the chunks sent to it, in order."""

    def __init__(self, context: BaseContext, index: int, setup: tuple[Any, ...]) -> None:
        self._index = index
        # The system reports an exit code once: a second thread that asks meanwhile gets None.
        # Re-entrant, since a signal handler of the trainer may close the loader.
        self._reaping = threading.RLock()
        self._exit_code: int | None = None
        self._released = False
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
        self.leases: dict[int, Lease | None] = {}
        """Of the chunks that it may read, by their numbers."""
        try:
            self._start(context, setup)
        except Exception as error:
            limit = limit_behind(error)
            raise WorkerError(
                f"worker {index} could not be started: {type(error).__name__}: {error}."
                f"{limit or _PICKLABLE + ('' if self._forked else _GUARD)}"
            ) from error

    def _start(self, context: BaseContext, setup: tuple[Any, ...]) -> None:
        # One at a time: a sibling that is forked between these lines would inherit the far end and
        # keep it open, so the death of this worker would not be seen.
        with _starting:
            self.connection, far_end = socket.socketpair()
            self.connection.settimeout(None)  # whatever `socket.setdefaulttimeout` says
            try:
                self._process = context.Process(  # type: ignore[attr-defined]
                    target=work,
                    args=(FarEnd(far_end), self._index, *setup),
                    name=f"odb_nodes-worker-{self._index}",
                    daemon=True,
                )
                self._process.start()
                keep_from_forks(self._process)
                self.pid: int = self._process.pid
            except BaseException:
                self.connection.close()
                raise
            finally:
                far_end.close()

    def has_begun(self) -> bool:
        """Tell whether a forked worker has said something, or has ended."""
        return not self._forked or bool(wait([self.connection], 0))

    @property
    def ended(self) -> bool:
        """Tell whether the process is gone."""
        return self._poll() is not None or not _exists(self.pid)

    @property
    def is_marked_dead(self) -> bool:
        """Whether it is known to be gone."""
        return self.connection.fileno() < 0

    @property
    def batches_due(self) -> int:
        """How many batches it has yet to make."""
        return self._batches.qsize()

    def message(
        self, generation: int, request: CollateRequest | None = None, *, has_task: bool = False
    ) -> bytes:
        """Return a message to it, with what else it should know."""
        forgotten, free = _taken(self._forgotten), _taken(self._free)
        return pickle.dumps(Message(generation, request, has_task, forgotten, free), protocol=5)

    def expect(self, *, batch: bool = False) -> Answer:
        """Return a future for the next chunk sent to this worker, or for the next batch."""
        answer = Answer(self)
        (self._batches if batch else self._pending).put(answer)
        if self.is_marked_dead:
            # The reader has closed it and may already have failed what was pending before.
            self.fail_pending()
        return answer

    def send(self, parts: Sequence[Part]) -> None:
        """Send a message; blocks while the worker has no room for it."""
        try:
            send(self.connection, parts)
        except OSError:
            return  # The worker is gone. The reader sees that too, and fails its futures.
        except Exception as error:
            self.end(f"the trainer could not send it a chunk: {type(error).__name__}: {error}.")

    def take(self, head: Pages, parts: Sequence[Pages | PageFile]) -> None:
        """Take a message of this worker: how far it has come, a chunk, or a batch."""
        content = pickle.loads(head)
        if isinstance(content, Stage):
            self._stage = content
        elif isinstance(content, LastWords):
            self._last_words = content.text
        else:
            self._take_reply(content, [*parts])

    def _take_reply(self, reply: Reply, parts: list[Pages | PageFile]) -> None:
        for number in reply.dropped:
            lease = self.leases.pop(max(number, ~number), None)
            if number < 0 and lease is not None:
                lease.retire()
        content: Any = parts.pop() if reply.has_content else None
        if reply.file != NO_FILE:
            content.lease = Lease(reply.file, self._free.append)
            if content.is_one_of_many:
                content = content.pages()
        if isinstance(reply.result, ChunkResult):
            self._has_answered = True
            chunk = replace(reply.result, results=[*map(mapped, parts)], content=content)
            self._pending.get_nowait().set_result(chunk)
        else:
            self._batches.get_nowait().set_result(replace(reply.result, content=content))

    def what_hangs(self) -> str:
        """Return what this worker is busy with."""
        if self._stage is Stage.READY:
            lock = _FORK_LOCK if self._forked and not self._has_answered else ""
            return f"`process_fn` hangs, or needs a longer limit.{lock}"
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
        how = self.exit_reason()
        chunk_error, batch_error = WorkerError(how + self._how_to_go_on()), WorkerError(how)
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
        code = self._poll()
        if code is None:
            how = "died; another part of this program took its exit code."
        elif code < 0:
            how = (
                f"died with exit code {code} (negative: killed by that signal; -9 is often out of "
                "memory)."
            )
        else:
            how = f"died with exit code {code}."
        return f"worker process {self.pid} {how}{self._owed}"

    def _how_to_go_on(self) -> str:
        if self._last_words and not self._reason:
            return ""  # It would end again.
        code = self._poll()
        unheard = code is not None and code >= 0 and self._stage is Stage.STARTING
        return _ON + (_GUARD if unheard and not (self._reason or self._forked) else "")

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

    def hang_up(self) -> None:
        """Make the reader see the end of the socket, which a child of the worker may hold open."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def _poll(self) -> int | None:
        with self._reaping:
            if not self._released:
                self._exit_code = self._process.exitcode
            return self._exit_code

    def _release(self) -> None:
        """Close the files of a process that has ended: somebody may keep an error that has it."""
        if self._poll() is not None:
            with self._reaping:
                if not self._released:
                    self._process.close()
                self._released = True


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
