"""What runs in a worker process: it processes chunks until the trainer is gone."""

from __future__ import annotations

import contextlib
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
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import wait
from types import TracebackType
from typing import Any

import numpy as np
import torch

from odb_nodes._core.processes import ignore_interrupt, keep_freed_memory
from odb_nodes._core.seeds import preserved_rngs
from odb_nodes.processing.chunk import ChunkProcessor
from odb_nodes.processing.transport import send
from odb_nodes.processing.worker_loop import WorkerLoop

__all__ = ["KEPT_BYTES", "FarEnd", "LastWords", "Stage", "work"]

KEPT_BYTES = 64 << 20  # of freed memory, for the next samples
_PARENT_POLL_S = 1.0  # between two looks of a worker at whether the trainer lives


class Stage(enum.Enum):
    """How far a worker has come; it tells so in messages before its first result."""

    STARTING = enum.auto()  # It imports modules and unpickles the dataset, and tells nothing yet.
    INITIALIZING = enum.auto()
    READY = enum.auto()


@dataclass(frozen=True)
class LastWords:
    """A worker's last message: why it ends before it has processed anything."""

    text: str


class FarEnd:
    """The worker's end of its socket, which tells the trainer what cannot be unpickled after it.

    A worker that is not forked is unpickled before `work` runs. Python reports an error of that on
    the worker's stderr alone.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection

    def __reduce__(self) -> Any:
        return _arrive, (self.connection,)


def _arrive(connection: socket.socket) -> FarEnd:
    def report(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        text = f" It could not unpickle its work: {kind.__name__}: {error}."
        if isinstance(error, AttributeError) and "main__'" in str(error):  # or `__mp_main__`
            text += (
                " Define it at the top of the program's main module, not below "
                '`if __name__ == "__main__":`, or in a module of its own: each worker imports the '
                "main module under another name."
            )
        with contextlib.suppress(OSError):
            send(connection, [pickle.dumps(LastWords(text))])
        sys.__excepthook__(kind, error, trace)

    sys.excepthook = report
    return FarEnd(connection)


def work(
    far_end: FarEnd,
    index: int,
    processor: ChunkProcessor,
    worker_init_fn: Callable[[int], None] | None,
) -> None:
    """Process chunks until the trainer closes the socket or dies."""
    connection = far_end.connection
    sys.excepthook = sys.__excepthook__
    ignore_interrupt()
    # SIGTERM is the trainer's as well: when preempted, it may want to finish its step and save.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection.settimeout(None)
    try:
        if _begin(connection, index, worker_init_fn):
            WorkerLoop(connection, processor).run()
    except (EOFError, ConnectionError):
        return


def _begin(
    connection: socket.socket, index: int, worker_init_fn: Callable[[int], None] | None
) -> bool:
    """Make this process a worker, and tell the trainer how far that has come."""
    doing = "start"
    try:
        _die_with_parent()
        torch.set_num_threads(1)
        keep_freed_memory(KEPT_BYTES)
        _use_locks()
        if worker_init_fn is not None:
            send(connection, [pickle.dumps(Stage.INITIALIZING)])
            doing = "`worker_init_fn`"
            worker_init_fn(index)
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
