"""The store of the job, of which no call can hang a rank."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from odb_nodes._compat import torch_distributed as compat

_LOOK_S = 0.05  # between two looks at whether a wait is to be given up
_LATE_S = 1.0  # for gloo to raise an error of its own, which says more

_under_way: set[Call] = set()

if hasattr(os, "register_at_fork"):  # A child has none of the threads.
    os.register_at_fork(after_in_child=_under_way.clear)


class StoreLost(Exception):
    """The store failed, or did not answer in time. The message is a clause that names its host."""


class BoundedStore:
    """A connection to the store of the job, of its own."""

    # Why threads: in C++, a call into the store of a host that is stopped never returns, and one of
    # a host that is gone returns when the timeout of the whole job is over. So each call has a
    # daemon thread, which is left behind where the call is given up. A store serves one call at a
    # time: each thread first waits for the one before it, so calls keep their order.

    def __init__(self, limit_s: float) -> None:
        self._last: Call | None = None
        self._queue = threading.Lock()  # two threads may call
        self._store: Any = None
        self._store = self._answer(self.begin(compat.job_store), limit_s)

    def use_prefix(self, prefix: str) -> None:
        """Let all keys from now on stand below a prefix."""
        self._store = dist.PrefixStore(prefix, self._store)

    def call(
        self, name: str, *arguments: Any, limit_s: float, check: Callable[[], None] = lambda: None
    ) -> Any:
        """Call a method of the store, and return what it returns."""
        return self._answer(self.begin(name, *arguments), limit_s, check)

    def begin(self, function: str | Callable[..., Any], *arguments: Any) -> Call:
        """Call a method of the store, or another function, after all calls before; do not wait."""
        called = getattr(self._store, function) if isinstance(function, str) else function
        with self._queue:
            self._last = call = Call(self._last, called, arguments)
        return call

    def make_group(self, prefix: str, rank: int, world_size: int, limit_s: float) -> Any:
        """Return the gloo group of the ranks that meet below a prefix; see `compat.gloo_group`."""
        store = dist.PrefixStore(prefix, self._store)
        call = self.begin(compat.gloo_group, store, rank, world_size, limit_s)
        if not call.done.wait(limit_s + _LATE_S):
            raise StoreLost(_silent(limit_s))
        return call.result()

    def _answer(self, call: Call, limit_s: float, check: Callable[[], None] = lambda: None) -> Any:
        deadline = time.monotonic() + limit_s
        while not call.done.wait(max(0.0, min(_LOOK_S, deadline - time.monotonic()))):
            check()
            if time.monotonic() > deadline:
                raise StoreLost(_silent(limit_s))
        return answer_of(call)


class Call:
    """A call on a daemon thread of its own."""

    def __init__(
        self, before: Call | None, function: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> None:
        self.done = threading.Event()  # set once `result` returns at once
        self._value: Any = None
        self._error: Exception | None = None
        _under_way.add(self)
        ended = None if before is None or before.done.is_set() else before.done
        threading.Thread(
            target=self._run, args=(ended, function, arguments), name="odb_nodes-store", daemon=True
        ).start()

    def result(self) -> Any:
        """Return what the function returned, or raise what it raised. Only once it is `done`."""
        if self._error is not None:
            raise self._error
        return self._value

    def _run(
        self,
        before: threading.Event | None,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
    ) -> None:
        if before is not None:
            before.wait()
        try:
            self._value = function(*arguments)
        except Exception as error:
            self._error = error
        _under_way.discard(self)
        self.done.set()


def settle_calls(limit_s: float) -> None:
    """Wait until no call is under way, also of a store that is gone, but no longer than that."""
    deadline = time.monotonic() + limit_s
    for call in list(_under_way):
        call.done.wait(max(0.0, deadline - time.monotonic()))


def answer_of(call: Call) -> Any:
    """Return the result of a call of the store that is done."""
    try:
        return call.result()
    except Exception as error:  # of any kind: it is another process that is gone
        raise StoreLost(
            f"{_HOSTS.format(compat.store_host())} is gone ({first_line(error)})"
        ) from error


def first_line(error: Exception) -> str:
    """Return what an error says, without the stack of C++ that torch adds."""
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else repr(error)


_HOSTS = "{}, which hosts the store of the job,"


def _silent(limit_s: float) -> str:
    return f"{_HOSTS.format(compat.store_host())} has not answered for {limit_s:.1f} s"
