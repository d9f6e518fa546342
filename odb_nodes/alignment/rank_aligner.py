"""Node: gives all ranks the same number of steps, of about the same cost, and one loss."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, get_args

from torchdata.nodes import BaseNode

from odb_nodes._core.checks import check_choice, check_count, check_integer
from odb_nodes._core.hashing import hash_ints
from odb_nodes.alignment.aligned_round import AlignedRound, LossRule, LossScaling
from odb_nodes.alignment.aligner_state import AlignerState
from odb_nodes.alignment.group_reader import GroupReader, cost_below
from odb_nodes.alignment.held_samples import HeldSamples
from odb_nodes.alignment.peers import PEER_TIMEOUT_S, Peers
from odb_nodes.alignment.resumed_round import ResumedRound, excluded_below
from odb_nodes.alignment.round_terms import RoundTerms
from odb_nodes.alignment.tells_of_rounds import TellsOfRounds
from odb_nodes.contract import EpochNode
from odb_nodes.contract.node import check_node, state_to_keep
from odb_nodes.contract.state import made
from odb_nodes.planning.alignment import Uneven, plan_round
from odb_nodes.planning.budget import round_up
from odb_nodes.planning.group_costs import CostFn, GroupCostEstimator, best_filler
from odb_nodes.planning.options import JobOptions
from odb_nodes.planning.rounds import round_steps
from odb_nodes.sample import LeftOut, Sample
from odb_nodes.step_info import AlignedGroup


class RankAligner(TellsOfRounds, EpochNode[AlignedGroup, AlignerState]):
    """Yields the groups of its source so that all ranks take the same steps.

    It works in rounds. In each one it pulls up to `round_size` groups, tells the other ranks what
    they cost, in one message, and receives what theirs cost. From then on every rank knows the
    round: groups of like cost go to the same step, one permutation that all ranks share shuffles
    the steps, and the groups of the next round are cut to costs that are the same on all ranks.

    At the end of the data, a rank that has fewer groups than others splits some of its own. One
    that has fewer samples than there are steps fills with a real sample whose loss weighs nothing.

    State: the source's, the plan of the round, how many of its steps are out, and key, length and
    digest of each sample of the others: 56 bytes per step and 16 per sample. Restoring makes these
    again, and asks no other rank. Where the source cannot make samples again by their keys, its
    state is that where the round begins, and all groups of the round are pulled again.

    Args:
        source: node that yields groups, `list[Sample]`: a `WindowBucketer`.
        process_group: the ranks that share steps: a process group of any backend, or a
            `DeviceMesh` of one dimension (the data-parallel one). Default: all ranks of the job;
            one where torch.distributed is not initialised.
        round_size: steps between two messages, 4, 8, 16 at first; rounded up to a multiple of
            `accumulate`. Larger matches costs better, and holds that many groups.
        uneven: what happens where ranks have different amounts of data. `"fill"`: as above.
            `"stop"`: all end with the first; the rest is counted in `unemitted_samples`.
        loss_scaling: what `StepInfo.loss_scale` makes of the mean of the ranks' gradients:
            `"exact"`, the gradient of the mean over all supervised tokens; `"approx"`, each rank's
            mean weighed by its samples; `"none"`, 1.0 (0.0 in filler steps).
        accumulate: steps of an optimizer step, which share one denominator.
        seed: the seed of the permutations; the same on all ranks.
        timeout_s: seconds until a rank that does not come is an error on the others.
        cost_fn: group -> what a step with it takes, an integer in any unit. Default: what it costs
            under the budget of the `WindowBucketer` below. With another one, groups are not cut.
        modalities: name -> whether a sample has it. Default: `"image"`, where it has patches.
        tasks: names of all tasks of the samples; `StepInfo.task_targets` has the targets of each.

    Raises:
        TypeError, ValueError: an argument is not valid.
    """

    STATE = AlignerState
    keeps_failed_items = True

    def __init__(
        self,
        source: BaseNode[list[Sample]],
        process_group: Any = None,
        round_size: int = JobOptions.round_size,
        uneven: Uneven = JobOptions.uneven,
        loss_scaling: LossScaling = LossRule.scaling,
        accumulate: int = JobOptions.accumulate,
        seed: int = JobOptions.seed,
        timeout_s: float = PEER_TIMEOUT_S,
        *,
        cost_fn: CostFn | None = None,
        modalities: Mapping[str, Callable[[Sample], bool]] | None = None,
        tasks: Sequence[str] = (),
    ) -> None:
        super().__init__()
        check_node("source", source)
        check_choice("uneven", uneven, get_args(Uneven))
        self.measure = GroupCostEstimator(cost_fn or cost_below(source), modalities, tasks)
        self.source = source
        accumulate = check_count("accumulate", accumulate)
        self.round_size = round_up(check_count("round_size", round_size), accumulate)
        self.uneven = uneven
        self.rule = LossRule(world_size=1, accumulate=accumulate, scaling=loss_scaling)
        self._seed = check_integer("seed", seed)
        self.peers = Peers(process_group, timeout_s, self.round_size, len(self.measure.tasks))
        cost_fn, fills = self.measure.cost_fn, uneven == "fill"
        self.terms = RoundTerms(source, self.peers, cost_fn, self.round_size, fills)
        self.replayed_samples = 0
        """Samples of the round that the last restore processed again."""
        self._at = AlignerState()
        self._clear()

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        """Begin the next epoch, or go to where `initial_state` stands.

        Raises:
            StateError: the state is damaged or does not fit, or the source does not yield the
                groups again. The other ranks raise it too, when they next meet this one, which
                waits for them for up to 5 s.
            RuntimeError: the job has several ranks, but torch.distributed is not initialised.
        """
        self.peers.begin()
        with self.peers.reporting_failure("reset"):
            super().reset(initial_state)

    def prepare_reset(self) -> None:
        """Find this rank's place among the others, and make sure that the sources share it."""
        batch, batches = self.peers.batch_of_step
        world_size = self.peers.world_size // batches
        self.rule = replace(self.rule, world_size=world_size, batch=batch, batches=batches)
        self._clear()
        self.peers.check_source(self.source)

    def _clear(self) -> None:
        self._before, self._at = self._at, AlignerState()
        may_split = self.uneven == "fill"
        self._reader = GroupReader(self.source, self.measure, self.terms, may_split)
        self._steps = AlignedRound(tasks=len(self.measure.tasks))
        self._filler: Sample | None = None
        self._held: HeldSamples | None = None  # what the next state holds
        self._resumed: ResumedRound  # where a state was restored: no other round is unsettled

    def begin_epoch(self) -> None:
        """Begin the epoch of the source."""
        self.terms.begin_epoch(self._at, self._before)
        self.source.reset(None)
        self._at.source = state_to_keep(self.source)

    def restore(self, state: AlignerState) -> None:
        """Go to a step of a round, and make what is left of the round again.

        Raises:
            StateError: the source does not yield it again.
        """
        self._at, accumulate = state, self.rule.accumulate
        self.terms.follow(state)
        self._steps = state.steps()
        resumed = ResumedRound(state, self._steps, self._reader, accumulate, self.uneven)
        resumed.restore(self.round_size if state.drained else self._round_steps(state.round))
        self._resumed, self._filler, self._held = resumed, resumed.filler, resumed.held
        self.replayed_samples = resumed.replayed_samples

    def save(self) -> AlignerState:
        """Return the source's state, the plan of the round, and what is held of it."""
        return made(self.save_to_keep())

    def save_to_keep(self) -> AlignerState:
        """Return the same, with what is to be said of samples made later."""
        at = copy(self._at)
        at.held, at.sizes = None, []
        at.wish, at.tasks = self.terms.budget.wish, len(self.measure.tasks)
        at.left_out, at.left_out_ahead = [(*one,) for one in at.left_out], []
        if self._held is not None:
            self._held.put_into(at)
        return at

    def fixed_fields(self, state: AlignerState) -> Collection[str]:
        """Return what would let the ranks take different steps, were it another in mid-epoch."""
        return state.fixed_fields()

    def next(self) -> AlignedGroup:
        """Return the next group and its `StepInfo`.

        Raises:
            PeerError: another rank failed, left, or did not come within `timeout_s`.
            StateError: the ranks do not go on from the same place.
            WorkerError: the connections belong to the process that this one was forked from.
        """
        self.peers.check_process()
        at = self._at
        if at.unsettled:
            self._settle()
        while at.emitted == len(self._steps):
            self._begin_round()
        self._agree()
        index, step, rule = at.emitted, at.step, self.rule
        at.emitted, at.step = at.emitted + 1, at.step + 1
        item = self._steps.take(
            index,
            rule,
            self.measure,
            step=step * rule.batches + rule.batch,
            epoch=self._epochs.epoch,
            ends_epoch=at.is_at_end(self._steps) and rule.batch == rule.batches - 1,
            left_out=tuple(self.take_left_out()),
            source_shares=self.terms.weights.shares(),
        )
        if self._held is not None:
            self._held = self._held.after(1)
        if at.emitted == len(self._steps):
            self._end_round()
        return item

    def take_left_out(self) -> list[LeftOut]:
        """Return the samples that were left out since the last step."""
        taken, self._at.left_out = self._at.left_out, []
        return [LeftOut(*one) for one in taken]

    def interrupt(self) -> None:
        """Make a `next` that waits for other ranks on another thread raise. A reset takes it back.

        The connections stay.
        """
        self.peers.interrupt()

    close = interrupt

    def _agree(self) -> None:
        if self.peers.agreed:
            return
        config = {
            **self._at.agreed(),
            "epoch": self._epochs.epoch,
            "totals of the round": self._steps.digest(),
            "exclude": repr(excluded_below(self.source)),
            type(self).__name__: {**self.fingerprint(), "rank": None},
        }
        self.peers.agree(config, self.source)

    def _stand(self) -> None:
        """Keep what a state has of the samples that are held, or begin the next round."""
        at = self._at
        if self._reader.recalls:
            own = None if at.filler is not None else self._filler
            held = self._reader.held(self._steps.groups()[at.emitted :], own)
            at.source, self._held = state_to_keep(self.source), held
        if at.emitted == len(self._steps):
            self._end_round()

    def _begin_round(self) -> None:
        """Settle the next round with the other ranks.

        Raises:
            StopIteration: there is none.
        """
        at = self._at
        if at.last:
            raise StopIteration
        where = f"round {at.round} of epoch {self._epochs.epoch} (from step {at.step})"
        most = self._round_steps(at.round)
        if at.shares_rest:
            self._agree()
            groups, most = self._reader.read_rest(at, where)
        with self.peers.reporting_failure(where):
            if not at.shares_rest:
                groups = self._reader.read_next(at, most)
            report, ladder = self._reader.report(groups, most, self._filler)
        self._agree()
        reports = self.peers.reports(report, where, most)
        self.terms.weights.settle(reports, where)
        if not at.step:
            self._reader.check_has_samples(reports, self._epochs.epoch)
        key = hash_ints(self._seed, self._epochs.epoch, at.round)
        plan = plan_round(reports, uneven=self.uneven, key=key)
        if groups:
            self._filler = best_filler(groups)
        if self.uneven == "fill":
            self._filler = self.peers.share_filler(reports, at, self._filler, where)
        at.last = plan.last
        self._steps = AlignedRound.of(plan, self.peers.rank)
        at.emitted, at.plan = 0, self._steps.to_bytes()
        self.terms.settle(at, reports, self._round_steps(at.round + 1))
        at.splits = plan.splits[self.peers.rank]
        at.left_out = [*at.left_out, *self._reader.left_out]
        self._steps.fill(ladder.groups(at.splits), self._filler)
        if self.uneven == "stop" and plan.last:
            whose = f"of rank {self.peers.rank} are not emitted in epoch {self._epochs.epoch}"
            at.unemitted_samples, rest = self._reader.leave(groups[len(self._steps) :], whose)
            at.left_out += rest
        self._stand()

    def _settle(self) -> None:
        """Tell the other ranks what is left of the round, where samples were excluded."""
        self._agree()
        self._filler = self._resumed.settle(self.peers)
        self._stand()

    def _end_round(self) -> None:
        """Stand at the beginning of the next round, or at the end of the epoch."""
        at = self._at
        if at.last:
            self._steps.fill([], None)
            at.source, at.excluded = state_to_keep(self.source), {}
            self._held = None
            return
        self._steps = AlignedRound(tasks=len(self.measure.tasks))
        at.emitted, at.plan, at.splits = 0, None, 0
        at.round += 1
        at.drained = self._reader.ahead is None
        if not (self._reader.recalls or at.drained):  # Else the filler comes from the same place.
            at.source, at.excluded = self._reader.next_state, {}

    def _round_steps(self, number: int) -> int:
        return round_steps(number, self.peers.world_size, self.round_size, self.accumulate)

    def fingerprint(self) -> dict[str, Any]:
        """Return what decides the output: a state fits only where it is equal."""
        return {
            "rank": self.peers.rank,
            "world_size": self.peers.world_size,
            "round_size": self.round_size,
            "uneven": self.uneven,
            "loss_scaling": self.rule.scaling,
            "accumulate": self.rule.accumulate,
            "seed": self._seed,
            **self.measure.fingerprint(),
        }
