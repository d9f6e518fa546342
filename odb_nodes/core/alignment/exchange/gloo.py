"""An exchange between ranks over gloo, and the ranks that a `process_group` argument names."""

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
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
import torch.distributed as dist

from odb_nodes._compat import torch_distributed as compat
from odb_nodes._support.arrays import IntArray
from odb_nodes._support.processes import resolve_rank
from odb_nodes._support.text import named_ranks
from odb_nodes.core.alignment.exchange.base import (
    Exchange,
    Interrupted,
    KnownRank,
    ProcessGroupLike,
)
from odb_nodes.core.alignment.exchange.store import (
    BoundedStore,
    StoreLost,
    answer_of,
    first_line,
    settle_calls,
)
from odb_nodes.errors import PeerError, StateError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_SLICE = timedelta(milliseconds=50)  # length of a wait between two checks of `interrupt`
_POLL_S = 1.0  # between two checks of the store for failures of other ranks
_GRACE_S = 5.0  # for all ranks to report, so that an error can name silent ranks
_LEAST_GRACE_S = 2.0  # the minimum for a short `timeout_s`, so that slow ranks are not named
_EXIT_S = 5.0  # for a thread to leave gloo, or the store, before the interpreter ends
_PUBLISH_S = 2.0  # for the store to take or return a published text
_UNDO_S = 1.0  # for the store to delete the key of this rank
_DATA_DIMENSIONS = {*"dp ddp fsdp hsdp data replicate shard batch".split()}  # words in names
_MODEL_DIMENSIONS = {*"tp cp sp pp ep etp tensor context sequence pipeline expert model".split()}
_LOST = "lost a connection"
_HOST_ENDED = "it was killed or stopped, or had given up waiting for a late rank"

_live: weakref.WeakSet[GlooExchange] = weakref.WeakSet()


class GlooExchange(Exchange):
    """An all-gather between ranks of the job, over separate gloo connections.

    Process groups of the same ranks may be in use meanwhile, with any backend and on any thread.
    The connections are made once, serve all epochs, and close with this object.
    """

    # Why calls meet: gloo matches the n-th all-gather of a group on one rank with the n-th on every
    # other rank. A call cannot be taken back, so an interrupted call stays pending, and the next
    # call first waits for the pending call: no rank ever skips a call.
    #
    # Why every wait ends: gloo is waited for in slices. After each slice, the waiting thread checks
    # for an interrupt and for its deadline, and once per second whether another rank has reported a
    # failure to the store, whose calls have limits. An exchange that has failed once is broken for
    # good: each later call raises at once, so no rank can meet an earlier call.
    #
    # Threads: `_idle` lets one thread at a time into a call. `interrupt` and `resume` only set an
    # event and take no lock, so another thread can always interrupt the thread inside.

    def __init__(self, ranks_of_job: Sequence[int], timeout_s: float) -> None:
        self.ranks = ranks_of_job
        self.rank = self.ranks.index(dist.get_rank())
        self.world_size = len(self.ranks)
        self.timeout_s = timeout_s
        self._grace_s = min(_GRACE_S, max(_LEAST_GRACE_S, timeout_s / 4))
        store_s = max(timeout_s, self._grace_s)
        # The n-th exchange of one rank meets the n-th exchange of the other ranks. Exchanges are
        # counted here, in program order. Threads call `connect`, and their order may differ between
        # ranks: to count there would connect different loaders.
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
        self._look: Future[Any] | None = None  # a check of the store for failures of other ranks
        self._group: Any = None
        self._pending: Any = None  # the work of an interrupted call
        # The group and the tensors of the last call. If gloo's thread held the last reference to
        # them, deleting them would need the interpreter, and abort a process that is ending.
        self._kept: Any = None
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
            if missing:
                cause = (
                    f"{named_ranks(missing)} did not come to the first exchange within "
                    f"{self.timeout_s} s (`timeout_s`). A missing rank has crashed (see its "
                    "output) or is late."
                )
            else:
                cause = (
                    f"{named_ranks(gave_up)} had given up waiting for the first exchange when this "
                    "rank came."
                )
            self._broken = f"{cause} {self._advice}"
            raise PeerError(self._broken)
        sizes = [int(text) for text in self._texts("size", range(self.world_size))]
        if len({*sizes}) > 1:
            raise StateError(
                "the ranks have messages of different sizes, "
                f"{dict(zip(self.ranks, sizes, strict=True))}: `round_size`, `accumulate`, "
                f"`virtual_ranks` or the number of `tasks` differ between them. {self._advice}"
            )
        # All ranks are here: connecting takes long only if a rank is lost meanwhile.
        remaining_s = max(deadline - time.monotonic(), self._grace_s)
        try:
            self._group = self._store.make_group("gloo", self.rank, self.world_size, remaining_s)
        except RuntimeError as error:
            raise PeerError(
                "a rank was lost while the ranks connected to each other: it was killed, or had "
                f"given up waiting for a late rank ({first_line(error)}). Restart all ranks."
            ) from error

    def all_gather(self, row: IntArray) -> IntArray:
        """Return the rows of all ranks. See `Exchange`."""
        with self._idle:
            if self._broken is not None:
                raise PeerError(self._broken)
            self._check_interrupted()
            # `_fail` takes up to `_grace_s`, and the whole call at most `timeout_s`. Only a short
            # `timeout_s` is the wait for the ranks alone, which `_fail` prolongs.
            limit_s = max(self.timeout_s - self._grace_s, 0.75 * self.timeout_s)
            deadline = time.monotonic() + limit_s
            if self._pending is not None:
                self._await(self._pending, deadline)
            rows = torch.empty((self.world_size, len(row)), dtype=torch.int64)
            parts = list(rows.unbind())
            sent = torch.from_numpy(row.copy())
            work = compat.begin_all_gather(self._group, parts, sent)
            self._kept = (self._group, work, parts, sent)
            self._set_pending(work)
            self._await(work, deadline)
            gathered: IntArray = rows.numpy()
            return gathered

    def publish(self, key: str, text: str) -> None:
        """Write a text to the store of the job, if it still answers. See `Exchange`."""
        with suppress(StoreLost):
            self._store.call("set", f"published/{key}", text, limit_s=_PUBLISH_S)

    def published(self, key: str) -> str | None:
        """Return the text that a rank has published. See `Exchange`."""
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
        """Undo `interrupt`."""
        self._interrupted.clear()

    def settle(self, timeout_s: float) -> None:
        """Wait until no thread is inside a call of gloo."""
        if self._idle.acquire(timeout=timeout_s):
            self._idle.release()

    def _await(self, work: Any, deadline: float) -> None:
        """Wait in slices until a call is done, because gloo itself cannot be interrupted."""
        next_look = time.monotonic() + _POLL_S
        while True:
            self._check_interrupted()
            try:
                work.wait(_SLICE)
                self._set_pending(None)
                return
            except RuntimeError as error:
                # A call may complete between the timeout of its slice and this line. The call has
                # failed only if the error is no timeout.
                if work.is_completed() and not compat.is_wait_timeout(error):
                    self._set_pending(None)
                    self._fail(f"{_LOST} ({first_line(error)})")
            now = time.monotonic()
            if now > deadline:
                self._fail("waited in vain")
            next_look = self._look_for_failures(now, next_look)

    def _look_for_failures(self, now: float, next_look: float) -> float:
        """Check once per second whether another rank has failed; return the time of the next check.

        This does not wait for the store: the call itself may be about to succeed.
        """
        look = self._look
        if look is None:
            if now > next_look:
                self._look = self._store.begin("check", ["failed"])
            return next_look
        if not look.done():
            return next_look
        self._look = None
        try:
            has_failed = answer_of(look)
        except StoreLost:
            self._fail("lost the store")
        if has_failed:
            self._fail("saw the failure that another rank reported")
        return now + _POLL_S

    def _fail(self, report: str) -> NoReturn:
        """Report to the other ranks, find out which ranks do not report, and raise."""
        within = f"within {self.timeout_s} s (`timeout_s`)"
        try:
            self._call("set", f"report/{self.rank}", report, limit_s=self._grace_s)
            self._call("set", "failed", "1", limit_s=self._grace_s)
            missing = self._wait_for("report", time.monotonic() + self._grace_s)
            present = [rank for rank in range(self.world_size) if self.ranks[rank] not in missing]
            texts = self._texts("report", present)
        except StoreLost as error:
            cause = self._loss_of_store(error, within)
            seen = f"rank {self.ranks[self.rank]} {report}; {error}"
        else:
            reports = zip(present, texts, strict=True)
            seen = "; ".join(f"rank {self.ranks[rank]} {text}" for rank, text in reports)
            if missing:
                cause = f"{named_ranks(missing)} {_was_lost(len(missing), within)}"
            elif any(text.startswith(_LOST) for text in texts):
                cause = f"a connection between ranks {_was_lost(1, within)}"
            else:
                cause = (
                    f"the ranks did not all come {within}, but all have answered since: raise "
                    "`timeout_s`"
                )
        self._broken = f"{cause}. What was seen: {seen}. Restart all ranks from a checkpoint."
        raise PeerError(self._broken)

    def _loss_of_store(self, error: StoreLost, within: str) -> str:
        """Return the cause of an error if the store does not answer: its host, if that is known.

        The host may have ended because it gave up waiting for another rank.
        """
        host = compat.store_host()
        if not host.startswith("rank"):
            return f"a rank {_was_lost(1, within)}"
        if error.__cause__ is None:
            return f"{host} {_was_lost(1, within)}"
        return (
            f"{host}, or a rank that it gave up waiting for, {_was_lost(1, within)}. If {host} has "
            "raised an error, that names the rank: see its output"
        )

    def _wait_for(self, key: str, deadline: float) -> list[int]:
        """Wait until every rank has set a key; return the ranks that have not set it in time."""
        keys = [f"{key}/{rank}" for rank in range(self.world_size)]
        pause_s = 0.005
        while (remaining_s := deadline - time.monotonic()) > 0:
            self._check_interrupted()
            # Not by `wait` of the store, which prints a warning on a timeout.
            if self._call("check", keys, limit_s=max(remaining_s, self._grace_s)):
                return []
            self._interrupted.wait(min(pause_s, remaining_s))
            pause_s = min(2 * pause_s, _POLL_S)
        return sorted({*self.ranks} - {*self._ranks_with(key)})

    def _ranks_with(self, key: str) -> list[int]:
        return [
            rank
            for index, rank in enumerate(self.ranks)
            if self._call("check", [f"{key}/{index}"], limit_s=self._grace_s)
        ]

    def _texts(self, key: str, ranks: Iterable[int]) -> list[str]:
        """Return the values of a key that these ranks have set."""
        return [
            self._call("get", f"{key}/{rank}", limit_s=self._grace_s).decode() for rank in ranks
        ]

    def _call(self, name: str, *arguments: Any, limit_s: float) -> Any:
        return self._store.call(name, *arguments, limit_s=limit_s, check=self._check_interrupted)

    def _check_interrupted(self) -> None:
        if self._interrupted.is_set():
            raise Interrupted("the exchange was interrupted: the graph is reset or closed.")

    def _set_pending(self, work: Any) -> None:
        """Set the work under way, or `None`, and protect the objects of work under way.

        To delete the group would wait for the other ranks; for the tensors see `_kept`.
        """
        if self._pending is None and work is not None:
            compat.keep_alive(self._kept)
        elif self._pending is not None and work is None:
            compat.stop_keeping_alive(self._kept)
        self._pending = work


def _was_lost(count: int, within: str) -> str:
    were = "were lost: they" if count > 1 else "was lost: it"
    return f"{were} crashed, left the epoch, or did not answer {within}"


# A forked child must never delete a group: that joins threads which exist only in the parent. The
# first garbage collection of the child may come at once, so all groups are kept from before the
# fork: in the parent until the fork is over, in the child for ever, even at its exit.
_kept_at_fork: list[list[GlooExchange]] = []

if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=lambda: _kept_at_fork.append(list(_live)),
        after_in_parent=_kept_at_fork.pop,
        after_in_child=_live.clear,
    )


@atexit.register
def _interrupt_all() -> None:
    """Get all threads out of gloo: a thread inside at the interpreter's end aborts the process."""
    for exchange in list(_live):
        exchange.interrupt()
    for exchange in list(_live):
        exchange.settle(_EXIT_S)
    settle_calls(_EXIT_S)


def group_rank(process_group: ProcessGroupLike) -> tuple[int, int]:
    """Return this process's rank in a process group, and the number of ranks in it."""
    if isinstance(process_group, KnownRank):
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


def resolve_exchange(process_group: ProcessGroupLike, timeout_s: float) -> Exchange:
    """Return an exchange between the ranks of `process_group`."""
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


def _ranks_of(process_group: ProcessGroupLike) -> list[int]:
    """Return the ranks of a group, or the ranks that share steps in a `DeviceMesh`."""
    check_process_group(process_group)
    if process_group is None:
        return [*range(dist.get_world_size())]
    if _is_no_member(process_group):
        return []
    if isinstance(process_group, dist.ProcessGroup):
        return dist.get_process_group_ranks(process_group)
    return _data_ranks(cast("DeviceMesh", process_group))


def check_process_group(process_group: ProcessGroupLike) -> None:
    """Raise a `TypeError` unless a `process_group` argument is of a valid type."""
    if process_group is None:
        return
    from torch.distributed.device_mesh import DeviceMesh  # only in torch with torch.distributed

    is_group = isinstance(process_group, (DeviceMesh, dist.ProcessGroup))
    if not (is_group or _is_no_member(process_group)):
        raise TypeError(
            "`process_group` must be a process group, a `DeviceMesh` or None, but is "
            f"`{type(process_group).__name__}` instead."
        )


def _is_no_member(process_group: ProcessGroupLike) -> bool:
    no_member: Any = dist.GroupMember.NON_GROUP_MEMBER  # returned by `new_group`
    return bool(process_group == no_member)


def _data_ranks(mesh: DeviceMesh) -> list[int]:
    """Return the ranks that share the steps of this rank with other data, including this rank."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return []
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    if mesh.ndim == 1 and not _words_of(names[0]) <= _MODEL_DIMENSIONS:
        return [int(rank) for rank in mesh.mesh.tolist()]  # of the data, under any name
    if mesh.ndim == 1 and mesh.size() < dist.get_world_size():
        raise ValueError(
            f"`process_group` is the dimension {names[0]!r} of a `DeviceMesh` alone, whose ranks "
            "have the same data, so that it does not say which ranks have other data. Pass the "
            "whole mesh, or the dimension of the data."
        )
    indices = [
        slice(None) if _has_other_data(name, names) else index
        for name, index in zip(names, coordinate, strict=True)
    ]
    ranks: list[int] = mesh.mesh[tuple(indices)].flatten().tolist()
    return ranks


def _words_of(name: str) -> set[str]:
    return {*name.lower().split("_")}


def _has_other_data(name: str, names: Sequence[str]) -> bool:
    """Return whether the ranks along a dimension of a mesh have different data."""
    words = _words_of(name)
    if words <= _DATA_DIMENSIONS:
        return True
    if words <= _MODEL_DIMENSIONS:
        return False
    raise ValueError(
        f"`process_group` is a `DeviceMesh` with the dimensions {[*names]}, of which {name!r} "
        "does not say whether its ranks have the same data. Name dimensions of different data "
        f"{sorted(_DATA_DIMENSIONS)}, and dimensions of the same data {sorted(_MODEL_DIMENSIONS)};"
        ' or pass the dimension of the data alone, as in `mesh["dp"]`.'
    )
