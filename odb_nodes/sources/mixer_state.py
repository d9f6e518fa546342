"""Where a mixture stands."""

from __future__ import annotations

from dataclasses import dataclass, field

from odb_nodes.contract import NodeState, SourceStates


@dataclass(kw_only=True)
class MixerState(NodeState):
    """Where a `SourceMixer` stands.

    Attributes:
        sources: the states of the sources, by name.
        samples: samples of the epoch so far, by source.
        tokens: tokens of the epoch so far, by source.
        exhausted: the sources that were exhausted at least once in the epoch, in that order.
        ended: the epoch has ended.
        weights: by which the last item was drawn, where they follow a schedule or were set.
        targets: what each source should have had when they last changed; likewise.
        had: sources that ranks had samples of before the epoch was dealt to another number of them.
    """

    sources: SourceStates
    samples: dict[str, int]
    tokens: dict[str, int]
    exhausted: list[str]
    ended: bool
    weights: dict[str, float] = field(default_factory=dict)
    targets: dict[str, float] = field(default_factory=dict)
    had: list[str] = field(default_factory=list)
