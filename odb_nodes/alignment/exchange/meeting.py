"""Ranks that meet outside the loader's rounds, for a monitor or for the weights of tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from odb_nodes.alignment.exchange.base import IntArray
from odb_nodes.alignment.exchange.channel import Channel
from odb_nodes.alignment.exchange.gloo import resolve_exchange
from odb_nodes.errors import StateError

_CAPACITY = 512  # integers of a message


class Meeting:
    """Meetings of all ranks: with equal settings, or else a `remedy`; never longer than a limit."""

    def __init__(
        self, name: str, process_group: Any, timeout_s: float, *, remedy: str = ""
    ) -> None:
        self._name, self._remedy = name, remedy
        self._process_group, self._timeout_s = process_group, timeout_s
        self._channel: Channel | None = None

    @property
    def rank(self) -> int:
        """This rank; 0 before the ranks have met."""
        return 0 if self._channel is None else self._channel.rank

    @property
    def world_size(self) -> int:
        """The number of ranks; 1 before they have met."""
        return 1 if self._channel is None else self._channel.world_size

    @property
    def wait_s(self) -> float:
        """Seconds spent waiting for the others so far."""
        return 0.0 if self._channel is None else self._channel.wait_s

    def begin(self) -> None:
        """Have the ranks compare their settings again."""
        if self._channel is not None:
            self._channel.begin()

    def agree(self, settings: Mapping[str, Any]) -> None:
        """Make sure, once after `begin`, that the settings are the same on all ranks."""
        if self._channel is None:
            # Not before the first step: only then is the process group sure to be there.
            exchange = resolve_exchange(self._process_group, self._timeout_s)
            self._channel = Channel(exchange, _CAPACITY)
            self._channel.begin()
        if not self._channel.agreed:
            try:
                self._channel.agree({self._name: settings})
            except StateError as error:
                raise StateError(f"{error} {self._remedy}".rstrip()) from None

    def gather(self, integers: Sequence[int], where: str) -> IntArray:
        """Return a few integers of each rank, after `agree`: (world_size, n) int64."""
        assert self._channel is not None
        return self._channel.gather(np.array(integers), where)[:, : len(integers)]

    def gather_bytes(self, data: bytes, where: str) -> list[bytes]:
        """Return the bytes of all ranks, after `agree`."""
        assert self._channel is not None
        return self._channel.gather_bytes(data, where)
