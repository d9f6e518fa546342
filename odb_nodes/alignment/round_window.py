"""The window of the pools below a `RankAligner`, which all ranks choose together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchdata.nodes import BaseNode

from odb_nodes.alignment.aligner_state import AlignerState
from odb_nodes.planning.alignment import CostReport
from odb_nodes.planning.auto_window import chosen_window


class RoundWindow:
    """Lets the pools of all ranks have the same `"auto"` window.

    The first round of an epoch tells it: each rank says what it has pulled so far. The window is in
    force from the second group of the next round on, and the next epoch begins with it.

    Args:
        source: the node that yields the groups. Ranks choose together if it is the `WindowBucketer`
            itself: a node between might read ahead, and groups then depend on how far it has come.
    """

    def __init__(self, source: BaseNode[Any]) -> None:
        node: Any = source
        self._node: Any = node if hasattr(node, "use_window") else None
        if self._node is not None:
            self._node.window.follows_ranks = True  # and so does not choose by itself

    def report(self) -> tuple[int, int]:
        """Return what this rank tells of its lengths; see `PulledLengths.report`."""
        if self._node is None:
            return 0, 0
        report: tuple[int, int] = self._node.window.report()
        return report

    def use(self, window: int) -> None:
        """Let pools hold so many samples from now on.

        Args:
            window: what the state of the aligner has of the round; 0 in the first: as before.
        """
        if self._node is not None:
            self._node.use_window(window)

    def settle(self, at: AlignerState, reports: Sequence[CostReport]) -> None:
        """Choose the window of the other rounds in the first one.

        Args:
            at: where this rank stands.
            reports: those of all ranks for the round.
        """
        at.next_window = at.next_window or chosen_window([one.lengths for one in reports])
