"""Ranks of a job, over gloo connections of their own."""

from __future__ import annotations

import atexit
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

from odb_nodes._compat import torch_distributed as compat
from odb_nodes.alignment.exchange.base import IntArray, Interrupted
from odb_nodes.errors import PeerError, StateError

_SLICE = timedelta(milliseconds=50)  # of a wait, between two looks at `interrupt`
_POLL_S = 1.0  # between two looks at the store, whether another rank has reported a failure
_GRACE_S = 5.0  # for all ranks to report, so that an error can name those that do not
_EXIT_S = 1.0  # for a thread to leave gloo before the interpreter ends

_live: weakref.WeakSet[GlooExchange] = weakref.WeakSet()


class GlooExchange:
    """An all-gather among the ranks of a process group, over gloo connections of their own.

    The group itself may be in use meanwhile, with any backend and on any thread. The connections
    are made once, serve all epochs, and close with this object.

    Args:
        process_group: the process group whose ranks take part. Each rank must make its exchanges
            over it in the same order.
        timeout_s: seconds until a call gives up.
    """

    # Why calls meet: gloo matches the n-th all-gather of a group on one rank with the n-th on every
    # other. A call cannot be taken back, so one that is interrupted stays pending, and the next
    # call first waits for it: at most one is under way, and no rank ever skips one.
    #
    # Why every wait ends: gloo is waited for in slices. After each, the waiting thread looks
    # whether it is interrupted and whether its time is up, and now and then whether another rank
    # has reported a failure to the store. An exchange that has failed once is broken for good:
    # each later call raises at once, so no rank can meet the remains of an earlier call.
    #
    # Threads: `_idle` lets one thread at a time into a call. `interrupt` and `resume` only touch an
    # event and take no lock, so another thread can always get the one inside out.

    def __init__(self, process_group: Any, timeout_s: float) -> None:
        self.rank = dist.get_rank(process_group)
        self.world_size = dist.get_world_size(process_group)
        self.timeout_s = timeout_s
        self._grace_s = min(_GRACE_S, timeout_s / 4)
        self.ranks: Sequence[int] = dist.get_process_group_ranks(process_group)
        # The n-th exchange of one rank meets the n-th of the others. They are counted here, in the
        # order of the program. `connect` is called by threads, whose order may differ between
        # ranks: it would connect ranks of one loader to those of another.
        ranks = hashlib.sha1(repr(self.ranks).encode()).hexdigest()[:12]
        try:
            job_store = compat.job_store()
            count = job_store.add(f"odb_nodes/{ranks}/{self.rank}", 1)
        except dist.DistError as error:
            raise PeerError(
                "the store of the job, which lives with rank 0 or torchrun, does not answer "
                f"({_first_line(error)}). Restart all ranks."
            ) from error
        self._store = dist.PrefixStore(f"odb_nodes/{ranks}/{count}", job_store)
        self._advice = (
            "Build and iterate the same graphs on all ranks, in the same order: this is number "
            f"{count} of this rank. Then restart all ranks."
        )
        self._group: Any = None
        self._pending: Any = None  # the work of a call that was interrupted
        # What the last call reads and writes. If gloo's thread were the last to hold it, deleting
        # it would need the interpreter, and abort a process that is ending.
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
        # All ranks are here: connecting takes long only if one of them is lost meanwhile.
        left_s = max(deadline - time.monotonic(), self._grace_s)
        store = dist.PrefixStore("gloo", self._store)
        try:
            self._group = compat.gloo_group(store, self.rank, self.world_size, left_s)
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
            # The grace is for `_fail`, so that the whole call takes `timeout_s` at most.
            deadline = time.monotonic() + self.timeout_s - self._grace_s
            if self._pending is not None:
                self._await(self._pending, deadline)
            rows = torch.empty((self.world_size, len(row)), dtype=torch.int64)
            parts, own = list(rows.unbind()), torch.from_numpy(row.copy())
            work = compat.begin_all_gather(self._group, parts, own)
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
        """Wait until no thread is inside a call."""
        if self._idle.acquire(timeout=timeout_s):
            self._idle.release()

    def _await(self, work: Any, deadline: float) -> None:
        """Wait in slices until a call is done, since gloo itself cannot be interrupted.

        Raises:
            PeerError: the call failed, `deadline` has passed, or another rank has failed.
            Interrupted: `interrupt` was called; the call stays pending.
        """
        next_poll = time.monotonic() + _POLL_S
        while True:
            self._check_interrupted()
            try:
                work.wait(_SLICE)
                self._set_pending(None)
                return
            except RuntimeError as error:
                # A call may complete between the timeout of its slice and this line: it has failed
                # only if the error is its own.
                if work.is_completed() and not compat.is_wait_timeout(error):
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
        """Report to the other ranks, find out which of them do not report, and raise."""
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
        """Wait until every rank has set its key, and return those that have not in time."""
        keys = [f"{what}/{rank}" for rank in range(self.world_size)]
        deadline = time.monotonic() + timeout_s
        pause_s = 0.005
        while (left_s := deadline - time.monotonic()) > 0:
            self._check_interrupted()
            # Not by the store's own `wait`, which prints a warning when it times out.
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
        """Set the work under way, or None. While there is one, the group cannot be deleted."""
        if self._pending is None and work is not None:
            compat.keep_group(self._group)
        elif self._pending is not None and work is None:
            compat.release_group(self._group)
        self._pending = work


# A forked child must never delete a group: that joins threads which exist only in the parent. Its
# first garbage collection may come at once, so all groups are held from before the fork: in the
# parent until it is over, in the child for ever.
_held: list[list[GlooExchange]] = []

if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=lambda: _held.append(list(_live)), after_in_parent=_held.pop)


@atexit.register
def _interrupt_all() -> None:
    """Get all threads out of gloo: one that is inside at the very end aborts the process."""
    for exchange in list(_live):
        exchange.interrupt()
    for exchange in list(_live):
        exchange.settle(_EXIT_S)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else repr(error)


def _name(ranks: Iterable[int]) -> str:
    named = list(map(str, ranks))
    return f"rank {named[0]}" if len(named) == 1 else f"ranks {', '.join(named)}"
