"""How ranks meet at the end of an optimizer step: alike, and never for longer than a limit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch.distributed as dist

from odb_nodes._core.checks import check_seconds, check_type
from odb_nodes.alignment.exchange import Channel, resolve_exchange
from odb_nodes.errors import StateError
from odb_nodes.step_info import StepInfo

__all__ = ["StepMeeting"]

_CAPACITY = 2  # integers of a message


class StepMeeting:
    """Makes sure that all ranks end the same optimizer step, with the same settings."""

    def __init__(
        self, name: str, process_group: dist.ProcessGroup | None, timeout_s: float
    ) -> None:
        if process_group is not None:
            remedy = "Pass one of `torch.distributed.new_group`, or None for all ranks of the job."
            check_type("process_group", process_group, dist.ProcessGroup, remedy)
        check_seconds("timeout_s", timeout_s)
        self._name, self._process_group, self._timeout_s = name, process_group, timeout_s
        self._channel: Channel | None = None

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
                remedy = f"Make `{self._name}` with the same weights and options on all of them."
                raise StateError(f"{error} {remedy}") from None

    def meet(self, info: StepInfo) -> None:
        """Make sure, after `agree`, that all ranks end the same step."""
        assert self._channel is not None
        where = f"`{self._name}.step` of epoch {info.epoch}, step {info.step}"
        rows = self._channel.gather(np.array([info.epoch, info.step]), where)[:, :_CAPACITY]
        if (rows != rows[0]).any():
            raise StateError(
                f"all ranks must call `{self._name}.step` after the same optimizer steps, but are "
                f"at (epoch, step) {[*map(tuple, rows.tolist())]} instead, in the order of the "
                "ranks: one has left a call out. Restart all ranks from a checkpoint."
            )
