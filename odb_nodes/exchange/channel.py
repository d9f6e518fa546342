"""Messages of ranks that can tell a beginning, a round and a failure from each other."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import numpy as np

from odb_nodes.errors import PeerError, StateError
from odb_nodes.exchange.base import Exchange, IntArray, Interrupted

_HELLO, _ROUND, _FAILED, _BAD_STATE = 1, 2, 3, 4
_KIND, _LENGTH, _GENERATION, _HEADER = 0, 1, 2, 3
_MIN_CAPACITY = 64  # integers, for the text of an error
_PAUSE_S = 0.02  # between two hellos
_SETTLED = 100  # equal hellos of all ranks, one after the other, until they are taken as they are


class Channel:
    """Rounds of messages among ranks, all of one size.

    What a rank has sent cannot be taken back, also if it begins anew before the others have come.
    Because all messages are of one size, one that was given up can meet any other of the others',
    and because each says its *generation*, which a rank counts up whenever it begins anew,
    everybody sees what met: a rank whose hello meets something older says hello again.

    Args:
        exchange: among the ranks.
        capacity: integers that a message can carry, at least.
    """

    def __init__(self, exchange: Exchange, capacity: int) -> None:
        self._exchange = exchange
        self._size = _HEADER + max(capacity, _MIN_CAPACITY)
        self._generation = 0
        self._agreed = False
        self.rank, self.world_size = exchange.rank, exchange.world_size
        self.wait_s = 0.0
        """Seconds spent in exchanges so far."""

    @property
    def capacity(self) -> int:
        """Integers that a message can carry."""
        return self._size - _HEADER

    def begin(self) -> None:
        """Leave what the ranks agreed on: the next `agree` begins anew."""
        self._generation += 1
        self._agreed = False

    def agree(self, place: Mapping[str, int], config: Mapping[str, Any]) -> None:
        """Make sure, once after `begin`, that all ranks go on from the same place.

        Args:
            place: where this rank stands.
            config: what all ranks must have in common, as JSON has it.

        Raises:
            StateError: they do not; the same error on all ranks, naming field, ranks and values.
            PeerError: a rank failed, or did not come.
        """
        if self._agreed:
            return
        self._exchange.connect(self._size)
        text = json.dumps(config, sort_keys=True).encode()
        digest = int.from_bytes(hashlib.sha1(text).digest()[:7], "little")
        rows = self._greet(np.array([*place.values(), digest], dtype=np.int64))
        self._generation, self._agreed = int(rows[:, _GENERATION].max()), True
        *places, digests = rows[:, _HEADER : _HEADER + len(place) + 1].T.tolist()
        differences = _differences(zip(place, places, strict=True))
        if len({*digests}) > 1:
            texts = self.gather_bytes(text, "comparing configurations")
            configs = [_flat(json.loads(one)) for one in texts]
            names = sorted({name for one in configs for name in one})
            differences += _differences(
                (name, [one.get(name, "absent") for one in configs]) for name in names
            )
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
        _raise_failures(rows)
        if left := np.flatnonzero(rows[:, _KIND] == _HELLO).tolist():
            raise PeerError(
                f"{where}: rank {', '.join(map(str, left))} has left it and begun anew. All ranks "
                "must iterate, break and load alike."
            )
        return rows[:, _HEADER:]

    def gather_bytes(self, data: bytes, where: str) -> list[bytes]:
        """Return the bytes of all ranks, of any lengths. Takes as many rounds as the longest needs.

        Raises:
            PeerError: a rank failed, left, or did not come.
        """
        sizes = self.gather(np.array([len(data)]), where)[:, 0].tolist()
        integers = _as_integers(data)
        parts = [
            self.gather(integers[start : start + self.capacity], where)
            for start in range(0, -(-max(sizes) // 8), self.capacity)
        ]
        whole = np.concatenate([np.empty((self.world_size, 0), dtype=np.int64), *parts], axis=1)
        return [_as_bytes(row)[:size] for row, size in zip(whole, sizes, strict=True)]

    def fail(self, error: BaseException, where: str) -> None:
        """Tell the other ranks why this one fails. Does not raise what they say."""
        kind = _BAD_STATE if isinstance(error, StateError) else _FAILED
        text = f"{where}: {type(error).__name__}: {error}".encode()[: 8 * self.capacity]
        try:
            self._exchange.connect(self._size)
            for _ in range(_SETTLED):
                rows = self._send(kind, _as_integers(text), where)
                if self._agreed or (rows[:, _GENERATION] >= self._generation).all():
                    return
                time.sleep(_PAUSE_S)  # It met what a rank has left by now, and nobody reads.
        except (PeerError, StateError, Interrupted):
            return

    def _greet(self, hello: IntArray) -> IntArray:
        """Say hello until all ranks do so at once, in one generation; return what they said.

        Where the generations stay different, a rank has begun more often than another, without a
        step: it has asked for a state, say. The ranks that hold still then take each other as they
        are. That no rank holds on to a hello that it is about to leave is known only by waiting.
        """
        where = "the first exchange after a reset"
        deadline = time.monotonic() + self._exchange.timeout_s
        before, repeats = None, 0
        while True:
            rows = self._send(_HELLO, hello, where)
            _raise_failures(rows, since=self._generation)  # What failed before was left by all.
            others = np.flatnonzero(rows[:, _KIND] != _HELLO).tolist()
            if not others and len({*rows[:, _GENERATION].tolist()}) == 1:
                return rows
            unchanged = not others and before is not None and np.array_equal(rows, before)
            before, repeats = rows, repeats + 1 if unchanged else 0
            if repeats == _SETTLED:
                return rows
            if time.monotonic() > deadline:
                raise PeerError(f"ranks {others} stay in an epoch that the other ranks have left.")
            time.sleep(_PAUSE_S)

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


def _raise_failures(rows: IntArray, since: int = 0) -> None:
    """Raise if a rank says that it has failed, in the generation `since` or a later one."""
    failed = [
        (rank, row)
        for rank, row in enumerate(rows)
        if row[_KIND] >= _FAILED and row[_GENERATION] >= since
    ]
    if not failed:
        return
    causes = "; ".join(f"rank {rank} failed in {_text(row)}" for rank, row in failed)
    if all(row[_KIND] == _BAD_STATE for _, row in failed):
        raise StateError(causes)
    raise PeerError(causes)


def _text(row: IntArray) -> str:
    data = _as_bytes(row[_HEADER : _HEADER + int(row[_LENGTH])])
    return data.rstrip(b"\0").decode(errors="replace")


def _as_integers(data: bytes) -> IntArray:
    return np.frombuffer(data + b"\0" * (-len(data) % 8), dtype="<i8").astype(np.int64)


def _as_bytes(integers: IntArray) -> bytes:
    return integers.astype("<i8").tobytes()


def _flat(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the fields of all nodes by `node.field`, as text."""
    return {
        f"{node}.{name}": json.dumps(value)
        for node, fields in config.items()
        for name, value in fields.items()
    }


def _differences(fields: Iterable[tuple[str, list[Any]]]) -> list[str]:
    """Return, for each field that ranks have different values of, which have which."""
    found = []
    for name, values in fields:
        ranks: dict[Hashable, list[str]] = {}
        for rank, value in enumerate(values):
            ranks.setdefault(value, []).append(str(rank))
        if len(ranks) > 1:
            by_value = (f"{value} on rank {', '.join(of)}" for value, of in ranks.items())
            found.append(f"`{name}` is {', '.join(by_value)}")
    return found
