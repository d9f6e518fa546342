"""Where a `ParallelProcessor` stands."""

from __future__ import annotations

from dataclasses import dataclass, field

from odb_nodes.contract import EpochState, SourceState


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
    taken: int
    position: int
    taken_of: dict[str, tuple[int, int]] = field(default_factory=dict)
