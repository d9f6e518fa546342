"""Ranks of a job, over gloo connections of their own."""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from odb_nodes.alignment.exchange.base import IntArray, Interrupted
from odb_nodes.errors import PeerError, StateError

_SLICE = timedelta(milliseconds=50)  # of a wait, after which it looks whether it is interrupted
_POLL_S = 1.0  # between looks whether another rank has reported a failure
_GRACE_S = 5.0  # for all ranks to report, so that the missing ones can be named
_EXIT_S = 1.0

_live: weakref.WeakSet[GlooExchange] = weakref.WeakSet()


class GlooExchange:
    """An all-gather among the ranks of a process group, over gloo connections of their own.

    Nothing that the group itself does meanwhile is disturbed, whatever its backend and thread. The
    connections are made once and serve all epochs. They are not registered with torch.distributed,
    so that no other rank of the job has to take part, and they close with this object.

    Args:
        process_group: whose ranks take part; each makes its exchanges over it in the same order.
        timeout_s: seconds until a call gives up.
    """

    def __init__(self, process_group: Any, timeout_s: float) -> None:
        self.rank = dist.get_rank(process_group)
        self.world_size = dist.get_world_size(process_group)
        self.timeout_s = timeout_s
        self._grace_s = min(_GRACE_S, timeout_s / 4)
        self.ranks: Sequence[int] = dist.get_process_group_ranks(process_group)
        # Numbered here, where the order is that of the program, and not in `connect`, which threads
        # of several loaders may call in any order: their ranks would meet those of another loader.
        ranks = hashlib.sha1(repr(self.ranks).encode()).hexdigest()[:12]
        try:
            job_store = _own_connection(dist.distributed_c10d._get_default_store())
            count = job_store.add(f"odb_nodes/{ranks}/{self.rank}", 1)  # of exchanges of these
        except dist.DistError as error:
            raise PeerError(
                "the store of the job, which lives with rank 0 or torchrun, does not answer "
                f"({_first_line(error)}). Restart all ranks."
            ) from error
        self._store = _prefixed(f"odb_nodes/{ranks}/{count}", job_store)
        self._advice = (
            "Build and iterate the same graphs on all ranks, in the same order: this is number "
            f"{count} of this rank. Then restart all ranks."
        )
        # All waits are ours. gloo would count on for a call that was given up, and close a
        # connection that nobody waits for.
        self._options = dist.distributed_c10d.AllgatherOptions()
        self._options.timeout = timedelta(days=365)
        self._group: Any = None
        self._pending: Any = None  # a call that was given up, but cannot be taken back
        # What the last call reads and writes, kept while it is under way and beyond: were gloo's
        # thread the last to let go of it, it would need the interpreter for that, and abort the
        # process at its end.
        self._held: Any = None
        self._broken: str | None = None
        self._interrupted = threading.Event()
        self._idle = threading.Lock()
        _live.add(self)

    def connect(self, size: int) -> None:
        """Meet the other ranks at the store of the job. See `Exchange`."""
        with self._idle:
            if self._broken is not None:
                raise PeerError(self._broken)
            if self._group is None:
                self._meet(size)

    def _meet(self, size: int) -> None:
        deadline = time.monotonic() + self.timeout_s
        self._store.set(f"size/{self.rank}", str(size))
        try:
            missing = self._wait_for("size", self.timeout_s)
        except Interrupted:
            self._store.delete_key(f"size/{self.rank}")
            raise
        gave_up = self._ranks_with("gone")
        if missing or gave_up:
            self._store.set(f"gone/{self.rank}", "1")
            self._broken = (
                f"{_name(missing)} did not come to the first exchange within {self.timeout_s} s "
                f"(`timeout_s`). {self._advice}"
                if missing
                else f"{_name(gave_up)} had given up waiting for the first exchange when this rank "
                f"came. {self._advice}"
            )
            raise PeerError(self._broken)
        sizes = [int(self._store.get(f"size/{rank}")) for rank in range(self.world_size)]
        if len({*sizes}) > 1:
            raise StateError(
                "the ranks have messages of different sizes, "
                f"{dict(zip(self.ranks, sizes, strict=True))}: `round_size` or `accumulate` "
                f"differ between them. {self._advice}"
            )
        # All ranks are here: what follows takes long only where one is lost meanwhile.
        left_s = max(deadline - time.monotonic(), self._grace_s)
        try:
            self._group = dist.ProcessGroupGloo(
                _prefixed("gloo", self._store),
                self.rank,
                self.world_size,
                timedelta(seconds=left_s),
            )
        except RuntimeError as error:
            raise PeerError(
                "a rank was lost while the ranks connected to each other: it was killed, or had "
                f"given up waiting for a late one ({_first_line(error)}). Restart all ranks."
            ) from error

    def all_gather(self, row: IntArray) -> IntArray:
        """Return the rows of all ranks. See `Exchange`."""
        with self._idle:
            if self._broken is not None:
                raise PeerError(self._broken)
            self._check_interrupted()
            deadline = time.monotonic() + self.timeout_s - self._grace_s
            if self._pending is not None:
                self._await(self._pending, deadline)
            rows = torch.empty((self.world_size, len(row)), dtype=torch.int64)
            parts, own = list(rows.unbind()), torch.from_numpy(row.copy())
            work = self._group.allgather([parts], [own], self._options)
            self._held = (work, parts, own)
            self._set_pending(work)
            self._await(work, deadline)
            gathered: IntArray = rows.numpy()
            return gathered

    def interrupt(self) -> None:
        """Make calls raise until `resume`. See `Exchange`."""
        self._interrupted.set()

    def resume(self) -> None:
        """Take `interrupt` back."""
        self._interrupted.clear()

    def settle(self, timeout_s: float) -> None:
        """Wait until no thread is inside of a call."""
        if self._idle.acquire(timeout=timeout_s):
            self._idle.release()

    def _await(self, work: Any, deadline: float) -> None:
        """Wait until a call is done, in slices: gloo itself cannot be interrupted."""
        next_poll = time.monotonic() + _POLL_S
        while True:
            self._check_interrupted()
            try:
                work.wait(_SLICE)
                self._set_pending(None)
                return
            except RuntimeError as error:
                if work.is_completed() and not _is_timeout(error):
                    self._set_pending(None)
                    self._fail(f"lost a connection ({_first_line(error)})")
            now = time.monotonic()
            if now > deadline:
                self._fail("waited in vain")
            if now > next_poll:
                next_poll = now + _POLL_S
                if self._has_failed():
                    self._fail("was told by another rank")

    def _fail(self, what: str) -> NoReturn:
        """Tell the other ranks, find out which of them is missing, and raise."""
        try:
            self._store.set(f"report/{self.rank}", what)
            self._store.set("failed", "1")
            missing = self._wait_for("report", self._grace_s)
            reports = {
                self.ranks[rank]: self._store.get(f"report/{rank}").decode()
                for rank in range(self.world_size)
                if self.ranks[rank] not in missing
            }
            seen = "; ".join(f"rank {rank} {text}" for rank, text in reports.items())
            lost = _name(missing) if missing else "a connection between ranks"
        except Interrupted:
            raise
        except Exception as error:  # of any kind: it is another process that is gone
            lost = "a rank"
            seen = (
                f"rank {self.ranks[self.rank]} {what}; the store of the job, which lives with "
                f"rank 0 or torchrun, does not answer either ({_first_line(error)})"
            )
        self._broken = (
            f"{lost} was lost: it was killed, raised, left its epoch, or did not come within "
            f"{self.timeout_s} s (`timeout_s`). What was seen: {seen}. Restart all ranks from a "
            "checkpoint."
        )
        raise PeerError(self._broken)

    def _wait_for(self, what: str, timeout_s: float) -> list[int]:
        """Wait until every rank has set its key, and return the ranks that have not."""
        keys = [f"{what}/{rank}" for rank in range(self.world_size)]
        deadline = time.monotonic() + timeout_s
        pause_s = 0.005
        while (left_s := deadline - time.monotonic()) > 0:
            self._check_interrupted()
            # Not the store's own wait, which prints warnings when it is in vain.
            if self._store.check(keys):
                return []
            self._interrupted.wait(min(pause_s, left_s))
            pause_s = min(2 * pause_s, _POLL_S)
        return sorted({*self.ranks} - {*self._ranks_with(what)})

    def _ranks_with(self, what: str) -> list[int]:
        """Return the ranks that have set a key."""
        return [
            rank for index, rank in enumerate(self.ranks) if self._store.check([f"{what}/{index}"])
        ]

    def _check_interrupted(self) -> None:
        if self._interrupted.is_set():
            raise Interrupted("the exchange was interrupted: the graph is reset or closed.")

    def _has_failed(self) -> bool:
        try:
            return bool(self._store.check(["failed"]))
        except Exception:
            return True

    def _set_pending(self, work: Any) -> None:
        """Keep the group while a call is under way; also past the end of the interpreter.

        A group that is deleted waits for what it has begun, and that may need the other ranks.
        """
        if self._pending is None and work is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
        elif self._pending is not None and work is None:
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(self._group))
        self._pending = work


# A forked process must never delete a group, which would join threads that are not there. It may
# collect garbage as soon as it runs, so they are held from before the fork, and there for ever.
_held: list[list[GlooExchange]] = []

if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=lambda: _held.append(list(_live)), after_in_parent=_held.pop)


@atexit.register
def _interrupt_all() -> None:
    """Get all threads out of gloo: one that is inside of it at the very end aborts the process."""
    for exchange in list(_live):
        exchange.interrupt()
    for exchange in list(_live):
        exchange.settle(_EXIT_S)


def _own_connection(store: Any) -> Any:
    """Return a store like `store` that nobody else waits for.

    A store serves one call at a time, and gloo waits for other ranks within one. Two threads that
    share it, in another order on another rank, would wait for each other.
    """
    try:
        return store.clone()
    except (AttributeError, RuntimeError, NotImplementedError):  # one in this process, or old torch
        return store


def _prefixed(prefix: str, store: Any) -> Any:
    return dist.PrefixStore(prefix, store)


def _is_timeout(error: RuntimeError) -> bool:
    return "Operation timed out!" in str(error)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else repr(error)


def _name(ranks: Iterable[int]) -> str:
    named = list(map(str, ranks))
    return f"rank {named[0]}" if len(named) == 1 else f"ranks {', '.join(named)}"
