"""Node: takes the steps of several virtual ranks as the batches of one process."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchdata.nodes import BaseNode

from odb_nodes.alignment.peers import VirtualTeam
from odb_nodes.alignment.rank_aligner import RankAligner
from odb_nodes.contract import NodeState, SourceStates, StatefulNode, copy_state
from odb_nodes.contract.node import call_member, snapshot
from odb_nodes.errors import StateError
from odb_nodes.nodes.seeded_collate import DeferredBatch
from odb_nodes.step_info import STEP_INFO_KEY, StepInfo

Batch = MutableMapping[str, Any]


@dataclass(kw_only=True)
class VirtualState(NodeState):
    """Where `VirtualRanks` stand."""

    sources: SourceStates  # the states of the graphs before the step, by number of the virtual rank
    turn: int  # batches of the step that are out
    samples: int  # samples in them
    step_digest: int  # a digest of the keys of the step, 0 where none of its batches is out


class VirtualRanks(StatefulNode[Batch, VirtualState]):
    """Yields the batches of each step of several virtual ranks, one after the other.

    The graphs settle rounds together, in one exchange with the other processes. The batches of a
    step are micro-steps: of a job that accumulates the gradients of `hosted` times as many.

    State: those of the graphs before the step, and how many of its batches are out. Restoring
    within a step takes it again.
    """

    STATE = VirtualState

    def __init__(
        self,
        sources: Sequence[BaseNode[Batch]],
        aligners: Sequence[RankAligner],
        team: VirtualTeam,
    ) -> None:
        super().__init__()
        first = team.rank * team.hosted
        self.sources = {str(first + number): source for number, source in enumerate(sources)}
        self._aligners = (aligners,)  # `walk` finds them below the sources
        self._team = team
        self._collates = True
        self._step: list[Any] = []
        self._before: dict[str, Any] | None = None
        self._forget()
        if team.hosted > 1:  # What draws random numbers must be collated on the trainer's thread.
            for source in sources:
                call_member(source, "expect_read_ahead")

    def expect_read_ahead(self) -> None:
        """Yield a `DeferredBatch` for what must be collated on the trainer's thread."""
        self._collates = False
        for source in self.sources.values():
            call_member(source, "expect_read_ahead")

    def begin_epoch(self) -> None:
        """Begin the epoch of each graph."""
        self._forget()
        for source in self.sources.values():
            source.reset(None)

    def restore(self, state: VirtualState) -> None:
        """Go to where each graph stands, and in their step to the batch that is next."""
        self._forget()
        if state.sources.keys() != self.sources.keys():
            raise StateError(
                f"the state is of virtual ranks {[*state.sources]}, but this process hosts those "
                f"of numbers {[*self.sources]}. Load the state that this rank has saved."
            )
        for name, source in self.sources.items():
            source.reset(copy_state(state.sources[name]))
        self._turn, self._samples, self._digest = state.turn, state.samples, state.step_digest
        self._before = state.sources if state.turn else None

    def save(self) -> VirtualState:
        """Return where the graphs stood before the step, and how far the step is out."""
        return VirtualState(
            sources={**self._states()},
            turn=self._turn,
            samples=self._samples,
            step_digest=self._digest,
        )

    def next(self) -> Batch:
        """Return the next batch of the step; after `expect_read_ahead` maybe a `DeferredBatch`."""
        if not self._step:
            self._take_step()
        item = self._step[self._turn]
        info = _info_of(item)
        if self._collates and isinstance(item, DeferredBatch):
            item = item.collate()
        self._turn, self._samples = self._turn + 1, self._samples + info.local_samples
        if self._turn == len(self._step):
            self._forget()
        batch: Batch = item
        return batch

    def fingerprint(self) -> dict[str, Any]:
        """Return which ranks the states in a state are of."""
        team = self._team
        return {"virtual_ranks": team.virtual_ranks, "world_size": team.processes}

    def fixed_fields(self, _state: VirtualState) -> tuple[str, ...]:
        """Return all: another number of virtual ranks has other graphs, and so other states."""
        return ("virtual_ranks", "world_size")

    def _take_step(self) -> None:
        self._states()  # which a state within the step holds
        (aligners,) = self._aligners
        peers = aligners[0].peers
        peers.check_process()
        has_step = peers.drive(
            [aligner.prepare_step() for aligner in aligners],
            lambda: aligners[0].where,
            place={"batches of the step that are out": self._turn},
        )
        if not has_step[0]:
            raise StopIteration
        step = [next(source) for source in self.sources.values()]
        infos = map(_info_of, step)
        told = [(one.keys, one.row_sources, one.row_repeats, one.local_targets) for one in infos]
        digest = zlib.crc32(repr(told).encode())
        if self._turn and digest != self._digest:
            raise StateError(
                f"the state was saved within a step, after batch {self._turn} of {len(step)}, and "
                "the step would have other samples now. Change the data, the budget or `exclude` "
                "only where you resume from a state that was saved after an optimizer step."
            )
        self._step, self._digest = step, digest

    def _states(self) -> dict[str, Any]:
        """Return the states of the graphs before the step."""
        if self._before is None:
            self._before = {name: snapshot(one) for name, one in self.sources.items()}
        return self._before

    def _forget(self) -> None:
        self._step, self._before = [], None
        self._turn = self._samples = self._digest = 0


def _info_of(item: Batch | DeferredBatch) -> StepInfo:
    info: StepInfo = item.info if isinstance(item, DeferredBatch) else item[STEP_INFO_KEY]
    return info


def place_of(state: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return epoch, step and samples done, of a state of `VirtualRanks` over `GroupCollator`."""
    sources = [*state["sources"].values()]
    done = state["samples"] + sum(one["samples"] for one in sources)
    return sources[0]["epoch"], sources[0]["step"] * len(sources) + state["turn"], done
