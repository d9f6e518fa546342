"""The caps of the groups below a `RankAligner`, which all ranks agree on one round before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torchdata.nodes import BaseNode

from odb_nodes.alignment.aligner_state import AlignerState
from odb_nodes.planning.alignment import CostReport
from odb_nodes.planning.caps import NO_CAPS, agreed_caps, caps_of_round
from odb_nodes.planning.group_costs import BudgetCost, CostFn
from odb_nodes.planning.table import IntArray


class RoundCaps:
    """Lets the groups of all ranks be cut to the same costs; see `odb_nodes.planning.caps`.

    Args:
        source: the node that yields the groups. With caps if it is the `WindowBucketer` itself: a
            node between might read ahead, and groups then depend on how far it has come.
        cost_fn: what the groups of a step are matched by. Caps are for the cost under the budget.
        round_size: steps of a full round; as many costs are offered.
    """

    def __init__(self, source: BaseNode[Any], cost_fn: CostFn, round_size: int) -> None:
        can = hasattr(source, "offer_costs") and type(cost_fn) is BudgetCost
        self._node: Any = source if can else None
        self._round_size = round_size

    def offer(self) -> IntArray:
        """Return what this rank offers for the next round."""
        if self._node is None:
            return NO_CAPS
        offer: IntArray = self._node.offer_costs(self._round_size)
        return offer

    def use(self, caps: bytes | None, *, ahead: bool) -> None:
        """Cut the next groups to caps.

        Args:
            caps: what the state of the aligner has of the round.
            ahead: the next group is the first of the round after; before, those of this one. That
                group gets the largest cap on all ranks, so that a round has the same caps on all.
        """
        if self._node is not None:
            found = np.frombuffer(caps or b"", np.int64)
            self._node.use_caps(found[-1:] if ahead else found[:-1])

    def settle(self, at: AlignerState, reports: Sequence[CostReport], next_steps: int) -> None:
        """Agree on the caps of the next round.

        Args:
            at: where this rank stands.
            reports: those of all ranks for the round.
            next_steps: steps of the next round.
        """
        agreed = agreed_caps([report.offer for report in reports])
        caps = caps_of_round(agreed, next_steps) if len(agreed) else NO_CAPS
        at.next_caps = caps.tobytes() or None
