"""States of a source, kept as long as a replay may begin at them."""

from __future__ import annotations

from collections import deque
from typing import Any

from torchdata.nodes import BaseNode

from odb_nodes.contract.state import copy_state


class Snapshots:
    """Where a source stood before some of its samples, oldest first.

    Args:
        source: the node whose state is kept.
        interval: samples between two of them.
    """

    def __init__(self, source: BaseNode[Any], interval: int) -> None:
        self._source = source
        self.interval = interval
        """Samples between two of them."""
        self._taken: deque[tuple[int, Any]] = deque()

    def put(self, ordinal: int, state: Any) -> None:
        """Keep a state of the source before sample `ordinal`. It is the caller's to copy."""
        self._taken.append((ordinal, state))

    def take(self, ordinal: int, *, only: bool = False) -> None:
        """Keep the state that the source has now, before sample `ordinal`.

        Args:
            ordinal: the ordinal of the next sample that the source yields.
            only: forget all others.
        """
        if only:
            self._taken.clear()
        self.put(ordinal, copy_state(self._source.state_dict()))

    def take_if_due(self, ordinal: int) -> int:
        """Keep the present state if the last one kept is an interval old.

        Returns:
            Samples until the next one is due.
        """
        if ordinal >= self._taken[-1][0] + self.interval:
            self.take(ordinal)
        return self._taken[-1][0] + self.interval - ordinal

    def at_or_before(self, ordinal: int) -> tuple[int, Any]:
        """Return the last (ordinal, state) that is not after `ordinal`, and forget earlier ones."""
        while len(self._taken) > 1 and self._taken[1][0] <= ordinal:
            self._taken.popleft()
        return self._taken[0]
