"""Ctrl-C while workers start or stop: not in the middle, and not in a worker."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

_CAN_MASK = hasattr(signal, "pthread_sigmask")  # not on Windows


@contextlib.contextmanager
def deferred_interrupt() -> Iterator[None]:
    """Within this context Ctrl-C does nothing; it takes effect after.

    Processes that start within it are born deaf to Ctrl-C: see `ignore_interrupt`.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    missed: list[Any] = []
    signal.signal(signal.SIGINT, lambda number, frame: missed.append((number, frame)))
    # Only this thread is deaf, so that is not enough for Ctrl-C here; but children inherit it.
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
    """In a worker: leave Ctrl-C to the trainer."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if _CAN_MASK:  # what it starts in turn should hear it
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
