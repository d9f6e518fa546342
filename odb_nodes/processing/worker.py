"""What runs in a worker process: it processes chunks until the trainer is gone."""

from __future__ import annotations

import ctypes
import enum
import multiprocessing
import os
import pickle
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch

from odb_nodes._core.processes import ignore_interrupt, keep_freed_memory
from odb_nodes._core.seeds import preserved_rngs
from odb_nodes.errors import WorkerError
from odb_nodes.processing.chunk import ChunkProcessor, ChunkResult
from odb_nodes.processing.transport import (
    NO_FILE,
    SHARED_BYTES,
    FilePool,
    Lease,
    PageFile,
    Pages,
    Part,
    mapped,
    pack,
    receive,
    send,
    split_parts,
    unpack,
)
from odb_nodes.step_info import StepInfo

KEPT_BYTES = 64 << 20  # of freed memory, for the next samples
_PARENT_POLL_S = 1.0  # between two looks of a worker at whether the trainer lives


class Stage(enum.Enum):
    """How far a worker has come; it tells so in messages before its first result, and of groups."""

    STARTING = enum.auto()  # It imports modules and unpickles the dataset, and tells nothing yet.
    INITIALIZING = enum.auto()
    READY = enum.auto()
    COLLATING = enum.auto()  # It makes the batch of a group, until its next result.


@dataclass(frozen=True)
class LastWords:
    """A worker's last message: why it ends before it has processed anything."""

    text: str


class WorkerCrash(WorkerError):
    """A worker has ended itself, by what it did for a chunk or a batch."""


INLINE = -1  # in place of a chunk's number: the sample comes with the request


@dataclass(frozen=True)
class CollateRequest:
    """A batch to be made; the chunks and samples that it lacks come as parts."""

    # of each sample, the number of its chunk and its place there; or `INLINE`, and its place among
    # the samples that come with the request
    rows: Sequence[tuple[int, int]]
    # numbers of the chunks that come with the request, since the worker lacks them
    chunks: Sequence[int]
    has_inline: bool  # whether samples come with it, after the chunks
    key: int  # what the random numbers are seeded by
    info: StepInfo | None  # where the maker wants it


@dataclass(frozen=True)
class BatchResult:
    """The packed batch, its parts joined once it is sent; or why it could not be made."""

    content: Any
    error: str = ""


@dataclass(frozen=True)
class Message:
    """What the trainer tells a worker."""

    generation: int  # chunks of an older one are to be skipped
    task: bytes | None  # a chunk to process, pickled on its own: its items may not be readable
    request: CollateRequest | None  # a batch to make, if any; its parts follow
    forgotten: Sequence[int] = ()  # chunks that no further batch is made of
    free: Sequence[int] = ()  # files of the worker that nobody reads any more


@dataclass(frozen=True)
class Reply:
    """What a worker answers to a chunk or a request; the parts of the result come with it."""

    result: ChunkResult | BatchResult  # what became of it, without its parts
    content_bytes: int  # the size of its content, which is the last part, or in `file`; -1 for none
    file: int  # number of the file that the content is in; `NO_FILE` where it is in none
    is_known: bool  # whether the trainer has that file mapped, and it does not come with this
    dropped: Sequence[int]  # chunks that this worker has forgotten, and reads no more
    gone: Sequence[int]  # files that are not written again


class Setup:
    """What workers work with. Those that are not forked get it pickled, through their sockets.

    multiprocessing would write it into a pipe that it holds open itself: for ever, if a worker ends
    or hangs before it has read that.
    """

    def __init__(
        self,
        processor: ChunkProcessor | None = None,
        worker_init_fn: Callable[[int], None] | None = None,
    ) -> None:
        self.processor, self.worker_init_fn = processor, worker_init_fn
        self.part: Part | None = None
        """What is to be sent to the worker whose start has pickled this."""
        self._pickled: Any = None

    def __reduce__(self) -> Any:
        # Here, since locks and files can be pickled only while multiprocessing starts a process.
        pickled = _SetupPickler.dumps((self.processor, self.worker_init_fn))
        if pickled != self._pickled:  # Workers share it: it may hold the dataset.
            is_large = len(pickled) >= _CHUNK_BYTES
            self._pickled = pickled
            self.part = (PageFile.of([pickled]) if is_large else None) or pickled
        return Setup, ()

    def receive(self, connection: socket.socket) -> str:
        """Take what has been sent; return why it cannot be unpickled, or ""."""
        (part,) = receive(connection)
        try:
            self.processor, self.worker_init_fn = pickle.loads(mapped(part))
        except BaseException as error:
            traceback.print_exc()
            text = f" It could not unpickle its work: {type(error).__name__}: {error}."
            is_of_main = isinstance(error, AttributeError) and "main__'" in str(error)
            return text + (_advice_on_main() if is_of_main else "")
        return ""


class _SetupPickler(ForkingPickler):
    """Sends the state of a `torch.Generator` itself: the memory that torch would share is freed."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Generator):
            return NotImplemented
        return _generator, (value.device, value.get_state().numpy())


def _generator(device: torch.device, state: Any) -> torch.Generator:
    generator = torch.Generator(device)
    generator.set_state(torch.from_numpy(state))
    return generator


def _advice_on_main() -> str:
    if sys.modules["__main__"].__name__ == "__mp_main__":
        return (
            " Define it at the top of the program's main module, not below "
            '`if __name__ == "__main__":`, or in a module of its own: each worker imports the main '
            "module under another name."
        )
    return (
        " Workers that are not forked cannot import what a notebook, a prompt, `python -c` or a "
        '`__main__.py` defines: define it in a module of its own, or use `start_method="fork"` or '
        '`method="thread"`.'
    )


_CHUNK_BYTES = 64 << 10  # that are worth a file
_POLL_S = 0.001  # between two looks, within a chunk, at whether a batch is to be made


class WorkerLoop:
    """Processes chunks in order; a batch is made once it is asked for, also within a chunk."""

    def __init__(self, connection: socket.socket, processor: ChunkProcessor) -> None:
        self._connection = connection
        self._waiting: deque[tuple[int, bytes]] = deque()  # chunks, pickled
        self._newest = 0  # generation: chunks of an older one are skipped
        self._chunks: dict[int, _Chunk] = {}  # that batches are made of
        self._dropped: deque[int] = deque()  # of them, those forgotten, and read no more
        self._files = FilePool()
        self._maker = processor.maker
        self._next_look_s = 0.0
        self._batches_s = 0.0  # spent on batches within a chunk
        self._own_pid = os.getpid()
        tell = partial(send, connection, [pickle.dumps(Stage.COLLATING)])
        self._processor = replace(processor, before_collate=tell)
        if self._maker is not None:
            self._processor = replace(self._processor, before_item=self._make_batches)
            self._poll = select.poll()
            self._poll.register(connection, select.POLLIN)

    def run(self) -> None:
        """Work until the trainer closes the connection."""
        while True:
            # Everything that has come is read first: the newest generation decides what is stale.
            while not self._waiting or wait([self._connection], 0):
                self._read()
            generation, task = self._waiting.popleft()
            self._batches_s = 0.0
            stale = generation != self._newest
            result = ChunkResult([], None) if stale else self._processor.run_pickled(task)
            self._end_child()
            seconds = max(0.0, result.seconds - self._batches_s)
            self._reply(replace(result, results=None, seconds=seconds), *result.results)

    def _reply(self, result: ChunkResult | BatchResult, *parts: memoryview) -> None:
        """Send a result, with its content, if it has one, as the last part."""
        content: list[PageFile | bytes] = []
        file, size_bytes, is_known = NO_FILE, -1, False
        if result.content is not None:
            # A chunk is worth a file sooner than a batch: it is mapped already, or read by others.
            least_bytes = _CHUNK_BYTES if isinstance(result, ChunkResult) else SHARED_BYTES
            joined, file = self._files.join(result.content, least_bytes)
            if file != NO_FILE and isinstance(result, ChunkResult) and not result.is_stored:
                is_known = self._files.is_known(file)
            content, size_bytes = [] if is_known else [joined], len(joined)
        dropped = [self._dropped.popleft() for _ in range(len(self._dropped))]
        result = replace(result, content=None)
        reply = Reply(result, size_bytes, file, is_known, dropped, self._files.gone())
        send(self._connection, [pickle.dumps(reply), *parts, *content])

    def _make_batches(self) -> None:
        """Make the batches that are asked for by now."""
        if (now := time.perf_counter()) >= self._next_look_s and os.getpid() == self._own_pid:
            try:
                while self._poll.poll(0):
                    self._read()
            except BaseException as error:  # It would pass for an error of the item.
                if not isinstance(error, (EOFError, ConnectionError)):
                    traceback.print_exc()
                os._exit(1)
            after = time.perf_counter()
            self._batches_s += after - now
            self._next_look_s = after + _POLL_S

    def _read(self) -> None:
        head, *parts = receive(self._connection)
        message: Message = pickle.loads(mapped(head))
        for number in message.forgotten:
            self._chunks.pop(number, None)
        self._files.take_back(message.free)
        self._newest = message.generation
        if message.task is not None:
            self._waiting.append((message.generation, message.task))
        elif message.request is not None:
            made = self._make(message.request, parts)
            self._end_child()
            self._reply(made)

    def _end_child(self) -> None:
        """End a process that a function of the user has forked: it must not answer, too."""
        if os.getpid() != self._own_pid:
            os._exit(0)

    def _make(self, request: CollateRequest, parts: list[Pages | PageFile]) -> BatchResult:
        try:
            for number, content in zip(request.chunks, parts, strict=False):
                if isinstance(content, PageFile):
                    content.lease = Lease(number, self._dropped.append)
                self._chunks[number] = _Chunk(content)
            inline = [*unpack(split_parts(parts[-1]))] if request.has_inline else []
            samples = [
                inline[row] if number == INLINE else self._chunks[number].data()[row]
                for number, row in request.rows
            ]
            assert self._maker is not None
            batch = self._maker(samples, request.key, request.info)
            return BatchResult(pack(batch))
        except BaseException as error:
            return BatchResult(None, f"{type(error).__name__}: {error}".removesuffix(": "))


class _Chunk:
    """The data of samples; unpacked when one of them is first asked for."""

    def __init__(self, content: PageFile | Pages) -> None:
        self._content: PageFile | Pages | None = content
        self._data: list[Any] = []

    def data(self) -> list[Any]:
        if self._content is not None:
            self._data, self._content = [*unpack(split_parts(self._content))], None
        return self._data


def work(connection: socket.socket, index: int, setup: Setup) -> None:
    """Process chunks until the trainer closes the socket or dies."""
    ignore_interrupt()
    # SIGTERM is the trainer's as well: when preempted, it may want to finish its step and save.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection.settimeout(None)
    try:
        if _begin(connection, index, setup):
            assert setup.processor is not None
            WorkerLoop(connection, setup.processor).run()
    except (EOFError, ConnectionError):
        return


def _begin(connection: socket.socket, index: int, setup: Setup) -> bool:
    """Make this process a worker, and tell the trainer how far that has come."""
    doing = "start"
    try:
        _die_with_parent()
        torch.set_num_threads(1)
        keep_freed_memory(KEPT_BYTES)
        _use_locks()
        if setup.processor is None and (why_not := setup.receive(connection)):
            send(connection, [pickle.dumps(LastWords(why_not))])
            return False
        if setup.worker_init_fn is not None:
            send(connection, [pickle.dumps(Stage.INITIALIZING)])
            doing = "`worker_init_fn`"
            setup.worker_init_fn(index)
    except BaseException:
        send(
            connection, [pickle.dumps(LastWords(f" Its {doing} raised:\n{traceback.format_exc()}"))]
        )
        return False
    send(connection, [pickle.dumps(Stage.READY)])
    return True


def _use_locks() -> None:
    """Use the locks of the global generators.

    A worker that was forked while another thread held one waits for it for ever. Here the trainer
    notices: it starts another worker in its place.
    """
    with preserved_rngs():
        np.random.random_sample()
        torch.rand(1, device="cpu")  # The default device may be one that a fork cannot use.


def _die_with_parent() -> None:
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    if sys.platform == "linux":
        # Works even while a library holds the GIL. The system sends it when the *thread* that
        # started this process ends; `ProcessPool` has one start it that lives until `close`.
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _exit_with_parent() -> None:
    """End this process soon after the trainer's, however that ended."""
    parent, parent_pid = multiprocessing.parent_process(), os.getppid()
    while parent is not None and not wait([parent.sentinel], _PARENT_POLL_S):
        if os.getppid() != parent_pid:
            break
    os._exit(1)
