"""Ranks of a job, over gloo connections of their own, and which ranks a graph shares steps with."""

from __future__ import annotations

import atexit
import hashlib
import os
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from odb_nodes._compat import torch_distributed as compat
from odb_nodes._core.processes import resolve_rank
from odb_nodes._core.text import named_ranks
from odb_nodes.alignment.exchange.base import Exchange, IntArray, Interrupted
from odb_nodes.alignment.exchange.store import (
    BoundedStore,
    StoreLost,
    answer_of,
    first_line,
    settle_calls,
)
from odb_nodes.errors import PeerError, StateError

_SLICE = timedelta(milliseconds=50)  # of a wait, between two looks at `interrupt`
_POLL_S = 1.0  # between two looks at the store, whether another rank has reported a failure
_GRACE_S = 5.0  # for all ranks to report, so that an error can name those that do not
_LEAST_GRACE_S = 2.0  # the same where `timeout_s` is short: else it would name one that is slow
_EXIT_S = 5.0  # for a thread to leave gloo, or the store, before the interpreter ends
_PUBLISH_S = 2.0  # for the store to take or give a published text
_UNDO_S = 1.0  # for the store to take back that this rank has come
_DATA_DIMENSIONS = {*"dp ddp fsdp hsdp data replicate shard batch".split()}  # words of their names
_MODEL_DIMENSIONS = {*"tp cp sp pp ep etp tensor context sequence pipeline expert model".split()}
_LOST = "lost a connection"
_HOST_ENDED = "it was killed or stopped, or had given up waiting for a late rank"

_live: weakref.WeakSet[GlooExchange] = weakref.WeakSet()


class GlooExchange(Exchange):
    """An all-gather among some ranks of the job, over gloo connections of their own.

    A process group of theirs may be in use meanwhile, with any backend and on any thread. The
    connections are made once, serve all epochs, and close with this object.
    """

    # Why calls meet: gloo matches the n-th all-gather of a group on one rank with the n-th on every
    # other. A call cannot be taken back, so one that is interrupted stays pending, and the next
    # call first waits for it: at most one is under way, and no rank ever skips one.
    #
    # Why every wait ends: gloo is waited for in slices. After each, the waiting thread looks
    # whether it is interrupted and whether its time is up, and now and then whether another rank
    # has reported a failure to the store, which has limits of its own. An exchange that has failed
    # once is broken for good: each later call raises at once, so no rank can meet the remains of an
    # earlier call.
    #
    # Threads: `_idle` lets one thread at a time into a call. `interrupt` and `resume` only touch an
    # event and take no lock, so another thread can always get the one inside out.

    def __init__(self, ranks_of_job: Sequence[int], timeout_s: float) -> None:
        self.ranks = ranks_of_job
        self.rank, self.world_size = self.ranks.index(dist.get_rank()), len(self.ranks)
        self.timeout_s = timeout_s
        self._grace_s = min(_GRACE_S, max(_LEAST_GRACE_S, timeout_s / 4))
        store_s = max(timeout_s, self._grace_s)
        # The n-th exchange of one rank meets the n-th of the others. They are counted here, in the
        # order of the program. `connect` is called by threads, whose order may differ between
        # ranks: it would connect ranks of one loader to those of another.
        ranks = hashlib.sha1(repr(self.ranks).encode()).hexdigest()[:12]
        try:
            self._store = BoundedStore(store_s)
            key = f"odb_nodes/{ranks}/{self.rank}"
            count = self._store.call("add", key, 1, limit_s=store_s)
        except StoreLost as error:
            raise PeerError(f"{error}: {_HOST_ENDED}. Restart all ranks.") from error
        self._store.use_prefix(f"odb_nodes/{ranks}/{count}")
        self._advice = (
            "Build and iterate the same graphs on all ranks, in the same order: this is number "
            f"{count} of this rank. Then restart all ranks."
        )
        self._look: Future[Any] | None = None  # asks the store whether another rank has failed
        self._group: Any = None
        self._pending: Any = None  # the work of a call that was interrupted
        # The group, and what the last call reads and writes. If gloo's thread were the last to hold
        # that, deleting it would need the interpreter, and abort a process that is ending.
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
                try:
                    self._meet(size)
                except StoreLost as error:
                    self._broken = f"{error}: {_HOST_ENDED}. Restart all ranks."
                    raise PeerError(self._broken) from error

    def _meet(self, size: int) -> None:
        deadline = time.monotonic() + self.timeout_s
        try:
            limit_s = max(self.timeout_s, self._grace_s)
            self._call("set", f"size/{self.rank}", str(size), limit_s=limit_s)
            missing = self._wait_for("size", deadline)
        except Interrupted:
            wait([self._store.begin("delete_key", f"size/{self.rank}")], _UNDO_S)
            raise
        gave_up = self._ranks_with("gone")
        if missing or gave_up:
            self._call("set", f"gone/{self.rank}", "1", limit_s=self._grace_s)
            self._broken = (
                f"{named_ranks(missing)} did not come to the first exchange within "
                f"{self.timeout_s} s (`timeout_s`). A rank that has died says why in its output; "
                f"else it is late. {self._advice}"
                if missing
                else f"{named_ranks(gave_up)} had given up waiting for the first exchange when "
                f"this rank came. {self._advice}"
            )
            raise PeerError(self._broken)
        sizes = [int(text) for text in self._texts("size", range(self.world_size))]
        if len({*sizes}) > 1:
            raise StateError(
                "the ranks have messages of different sizes, "
                f"{dict(zip(self.ranks, sizes, strict=True))}: `round_size`, `accumulate`, "
                f"`virtual_ranks` or the number of `tasks` differ between them. {self._advice}"
            )
        # All ranks are here: connecting takes long only if one of them is lost meanwhile.
        left_s = max(deadline - time.monotonic(), self._grace_s)
        try:
            self._group = self._store.make_group("gloo", self.rank, self.world_size, left_s)
        except RuntimeError as error:
            raise PeerError(
                "a rank was lost while the ranks connected to each other: it was killed, or had "
                f"given up waiting for a late one ({first_line(error)}). Restart all ranks."
            ) from error

    def all_gather(self, row: IntArray) -> IntArray:
        """Return the rows of all ranks. See `Exchange`."""
        with self._idle:
            if self._broken is not None:
                raise PeerError(self._broken)
            self._check_interrupted()
            # The grace is for `_fail`, so that the whole call takes `timeout_s` at most; a short
            # timeout is for the ranks to come, and finding out who did not takes longer.
            waits_s = max(self.timeout_s - self._grace_s, 0.75 * self.timeout_s)
            deadline = time.monotonic() + waits_s
            if self._pending is not None:
                self._await(self._pending, deadline)
            rows = torch.empty((self.world_size, len(row)), dtype=torch.int64)
            parts, own = list(rows.unbind()), torch.from_numpy(row.copy())
            work = compat.begin_all_gather(self._group, parts, own)
            self._held = (self._group, work, parts, own)
            self._set_pending(work)
            self._await(work, deadline)
            gathered: IntArray = rows.numpy()
            return gathered

    def publish(self, key: str, text: str) -> None:
        """Leave a text at the store of the job, if that is still there. See `Exchange`."""
        with suppress(StoreLost):
            self._store.call("set", f"published/{key}", text, limit_s=_PUBLISH_S)

    def published(self, key: str) -> str | None:
        """Return the text that a rank has left. See `Exchange`."""
        name = f"published/{key}"
        with suppress(StoreLost):
            if self._store.call("check", [name], limit_s=_PUBLISH_S):
                text: bytes = self._store.call("get", name, limit_s=_PUBLISH_S)
                return text.decode(errors="replace")
        return None

    def interrupt(self) -> None:
        """Make calls raise until `resume`. See `Exchange`."""
        self._interrupted.set()

    def resume(self) -> None:
        """Take `interrupt` back."""
        self._interrupted.clear()

    def settle(self, timeout_s: float) -> None:
        """Wait until no thread is inside a call of gloo."""
        if self._idle.acquire(timeout=timeout_s):
            self._idle.release()

    def _await(self, work: Any, deadline: float) -> None:
        """Wait in slices until a call is done, since gloo itself cannot be interrupted."""
        next_look = time.monotonic() + _POLL_S
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
                    self._fail(f"{_LOST} ({first_line(error)})")
            now = time.monotonic()
            if now > deadline:
                self._fail("waited in vain")
            next_look = self._look_for_failures(now, next_look)

    def _look_for_failures(self, now: float, next_look: float) -> float:
        """Look, from time to time, whether another rank has failed; return when to look again.

        Nobody waits for the answer of the store: the call itself may be about to succeed.
        """
        if self._look is None:
            if now > next_look:
                self._look = self._store.begin("check", ["failed"])
            return next_look
        if self._look.done():
            look, self._look = self._look, None
            try:
                has_failed = answer_of(look)
            except StoreLost:
                self._fail("lost the store")
            if has_failed:
                self._fail("was told by another rank")
            return now + _POLL_S
        return next_look

    def _fail(self, what: str) -> NoReturn:
        """Report to the other ranks, find out which of them do not report, and raise."""
        own, where = self.ranks[self.rank], ""
        try:
            for key, value in ((f"report/{self.rank}", what), ("failed", "1")):
                self._call("set", key, value, limit_s=self._grace_s)
            missing = self._wait_for("report", time.monotonic() + self._grace_s)
            present = [rank for rank in range(self.world_size) if self.ranks[rank] not in missing]
            texts = self._texts("report", present)
            reports = zip(present, texts, strict=True)
            seen = "; ".join(f"rank {self.ranks[rank]} {text}" for rank, text in reports)
            lost = named_ranks(missing) if missing else "a connection between ranks"
            all_late = not missing and not any(text.startswith(_LOST) for text in texts)
        except StoreLost as error:
            host = compat.store_host()  # Who else is gone, nobody can tell.
            lost = host if host.startswith("rank") else "a rank"
            has_ended = error.__cause__ is not None  # perhaps since it gave up
            if has_ended and lost != "a rank":
                lost = f"{host}, or a rank that it gave up waiting for,"
                where = f" If {host} has raised an error, that names the rank: see its output."
            seen, all_late, missing = f"rank {own} {what}; {error}", False, []
        were = "were lost: they" if len(missing) > 1 else "was lost: it"
        within = f"within {self.timeout_s} s (`timeout_s`)"
        cause = (
            f"the ranks did not all come {within}, but all have answered since: raise `timeout_s`"
            if all_late
            else f"{lost} {were} crashed, left the epoch, or did not answer {within}"
        )
        self._broken = (
            f"{cause}. What was seen: {seen}.{where} Restart all ranks from a checkpoint."
        )
        raise PeerError(self._broken)

    def _wait_for(self, what: str, deadline: float) -> list[int]:
        """Wait until every rank has set its key, and return those that have not in time."""
        keys = [f"{what}/{rank}" for rank in range(self.world_size)]
        pause_s = 0.005
        while (left_s := deadline - time.monotonic()) > 0:
            self._check_interrupted()
            # Not by the store's own `wait`, which prints a warning when it times out.
            if self._call("check", keys, limit_s=max(left_s, self._grace_s)):
                return []
            self._interrupted.wait(min(pause_s, left_s))
            pause_s = min(2 * pause_s, _POLL_S)
        return sorted({*self.ranks} - {*self._ranks_with(what)})

    def _ranks_with(self, what: str) -> list[int]:
        """Return the ranks that have set a key."""
        return [
            rank
            for index, rank in enumerate(self.ranks)
            if self._call("check", [f"{what}/{index}"], limit_s=self._grace_s)
        ]

    def _texts(self, what: str, of: Iterable[int]) -> list[str]:
        """Return what these ranks of the group have set their keys to."""
        return [self._call("get", f"{what}/{rank}", limit_s=self._grace_s).decode() for rank in of]

    def _call(self, name: str, *arguments: Any, limit_s: float) -> Any:
        """Call the store; see `BoundedStore.call`."""
        return self._store.call(name, *arguments, limit_s=limit_s, check=self._check_interrupted)

    def _check_interrupted(self) -> None:
        if self._interrupted.is_set():
            raise Interrupted("the exchange was interrupted: the graph is reset or closed.")

    def _set_pending(self, work: Any) -> None:
        """Set the work under way, or None. While there is one, what it uses cannot be deleted.

        Deleting the group would wait for the other ranks; for the tensors see `_held`.
        """
        if self._pending is None and work is not None:
            compat.keep(self._held)
        elif self._pending is not None and work is None:
            compat.release(self._held)
        self._pending = work


# A forked child must never delete a group: that joins threads which exist only in the parent. Its
# first garbage collection may come at once, so all groups are held from before the fork: in the
# parent until it is over, in the child for ever. Nor does a child wait for them at its exit.
_held: list[list[GlooExchange]] = []

if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=lambda: _held.append(list(_live)),
        after_in_parent=_held.pop,
        after_in_child=_live.clear,
    )


@atexit.register
def _interrupt_all() -> None:
    """Get all threads out of gloo: one that is inside at the very end aborts the process."""
    for exchange in list(_live):
        exchange.interrupt()
    for exchange in list(_live):
        exchange.settle(_EXIT_S)
    settle_calls(_EXIT_S)


def group_rank(process_group: Any) -> tuple[int, int]:
    """Return this process's rank in a process group, and the number of ranks in it."""
    place = getattr(process_group, "rank", None), getattr(process_group, "world_size", None)
    if isinstance(process_group, Exchange) or all(type(one) is int for one in place):
        return process_group.rank, process_group.world_size
    if process_group is None:
        return resolve_rank(None, None)
    ranks = _ranks_of(process_group)
    if dist.get_rank() not in ranks:
        raise ValueError(
            "`process_group` must contain this rank, but does not. Build the loader only on the "
            "ranks of the group, or pass the group that this rank is in."
        )
    return ranks.index(dist.get_rank()), len(ranks)


def resolve_exchange(process_group: Any, timeout_s: float) -> Exchange:
    """Return the exchange among the ranks of `process_group`."""
    if isinstance(process_group, Exchange):
        return process_group
    _, world_size = group_rank(process_group)
    if process_group is None and not (dist.is_available() and dist.is_initialized()):
        if world_size > 1:
            raise RuntimeError(
                f"`WORLD_SIZE` says that the job has {world_size} ranks, but torch.distributed is "
                "not initialised, so nothing can align them. Call "
                '`torch.distributed.init_process_group("gloo")` (or "nccl") before the first '
                "iteration."
            )
        return Exchange()
    if world_size == 1:
        return Exchange()
    return GlooExchange(_ranks_of(process_group), timeout_s)


def _ranks_of(process_group: Any) -> list[int]:
    """Return the ranks of the job that a group has, or that share steps in a `DeviceMesh`."""
    if process_group is None:
        return [*range(dist.get_world_size())]
    if hasattr(process_group, "mesh_dim_names"):
        return _data_ranks(process_group)
    if process_group == dist.GroupMember.NON_GROUP_MEMBER:  # of a `new_group`
        return []
    if not isinstance(process_group, dist.ProcessGroup):
        raise TypeError(
            "`process_group` must be a process group, a `DeviceMesh` or None, but is "
            f"`{type(process_group).__name__}` instead."
        )
    return dist.get_process_group_ranks(process_group)


def _data_ranks(mesh: Any) -> list[int]:
    """Return the ranks that take the same steps on other data, this one among them."""
    if (here := mesh.get_coordinate()) is None:
        return []
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    if mesh.ndim == 1 and not _words_of(names[0]) <= _MODEL_DIMENSIONS:
        return list(map(int, mesh.mesh.tolist()))  # the dimension of the data, of any name
    if mesh.ndim == 1 and mesh.size() < dist.get_world_size():
        raise ValueError(
            f"`process_group` is the dimension {names[0]!r} of a `DeviceMesh` alone, whose ranks "
            "have the same data, so that it does not say which have other data. Pass the whole "
            "mesh, or the dimension of the data."
        )
    place = [
        slice(None) if _shares_steps(name, names) else at
        for name, at in zip(names, here, strict=True)
    ]
    ranks: list[int] = mesh.mesh[tuple(place)].flatten().tolist()
    return ranks


def _words_of(name: str) -> set[str]:
    return {*name.lower().split("_")}


def _shares_steps(name: str, names: Sequence[str]) -> bool:
    """Tell whether the ranks along a dimension of a mesh have different data."""
    words = _words_of(name)
    if words <= _DATA_DIMENSIONS:
        return True
    if words <= _MODEL_DIMENSIONS:
        return False
    raise ValueError(
        f"`process_group` is a `DeviceMesh` with the dimensions {[*names]}, of which {name!r} "
        "does not say whether its ranks have the same data. Name those that have other data as "
        f"{sorted(_DATA_DIMENSIONS)}, and those that share data as {sorted(_MODEL_DIMENSIONS)}; "
        'or pass the dimension of the data alone, as in `mesh["dp"]`.'
    )
