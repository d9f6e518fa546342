"""Where a `ParallelProcessor` stands."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from odb_nodes.contract import Count, EpochState, SourceState, Sparse


@dataclass(kw_only=True)
class ProcessorState(EpochState):
    """Where a `ParallelProcessor` stands.

    Attributes:
        source: the state of the source before the chunk in hand.
        taken: items of that chunk that are out.
        position: items of the epoch that are out.
        taken_of: source -> how many of `taken` are of it, and the `repeat` of the last, where
            sources have names.
    """

    source: SourceState
    taken: Count
    position: Count
    taken_of: Annotated[dict[str, tuple[Count, Count]], Sparse()] = field(default_factory=dict)

    def validate(self) -> None:
        """Check that what is out of the chunk is out of the epoch."""
        if self.taken > self.position:
            most = self.position
            raise ValueError(f"`taken` must be at most `position`, {most}, but is {self.taken}.")
