"""The store of the job, with time limits for all calls."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

import torch.distributed as dist

from odb_nodes._compat import torch_distributed as compat

_LOOK_S = 0.05  # between two checks whether to give up a wait
_LATE_S = 1.0  # extra time for gloo to raise its error, which has more details

_under_way: set[Future[Any]] = set()

if hasattr(os, "register_at_fork"):  # A child has none of the threads.
    os.register_at_fork(after_in_child=_under_way.clear)


class StoreLost(Exception):
    """The store failed, or did not answer in time. The message names the host of the store."""


class BoundedStore:
    """A separate connection to the store of the job."""

    # Why threads: in C++, a call into the store of a stopped host never returns, and a call into
    # the store of a lost host returns only at the timeout of the whole job. So each call has a
    # daemon thread, which is abandoned with the call. A store serves one call at a time: each
    # thread first waits for the previous call, so calls keep their order.

    def __init__(self, limit_s: float) -> None:
        self._last: Future[Any] | None = None
        self._queue = threading.Lock()  # two threads may call
        self._store: Any = None
        self._store = self._answer(self.begin(compat.job_store), limit_s)

    def use_prefix(self, prefix: str) -> None:
        """Put a prefix before all keys from now on."""
        self._store = dist.PrefixStore(prefix, self._store)

    def call(
        self, name: str, *arguments: Any, limit_s: float, check: Callable[[], None] = lambda: None
    ) -> Any:
        """Call a method of the store, and return its result.

        check: called repeatedly while waiting; it may raise.
        """
        return self._answer(self.begin(name, *arguments), limit_s, check)

    def begin(self, function: str | Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Call a method of the store, or another function, after all earlier calls; do not wait."""
        called = getattr(self._store, function) if isinstance(function, str) else function
        call: Future[Any] = Future()
        _under_way.add(call)
        with self._queue:
            previous = self._last
            self._last = call
        if previous is not None and previous.done():
            previous = None
        job = (previous, call, called, arguments)
        threading.Thread(target=_run, args=job, name="odb_nodes-store", daemon=True).start()
        return call

    def make_group(self, prefix: str, rank: int, world_size: int, limit_s: float) -> Any:
        """Return a gloo group of the ranks that use the same prefix; see `compat.gloo_group`."""
        store = dist.PrefixStore(prefix, self._store)
        call = self.begin(compat.gloo_group, store, rank, world_size, limit_s)
        if not wait([call], limit_s + _LATE_S).done:
            raise StoreLost(_silent(limit_s))
        return call.result()

    def _answer(
        self, call: Future[Any], limit_s: float, check: Callable[[], None] = lambda: None
    ) -> Any:
        deadline = time.monotonic() + limit_s
        while not wait([call], max(0.0, min(_LOOK_S, deadline - time.monotonic()))).done:
            check()
            if time.monotonic() > deadline:
                raise StoreLost(_silent(limit_s))
        return answer_of(call)


def _run(
    previous: Future[Any] | None,
    call: Future[Any],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    if previous is not None:
        wait([previous])
    try:
        call.set_result(function(*arguments))
    except Exception as error:
        call.set_exception(error)
    _under_way.discard(call)


def settle_calls(limit_s: float) -> None:
    """Wait until no call of any store is under way, at most `limit_s`."""
    wait(list(_under_way), limit_s)


def answer_of(call: Future[Any]) -> Any:
    """Return the result of a finished call of the store."""
    try:
        return call.result()
    except Exception as error:  # Of any type: the process of the store has ended.
        raise StoreLost(
            f"{_HOST.format(compat.store_host())} is gone ({first_line(error)})"
        ) from error


def first_line(error: Exception) -> str:
    """Return the text of an error, without the C++ stack that torch adds."""
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else repr(error)


_HOST = "{}, which hosts the store of the job,"


def _silent(limit_s: float) -> str:
    return f"{_HOST.format(compat.store_host())} has not answered for {limit_s:.1f} s"
