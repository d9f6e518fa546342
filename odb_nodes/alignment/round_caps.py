"""The caps of the groups below a `RankAligner`, which all ranks agree on one round before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torchdata.nodes import BaseNode

from odb_nodes.alignment.aligner_state import AlignerState
from odb_nodes.contract.graph import walk
from odb_nodes.planning.alignment import CostReport
from odb_nodes.planning.caps import NO_CAPS, agreed_caps, caps_of_round
from odb_nodes.planning.group_costs import BudgetCost, CostFn
from odb_nodes.planning.table import IntArray


class RoundCaps:
    """Lets the groups of all ranks be cut to the same costs; see `odb_nodes.planning.caps`.

    Args:
        source: the node that yields the groups: a `WindowBucketer`, or a node over one.
        cost_fn: what the groups of a step are matched by. Caps are for the cost under the budget.
        round_size: steps of a full round; as many costs are offered.
        world_size: number of ranks. A single one has nobody to be level with.
    """

    def __init__(
        self, source: BaseNode[Any], cost_fn: CostFn, round_size: int, world_size: int
    ) -> None:
        nodes: list[Any] = [one for one in walk(source) if hasattr(one, "offer_costs")]
        can = len(nodes) == 1 and world_size > 1 and type(cost_fn) is BudgetCost
        self._node = nodes[0] if can else None
        self._round_size = round_size

    def offer(self) -> IntArray:
        """Return what this rank offers for the next round."""
        if self._node is None:
            return NO_CAPS
        offer: IntArray = self._node.offer_costs(self._round_size)
        return offer

    def use(self, agreed: bytes | None, steps: int, *, ahead: bool) -> None:
        """Cut the next groups to caps.

        Args:
            agreed: what the state of the aligner has of the round.
            steps: of the round.
            ahead: the next group is the first of the round after; before, those of this one. That
                group gets the largest cap on all ranks, so that a round has the same caps on all.
        """
        if self._node is not None:
            curve = np.frombuffer(agreed or b"", np.int64)
            caps = caps_of_round(curve, steps)
            self._node.use_caps(caps[-1:] if ahead else caps[:-1])

    def settle(self, at: AlignerState, reports: Sequence[CostReport]) -> None:
        """Note the caps of a round that begins, and agree on those of the next one.

        Args:
            at: where this rank stands.
            reports: those of all ranks for the round.
        """
        if not at.drained:  # Else `source` stands in the last round that had groups.
            at.caps = at.next_caps
        at.next_caps = agreed_caps([report.offer for report in reports]).tobytes() or None
