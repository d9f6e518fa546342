"""Messages of ranks that can tell a beginning, a round and a failure from each other."""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np

from odb_nodes.errors import PeerError, StateError
from odb_nodes.exchange.base import Exchange, IntArray, Interrupted

_HELLO, _ROUND, _FAILED, _BAD_STATE = 1, 2, 3, 4
_KIND, _LENGTH, _HEADER = 0, 1, 2
_MIN_CAPACITY = 64  # integers, for the text of an error


class Channel:
    """Rounds of messages among ranks, all of one size.

    Because all are of one size, a message that one rank gave up can meet any other of the others',
    and everybody sees what met: a rank that begins anew and meets the rest of an old round says
    hello again.

    Args:
        exchange: among the ranks.
        capacity: integers that a message can carry, at least.
    """

    def __init__(self, exchange: Exchange, capacity: int) -> None:
        self._exchange = exchange
        self._size = _HEADER + max(capacity, _MIN_CAPACITY)
        self.rank, self.world_size = exchange.rank, exchange.world_size
        self.wait_s = 0.0
        """Seconds spent in exchanges so far."""

    @property
    def capacity(self) -> int:
        """Integers that a message can carry."""
        return self._size - _HEADER

    def agree(self, fields: Mapping[str, int]) -> None:
        """Begin together, and find out whether all ranks have the same `fields`.

        Raises:
            StateError: they have not; the same error on all ranks, naming field, ranks and values.
            PeerError: a rank failed, or did not come.
        """
        self._exchange.connect(self._size)
        values = np.array([*fields.values()], dtype=np.int64)
        deadline = time.monotonic() + self._exchange.timeout_s
        while True:
            rows = self._send(_HELLO, values, "the first exchange after a reset")
            if (rows[:, _KIND] == _HELLO).all():
                break
            if time.monotonic() > deadline:
                others = np.flatnonzero(rows[:, _KIND] != _HELLO).tolist()
                raise PeerError(f"ranks {others} stay in an epoch that the other ranks have left.")
        differences = [
            f"`{name}` is {_by_rank(column)}"
            for name, column in zip(fields, rows[:, _HEADER:].T, strict=False)
            if len({*column.tolist()}) > 1
        ]
        if differences:
            raise StateError(
                f"the ranks do not go on from the same place: {'; '.join(differences)}. Build the "
                "same graph on all ranks, and load states that were saved at the same step."
            )

    def gather(self, payload: IntArray, where: str) -> IntArray:
        """Return the payloads of all ranks: (n,) int64 -> (world_size, capacity) int64.

        Args:
            payload: up to `capacity` integers; the rest is 0.
            where: for errors.

        Raises:
            PeerError: a rank failed, left, or did not come.
        """
        rows = self._send(_ROUND, payload, where)
        if left := np.flatnonzero(rows[:, _KIND] == _HELLO).tolist():
            raise PeerError(
                f"{where}: rank {', '.join(map(str, left))} has left it and begun anew. All ranks "
                "must iterate, break and load alike. Make new loaders on all to begin again."
            )
        return rows[:, _HEADER:]

    def fail(self, error: BaseException, where: str) -> None:
        """Tell the other ranks why this one fails. Does not raise what they say."""
        kind = _BAD_STATE if isinstance(error, StateError) else _FAILED
        text = f"{where}: {type(error).__name__}: {error}".encode()[: 8 * self.capacity]
        padded = text + b"\0" * (-len(text) % 8)
        try:
            self._exchange.connect(self._size)
            self._send(kind, np.frombuffer(padded, dtype="<i8").astype(np.int64), where)
        except (PeerError, StateError, Interrupted):
            return

    def broadcast(self, data: bytes | None, source: int, where: str) -> bytes:
        """Return the bytes that rank `source` has. Takes as many rounds as they need.

        Raises:
            PeerError: a rank failed, left, or did not come.
        """
        mine = self.rank == source and data is not None
        size = self.gather(np.array([len(data) if mine and data else 0]), where)[source, 0]
        body = (data or b"") + b"\0" * (-len(data or b"") % 8)
        integers = np.frombuffer(body, dtype="<i8").astype(np.int64)
        parts = []
        for start in range(0, -(-int(size) // 8), self.capacity):
            part = integers[start : start + self.capacity] if mine else integers[:0]
            parts.append(self.gather(part, where)[source])
        received = np.concatenate([*parts, integers[:0]]).astype("<i8").tobytes()
        return received[: int(size)]

    def _send(self, kind: int, payload: IntArray, where: str) -> IntArray:
        """Exchange a message; raise if a rank says that it has failed."""
        row = np.zeros(self._size, dtype=np.int64)
        row[_KIND], row[_LENGTH] = kind, len(payload)
        row[_HEADER : _HEADER + len(payload)] = payload
        start = time.perf_counter()
        try:
            rows = self._exchange.all_gather(row)
        except PeerError as error:
            raise PeerError(f"{where}: {error}") from None
        self.wait_s += time.perf_counter() - start
        failed = np.flatnonzero(rows[:, _KIND] >= _FAILED).tolist()
        if failed:
            causes = "; ".join(f"rank {rank} failed in {_text(rows[rank])}" for rank in failed)
            if (rows[failed, _KIND] == _BAD_STATE).all():
                raise StateError(causes)
            raise PeerError(causes)
        return rows


def _text(row: IntArray) -> str:
    data = row[_HEADER : _HEADER + int(row[_LENGTH])].astype("<i8").tobytes()
    return data.rstrip(b"\0").decode(errors="replace")


def _by_rank(column: IntArray) -> str:
    """Return which value which ranks have."""
    ranks: dict[int, list[int]] = {}
    for rank, value in enumerate(column.tolist()):
        ranks.setdefault(value, []).append(rank)
    return ", ".join(
        f"{value} on rank {', '.join(map(str, having))}" for value, having in ranks.items()
    )
