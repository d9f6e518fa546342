"""Keep Ctrl-C from interrupting the start and stop of workers, and the workers themselves."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

_CAN_MASK = hasattr(signal, "pthread_sigmask")  # not on Windows


@contextlib.contextmanager
def deferred_interrupt() -> Iterator[None]:
    """Defer Ctrl-C until this context ends.

    Processes that start within it block the signal until they call `ignore_interrupt`.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    missed: list[Any] = []
    signal.signal(signal.SIGINT, lambda number, frame: missed.append((number, frame)))
    # The mask is for children, which inherit it. It blocks the signal in this thread only, so the
    # trainer needs the handler as well.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}) if _CAN_MASK else set()
    try:
        yield
    finally:
        if _CAN_MASK:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, before)
    if missed:
        before(*missed[-1])


def ignore_interrupt() -> None:
    """Leave Ctrl-C to the trainer; to be called in a worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if _CAN_MASK:  # processes that the worker starts may want the signal
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def block_interrupt() -> None:
    """Block Ctrl-C in this thread, and in what it starts; the main thread handles it."""
    if _CAN_MASK:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
