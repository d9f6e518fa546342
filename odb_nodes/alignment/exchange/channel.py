"""Messages among ranks, which tell a beginning, a round and a failure apart."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from odb_nodes.alignment.exchange.base import Exchange, IntArray, Interrupted
from odb_nodes.alignment.exchange.gloo import resolve_exchange
from odb_nodes.errors import PeerError, StateError

_HELLO, _ROUND, _FAILED = 1, 2, 3  # kinds of messages
_KIND, _LENGTH, _GENERATION, _HEADER = 0, 1, 2, 3  # columns of a message; its payload follows
_MIN_CAPACITY = 64  # integers, so that the text of an error fits
_CAPACITY_OF_MEETING = 512  # integers of a message
_PAUSE_S = 0.02  # between two greetings
_SETTLED_S = 2.0  # greetings that stay the same for so long are accepted
_DOUBTFUL_S = 60.0  # the same, if to accept them is an error


class Channel:
    """Rounds of messages among ranks, all of one size.

    A message that was sent cannot be taken back, even if its rank begins anew before the others
    have answered. Two things make that harmless. All messages have one size, so a message that was
    given up can meet any message of the others. And each carries its *generation*, which a rank
    counts up whenever it begins anew, so every rank sees what met, and a rank whose hello met an
    older message says hello again.
    """

    def __init__(self, exchange: Exchange, capacity: int) -> None:
        self._size = _HEADER + max(capacity, _MIN_CAPACITY)
        self.agreed = False  # whether `agree` has succeeded since the last `begin`
        self.wait_s = 0.0  # seconds spent in exchanges so far
        self._use(exchange)

    def _use(self, exchange: Exchange) -> None:
        self._exchange, self._generation = exchange, 0
        self.timeout_s = exchange.timeout_s
        self.rank, self.world_size = exchange.rank, exchange.world_size

    @property
    def capacity(self) -> int:
        """Integers that a message can carry."""
        return self._size - _HEADER

    def begin(self) -> None:
        """Begin anew: the ranks have to `agree` again."""
        self._generation += 1
        self.agreed = False

    def agree(self, config: Mapping[str, Any]) -> None:
        """Make sure, after `begin`, that all ranks go on from the same place."""
        text = json.dumps(config, sort_keys=True, default=str).encode()
        digest = int.from_bytes(hashlib.sha1(text).digest()[:7], "little")
        rows = self._greet(_HELLO, np.array([digest]), "the first exchange after a reset")
        self._raise_failures(rows)
        if stay := self._ranks_that(rows[:, _KIND] == _ROUND):
            raise PeerError(f"rank {stay} stays in an epoch that the other ranks have left.")
        self.agreed = True
        if len({*rows[:, _HEADER].tolist()}) > 1:
            texts = self.gather_bytes(text, "comparing what the ranks have in common")
            raise StateError(
                "the ranks do not go on from the same place: "
                f"{'; '.join(self._differences(list(map(json.loads, texts))))}. Build the same "
                "graph on all ranks, and load states that were saved at the same step."
            )

    def gather(self, payload: IntArray | Sequence[int], where: str) -> IntArray:
        """Return the payloads of all ranks, of as many integers each: (world_size, n) int64."""
        return self._gather(np.asarray(payload), where)[:, : len(payload)]

    def _gather(self, payload: IntArray, where: str) -> IntArray:
        """Return the payloads of all ranks: (n,) int64 -> (world_size, capacity) int64."""
        rows = self._send(_ROUND, payload, where)
        self._raise_failures(rows)
        if left := self._ranks_that(rows[:, _KIND] == _HELLO):
            raise PeerError(
                f"{where}: rank {left} has left it and begun anew. All ranks must iterate, break "
                "and load alike."
            )
        return rows[:, _HEADER:]

    def gather_bytes(self, data: bytes, where: str) -> list[bytes]:
        """Return the bytes of all ranks, in as many rounds as the longest needs."""
        sizes = self.gather([len(data)], where)[:, 0].tolist()
        integers = _as_integers(data)
        parts = [
            self._gather(integers[start : start + self.capacity], where)
            for start in range(0, -(-max(sizes) // 8), self.capacity)
        ]
        whole = np.concatenate([np.empty((self.world_size, 0), dtype=np.int64), *parts], axis=1)
        return [_as_bytes(row)[:size] for row, size in zip(whole, sizes, strict=True)]

    def fail(self, error: BaseException, where: str) -> None:
        """Tell the other ranks why this one fails; raises nothing of theirs."""
        text = f"{where}: {type(error).__name__}: {error}".encode()[: 8 * self.capacity]
        try:
            if self.agreed:
                self._send(_FAILED, _as_integers(text), where)
            else:
                self._greet(_FAILED, _as_integers(text), where)
        except (PeerError, StateError, Interrupted):
            return

    def publish(self, text: str) -> None:
        """Leave a text for ranks that wait for this one elsewhere than in an exchange."""
        self._exchange.publish(str(self._generation), text)

    def published(self) -> str | None:
        """Return what a rank has left since all have agreed; `None` while there is nothing."""
        return self._exchange.published(str(self._generation))

    def _greet(self, kind: int, payload: IntArray, where: str) -> IntArray:
        """Send the first message of a generation until all ranks do, and return their messages."""
        # Why all ranks end together: a call returns the same rows on every rank, and a rank that
        # enters the loop changes its own (another generation or kind), so all ranks count the same
        # rows as unchanged, and leave after the same call.
        #
        # When they end: usually once all greet in one generation. A lower generation is either a
        # message that its rank has given up, which the next call replaces, or the present one of a
        # rank that has begun less often (this one was asked for a state in between, say). Only time
        # tells these apart: rows that stay the same are present. They are waited for longer if they
        # mean an error, since a thread that reads ahead may be about to leave what it says.
        #
        # Why it ends at all: rows change only when a rank begins anew, fails or takes part in a
        # round, and without a change the count of equal rows reaches the limit. A rank that sends
        # nothing makes the exchange raise.
        self._exchange.connect(self._size)
        before, unchanged = np.empty(0, dtype=np.int64), 0
        while True:
            rows = self._send(kind, payload, where)
            hellos = rows[rows[:, _KIND] == _HELLO]
            met = bool((rows[:, _KIND] != _ROUND).all())
            if met and len({*rows[:, _GENERATION].tolist()}) == 1:
                break
            unchanged = unchanged + 1 if np.array_equal(rows, before) else 0
            before = rows
            alike = met and len({*hellos[:, _HEADER].tolist()}) <= 1
            doubtful_s = min(_DOUBTFUL_S, self._exchange.timeout_s / 2)
            if unchanged * _PAUSE_S >= (_SETTLED_S if alike else max(doubtful_s, _SETTLED_S)):
                break
            time.sleep(_PAUSE_S)
        self._generation = int(rows[:, _GENERATION].max())
        return rows

    def _send(self, kind: int, payload: IntArray, where: str) -> IntArray:
        """Return the messages of all ranks."""
        row = np.zeros(self._size, dtype=np.int64)
        row[_KIND], row[_LENGTH], row[_GENERATION] = kind, len(payload), self._generation
        row[_HEADER : _HEADER + len(payload)] = payload
        start = time.perf_counter()
        try:
            return self._exchange.all_gather(row)
        except PeerError as error:
            raise PeerError(f"{where}: {error}") from None
        finally:
            self.wait_s += time.perf_counter() - start

    def _raise_failures(self, rows: IntArray) -> None:
        """Raise a `PeerError` if a rank has sent that it failed, whatever the cause is."""
        failed = np.flatnonzero(rows[:, _KIND] == _FAILED).tolist()
        if not failed:
            return
        causes = "; ".join(
            f"rank {self._exchange.ranks[index]} failed in {_text(rows[index])}" for index in failed
        )
        raise PeerError(causes)

    def _differences(self, configs: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return a text for each field that differs: its values, and the ranks that have each."""
        flat = list(map(_flat, configs))
        found = []
        for name in dict.fromkeys(name for one in flat for name in one):
            values = [one.get(name, "absent") for one in flat]
            by_value = [
                f"{value} on rank {self._ranks_that(np.array([one == value for one in values]))}"
                for value in dict.fromkeys(values)
            ]
            if len(by_value) > 1:
                found.append(f"`{name}` is {', '.join(by_value)}")
        return found

    def _ranks_that(self, do: NDArray[np.bool_]) -> str:
        """Return the ranks, as the job numbers them, where a mask is true."""
        return ", ".join(str(self._exchange.ranks[index]) for index in np.flatnonzero(do).tolist())


class Meeting(Channel):
    """Meets outside the loader's rounds, for a monitor, say: with equal settings, or a `remedy`."""

    def __init__(
        self, name: str, process_group: Any, timeout_s: float, *, remedy: str = ""
    ) -> None:
        super().__init__(Exchange(), _CAPACITY_OF_MEETING)
        self._name, self._remedy = name, remedy
        self._place: tuple[Any, float] | None = (process_group, timeout_s)

    def agree(self, config: Mapping[str, Any]) -> None:
        """Make sure, once after `begin`, that the settings are the same on all ranks."""
        if self._place is not None:
            # Not before the first step: only then is the process group sure to be there.
            self._use(resolve_exchange(*self._place))
            self._place = None
            self.begin()
        if not self.agreed:
            try:
                super().agree({self._name: config})
            except StateError as error:
                raise StateError(f"{error} {self._remedy}".rstrip()) from None


def _text(row: IntArray) -> str:
    data = _as_bytes(row[_HEADER : _HEADER + int(row[_LENGTH])])
    return data.rstrip(b"\0").decode(errors="replace")


def _as_integers(data: bytes) -> IntArray:
    return np.frombuffer(data + b"\0" * (-len(data) % 8), dtype="<i8").astype(np.int64)


def _as_bytes(integers: IntArray) -> bytes:
    return integers.astype("<i8").tobytes()


def _flat(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the values as JSON text by `name`, or by `name.field` for those in a mapping."""
    found: dict[str, str] = {}
    for name, value in config.items():
        fields = value.items() if isinstance(value, Mapping) else [("", value)]
        found |= {f"{name}.{key}" if key else name: json.dumps(one) for key, one in fields}
    return found
