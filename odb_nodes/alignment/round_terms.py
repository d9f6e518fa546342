"""What all ranks agree on from round to round, by what they tell each other in its message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchdata.nodes import BaseNode

from odb_nodes.alignment.aligner_state import AlignerState
from odb_nodes.alignment.last_round import LastRound
from odb_nodes.alignment.peers import Peers
from odb_nodes.alignment.round_budget import RoundBudget
from odb_nodes.alignment.round_caps import RoundCaps
from odb_nodes.alignment.round_weights import RoundWeights
from odb_nodes.alignment.round_window import RoundWindow
from odb_nodes.nodes.bucketer_state import LimitsState
from odb_nodes.planning.alignment import CostReport
from odb_nodes.planning.group_costs import CostFn
from odb_nodes.planning.levelling import begins_last_round
from odb_nodes.sample import Sample


class RoundTerms:
    """The terms of rounds, each of which is agreed on in the round before.

    Args:
        source: the node that yields the groups.
        peers: the other ranks.
        cost_fn: what the groups of a step are matched by.
        round_size: steps of a full round.
        fills: ranks end together, and none leaves samples over.
    """

    def __init__(
        self,
        source: BaseNode[list[Sample]],
        peers: Peers,
        cost_fn: CostFn,
        round_size: int,
        fills: bool,
    ) -> None:
        self._peers = peers
        self.budget = RoundBudget(source)
        self.caps = RoundCaps(source, cost_fn, round_size)
        self.window = RoundWindow(source)
        self.weights = RoundWeights(source)
        self.last_round = LastRound(source if fills else None, peers)

    def begin_epoch(self, at: AlignerState, before: AlignerState) -> None:
        """Begin an epoch as the one before went on.

        Args:
            at: where this rank stands.
            before: where it stood at the end of the epoch before.
        """
        self.budget.tighten(before.next_limits)
        self.window.use(before.next_window)
        self.weights.begin_epoch(at)

    def follow(self, at: AlignerState) -> None:
        """Go on from a state.

        Args:
            at: where this rank stands.
        """
        self.budget.wish = at.wish
        self.weights.follow(at)

    def use(self, limits: LimitsState | None, caps: bytes | None, window: int) -> None:
        """Form the groups of a round after the first, which was formed with the round before.

        Args:
            limits: what the state of the aligner has of the round.
            caps: likewise.
            window: likewise.
        """
        self.budget.tighten(limits)
        self.window.use(window)
        self.caps.use(caps, ahead=False)

    def complete(self, report: CostReport, ahead: Sequence[Sample] | None) -> CostReport:
        """Return a report with what this rank tells of the terms.

        Args:
            report: that of the groups of a round.
            ahead: the first group of the next one; `None` where there is none.
        """
        terms: dict[str, Any] = {
            "wish": self.budget.wish,
            "weights": self.weights.digest(),
            "lengths": self.window.report(),
        }
        if self._peers.world_size > 1:  # there are others to be level with
            terms |= {"left": self.last_round.left(ahead), "offer": self.caps.offer()}
        return CostReport(report.table, report.groups, report.ended, report.has_filler, **terms)

    def settle(self, at: AlignerState, reports: Sequence[CostReport], next_steps: int) -> None:
        """Note the terms of a round that begins, and agree on those of the next.

        Args:
            at: where this rank stands.
            reports: those of all ranks for the round.
            next_steps: steps of the next round.
        """
        if not at.drained:  # Else `source` stands in the last round that had groups.
            at.limits, at.caps, at.window = at.next_limits, at.next_caps, at.next_window
        self.budget.settle(at, reports)
        self.caps.settle(at, reports, next_steps)
        self.window.settle(at, reports)
        at.shares_rest = begins_last_round(reports, next_steps)
