"""Where a mixture stands."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated

from odb_nodes.contract import Count, NodeState, SourceStates, Sparse


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
    samples: dict[str, Count]
    tokens: dict[str, Count]
    exhausted: list[str]
    ended: bool
    weights: Annotated[dict[str, float], Sparse()] = field(default_factory=dict)
    targets: Annotated[dict[str, float], Sparse()] = field(default_factory=dict)
    had: Annotated[list[str], Sparse()] = field(default_factory=list)

    def validate(self) -> None:
        """Check that all fields are of the same sources, and that weights are some."""
        names = self.sources.keys()
        if self.weights and not self.weights.keys() == self.targets.keys() == names:
            raise ValueError("`sources`, `weights` and `targets` name other sources.")
        numbers = [*self.weights.values(), *self.targets.values()]
        if not all(map(math.isfinite, numbers)) or any(one < 0 for one in self.weights.values()):
            raise ValueError("`weights` or `targets` are no weights.")
        if not (names == self.samples.keys() == self.tokens.keys() >= {*self.exhausted, *self.had}):
            raise ValueError(
                "`sources`, `samples`, `tokens`, `exhausted` and `had` name other sources."
            )
