"""When the weights of a mixture change, and by which ones an item was drawn."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from odb_nodes.sources.fair_queue import FairQueue
from odb_nodes.sources.weight_schedule import Shares, WeightSchedule

Changes = Sequence[tuple[int, Mapping[str, float]]]
"""(place, weights): the number of items before those that are drawn by them."""


class ChangingWeights:
    """Turns the weights of a `FairQueue` at places that are known before it comes to them.

    Args:
        weights: the weights that an epoch begins with; or the schedule that they follow.
        world_size: ranks that draw alike; the places of a schedule count what all of them draw.
        read_ahead: items that the nodes above may have taken beyond those they have yielded.
        settable: whether changes may be planned from outside.
    """

    def __init__(
        self,
        weights: Mapping[str, float] | WeightSchedule,
        world_size: int,
        read_ahead: int,
        settable: bool,
    ) -> None:
        self.schedule = weights if isinstance(weights, WeightSchedule) else None
        self._first = weights.places[0][1] if isinstance(weights, WeightSchedule) else weights
        self._world_size, self.read_ahead, self.settable = world_size, read_ahead, settable
        self.planned: Changes = ()
        """Changes that are made from outside, in the order of their places."""
        self.begin()

    def begin(self) -> None:
        """Begin an epoch."""
        self.go_to(0, {}, {})

    def go_to(
        self, position: int, weights: Mapping[str, float], targets: Mapping[str, float]
    ) -> None:
        """Stand after `position` items, where the queue had these weights and targets, or none."""
        self.position = position
        """Items drawn in the epoch."""
        self.queue = FairQueue(weights or self._first)
        self.queue.targets = dict(targets) or dict.fromkeys(self._first, 0.0)
        self._drawn_by = deque([(position - 1, self.queue.weights)])

    def turn(self, names: Sequence[str], had: Mapping[str, int]) -> None:
        """Turn the queue to the weights that the next item is drawn by.

        Args:
            names: the sources that have items left.
            had: what each has had, in the unit of the shares.
        """
        weights = self.queue.weights
        if self.schedule is not None:
            weights = self.schedule.at(sum(had.values()) * self._world_size, names)
        for place, changed in self.planned:
            if place <= self.position:
                weights = changed
        if self.queue.turn_to(weights, names, had):
            self._drawn_by.append((self.position, weights))
            self._forget(self.position - self.read_ahead)

    def shares_at(self, taken: int) -> Shares:
        """Return the shares by which the last of the first `taken` items of the epoch was drawn."""
        self._forget(taken)
        weights = self._drawn_by[0][1]
        total = sum(weights.values())
        return {name: weight / total for name, weight in weights.items()}

    def fingerprint(self) -> dict[str, Any]:
        """Return what decides the draws; what is unset is absent, as in earlier states."""
        config: dict[str, Any] = {}
        if self.schedule is not None and self.schedule.ramp:
            config["ramp"] = True
        if self.settable:
            config["settable"] = f"after {self.read_ahead} samples"
        return config

    def _forget(self, taken: int) -> None:
        while len(self._drawn_by) > 1 and self._drawn_by[1][0] < taken:
            self._drawn_by.popleft()
