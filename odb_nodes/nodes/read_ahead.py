"""Node: reads ahead on a thread, without a trace in the state."""

from __future__ import annotations

from typing import Any, TypeVar

from torchdata.nodes import BaseNode, PinMemory, Prefetcher

T = TypeVar("T")


class ReadAhead(BaseNode[T]):
    """Runs torchdata's `Prefetcher` or `PinMemory` and keeps its state out of the graph's.

    The state is the source's, as of the item that was last taken. So a run that read ahead may
    resume without, and the other way round.

    Args:
        node: a `Prefetcher` or `PinMemory` with `snapshot_frequency=1`.
    """

    def __init__(self, node: Prefetcher[T] | PinMemory[T]) -> None:
        super().__init__()
        if node.snapshot_frequency != 1:
            raise ValueError(
                "`node.snapshot_frequency` must be 1, so that every item has a state, "
                f"but is {node.snapshot_frequency} instead."
            )
        self.node = node

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        """Begin the next epoch, or go to where `initial_state`, the source's, stands."""
        super().reset(initial_state)
        state = {"snapshot": initial_state, "steps_since_snapshot": 0}
        self.node.reset(None if initial_state is None else state)

    def next(self) -> T:
        """Return the next item."""
        item: T = next(self.node)
        return item

    def get_state(self) -> dict[str, Any]:
        """Return the source's state after the last item that was taken."""
        state: dict[str, Any] = self.node.state_dict()["snapshot"]
        return state
