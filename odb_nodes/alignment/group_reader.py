"""The groups below an aligner: what they cost, and those of a round."""

from __future__ import annotations

from typing import Any

from torchdata.nodes import BaseNode

from odb_nodes.contract import copy_state
from odb_nodes.contract.graph import find_budget
from odb_nodes.contract.node import call_member
from odb_nodes.planning.group_costs import BudgetCost, CostFn, padded_tokens
from odb_nodes.sample import LeftOut, Sample


class GroupReader:
    """Reads groups of a source, one further than asked for.

    Without that, a rank would find out too late that its data has ended: it could then no longer
    keep a sample to fill with.

    Args:
        source: node that yields groups, `list[Sample]`.
    """

    def __init__(self, source: BaseNode[list[Sample]]) -> None:
        self._source = source
        self.ahead: list[Sample] | None = None
        """First group of the next round; `None` where there is none, and before the first read."""
        self.next_state: Any = None
        """The source's state before that group."""
        self.left_out: list[LeftOut] = []
        """Samples that were left out among those of the last read."""
        self._left_out_ahead: list[LeftOut] = []

    def read(self, most: int) -> list[list[Sample]]:
        """Return the next groups, `most` of them, or all that are left."""
        groups = [] if self.ahead is None else [self.ahead]
        while len(groups) < most and (group := self._read_one()) is not None:
            groups.append(group)
        self.left_out = [*self._left_out_ahead, *self._take_left_out()]
        self.next_state = copy_state(self._source.state_dict())
        self.ahead = self._read_one() if len(groups) == most else None
        self._left_out_ahead = self._take_left_out()
        if self.ahead is None:  # The source has ended.
            self.left_out, self._left_out_ahead = [*self.left_out, *self._left_out_ahead], []
        return groups

    def _take_left_out(self) -> list[LeftOut]:
        return call_member(self._source, "take_left_out") or []

    def _read_one(self) -> list[Sample] | None:
        try:
            group = next(self._source)
        except StopIteration:
            return None
        if group and isinstance(group, list) and all(isinstance(one, Sample) for one in group):
            return group
        kind = "an empty list" if group == [] else f"`{type(group).__name__}`"
        raise TypeError(
            "`source` of RankAligner must yield groups, `list[Sample]`, but yielded "
            f"{kind} instead. Put a `WindowBucketer` before it."
        )


def cost_below(source: BaseNode[Any]) -> CostFn:
    """Return the cost of a group under the budget below; where there is none, its padded tokens."""
    budget = find_budget(source)
    return padded_tokens if budget is None else BudgetCost(budget)
