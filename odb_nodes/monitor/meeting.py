"""How the ranks of a monitor meet: at the same steps, and never for longer than a limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from odb_nodes.alignment.exchange import Channel, resolve_exchange
from odb_nodes.monitor.window import Share

_CAPACITY = 512  # integers of a message


class Meeting:
    """Gathers the shares of all ranks."""

    def __init__(self, process_group: Any, timeout_s: float) -> None:
        self._process_group, self._timeout_s = process_group, timeout_s
        self._channel: Channel | None = None
        self.rank: int | None = None
        """This rank, once the ranks have met."""
        self.world_size = 1

    @property
    def wait_s(self) -> float:
        """Seconds spent waiting for the others so far."""
        return 0.0 if self._channel is None else self._channel.wait_s

    def begin(self) -> None:
        """Have the ranks make sure again that they stand alike."""
        if self._channel is not None:
            self._channel.begin()

    def meet(self, place: Mapping[str, Any]) -> None:
        """Find out which rank this is; make sure that all stand alike."""
        if self.rank is None:
            # Not before the first record: only then is the process group sure to be there.
            exchange = resolve_exchange(self._process_group, self._timeout_s)
            self.rank, self.world_size = exchange.rank, exchange.world_size
            if exchange.world_size > 1:
                self._channel = Channel(exchange, _CAPACITY)
                self._channel.begin()
        if self._channel is not None and not self._channel.agreed:
            self._channel.agree({"Monitor": place})

    def gather(self, share: Share, where: str) -> Sequence[Share]:
        """Return the shares of all ranks, on rank 0; none on the others."""
        if self._channel is None:
            return [share]
        parts = self._channel.gather_bytes(share.to_bytes(), where)
        return [Share.from_bytes(part) for part in parts] if self.rank == 0 else []
