"""multiprocessing: child processes that forks inherit, that hang in a start, or are hard to join.

Relied on beside the public names: `_children` of `multiprocessing.process`, the set that
`active_children` reads, and whose processes are signalled and joined at exit; and
`_forkserver._forkserver_pid` of `multiprocessing.forkserver`, the process that forks.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import process
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any
from weakref import WeakSet

_LONGEST_POLL_S = 0.02
_kept: WeakSet[BaseProcess] = WeakSet()


class Child:
    """A daemonic child process. Several threads may kill it and read its exit code."""

    def __init__(
        self,
        context: BaseContext,
        limit_s: float,
        name: str,
        target: Callable[..., None],
        *args: Any,
    ) -> None:
        self._process: BaseProcess = context.Process(  # type: ignore[attr-defined]
            target=target, args=args, name=name, daemon=True
        )
        with _bounded_start(context, limit_s):
            self._process.start()
        keep_from_forks(self._process)
        assert self._process.pid is not None
        self.pid = self._process.pid
        self._exit_code: int | None = None
        self._is_released = False
        # The system reports an exit code once: a second thread that asks meanwhile gets None.
        # Re-entrant, since a signal handler of the program may call `kill`.
        self._reaping = threading.RLock()

    @property
    def has_ended(self) -> bool:
        """Whether the process is gone."""
        return self.exit_code() is not None or not _exists(self.pid)

    def exit_code(self) -> int | None:
        """Return the exit code; `None` while it runs, or if other code has taken the exit code."""
        with self._reaping:
            if not self._is_released:
                self._exit_code = self._process.exitcode
            return self._exit_code

    def kill(self) -> None:
        """End the process, and do not wait for it."""
        with self._reaping:
            if not self._is_released:
                self._process.kill()

    def wait_until_ended(self, timeout_s: float) -> bool:
        """Wait for the process to end; tell whether it did in time.

        `Process.join` does not serve: it waits for a pipe that a grandchild may hold open, and has
        no limit for a child that has closed the pipe.
        """
        deadline = time.monotonic() + timeout_s
        pause_s = 0.0005
        while not self.has_ended:
            if time.monotonic() > deadline:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_POLL_S)
        with self._reaping:
            if self._exit_code is not None and not self._is_released:
                self._process.close()  # An error that somebody keeps may refer to its files.
                self._is_released = True
        return True


def _exists(pid: int) -> bool:
    if sys.platform == "win32":  # There, signal 0 is Ctrl-C.
        return True
    try:
        os.kill(pid, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True


def keep_from_forks(child: BaseProcess) -> None:
    """Keep a child from forks of this process, which would send it SIGTERM at their exit."""
    _kept.add(child)


def start_tracker() -> None:
    """Start the tracker of resources, if none runs, and keep the signal mask, which it changes."""
    if hasattr(signal, "pthread_sigmask"):  # not on Windows
        from multiprocessing import resource_tracker

        mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextmanager
def _bounded_start(context: BaseContext, limit_s: float) -> Iterator[None]:
    """Kill the fork server if a start takes longer: `Process.start` would wait without a limit."""
    timer = threading.Timer(min(limit_s, threading.TIMEOUT_MAX), _kill_server)
    timer.daemon = True
    if context.get_start_method() == "forkserver":
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _kill_server() -> None:
    from multiprocessing.forkserver import _forkserver

    pid = _forkserver._forkserver_pid  # type: ignore[attr-defined]
    with suppress(OSError, TypeError):  # the server has ended, or was never started
        os.kill(pid, signal.SIGKILL)


def _forget_children() -> None:
    process._children.difference_update(_kept)  # type: ignore[attr-defined]


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forget_children)
