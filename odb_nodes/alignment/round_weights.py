"""The weights of the mixture below a `RankAligner`, which all ranks may change at a round."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torchdata.nodes import BaseNode

from odb_nodes.alignment.aligner_state import AlignerState
from odb_nodes.contract.graph import walk
from odb_nodes.errors import StateError
from odb_nodes.planning.alignment import CostReport
from odb_nodes.sources.changing_weights import ChangingWeights
from odb_nodes.sources.source_mixer import SourceMixer


class WeightsCall(NamedTuple):
    """Weights that the user has set.

    Attributes:
        number: of the call, from 1, over all epochs.
        due: the first round that begins at this step of the epoch, or later, tells the others.
        weights: name of the source -> weight.
    """

    number: int
    due: int
    weights: dict[str, float]


class RoundWeights:
    """Changes the weights of a mixture at the same round on all ranks.

    A round whose first step is not before the one that a call is due at tells the other ranks a
    digest of its weights. All must tell the same. They are then in force from a place of this
    rank's draw on that follows from what is pulled: beyond what any number of workers has read
    ahead. The state has that place, so that a replay follows it.

    Args:
        source: the node that yields the groups.
    """

    def __init__(self, source: BaseNode[Any]) -> None:
        self._source = source
        self.calls: Sequence[WeightsCall] = ()
        """Calls that may not be agreed on yet, oldest first. Replaced by the trainer's thread."""
        self._at = AlignerState()
        self._mixture: ChangingWeights | None = None

    def begin_epoch(self, at: AlignerState) -> None:
        """Begin an epoch with the weights that were set last: all calls are of epochs before.

        Args:
            at: where the aligner stands; it changes with what is agreed on.
        """
        number, weights = self._at.weight_calls, self._at.weights
        if self.calls:
            number, _, weights = self.calls[-1]
        self.calls, at.weight_calls = (), number
        at.weight_changes = [] if weights is None else [(0, weights)]
        self.follow(at)

    def follow(self, at: AlignerState) -> None:
        """Plan the changes of a state, before the source is reset to it."""
        self._at = at
        mixers = (node for node in walk(self._source) if isinstance(node, SourceMixer))
        outermost = next(mixers, None)
        self._mixture = None if outermost is None else outermost.changing
        if self._mixture is not None:
            self._mixture.planned = at.weight_changes

    def digest(self) -> int:
        """Return a digest of the weights that this rank tells of the round that begins; 0: none."""
        call = self._due()
        if call is None:
            return 0
        return zlib.crc32(json.dumps(call.weights, sort_keys=True).encode()) or 1

    def settle(self, reports: Sequence[CostReport], where: str) -> None:
        """Change the weights, where a round that begins has told of it.

        Args:
            reports: those of all ranks for the round.
            where: the place that an error names.

        Raises:
            StateError: the ranks have set different weights, or some have set none.
        """
        digests = [report.weights for report in reports]
        if len({*digests}) > 1:
            silent = [rank for rank, digest in enumerate(digests) if not digest]
            raise StateError(
                f"{where}: the ranks have set different weights of the mixture: "
                f"{f'ranks {silent} none' if silent else f'their digests are {digests}'}. Call "
                "`set_weights` with the same weights after the same step on all ranks."
            )
        at, call, mixture = self._at, self._due(), self._mixture
        if call is None or mixture is None:
            return
        oldest = min(_positions(at.source), default=0)
        kept = [change for change in at.weight_changes if change[0] >= oldest]
        place = self._pulled() + mixture.read_ahead
        at.weight_changes = [*kept, (place, call.weights)]
        mixture.planned = at.weight_changes
        at.weight_calls = call.number

    def shares(self) -> Mapping[str, float]:
        """Return the shares by which the last sample that was pulled was drawn; empty: fixed."""
        return {} if self._mixture is None else self._mixture.shares_at(self._pulled())

    def _due(self) -> WeightsCall | None:
        at = self._at
        calls = [one for one in self.calls if one.number > at.weight_calls and one.due <= at.step]
        return calls[-1] if calls else None

    def _pulled(self) -> int:
        found = (getattr(node, "pulled_samples", None) for node in walk(self._source))
        return next((one for one in found if isinstance(one, int)), 0)


def _positions(state: Any) -> Iterator[int]:
    """Yield the items that each mixture had drawn, in the state of a graph."""
    for part in state.values() if isinstance(state, dict) else ():
        yield from _positions(part)
    if isinstance(state, dict) and "targets" in state and "weights" in state:
        yield state.get("position", 0)
