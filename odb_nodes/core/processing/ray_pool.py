"""A pool of actors of a Ray cluster, also on other machines."""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import socket
import threading
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from odb_nodes._support.checks import import_extra
from odb_nodes._support.processes import block_interrupt, keep_freed_memory, start_thread
from odb_nodes.core.processing.chunk import ChunkProcessor, ChunkResult, ChunkTask
from odb_nodes.core.processing.options import WorkerOptions
from odb_nodes.core.processing.worker import KEPT_BYTES
from odb_nodes.core.processing.worker_pool import ENDED, WorkerPool
from odb_nodes.errors import WorkerError

_MOST_CHUNKS = 2  # chunks of an actor: one in process, and one waiting
_MOST_LOSSES = 3  # actors lost with one chunk, or at the start of one worker
_STOP_S = 10.0  # for the thread to end, which shuts down Ray
_POLL_S = 1.0  # between two checks whether Ray is connected
_SHUT_DOWN = (
    "Ray was shut down while its actors were in use. Close the loader before `ray.shutdown()`."
)

_starting = threading.Lock()
_sharers = 0  # pools that use a Ray started by a pool
_started = ""  # the session of that Ray
_unused = threading.Event()  # set when the last of these pools is closed


@dataclass(eq=False)
class _SentChunk:
    """A chunk, and how many actors were lost while they processed it."""

    task: bytes  # the pickled `ChunkTask`
    future: Future[ChunkResult]
    losses: int = 0

    def fail(self, message: str) -> None:
        with contextlib.suppress(InvalidStateError):  # already done or failed
            self.future.set_exception(WorkerError(message))


@dataclass(eq=False)
class _Worker:
    """An actor, and its chunks, in order."""

    index: int
    handle: Any
    losses: int  # predecessors in a row that were lost before they had begun
    has_begun: bool = False
    chunks: deque[_SentChunk] = field(default_factory=deque)


class ChunkActor:
    """Processes chunks, one at a time.

    Errors are returned as text: not every exception can be sent, and Ray's would hide it.
    """

    _processor: ChunkProcessor

    def begin(self, index: int, setup: bytes) -> str:
        """Prepare for chunks; return an error, or ""."""
        self._pid = os.getpid()
        problem = "It could not unpickle its work"
        try:
            torch.set_num_threads(1)
            keep_freed_memory(KEPT_BYTES)
            self._processor, worker_init_fn = pickle.loads(setup)
            problem = "Its `worker_init_fn` raised"
            if worker_init_fn is not None:
                worker_init_fn(index)
        except BaseException:
            return f"{problem}:\n{traceback.format_exc()}"
        return ""

    def run(self, task: bytes) -> tuple[ChunkResult, list[np.ndarray[Any, Any]]]:
        """Process a pickled chunk; return its result, and the parts of the result as arrays."""
        result = self._processor.run_pickled(task)
        if os.getpid() != self._pid:  # This is a child that `process_fn` has forked.
            os._exit(0)
        failure = result.failure
        if failure is not None:
            where = f"{failure.worker}, machine {socket.gethostname()!r}"
            failure = replace(failure, worker=where)
        # Ray sends arrays without a copy.
        parts = [np.asarray(part) for part in result.results]
        return replace(result, results=None, failure=failure), parts


class RayPool(WorkerPool):
    """Actors that live until `close`. A lost actor is replaced; its chunks are processed again.

    An actor takes one CPU of the cluster. Actors that wait for a free CPU join later.
    """

    # One thread makes all calls to Ray, and owns all state: requests and answers go to its inbox.
    # So no lock is needed, and only this thread waits for a cluster that does not answer. Most
    # calls would start Ray if it does not run, and no call is valid in another session. So the
    # thread checks before each call that the session of its actors is the current session.

    def __init__(self, processor: ChunkProcessor, options: WorkerOptions) -> None:
        super().__init__()
        self._ray = import_extra("ray", "ray")
        self._workers: list[_Worker] = []
        self._waiting: deque[_SentChunk] = deque()
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._closed = False
        self._broken = ""  # why the pool no longer processes chunks
        try:
            setup = self._ray.cloudpickle.dumps((processor, options.worker_init_fn))
        except Exception as error:
            raise WorkerError(
                "the dataset and the functions cannot be sent to Ray's actors: "
                f"{type(error).__name__}: {error}. They must be picklable, or use "
                '`method="thread"`.'
            ) from error
        self._session = ""  # the session of Ray that the actors belong to
        self._shares = False  # whether a pool has started this Ray, and the last pool shuts it down
        self._inbox.put(partial(self._start_all, options.num_workers, setup))
        self._thread = start_thread("ray", self._work)

    @property
    def actors(self) -> list[Any]:
        """Handles of the live actors."""
        return [worker.handle for worker in self._workers]

    def dumps(self, value: Any) -> bytes:
        """Pickle a value for an actor."""
        pickled: bytes = self._ray.cloudpickle.dumps(value)
        return pickled

    def submit(self, task: ChunkTask) -> Future[ChunkResult]:
        """Queue a chunk."""
        chunk = _SentChunk(self.dumps(task), Future())
        self._inbox.put(partial(self._queue, chunk))
        if self._closed:  # The thread may have ended.
            chunk.fail(ENDED)
        return chunk.future

    def what_hangs(self, future: Future[ChunkResult], functions: str) -> str:  # noqa: ARG002
        """Return why a chunk is not done."""
        workers = [*self._workers]
        if any(worker.has_begun for worker in workers):
            return f"{functions} hangs, or needs a longer limit."
        if not workers:
            return "Ray does not answer. A process that was forked after `ray.init` cannot use it."
        return (
            f"none of {len(workers)} Ray actors has begun: the cluster has no CPU for them, or "
            "`worker_init_fn` hangs. Each takes one CPU: use fewer workers, or see `ray status`."
        )

    def discard(self) -> None:
        """Skip chunks that no actor has yet."""
        self._inbox.put(partial(self._fail_all, ENDED))

    def close(self) -> None:
        """Kill the actors; shut Ray down if a pool has started Ray, and no other pool uses it.

        Returns after 10 s even if the cluster does not answer.
        """
        if not self.owner.is_here:
            return
        self._closed = True
        self._inbox.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(_STOP_S)

    def _work(self) -> None:
        block_interrupt()
        while (call := self._next_call()) is not None:
            try:
                if self._session != "" and not self._is_connected:
                    self._break(_SHUT_DOWN)
                call()
            except Exception as error:  # Ray raised: the cluster may be gone.
                failed = f"Ray failed: {type(error).__name__}: {error}"
                self._break(failed if self._is_connected else _SHUT_DOWN)
        self._break(ENDED)
        if self._shares:
            _leave(self._ray, self._session)

    def _next_call(self) -> Callable[[], None] | None:
        try:
            return self._inbox.get(timeout=_POLL_S)
        except queue.Empty:
            return lambda: None

    @property
    def _is_connected(self) -> bool:
        return self._session == _session_of(self._ray) != ""

    def _start_all(self, count: int, setup: bytes) -> None:
        self._session, self._shares = _join(self._ray)
        self._setup = self._ray.put(setup)
        self._actor_class = self._ray.remote(num_cpus=1, scheduling_strategy="SPREAD")(ChunkActor)
        for index in range(count):
            self._start(index, 0)

    def _start(self, index: int, losses: int) -> None:
        worker = _Worker(index, self._actor_class.remote(), losses)
        self._workers.append(worker)
        self._expect(worker.handle.begin.remote(index, self._setup), self._begun, worker)

    def _expect(self, reply: Any, take: Callable[..., None], *args: Any) -> None:
        """Call `take` with a reply of Ray, on the thread of this pool."""
        reply.future().add_done_callback(
            lambda answer: self._inbox.put(partial(take, answer, *args))
        )

    def _begun(self, answer: Future[str], worker: _Worker) -> None:
        if self._is_lost(answer, worker):
            return
        if problem := answer.result():
            self._break(f"worker {worker.index} could not start. {problem}")
        worker.has_begun = True
        self._dispatch()

    def _queue(self, chunk: _SentChunk) -> None:
        if self._broken:
            chunk.fail(self._broken)
        self._waiting.append(chunk)
        self._dispatch()

    def _dispatch(self) -> None:
        while self._waiting:
            begun = [worker for worker in self._workers if worker.has_begun]
            free = [worker for worker in begun if len(worker.chunks) < _MOST_CHUNKS]
            if not free:
                return
            chunk = self._waiting.popleft()
            if not chunk.future.done():
                worker = min(free, key=lambda worker: len(worker.chunks))
                worker.chunks.append(chunk)
                self._expect(worker.handle.run.remote(chunk.task), self._take, worker, chunk)

    def _take(self, answer: Future[Any], worker: _Worker, chunk: _SentChunk) -> None:
        if self._is_lost(answer, worker):
            return
        worker.chunks.remove(chunk)
        error = answer.exception()
        if error:
            chunk.fail(f"{type(error).__name__}: {error}")
        elif not chunk.future.done():
            result, parts = answer.result()
            # Copied, since Ray's memory is read-only, and its store is small.
            results = [np.array(part).data for part in parts]
            chunk.future.set_result(replace(result, results=results))
        self._dispatch()

    def _is_lost(self, answer: Future[Any], worker: _Worker) -> bool:
        """Return whether an actor is lost; if so, replace it and queue its chunks again."""
        if worker not in self._workers:
            return True
        error = answer.exception()
        errors = self._ray.exceptions
        if not isinstance(error, errors.RayError) or isinstance(error, errors.RayTaskError):
            return False
        self._workers.remove(worker)
        self._ray.kill(worker.handle)  # It may be alive but unreachable.
        if worker.chunks:
            first = worker.chunks[0]  # the chunk in process
            first.losses += 1
            if first.losses > _MOST_LOSSES:
                first.fail(f"{first.losses} actors were lost that processed it. {error}")
        self._waiting.extendleft(reversed(worker.chunks))
        losses = 0 if worker.has_begun else worker.losses + 1
        if losses > _MOST_LOSSES:
            self._break(f"{losses} actors were lost before they had begun. {error}")
        else:
            self._start(worker.index, losses)
            self._dispatch()
        return True

    def _fail_all(self, message: str) -> None:
        for chunk in self._waiting:
            chunk.fail(message)
        for worker in self._workers:
            for chunk in worker.chunks:
                chunk.fail(message)
        self._waiting.clear()

    def _break(self, message: str) -> None:
        """Kill the actors, and fail all present and future chunks."""
        self._broken = self._broken or message
        self._fail_all(self._broken)
        workers, self._workers = self._workers, []
        for worker in workers if self._is_connected else ():
            with contextlib.suppress(Exception):  # Ray raised: the user may shut it down now.
                self._ray.kill(worker.handle)


def _session_of(ray: Any) -> str:
    """Return the identity of this process's connection to Ray; "" for none."""
    try:
        return str(ray.get_runtime_context().get_worker_id()) if ray.is_initialized() else ""
    except Exception:  # Ray raised: it was shut down.
        return ""


def _join(ray: Any) -> tuple[str, bool]:
    """Connect to Ray; return its session, and whether to shut it down after use."""
    global _sharers, _started
    with _starting:
        if not ray.is_initialized():
            _connect(ray)
            _sharers, _started = 0, _session_of(ray)
        elif not _sharers or _session_of(ray) != _started:
            return _session_of(ray), False
        _sharers += 1
        return _started, True


def _leave(ray: Any, session: str) -> None:
    global _sharers
    with _starting:
        if session != _started:  # The user has shut this Ray down, and pools have started another.
            return
        _sharers -= 1
        if not _sharers:
            if _session_of(ray) == session:
                ray.shutdown()
            _unused.set()


def _connect(ray: Any) -> None:
    """Connect on a thread that lasts, since Ray's local processes die with the thread.

    On that thread, Ray cannot set its SIGTERM handler, which would end a trainer that wants to
    save.
    """
    connected: Future[None] = Future()

    def keep() -> None:
        try:
            ray.init()
        except BaseException as error:
            connected.set_exception(error)
        else:
            connected.set_result(None)
            _unused.wait()

    _unused.clear()
    start_thread("ray-keeper", keep)
    connected.result()
