"""Read samples again from a state of their source, where it cannot read them by their keys."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import Any

from torchdata.nodes import BaseNode

from odb_nodes.contract.node import call_member, snapshot
from odb_nodes.errors import StateError
from odb_nodes.nodes.sample_records import with_progress
from odb_nodes.sample import Sample, Skipped


class Snapshots:
    """Where a source stood before some of its samples, oldest first."""

    def __init__(self, source: BaseNode[Any], node: str) -> None:
        self._source, self._node = source, node
        self._taken: deque[tuple[int, Any]] = deque()

    def put(self, ordinal: int, state: Any) -> None:
        """Keep a state of the source before sample `ordinal`."""
        self._taken.append((ordinal, state))

    def take(self, ordinal: int) -> None:
        """Keep the state that the source has now, before sample `ordinal`, and no other."""
        self._taken.clear()
        self.put(ordinal, snapshot(self._source))

    def take_if_due(self, ordinal: int, interval: int) -> int:
        """Keep the state if one is due; return the samples until the next one is."""
        if ordinal >= self._taken[-1][0] + interval:
            self.put(ordinal, snapshot(self._source))
        return self._taken[-1][0] + interval - ordinal

    def at_or_before(self, ordinal: int) -> tuple[int, Any]:
        """Return the last (ordinal, state) that is not after `ordinal`, and forget earlier ones."""
        while len(self._taken) > 1 and self._taken[1][0] <= ordinal:
            self._taken.popleft()
        return self._taken[0]

    def read_again(
        self, start: int, stop: int, wanted: Collection[int], interval: int
    ) -> tuple[dict[int, Sample | Skipped], int]:
        """Bring the source from sample `start` of the epoch to `stop`; keep states on the way."""
        is_wanted = [False] * (stop - start)
        for number in wanted:
            is_wanted[number - start] = True
        selects = call_member(self._source, "select", is_wanted)  # only these are yielded then
        numbers = sorted(wanted) if selects else range(start, stop)
        found: dict[int, Sample | Skipped] = {}
        for number in with_progress(numbers, len(numbers)):
            self.take_if_due(number, interval)
            try:
                sample: Sample | Skipped = next(self._source)
            except StopIteration:
                raise StateError(
                    f"{self._node} cannot restore its pool: the source ended before sample "
                    f"{number} of the epoch, which it had yielded when the state was saved. Resume "
                    "over the data that the state was saved on."
                ) from None
            if is_wanted[number - start]:
                if isinstance(sample, Sample):
                    sample = sample._replace(ordinal=number)
                found[number] = sample
        return found, len(numbers)

    def expect_end(self, pulled: int) -> None:
        """Bring the source to where it had ended: one call after its last sample."""
        try:
            next(self._source)
        except StopIteration:
            return
        raise StateError(
            f"{self._node} cannot restore its pool: the source had ended after {pulled} samples "
            "when the state was saved, but has more now. Resume over the data that the state was "
            "saved on."
        )
