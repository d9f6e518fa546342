"""The groups below an aligner: those of a round, and what they cost."""

from __future__ import annotations

from typing import Any

from torchdata.nodes import BaseNode

from odb_nodes.contract import copy_state
from odb_nodes.contract.graph import find_budget
from odb_nodes.contract.node import call_member
from odb_nodes.planning.alignment import CostReport, SplitLadder, make_report
from odb_nodes.planning.group_costs import (
    BudgetCost,
    CostFn,
    GroupCostEstimator,
    padded_tokens,
    tokens_of,
)
from odb_nodes.sample import LeftOut, Sample


class GroupReader:
    """Reads groups of a source, one further than asked for.

    Without that, a rank would find out too late that its data has ended: it could then no longer
    keep a sample to fill with.

    Args:
        source: node that yields groups, `list[Sample]`.
        measure: tells what groups cost.
        may_split: groups may be split where there are fewer than steps.
    """

    def __init__(
        self, source: BaseNode[list[Sample]], measure: GroupCostEstimator, may_split: bool
    ) -> None:
        self._source, self._measure, self._may_split = source, measure, may_split
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

    def report(
        self, groups: list[list[Sample]], most: int, filler: Sample | None
    ) -> tuple[CostReport, SplitLadder[Sample]]:
        """Return what this rank tells of the groups of a round, and how they may be split.

        Args:
            groups: the last that were read, or none.
            most: how many were asked for.
            filler: a sample for the steps that none of them is for.
        """
        return make_report(
            groups,
            most=most,
            ended=self.ahead is None,
            has_filler=filler is not None,
            may_split=self._may_split,
            measure=self._measure,
            tokens=tokens_of,
        )

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
