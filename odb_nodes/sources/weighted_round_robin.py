"""Which source of a mixture is next: the one that has had the least for its weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class WeightedRoundRobin:
    """Chooses among sources by weights, also where these change.

    Each source has a target: what it should have had when the weights last changed. What it has had
    since then is compared with its weight, so that an item more or less is made up for after the
    change, and the shares do not drift however often the weights change.
    """

    def __init__(
        self, weights: Mapping[str, float], targets: Mapping[str, float] | None = None
    ) -> None:
        self.weights = weights
        """The weights in force. Shared: not to be changed."""
        self.targets = dict(targets or dict.fromkeys(weights, 0.0))
        """What each source should have had at the last change."""

    def first(self, names: Sequence[str], had: Mapping[str, int]) -> str:
        """Return the source that is next; of equals, the first."""
        weights, targets = self.weights, self.targets
        on = [name for name in names if weights[name]]
        return min(on, key=lambda name: (had[name] - targets[name]) / weights[name])

    def turn_to(
        self, weights: Mapping[str, float], names: Sequence[str], had: Mapping[str, int]
    ) -> None:
        """Choose by weights from now on, which may be others."""
        if weights is self.weights or weights == self.weights:
            return
        targets = self.targets
        on = [name for name in names if self.weights[name]]
        if on:
            since = sum(had[name] - targets[name] for name in on)
            rounds = since / sum(self.weights[name] for name in on)
            targets = targets | {name: targets[name] + self.weights[name] * rounds for name in on}
        self.weights, self.targets = weights, targets
