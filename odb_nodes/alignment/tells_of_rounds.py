"""What an aligner tells of its rounds so far."""

from __future__ import annotations

from odb_nodes.alignment.aligned_round import LossRule
from odb_nodes.alignment.aligner_state import AlignerState
from odb_nodes.alignment.peers import Peers


class TellsOfRounds:
    """What a `RankAligner` tells of its rounds so far."""

    rule: LossRule
    peers: Peers
    _at: AlignerState

    @property
    def accumulate(self) -> int:
        """Steps of an optimizer step."""
        return self.rule.accumulate

    @property
    def unemitted_samples(self) -> int:
        """Samples of this rank and epoch that `uneven="stop"` left over."""
        return self._at.unemitted_samples

    @property
    def excluded_samples(self) -> int:
        """Samples of this rank and epoch that were in a round when they were excluded."""
        return self._at.excluded_samples

    @property
    def exchange_wait_s(self) -> float:
        """Seconds spent waiting for other ranks so far."""
        return self.peers.wait_s

    @property
    def has_workers(self) -> bool:
        """Tell whether threads run for the connections to other ranks."""
        return self.peers.are_connected
