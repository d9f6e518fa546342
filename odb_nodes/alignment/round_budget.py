"""The budget below a `RankAligner`, which ranks may ask to be smaller from the next round on."""

from __future__ import annotations

from collections.abc import Sequence

from torchdata.nodes import BaseNode

from odb_nodes.alignment.aligner_state import AlignerState
from odb_nodes.contract.graph import walk
from odb_nodes.contract.node import StatefulNode, call_member
from odb_nodes.contract.state import resealed
from odb_nodes.nodes.bucketer_state import LimitsState
from odb_nodes.planning.alignment import CostReport
from odb_nodes.planning.budget import TokenBudget
from odb_nodes.planning.limits import Limits
from odb_nodes.sample import Sample


class RoundBudget:
    """Limits what groups are formed under, in all rounds alike on all ranks.

    Args:
        source: the node that yields the groups: a `WindowBucketer`, or a node over one.
    """

    def __init__(self, source: BaseNode[list[Sample]]) -> None:
        self._source = source
        self.wish = 0
        """The `tokens` that this rank asks for; 0 for none."""

    def ask_for(self, tokens: int) -> None:
        """Ask all ranks for groups of at most `tokens`, from the next round on.

        The smallest number that a rank asks for is taken. May be called from any thread.
        """
        self.wish = min(self.wish or tokens, tokens)

    def tighten(self, limits: LimitsState | None) -> None:
        """Form groups under tighter limits from now on."""
        if limits is not None:
            for node in walk(self._source):
                call_member(node, "tighten", Limits(*limits))

    def settle(self, at: AlignerState, reports: Sequence[CostReport]) -> None:
        """Agree on the limits of the next round.

        Args:
            at: where this rank stands.
            reports: those of all ranks for the round.
        """
        at.next_limits = self._wished(reports, at.next_limits)

    def _wished(
        self, reports: Sequence[CostReport], before: LimitsState | None
    ) -> LimitsState | None:
        """Return what had been agreed on before, or what ranks ask for."""
        wishes = [report.wish for report in reports if report.wish]
        if not wishes or (found := self._limits()) is None:
            return before
        # A rank without further groups has not tightened yet what had been agreed on.
        now = found[1] if before is None else Limits(*before)
        return (*now.tightened(now._replace(tokens=min(wishes))),)

    def change(self, at: AlignerState) -> None:
        """Let a state that was saved under a larger budget go on with the present one.

        The round keeps its groups. That the state may be restored once more, it says what they were
        formed under.
        """
        if (found := self._limits()) is None:
            return
        nominal, now = found
        if now.tightened(nominal) == now:
            return
        before = nominal if at.next_limits is None else Limits(*at.next_limits)
        at.next_limits = (*nominal.tightened(before),)
        for node in walk(self._source):
            if isinstance(node, StatefulNode) and hasattr(node, "limits"):
                name, config = type(node).__name__, node.fingerprint()
                at.source = resealed(at.source, name, config, has_own_limits=True)

    def _limits(self) -> tuple[Limits, Limits] | None:
        """Return the limits of the budget, and those that groups are formed under now."""
        for node in walk(self._source):
            budget, limits = getattr(node, "budget", None), getattr(node, "limits", None)
            if isinstance(budget, TokenBudget) and isinstance(limits, Limits):
                return Limits.of(budget), limits
        return None
