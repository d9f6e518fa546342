"""Node: yields the batches of several virtual ranks in one process."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchdata.nodes import BaseNode

from odb_nodes.core.alignment.peers import VirtualTeam
from odb_nodes.core.alignment.rank_aligner import RankAligner
from odb_nodes.core.contract import NodeState, SourceStates, StatefulNode, copy_state
from odb_nodes.core.contract.node import call_member, snapshot
from odb_nodes.core.nodes.seeded_collate import DeferredBatch
from odb_nodes.core.step_info import STEP_INFO_KEY, Batch, StepInfo
from odb_nodes.errors import StateError


@dataclass(kw_only=True)
class VirtualState(NodeState):
    """The state of a `VirtualRanks`."""

    sources: SourceStates  # the states of the graphs before the step, by number of the virtual rank
    turn: int  # batches of the step that were yielded
    samples: int  # samples in these batches
    step_digest: int  # a digest of the samples of the step, 0 before its first batch


class VirtualRanks(StatefulNode[Batch, VirtualState]):
    """Yields the batches of each step of several virtual ranks, one after the other.

    The graphs settle rounds together, in one exchange with the other processes. Each batch of a
    step is a micro-step, so a process accumulates the gradients of its virtual ranks.

    State: the states of the graphs before the step, and how many batches of the step were yielded.
    A restore within a step takes the step again and skips these batches.
    """

    STATE = VirtualState

    def __init__(
        self,
        sources: Sequence[BaseNode[Batch]],
        aligners: Sequence[RankAligner],
        team: VirtualTeam,
    ) -> None:
        super().__init__()
        first = team.rank * team.ranks_per_process
        self.sources = {str(first + number): source for number, source in enumerate(sources)}
        self._aligners = aligners  # After `sources`: a walk of the graph finds them there.
        self._team = team
        self._collates = True
        self._step: list[Any] = []
        self._before: dict[str, Any] | None = None
        self._forget()
        if team.ranks_per_process > 1:
            # A collate function that draws random numbers runs on the training thread.
            for source in sources:
                call_member(source, "expect_read_ahead")

    def expect_read_ahead(self) -> None:
        """Yield a `DeferredBatch` for batches that the training thread must collate."""
        self._collates = False
        for source in self.sources.values():
            call_member(source, "expect_read_ahead")

    def begin_epoch(self) -> None:
        """Begin the epoch of each graph."""
        self._forget()
        for source in self.sources.values():
            source.reset(None)

    def restore(self, state: VirtualState) -> None:
        """Go to the position of each graph, and to the next batch of their step."""
        self._forget()
        if state.sources.keys() != self.sources.keys():
            raise StateError(
                f"the state is of virtual ranks {[*state.sources]}, but this process hosts virtual "
                f"ranks {[*self.sources]}. Load the state that this rank has saved."
            )
        for name, source in self.sources.items():
            source.reset(copy_state(state.sources[name]))
        self._turn = state.turn
        self._samples = state.samples
        self._digest = state.step_digest
        self._before = state.sources if state.turn else None

    def save(self) -> VirtualState:
        """Return the states of the graphs before the step, and the position in the step."""
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
        self._turn += 1
        self._samples += info.local_samples
        if self._turn == len(self._step):
            self._forget()
        batch: Batch = item
        return batch

    def fingerprint(self) -> dict[str, Any]:
        """Return the numbers of virtual ranks and of processes."""
        team = self._team
        return {"virtual_ranks": team.virtual_ranks, "world_size": team.processes}

    def fixed_fields(self, _state: VirtualState) -> tuple[str, ...]:
        """Return all fields: the number of virtual ranks decides the graphs and their states."""
        return ("virtual_ranks", "world_size")

    def _take_step(self) -> None:
        # A state within the step has the states of the graphs from before the step.
        self._states()
        aligners = self._aligners
        peers = aligners[0].peers
        peers.check_process()
        has_step = peers.drive(
            [aligner.prepare_step() for aligner in aligners],
            lambda: aligners[0].where,
            common={"batches of the step that are out": self._turn},
        )
        if not has_step[0]:
            raise StopIteration
        step = [next(source) for source in self.sources.values()]
        infos = [_info_of(item) for item in step]
        samples = [
            (info.keys, info.row_sources, info.row_repeats, info.local_targets) for info in infos
        ]
        digest = zlib.crc32(repr(samples).encode())
        if self._turn and digest != self._digest:
            raise StateError(
                f"the state was saved within a step, after batch {self._turn} of {len(step)}, and "
                "the step would have other samples now. Change the data, the budget, `step_time` "
                "or `exclude` only if you resume from a state that was saved after an optimizer "
                "step."
            )
        self._step = step
        self._digest = digest

    def _states(self) -> dict[str, Any]:
        """Return the states of the graphs before the step."""
        if self._before is None:
            self._before = {name: snapshot(source) for name, source in self.sources.items()}
        return self._before

    def _forget(self) -> None:
        self._step = []
        self._before = None
        self._turn = self._samples = self._digest = 0


def _info_of(item: Batch | DeferredBatch) -> StepInfo:
    info: StepInfo = item.info if isinstance(item, DeferredBatch) else item[STEP_INFO_KEY]
    return info


def progress_of(state: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return epoch, step and samples done, of a state of `VirtualRanks` over `GroupCollator`."""
    collators = [*state["sources"].values()]
    done = state["samples"] + sum(collator["samples"] for collator in collators)
    return collators[0]["epoch"], collators[0]["step"] * len(collators) + state["turn"], done
