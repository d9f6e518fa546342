"""Messages between ranks: a hello, a round or a failure."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from odb_nodes._support.arrays import IntArray, int64_array, int64_bytes
from odb_nodes.core.alignment.exchange.base import Exchange, Interrupted, ProcessGroupLike
from odb_nodes.core.alignment.exchange.gloo import resolve_exchange
from odb_nodes.errors import PeerError, StateError

_HELLO, _ROUND, _FAILED = 1, 2, 3  # kinds of messages
_KIND, _LENGTH, _GENERATION, _HEADER = 0, 1, 2, 3  # columns of a message; its payload follows
_MIN_CAPACITY = 64  # integers, so that the text of an error fits
_CAPACITY_OF_MEETING = 512  # integers of a message
_PAUSE_S = 0.02  # between two greetings
_SETTLED_S = 2.0  # greetings are accepted if they have not changed for this time
_DOUBTFUL_S = 60.0  # this time, if to accept the greetings is an error


class Channel:
    """Rounds of messages between ranks, all of one size.

    A sent message cannot be taken back, even if its rank begins anew before the other ranks have
    answered. Two rules make this harmless. All messages have one size, so an abandoned message can
    meet any message of the other ranks. And each message carries a *generation*, which grows when
    its rank begins anew. So every rank sees which messages have met, and a rank whose hello has met
    an older message says hello again.
    """

    def __init__(self, exchange: Exchange, capacity: int) -> None:
        self._size = _HEADER + max(capacity, _MIN_CAPACITY)
        self.agreed = False  # whether `agree` has succeeded since the last `begin`
        self.wait_s = 0.0  # seconds spent in exchanges so far
        self._use(exchange)

    def _use(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._generation = 0
        self.timeout_s = exchange.timeout_s
        self.rank = exchange.rank
        self.world_size = exchange.world_size

    @property
    def capacity(self) -> int:
        """Integers that a message can carry."""
        return self._size - _HEADER

    def begin(self) -> None:
        """Begin anew: the ranks must `agree` again."""
        self._generation += 1
        self.agreed = False

    def agree(self, config: Mapping[str, Any]) -> None:
        """Raise an error on all ranks unless all have an equal `config`; call it after `begin`."""
        text = json.dumps(config, sort_keys=True, default=str).encode()
        digest = int.from_bytes(hashlib.sha1(text).digest()[:7], "little")
        rows = self._greet(_HELLO, np.array([digest]), "the first exchange after a reset")
        self._raise_failures(rows)
        if stay := self._ranks_that(rows[:, _KIND] == _ROUND):
            raise PeerError(f"rank {stay} stays in an epoch that the other ranks have left.")
        self.agreed = True
        if len({*rows[:, _HEADER].tolist()}) > 1:
            texts = self.gather_bytes(text, "comparing the configurations of ranks")
            differences = self._differences([json.loads(text) for text in texts])
            raise StateError(
                f"the ranks do not continue from the same place: {'; '.join(differences)}. Build "
                "the same graph on all ranks, and load states that were saved at the same step."
            )

    def gather(self, payload: IntArray | Sequence[int], where: str) -> IntArray:
        """Return the payloads of all ranks, n integers each: (world_size, n) int64."""
        return self._gather(np.asarray(payload), where)[:, : len(payload)]

    def _gather(self, payload: IntArray, where: str) -> IntArray:
        """Return the payloads of all ranks: (n,) int64 -> (world_size, capacity) int64."""
        rows = self._send(_ROUND, payload, where)
        self._raise_failures(rows)
        if restarted := self._ranks_that(rows[:, _KIND] == _HELLO):
            raise PeerError(
                f"{where}: rank {restarted} has left it and begun anew. All ranks must iterate, "
                "break and load alike."
            )
        return rows[:, _HEADER:]

    def gather_bytes(self, data: bytes, where: str) -> list[bytes]:
        """Return the bytes of all ranks. The longest bytes decide the number of exchanges."""
        sizes = self.gather([len(data)], where)[:, 0].tolist()
        integers = _as_integers(data)
        parts = [
            self._gather(integers[start : start + self.capacity], where)
            for start in range(0, -(-max(sizes) // 8), self.capacity)
        ]
        whole = np.concatenate([np.empty((self.world_size, 0), dtype=np.int64), *parts], axis=1)
        return [int64_bytes(row)[:size] for row, size in zip(whole, sizes, strict=True)]

    def fail(self, error: BaseException, where: str) -> None:
        """Send the error of this rank to the other ranks, and ignore their errors."""
        text = f"{where}: {type(error).__name__}: {error}".encode()[: 8 * self.capacity]
        try:
            if self.agreed:
                self._send(_FAILED, _as_integers(text), where)
            else:
                self._greet(_FAILED, _as_integers(text), where)
        except (PeerError, StateError, Interrupted):
            return

    def publish(self, text: str) -> None:
        """Publish a text for ranks that wait outside an exchange."""
        self._exchange.publish(str(self._generation), text)

    def published(self) -> str | None:
        """Return the text that a rank has published since all ranks agreed, or `None`."""
        return self._exchange.published(str(self._generation))

    def _greet(self, kind: int, payload: IntArray, where: str) -> IntArray:
        """Send a greeting until all ranks greet in one generation; return all messages."""
        # Why all ranks leave the loop together: a call returns the same rows on every rank, and a
        # rank that enters the loop changes its row (another generation or kind). So all ranks count
        # the same rows as unchanged, and leave after the same call.
        #
        # When they leave: usually once all greet in one generation. A lower generation is either an
        # abandoned message, which the next call replaces, or the present message of a rank that has
        # begun less often (for example because only the other ranks have saved a state). Only time
        # tells the two cases apart: rows that do not change are present. If to accept them is an
        # error, the limit is longer, because a read-ahead thread may be about to leave.
        #
        # Why the loop ends: rows change only when a rank begins anew, fails or takes part in a
        # round, and without a change the count of equal rows reaches the limit. If a rank sends
        # nothing, the exchange raises.
        self._exchange.connect(self._size)
        previous = np.empty(0, dtype=np.int64)
        unchanged = 0
        while True:
            rows = self._send(kind, payload, where)
            hellos = rows[rows[:, _KIND] == _HELLO]
            all_greet = bool((rows[:, _KIND] != _ROUND).all())
            if all_greet and len({*rows[:, _GENERATION].tolist()}) == 1:
                break
            unchanged = unchanged + 1 if np.array_equal(rows, previous) else 0
            previous = rows
            are_alike = all_greet and len({*hellos[:, _HEADER].tolist()}) <= 1
            doubtful_s = min(_DOUBTFUL_S, self._exchange.timeout_s / 2)
            limit_s = _SETTLED_S if are_alike else max(doubtful_s, _SETTLED_S)
            if unchanged * _PAUSE_S >= limit_s:
                break
            time.sleep(_PAUSE_S)
        self._generation = int(rows[:, _GENERATION].max())
        return rows

    def _send(self, kind: int, payload: IntArray, where: str) -> IntArray:
        row = np.zeros(self._size, dtype=np.int64)
        row[_KIND] = kind
        row[_LENGTH] = len(payload)
        row[_GENERATION] = self._generation
        row[_HEADER : _HEADER + len(payload)] = payload
        start = time.perf_counter()
        try:
            return self._exchange.all_gather(row)
        except PeerError as error:
            raise PeerError(f"{where}: {error}") from None
        finally:
            self.wait_s += time.perf_counter() - start

    def _raise_failures(self, rows: IntArray) -> None:
        """Raise a `PeerError` with the causes if ranks have failed."""
        causes = [
            f"rank {self._exchange.ranks[index]} failed in {_text(rows[index])}"
            for index in np.flatnonzero(rows[:, _KIND] == _FAILED).tolist()
        ]
        if causes:
            raise PeerError("; ".join(causes))

    def _differences(self, configs: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return a text for each node that some ranks lack, and for each field that differs."""
        differences = []
        for name in dict.fromkeys(name for config in configs for name in config):
            lacking = np.array([name not in config for config in configs])
            if lacking.any():
                differences.append(f"`{name}` is absent on rank {self._ranks_that(lacking)}")
                configs = [
                    {key: config[key] for key in config if key != name} for config in configs
                ]
        by_rank = [_flat(config) for config in configs]
        for name in dict.fromkeys(name for config in by_rank for name in config):
            values = np.array([config.get(name, "absent") for config in by_rank])
            by_value = [
                f"{value} on rank {self._ranks_that(values == value)}"
                for value in dict.fromkeys(values.tolist())
            ]
            if len(by_value) > 1:
                differences.append(f"`{name}` is {', '.join(by_value)}")
        return differences

    def _ranks_that(self, mask: NDArray[np.bool_]) -> str:
        """Return the ranks, as the job numbers them, where a mask is true."""
        indices = np.flatnonzero(mask).tolist()
        return ", ".join(str(self._exchange.ranks[index]) for index in indices)


class Meeting(Channel):
    """A channel outside the loader's rounds, for example of a monitor.

    If settings differ between ranks, `agree` raises an error that ends with `remedy`.
    """

    def __init__(
        self, name: str, process_group: ProcessGroupLike, timeout_s: float, *, remedy: str = ""
    ) -> None:
        super().__init__(Exchange(), _CAPACITY_OF_MEETING)
        self._name = name
        self._remedy = remedy
        self._process_group = process_group
        self._timeout_s = timeout_s
        self._is_connected = False

    def agree(self, config: Mapping[str, Any]) -> None:
        """Raise an error, once after `begin`, unless the settings are equal on all ranks."""
        if not self._is_connected:
            # Not earlier: the process group may not exist before the first step.
            self._use(resolve_exchange(self._process_group, self._timeout_s))
            self._is_connected = True
            self.begin()
        if not self.agreed:
            try:
                super().agree({self._name: config})
            except StateError as error:
                raise StateError(f"{error} {self._remedy}".rstrip()) from None


def _text(row: IntArray) -> str:
    data = int64_bytes(row[_HEADER : _HEADER + int(row[_LENGTH])])
    return data.rstrip(b"\0").decode(errors="replace")


def _as_integers(data: bytes) -> IntArray:
    return int64_array(data + b"\0" * (-len(data) % 8))


def _flat(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the values as JSON text by `name`; the values of a mapping by `name.field`."""
    texts: dict[str, str] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            texts |= {f"{name}.{key}": json.dumps(field) for key, field in value.items()}
        else:
            texts[name] = json.dumps(value)
    return texts
