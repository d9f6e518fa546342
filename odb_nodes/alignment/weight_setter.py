"""Node: notes at which step of the trainer the weights of a mixture were set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from torchdata.nodes import BaseNode

from odb_nodes.alignment.rank_aligner import RankAligner
from odb_nodes.alignment.round_weights import WeightsCall
from odb_nodes.contract import Count, NodeState, SourceState, StatefulNode
from odb_nodes.contract.node import state_to_keep
from odb_nodes.contract.state import made

T = TypeVar("T")


@dataclass(kw_only=True)
class SetterState(NodeState):
    """Where a `WeightSetter` stands.

    Attributes:
        source: the state of the source.
        step: items of the epoch that are out.
        number: number of calls so far.
        calls: number, step that it is due at, and weights of those that may not be agreed on yet.
    """

    source: SourceState
    step: Count
    number: Count
    calls: list[tuple[Count, Count, dict[str, float]]]


class WeightSetter(StatefulNode[T, SetterState]):
    """Yields the items of its source, and tells the `RankAligner` below which weights are set when.

    It stands above all read-ahead, where the steps are those of the trainer. A call is due so many
    steps later as may have been read ahead: no thread has come to a round at that step, so it
    depends on the step alone which round tells of it.

    State: the source's, and the calls that are not surely a part of it.

    Args:
        source: the last node of the graph.
        aligner: the `RankAligner` below.
        read_ahead: steps that may have been read ahead.
    """

    STATE = SetterState
    retries_errors = True

    def __init__(self, source: BaseNode[T], aligner: RankAligner, read_ahead: int) -> None:
        super().__init__()
        self.source = source
        self._weights, self._round_size = aligner.terms.weights, aligner.round_size
        self._read_ahead = read_ahead
        self._step = self._number = 0
        self._calls: list[WeightsCall] = []

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Note that weights are set after the step that is out, which are known to be valid."""
        self._number += 1
        self._calls.append(WeightsCall(self._number, self._step + self._read_ahead, {**weights}))
        self._weights.calls = (*self._calls,)

    def with_call(self, state: dict[str, Any], weights: Mapping[str, float]) -> dict[str, Any]:
        """Return a state as it would be, had the weights been set after it."""
        if "calls" in state:  # Another is refused when the graph is reset to it.
            state["number"] += 1
            due = state["step"] + self._read_ahead
            state["calls"] = [*state["calls"], (state["number"], due, {**weights})]
        return state

    def begin_epoch(self) -> None:
        """Begin the epoch of the source with the weights that were set last."""
        self._step = 0
        self.source.reset(None)
        self._calls = []

    def restore(self, state: SetterState) -> None:
        """Go to where the source stands, with what was set before."""
        self._step, self._number = state.step, state.number
        self._calls = [WeightsCall(*call) for call in state.calls]
        self._weights.calls = (*self._calls,)
        self.source.reset(state.source)

    def save(self) -> SetterState:
        """Return where the source stands, and what was set."""
        return made(self.save_to_keep())

    def save_to_keep(self) -> SetterState:
        """Return the same, with the state of the source that it keeps."""
        return SetterState(
            source=state_to_keep(self.source),
            step=self._step,
            number=self._number,
            calls=[(*call,) for call in self._calls],
        )

    def next(self) -> T:
        """Return the next item of the source."""
        item: T = next(self.source)
        self._step += 1
        # By the end of a round that began at that step or later, the source's state has them.
        self._calls = [one for one in self._calls if self._step <= one.due + self._round_size]
        return item

    def fingerprint(self) -> dict[str, Any]:
        """Return what decides at which round a call takes effect."""
        return {"read_ahead": self._read_ahead}
