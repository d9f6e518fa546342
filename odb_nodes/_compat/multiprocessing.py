"""multiprocessing: what a forked child believes to be its own children; starts that hang.

Relied on beside the public names: `_children` of `multiprocessing.process`, the set that
`active_children` reads, and whose processes are signalled and joined at exit; and
`_forkserver._forkserver_pid` of `multiprocessing.forkserver`, the process that forks.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import process
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from weakref import WeakSet

_kept: WeakSet[BaseProcess] = WeakSet()


def keep_from_forks(child: BaseProcess) -> None:
    """Keep a child from forks of this process, which would send it SIGTERM at their exit."""
    _kept.add(child)


def start_tracker() -> None:
    """Start the tracker of resources, if none runs. That unblocks SIGINT: here, it does not."""
    if hasattr(signal, "pthread_sigmask"):  # not on Windows
        from multiprocessing import resource_tracker

        mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextmanager
def bounded_start(context: BaseContext, limit_s: float) -> Iterator[None]:
    """End the server that forks if a start takes longer: `Process.start` waits without a limit."""
    timer = threading.Timer(min(limit_s, threading.TIMEOUT_MAX), _end_server)
    timer.daemon = True
    if context.get_start_method() == "forkserver":
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _end_server() -> None:
    from multiprocessing.forkserver import _forkserver

    pid = _forkserver._forkserver_pid  # type: ignore[attr-defined]
    with suppress(OSError, TypeError):  # it has ended, or has never begun
        os.kill(pid, signal.SIGKILL)


def _forget() -> None:
    process._children.difference_update(_kept)  # type: ignore[attr-defined]


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forget)
