"""The main loop of a worker process, which processes chunks until the trainer ends."""

from __future__ import annotations

import ctypes
import enum
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch

from odb_nodes._support.processes import ignore_interrupt, keep_freed_memory
from odb_nodes._support.seeds import preserved_rngs
from odb_nodes.core.processing.chunk import ChunkProcessor, ChunkResult
from odb_nodes.core.processing.transport import PageFile, Part, mapped, receive, send

_SHARED_SETUP_BYTES = 64 << 10  # from this size on, workers read the setup from a shared file
KEPT_BYTES = 64 << 20  # freed memory that is kept for the next samples
_PARENT_POLL_S = 1.0  # between two checks whether the trainer is alive


class Stage(enum.Enum):
    """What a worker is doing, which it reports in messages."""

    STARTING = enum.auto()  # Importing modules and unpickling the dataset; never sent.
    INITIALIZING = enum.auto()  # In `worker_init_fn`.
    READY = enum.auto()  # Processing chunks, or waiting for them.
    COLLATING = enum.auto()  # Making the batch of a group, until it is sent.


@dataclass(frozen=True)
class LastWords:
    """The last message of a worker that could not start: why."""

    text: str


@dataclass(frozen=True)
class TrainerMessage:
    """A message of the trainer to a worker."""

    generation: int  # Chunks of older generations are skipped.
    task: bytes | None = None  # a chunk, pickled separately: its items may fail to unpickle


class Setup:
    """The functions of workers, which a worker that is not forked receives through its socket.

    multiprocessing would write the pickle to a pipe that it also keeps open for reading, and block
    for ever if a worker ends or hangs before it has read the pipe.
    """

    def __init__(
        self,
        processor: ChunkProcessor | None = None,
        worker_init_fn: Callable[[int], None] | None = None,
    ) -> None:
        self.processor, self.worker_init_fn = processor, worker_init_fn
        self.part: Part | None = None
        """The pickle to send to a worker, set when multiprocessing pickles this object."""
        self._pickled: Any = None

    def __reduce__(self) -> Any:
        # Locks and files can be pickled only here, while multiprocessing starts a process.
        pickled = _SetupPickler.dumps((self.processor, self.worker_init_fn))
        if pickled != self._pickled:  # Workers share one file, which may hold the dataset.
            self._pickled = pickled
            is_large = len(pickled) >= _SHARED_SETUP_BYTES
            self.part = (PageFile.of(pickled) if is_large else None) or pickled
        return Setup, ()

    def receive(self, connection: socket.socket) -> str:
        """Receive and unpickle the functions; return why that fails, or ""."""
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
    """Copies the state of a `torch.Generator`: torch would share memory that is freed too early."""

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
            '`if __name__ == "__main__":`, or in a separate module: each worker imports the main '
            "module under another name."
        )
    return (
        " Workers that are not forked cannot import what a notebook, a prompt, `python -c` or a "
        '`__main__.py` defines: define it in a separate module, or use `start_method="fork"` or '
        '`method="thread"`.'
    )


def work(connection: socket.socket, index: int, setup: Setup) -> None:
    """Process chunks until the trainer closes the socket or dies."""
    ignore_interrupt()
    # A preempted trainer gets SIGTERM, too, and may finish its step and save.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection.settimeout(None)
    try:
        if _begin(connection, index, setup):
            assert setup.processor is not None
            _process_chunks(connection, setup.processor)
    except (EOFError, ConnectionError):
        return


def _process_chunks(connection: socket.socket, processor: ChunkProcessor) -> None:
    pid = os.getpid()
    newest_generation = 0
    waiting: deque[tuple[int, bytes]] = deque()  # generations and pickled chunks
    report = partial(send, connection, [pickle.dumps(Stage.COLLATING)])
    processor = replace(processor, before_collate=report)
    while True:
        # All messages are read first, since the newest message may make older chunks obsolete.
        while not waiting or wait([connection], 0):
            (part,) = receive(connection)
            message: TrainerMessage = pickle.loads(mapped(part))
            newest_generation = message.generation
            if message.task is not None:
                waiting.append((message.generation, message.task))
        generation, task = waiting.popleft()
        is_stale = generation != newest_generation
        result = ChunkResult([], None) if is_stale else processor.run_pickled(task)
        if os.getpid() != pid:  # This is a child that the user's function has forked.
            os._exit(0)
        send(connection, [pickle.dumps(replace(result, results=None)), *result.results])


def _begin(connection: socket.socket, index: int, setup: Setup) -> bool:
    """Prepare this process, and report each stage to the trainer; `False` if that fails."""
    stage = "start"
    try:
        _die_with_parent()
        torch.set_num_threads(1)
        keep_freed_memory(KEPT_BYTES)
        _use_locks()
        error = setup.receive(connection) if setup.processor is None else ""
        if error:
            send(connection, [pickle.dumps(LastWords(error))])
            return False
        if setup.worker_init_fn is not None:
            send(connection, [pickle.dumps(Stage.INITIALIZING)])
            stage = "`worker_init_fn`"
            setup.worker_init_fn(index)
    except BaseException:
        last_words = LastWords(f" Its {stage} raised:\n{traceback.format_exc()}")
        send(connection, [pickle.dumps(last_words)])
        return False
    send(connection, [pickle.dumps(Stage.READY)])
    return True


def _use_locks() -> None:
    """Acquire the locks of the global generators.

    A worker that was forked while another thread held such a lock waits for ever. Here, before the
    first message, the trainer notices that, and replaces the worker.
    """
    with preserved_rngs():
        np.random.random_sample()
        torch.rand(1, device="cpu")  # A fork may be unable to use the default device.


def _die_with_parent() -> None:
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    if sys.platform == "linux":
        # Works even while a library holds the GIL. The system sends the signal when the *thread*
        # that started this process ends: `ProcessPool` starts it on a lasting thread.
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _exit_with_parent() -> None:
    """End this process soon after the trainer's process ends, for any reason."""
    parent = multiprocessing.parent_process()
    parent_pid = os.getppid()
    while parent is not None and not wait([parent.sentinel], _PARENT_POLL_S):
        if os.getppid() != parent_pid:
            break
    os._exit(1)
