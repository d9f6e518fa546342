"""Requests and answers of a `FeedSource` over connections to other processes."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import (
    Client,
    Connection,
    Listener,
    answer_challenge,
    deliver_challenge,
)
from typing import Any, NamedTuple

from odb_nodes._support.checks import MAX_KEY, check_count
from odb_nodes._support.encoding import decode, encode
from odb_nodes._support.processes import start_thread
from odb_nodes.core.sample import Skipped
from odb_nodes.errors import SampleError, WorkerError

POLL_S = 0.2  # between checks whether a connection or a feed was closed
_EXIT_S = 5.0  # for the thread that accepts connections
_HANDSHAKE_S = 10.0  # for the other end of a new connection to prove that it knows the secret
_FAREWELL_S = 60.0  # in which a closed feed still answers a client that says nothing
_CLOSED = "closed"  # answers a client of a feed that was closed


class Request(NamedTuple):
    """An item of the source, of which `put` expects what was made of it.

    Attributes:
        key: number of the item in its source, for `put`.
        item: the item itself.
    """

    key: int
    item: Any


def check_address(address: Any, authkey: Any, least_port: int = 1) -> None:
    """Raise an error unless `address` and `authkey` can be those of a feed."""
    is_pair = isinstance(address, tuple) and len(address) == 2
    if not is_pair or not isinstance(address[0], str):
        raise TypeError(
            f"`address` must be (host, port), but is {address!r:.80} instead. Pass "
            '`("127.0.0.1", 29417)`, say.'
        )
    check_count("address[1]", address[1], least_port, 65_535)
    if not (isinstance(authkey, bytes) and authkey):
        kind = "empty" if authkey == b"" else f"a `{type(authkey).__name__}`"  # It is secret.
        raise ValueError(f'`authkey` must be 1 byte or more, as b"secret", but is {kind} instead.')


SKIPPED = "odb_nodes.Skipped"  # marks what stands for a `Skipped`


def encoded_items(items: Any) -> bytes:
    """Return what is put as bytes; a `Skipped` as a marked tuple."""
    if isinstance(items, Skipped):
        return encode((SKIPPED, items.reason, items.message))
    if items is None:
        raise TypeError(
            "`items` must be a sample or a list of samples, but is None. Put `Skipped(reason)` if "
            "nothing could be made."
        )
    if isinstance(items, tuple):
        raise TypeError("`items` must be a sample or a list of samples, but is a tuple instead.")
    if isinstance(items, list) and not items:
        raise ValueError(
            "`items` must have at least 1 row, but is empty. Put `Skipped(reason)` if nothing "
            "could be made."
        )
    return encode(items)


class FeedClient:
    """A `FeedSource` of another process: `request`, `requests` and `put` as there.

    It can be pickled, and connects when it is first used. Each process has connections of its own,
    one for requests and one for `put`, which its threads share.

    Args:
        address: host and port of the feed.
        authkey: the secret of the feed.

    Raises:
        TypeError, ValueError: an argument is not valid.
    """

    def __init__(self, address: tuple[str, int], authkey: bytes) -> None:
        check_address(address, authkey)
        self.address, self.authkey = address, authkey
        self._begin()

    def _begin(self) -> None:
        """Be a client of this process: with locks, connections and a name of its own."""
        self._lines = {name: _Line(self) for name in ("request", "put")}
        self._pid = os.getpid()
        self._name = uuid.uuid4().hex

    def __reduce__(self) -> tuple[Any, ...]:
        return FeedClient, (self.address, self.authkey)

    def request(self, timeout_s: float | None = None) -> Request | None:
        """Return the next item; `None` after `timeout_s`, or if the feed is closed.

        Raises:
            WorkerError: the feed cannot be reached. The next call connects again.
        """
        limit_s = None if timeout_s is None else time.monotonic() + timeout_s
        while (answer := self._call("request", POLL_S)) != _CLOSED:
            if answer is not None:
                key, data = answer
                return Request(key, decode(data))
            if limit_s is not None and time.monotonic() >= limit_s:
                break
        return None

    def requests(self) -> Iterator[Request]:
        """Yield the items that something is to be made of, until the feed is closed.

        Raises:
            WorkerError: the feed cannot be reached: its process was killed, or has ended since the
                last call. The next call connects again.
        """
        while (request := self.request()) is not None:
            yield request

    def put(self, key: int, items: Any, version: int = 0) -> bool:
        """Hand in what was made of a request: see `FeedSource.put`.

        Raises:
            SampleError: the loader refuses the items.
            WorkerError: the feed cannot be reached. The next call connects again.
        """
        key = check_count("key", key, 0, MAX_KEY)
        version = check_count("version", version, 0, MAX_KEY)
        answer = self._call("put", key, encoded_items(items), version)
        if isinstance(answer, SampleError):
            raise answer
        return answer is True

    def close(self) -> None:
        """End the connections of this process; its requests are issued again."""
        for line in self._lines.values():
            line.close()

    def _call(self, name: str, *arguments: Any) -> Any:
        if self._pid != os.getpid():  # A forked child must not use its parent's connections.
            self._begin()
        lines = self._lines
        try:
            return lines[name].call(name, self._name, *arguments)
        except (OSError, EOFError, AuthenticationError) as error:
            # The caller gives up its request, so no line may show the feed that it is still held.
            # The other line may also be of a trainer that was killed.
            if self._lines is lines:
                self._begin()
            for line in lines.values():
                line.close(wait=False)
            host, port = self.address
            raise WorkerError(
                f"the FeedSource at {host}:{port} cannot be reached: {error!r}. It was closed, its "
                "process has ended, or `authkey` is another."
            ) from error


class _Line:
    """A connection of a client, and its lock."""

    def __init__(self, client: FeedClient) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._connection: Connection[Any, Any] | None = None

    def call(self, *message: Any) -> Any:
        with self._lock:
            try:
                if self._connection is None:
                    connection = Client(self._client.address)
                    with _limited(connection):
                        answer_challenge(connection, self._client.authkey)
                        deliver_challenge(connection, self._client.authkey)
                    self._connection = connection
                self._connection.send(message)
                return self._connection.recv()
            except BaseException:  # Whatever interrupts a call, the answer to it is still to come.
                self._connection = None
                raise

    def close(self, *, wait: bool = True) -> None:
        """End the connection; without `wait`, unless another thread is in a call."""
        if self._lock.acquire(blocking=wait):
            try:
                if self._connection is not None:
                    self._connection.close()
                    self._connection = None
            finally:
                self._lock.release()


@contextlib.contextmanager
def _limited(connection: Connection[Any, Any]) -> Iterator[None]:
    """End a connection whose other end does not complete the block in time; notice lost hosts."""
    with socket.socket(fileno=os.dup(connection.fileno())) as copy:
        copy.setblocking(True)  # A default timeout would make it non-blocking, and `connection`.
        copy.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        timer = threading.Timer(_HANDSHAKE_S, copy.shutdown, (socket.SHUT_RDWR,))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()  # before `copy` is closed


class FeedServer:
    """Answers the clients of a `FeedSource`, each on a thread of its own."""

    def __init__(self, feed: Any, address: tuple[str, int], authkey: bytes) -> None:
        self._feed = feed
        host, port = address
        try:
            self._listener = Listener(address)
        except OSError as error:
            raise OSError(
                error.errno,
                f"FeedSource cannot be served at {host}:{port} ({error.strerror}): another process "
                "listens there, or a child of an earlier trainer still runs. End it, or pass "
                "another port",
            ) from error
        _, port = self._listener.address
        self.client = FeedClient((host, port), authkey)
        self._is_closed = threading.Event()
        self._accepting = start_thread("feed", self._accept)

    def close(self) -> None:
        """Accept no more connections. Clients that are connected are still answered."""
        self._is_closed.set()
        with contextlib.suppress(OSError):
            Client(self.client.address).close()  # A thread in `accept` does not see a close.
        self._accepting.join(_EXIT_S)
        self._listener.close()

    def _accept(self) -> None:
        while not self._is_closed.is_set():
            with contextlib.suppress(OSError, EOFError):  # of a connection that has ended again
                start_thread("feed-client", self._answer, self._listener.accept())

    def _answer(self, connection: Connection[Any, Any]) -> None:
        holder = ""  # once the client has requested
        try:
            with connection:
                with _limited(connection):
                    deliver_challenge(connection, self.client.authkey)
                    answer_challenge(connection, self.client.authkey)
                # A feed that is opened again goes on with the clients that it had.
                heard_s = time.monotonic()
                while time.monotonic() - heard_s < _FAREWELL_S:
                    if not self._feed.is_closed:
                        heard_s = time.monotonic()
                    if not connection.poll(POLL_S):
                        continue
                    name, client, *arguments = connection.recv()
                    heard_s = time.monotonic()
                    if name == "put":
                        try:
                            connection.send(self._feed.accept(*arguments))
                        except SampleError as error:
                            connection.send(error)
                        continue
                    holder = client
                    entry = self._feed.issue(arguments[0], client)
                    nothing = _CLOSED if self._feed.is_closed else None
                    connection.send(nothing if entry is None else (entry.key.key, entry.data))
        except (OSError, EOFError, AuthenticationError):
            pass
        finally:
            if holder:
                self._feed.issue_again(holder)
