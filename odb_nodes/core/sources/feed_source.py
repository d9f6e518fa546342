"""Source node: items that other threads and processes make while ranks train."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from torchdata.nodes import BaseNode

from odb_nodes._support.checks import MAX_KEY, check_count, check_seconds
from odb_nodes._support.encoding import decode, encode
from odb_nodes._support.text import counted
from odb_nodes.core.contract import EpochNode, EpochState, SourceState
from odb_nodes.core.contract.graph import length_of
from odb_nodes.core.contract.node import call_member, check_node, checked_key, snapshot
from odb_nodes.core.contract.state import copy_state
from odb_nodes.core.sample import ItemKey, Skipped
from odb_nodes.core.sources.feed_client import (
    POLL_S,
    SKIPPED,
    FeedClient,
    FeedServer,
    Request,
    check_address,
    encoded_items,
)
from odb_nodes.errors import SampleError, StateError, WorkerError

_SHOWN = 5  # keys that an error names
_Phase = Literal["waiting", "open", "closed"]
"""Waiting: until a reset, and after `interrupt`. A reset opens the feed, also a closed feed."""


class _Entry(NamedTuple):
    """A request, or what was made of it."""

    key: ItemKey
    data: bytes  # encoded
    version: int = 0
    items: Any = None  # decoded, but for an entry of a state

    def to_state(self) -> tuple[Any, ...]:
        return (*self.key, self.data, self.version)

    @classmethod
    def of_state(cls, saved: tuple[Any, ...]) -> _Entry:
        *key, data, version = saved
        return cls(ItemKey(*key), data, version)


def _items_of(data: bytes) -> Any:
    """Return what was put: the reverse of `encoded_items`."""
    items = decode(data)
    is_skipped = isinstance(items, tuple) and items[:1] == (SKIPPED,)
    return Skipped(*items[1:]) if is_skipped else items


@dataclass(kw_only=True)
class FeedState(EpochState):
    """Where a `FeedSource` stands. Keys of items are fields of `ItemKey`, data is encoded."""

    source: SourceState
    ended: bool = False  # whether the source has ended
    # (source, key, world size, repeat, data, version): what is to be made, again if it was begun
    requests: list[tuple[str, int, int, int, bytes, int]] = field(default_factory=list)
    # what was put and not yet yielded, in order of `put`
    finished: list[tuple[str, int, int, int, bytes, int]] = field(default_factory=list)
    oldest_version: int = 0


class FeedSource(EpochNode[Any, FeedState]):
    """Yields what others make of the items of its source, in the order in which it is put.

    For data that is made while ranks train: rollouts of reinforcement learning, distillation,
    synthetic data. The source yields prompts, or their indices. Generators take them by
    `requests`, and `put` what they have made, in any order, from any thread, or from any process by
    `serve`. Each key is yielded once in an epoch, however long it takes.

    What is put under a key stays together: a list of rows, such as all answers to a prompt, is one
    sample, whose rows share a step. See `RowsObserve` and `RowsCollate`.

    State: the state of the source; what was put and not yet yielded; and the requests that were
    not yet put, which are issued again after a restore. Nodes above must hold their samples in
    their own state (`WindowBucketer(state="payload")`, which `ODBDataLoader` chooses): a finished
    item cannot be made again.

    Args:
        source: node that yields what something is to be made of. Its items, and what is put, must
            be dicts, lists and tuples of tensors, arrays, numbers and strings.
        max_ahead: the most requests and finished items that wait at a time. Then `requests` waits:
            generators do not run further ahead of training.
        timeout_s: seconds without any `put` after which `next` raises an error.

    Raises:
        TypeError, ValueError: an argument is not valid.
    """

    STATE = FeedState
    retries_errors = True
    keeps_failed_items = True
    yields_once = True
    """A `WindowBucketer` above cannot have items made again."""

    def __init__(
        self, source: BaseNode[Any], *, max_ahead: int = 64, timeout_s: float = 1800.0
    ) -> None:
        super().__init__()
        check_node("source", source)
        self.source = source
        self._max_ahead = check_count("max_ahead", max_ahead)
        check_seconds("timeout_s", timeout_s)
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._pid = os.getpid()
        self._oldest_version = 0
        self._last_key: ItemKey | None = None
        self._server: FeedServer | None = None
        self._served: tuple[tuple[str, int], bytes] | None = None  # where a reset serves again
        self._phase: _Phase = "waiting"
        self._checks: tuple[Callable[[Any], object], ...] = ()
        self._clear()

    def _clear(self) -> None:
        self._to_issue: deque[_Entry] = deque()
        self._in_flight: dict[int, tuple[_Entry, str]] = {}  # by key, with the client that has it
        self._issued_before: set[int] = set()  # keys in `_to_issue` that a generator may still put
        self._finished: deque[_Entry] = deque()
        self._ended = False  # whether the source has ended
        self._failure: Exception | None = None  # of the source
        self._is_asked = False  # whether a generator has called `request` since the reset
        self._ignored = 0  # calls of `put` whose key was not in flight
        self._last_put_s = time.monotonic()

    # --- for generators -------------------------------------------------------------------------

    def request(self, timeout_s: float | None = None) -> Request | None:
        """Return the next item that something is to be made of.

        Waits while `max_ahead` requests and finished items are out, between epochs, and before the
        first reset; a fifth of a second if the feed is closed, which an `iter()` opens again.

        Args:
            timeout_s: the most seconds to wait. Default: no limit.

        Returns:
            The item; or `None` after `timeout_s`, or if the feed is closed.

        Raises:
            WorkerError: this is a forked process, which has a copy of the feed. Use `serve`.
        """
        entry = self.issue(timeout_s)
        return None if entry is None else Request(entry.key.key, decode(entry.data))

    def requests(self) -> Iterator[Request]:
        """Yield the items to make something of, until the feed is closed. Call it in a loop."""
        while (request := self.request()) is not None:
            yield request

    def put(self, key: int, items: Any, version: int = 0) -> bool:
        """Hand in what was made of a request.

        Args:
            key: the key of the request.
            items: what was made of it: a sample, or a list of samples that share a step; or a
                `Skipped` if nothing could be made of it.
            version: number of the policy that made it, see `oldest_version`.

        Returns:
            Whether it is taken. `False` if nothing is expected of the key, because it was put
            before or never requested, or if the feed is closed. Go on with the next request.

        Raises:
            TypeError, ValueError: an argument is not valid.
            SampleError: the items hold something that a state cannot hold, or the loader refuses
                them: no integer `input_ids`, unlike keys of rows. The request stays in flight.
            WorkerError: this is a forked process, which has a copy of the feed. Use `serve`.
        """
        return self.accept(check_count("key", key, 0, MAX_KEY), encoded_items(items), version)

    @property
    def oldest_version(self) -> int:
        """The oldest version that is trained on; older items are left out as "stale".

        Items that the nodes above have pulled already are not affected.
        """
        return self._oldest_version

    @oldest_version.setter
    def oldest_version(self, version: int) -> None:
        with self._changed:
            self._oldest_version = check_count("oldest_version", version, 0)

    @property
    def in_flight(self) -> list[int]:
        """Keys of the requests that were issued and not yet put."""
        with self._changed:
            return [*self._in_flight]

    def serve(
        self, address: tuple[str, int] = ("127.0.0.1", 0), authkey: bytes | None = None
    ) -> FeedClient:
        """Accept `request` and `put` from other processes, until `close`.

        If the connection to a process ends, the requests that it had not put are issued again.

        Args:
            address: host and port to listen on; port 0 is a free port. `("0.0.0.0", port)` is
                reached from other hosts.
            authkey: secret that clients prove to know. Default: a random one.

        Returns:
            A client, which can be pickled, such as for the arguments of a process.

        Raises:
            OSError: the address cannot be listened on.
            TypeError, ValueError: an argument is not valid, or the feed is served already.
        """
        authkey = os.urandom(32) if authkey is None else authkey
        check_address(address, authkey, least_port=0)
        with self._changed:
            if self._server is not None:
                raise ValueError(
                    f"this FeedSource is served already, at {self._server.client.address}. Use the "
                    "client that the first call has returned."
                )
            self._server = FeedServer(self, address, authkey)
            client = self._server.client
            self._served = client.address, client.authkey
            return client

    # --- the contract of a node -----------------------------------------------------------------

    def __len__(self) -> int:
        """Return how many items an epoch has."""
        return length_of(self.source)

    def begin_epoch(self) -> None:
        """Begin the epoch of the source."""
        with self._changed:
            self._clear()
            self.source.reset(None)
            self._open()

    def restore(self, state: FeedState) -> None:
        """Go to the position of a state; all requests that were not yet put are issued again."""
        with self._changed:
            self._clear()
            self.source.reset(copy_state(state.source))
            self._ended = state.ended
            try:
                self._to_issue.extend(map(_Entry.of_state, state.requests))
                self._issued_before = {entry.key.key for entry in self._to_issue}
                self._finished.extend(map(_Entry.of_state, state.finished))
            except (TypeError, ValueError) as error:
                raise StateError(
                    f"the items of FeedSource are damaged: {error}. Use an earlier checkpoint."
                ) from error
            self._oldest_version = max(self._oldest_version, state.oldest_version)
            self._open()

    def save(self) -> FeedState:
        """Return the state of the source, the requests, and what was put."""
        with self._changed:
            requests = [*(entry for entry, _ in self._in_flight.values()), *self._to_issue]
            return FeedState(
                source=snapshot(self.source),
                ended=self._ended,
                requests=[entry.to_state() for entry in requests],
                finished=[entry.to_state() for entry in self._finished],
                oldest_version=self._oldest_version,
            )

    def next(self) -> Any:
        """Return what was put next; a `Skipped` if it is older than `oldest_version`.

        Raises:
            StopIteration: all items of the source were yielded.
            WorkerError: nothing was put within `timeout_s`, or the feed was closed.
        """
        with self._changed:
            since_s = time.monotonic()
            while not self._finished:
                if self._phase != "open":
                    raise WorkerError("FeedSource was closed while `next` waited for an item.")
                self._look_ahead()
                if not self._in_flight and not self._to_issue:
                    if self._failure is not None:
                        raise self._failure
                    raise StopIteration
                waited_s = time.monotonic() - max(since_s, self._last_put_s)
                if waited_s >= self._timeout_s:
                    raise WorkerError(self._why_nothing())
                self._changed.wait(min(POLL_S, self._timeout_s - waited_s))
            entry = self._finished[0]
            items = _items_of(entry.data) if entry.items is None else entry.items
            self._finished.popleft()
            self._last_key = entry.key
            self._changed.notify_all()
            oldest = self._oldest_version
        if entry.version < oldest and not isinstance(items, Skipped):
            return Skipped("stale", f"it is of version {entry.version}, older than {oldest}.")
        return items

    def item_key(self) -> ItemKey | None:
        """Return the key of the last item."""
        return self._last_key

    def interrupt(self) -> None:
        """Make a `next` that waits raise, until the next reset."""
        self._leave("waiting")

    def close(self) -> None:
        """End `requests` and connections."""
        self._leave("closed")
        server, self._server = self._server, None
        if server is not None:
            server.close()

    # --------------------------------------------------------------------------------------------

    def check_by(self, *checks: Callable[[Any], object]) -> None:
        """Have `put` refuse items of which a check raises."""
        self._checks = checks

    @property
    def is_closed(self) -> bool:
        """Whether the feed is closed, until the next reset."""
        return self._phase == "closed"

    def _leave(self, phase: _Phase) -> None:
        with self._changed:
            if not self.is_closed:
                self._phase = phase
            self._changed.notify_all()

    def _open(self) -> None:
        self._phase = "open"
        self._pid = os.getpid()
        if self._server is None and self._served is not None:  # after `close`
            self._server = FeedServer(self, *self._served)
        self._changed.notify_all()

    def _look_ahead(self) -> None:
        """Have a request ready, unless the source has ended or failed."""
        if self._to_issue or self._ended or self._failure is not None:
            return
        try:
            item = next(self.source)
            key = checked_key(self.source, call_member(self.source, "item_key"))
            if key is None:
                raise SampleError(
                    f"`source` of FeedSource must have keys, by which items are put, but "
                    f"`{type(self.source).__name__}` has none. Use a `ShardedSampler`."
                )
            if key.key in self._in_flight:
                raise SampleError(
                    f"the keys of `source` of FeedSource must differ, but key {key.key} is in "
                    "flight, and comes again. Leave out replacement; give each source of a mixture "
                    "a feed of its own."
                )
            self._to_issue.append(_Entry(key, encode(item)))
        except StopIteration:
            self._ended = True
            self._changed.notify_all()
        except Exception as error:  # of any kind, also the user's
            self._failure = error
            self._changed.notify_all()

    def issue(self, timeout_s: float | None, holder: str = "") -> _Entry | None:
        """Return the next request, which `holder` then has; `None` after `timeout_s`."""
        self._check_process()
        limit_s = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            if self.is_closed:  # A loop over `requests` must not spin.
                wait_s = POLL_S if timeout_s is None else min(POLL_S, timeout_s)
                self._changed.wait_for(lambda: not self.is_closed, wait_s)
            while not self.is_closed:
                self._is_asked = self._is_asked or self._phase == "open"
                ahead = len(self._in_flight) + len(self._finished)
                if self._phase == "open" and ahead < self._max_ahead:
                    self._look_ahead()
                    if self._to_issue:
                        entry = self._to_issue.popleft()
                        self._in_flight[entry.key.key] = entry, holder
                        self._issued_before.discard(entry.key.key)
                        return entry
                wait_s = POLL_S if limit_s is None else min(POLL_S, limit_s - time.monotonic())
                if wait_s <= 0:
                    break
                self._changed.wait(wait_s)
        return None

    def accept(self, key: int, data: bytes, version: int) -> bool:
        """Take what was made of a request; return whether it was expected."""
        self._check_process()
        check_count("version", version, 0, MAX_KEY)
        is_expected = self._expects(key)
        # Without the lock: this takes long, and may call the user's `observe`.
        items = self._checked_items(key, data) if is_expected else None
        with self._changed:
            if not (is_expected and self._expects(key)):  # it may have changed meanwhile
                self._ignored += 1
                return False
            if key in self._in_flight:
                request, _ = self._in_flight.pop(key)
            else:  # by a generator that an earlier trainer had
                request = next(entry for entry in self._to_issue if entry.key.key == key)
                self._to_issue.remove(request)
                self._issued_before.remove(key)
            self._finished.append(_Entry(request.key, data, version, items))
            self._last_put_s = time.monotonic()
            self._changed.notify_all()
            return True

    def _expects(self, key: int) -> bool:
        with self._changed:
            return not self.is_closed and (key in self._in_flight or key in self._issued_before)

    def _checked_items(self, key: int, data: bytes) -> Any:
        items = _items_of(data)
        try:
            for check in self._checks:
                check(items)
        except Exception as error:  # of any kind, also the user's
            raise SampleError(
                f"the loader refuses what is put for key {key}: {error} Its request stays in "
                "flight: put other items, or `Skipped(reason)` to leave the key out."
            ) from error
        return items

    def issue_again(self, holder: str) -> None:
        """Issue the requests again that a client holds, which has ended."""
        with self._changed:
            lost = [entry for entry, client in self._in_flight.values() if client == holder]
            for entry in lost:
                del self._in_flight[entry.key.key]
                self._issued_before.add(entry.key.key)
            self._to_issue.extendleft(reversed(lost))
            self._changed.notify_all()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise WorkerError(
                "this process has a copy of a FeedSource of its parent, which does not see what is "
                "put here. Pass the result of `feed.serve()` to the process."
            )

    def _why_nothing(self) -> str:
        keys = [*self._in_flight]
        more = " and so on" * (len(keys) > _SHOWN)
        shown = f" ({', '.join(map(str, keys[:_SHOWN]))}{more})" if keys else ""
        text = (
            f"nothing was put into FeedSource for {self._timeout_s:g} s, `timeout_s`, with "
            f"{counted(len(keys), 'request')} in flight{shown} and {len(self._to_issue)} to issue."
        )
        if self._ignored:
            text += f" {counted(self._ignored, 'call')} of `put` had a key that was not in flight."
        if not self._is_asked:
            text += (
                " No generator has called `requests` since `iter()`. It ends when the feed is "
                "closed, as after an error: generators must call it again, in a loop."
            )
        return f"{text} See whether the generators run, or raise `timeout_s`."
