"""Node: gives all ranks the same number of steps, of about the same cost, and one loss."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, get_args

from torchdata.nodes import BaseNode

from odb_nodes._core.checks import check_choice, check_count, check_integer
from odb_nodes._core.hashing import hash_ints
from odb_nodes._core.user_warning import warn_user
from odb_nodes.alignment.aligned_round import (
    AlignedRound,
    HeldContent,
    HeldSamples,
    LossRule,
    LossScaling,
    groups_again,
)
from odb_nodes.alignment.last_round import TailBalancer
from odb_nodes.alignment.peers import (
    PEER_TIMEOUT_S,
    Ask,
    Exchanges,
    Peers,
    VirtualRank,
    check_sharing,
    sharing_configs,
)
from odb_nodes.contract import EpochNode, EpochState, SourceState, copy_state
from odb_nodes.contract.config import loading
from odb_nodes.contract.graph import budget_below, describe_empty_epoch, remaining_samples, walk
from odb_nodes.contract.node import call_member, can_restore, check_node, snapshot
from odb_nodes.errors import SampleError, StateError
from odb_nodes.nodes import WindowBucketer
from odb_nodes.nodes.sample_records import decode_sample, encode_sample
from odb_nodes.planning.budget import round_up
from odb_nodes.planning.group_costs import (
    BudgetCost,
    CostFn,
    GroupCostEstimator,
    best_filler,
    padded_tokens,
)
from odb_nodes.planning.group_planner import RoundSettings
from odb_nodes.planning.levelling import UNKNOWN_LEFT
from odb_nodes.planning.options import JobOptions
from odb_nodes.planning.rounds import (
    CostReport,
    RoundPlan,
    RoundPlanner,
    Uneven,
    next_settings,
    plan_round,
    round_steps,
)
from odb_nodes.sample import LeftOut, Sample
from odb_nodes.sample_block import NO_SAMPLES, SampleBlock
from odb_nodes.step_info import AlignedGroup


@dataclass(kw_only=True)
class AlignerState(EpochState):
    """The state of a `RankAligner`."""

    source: SourceState = field(default_factory=dict)  # after what is held
    round: int = 0  # its number in the epoch
    step: int = 0  # the number of the next one in the epoch
    emitted: int = 0  # the steps of the round that are out
    plan: bytes | None = None  # of the round; `None` between rounds
    tasks: int = 0  # number of the tasks whose targets it has
    last: bool = False  # there is no round after this one
    source_exhausted: bool = False  # the source has no groups after those that are held
    # the `RoundSettings` of the next round
    settings: tuple[int, list[int], int, bool] = field(
        default_factory=lambda: RoundSettings().to_state()
    )
    requested_max_tokens: int = 0  # the `tokens` that this rank asks all ranks for; 0 for none
    # the sample that this rank fills with, encoded, where it came from another rank
    filler: bytes | None = None
    # the groups of the round's further steps, that of the round after it, and the sample to fill
    # with, as a group; `None` where nothing of the epoch was read
    held: HeldContent | None = None
    # key, source and reason of what is left out, and in no step yet
    left_out: list[tuple[int | None, str, str]] = field(default_factory=list)
    # those of what comes with the next round
    left_out_ahead: list[tuple[int | None, str, str]] = field(default_factory=list)
    unemitted_samples: int = 0  # the samples that `uneven="stop"` left over

    def steps(self) -> AlignedRound:
        """Return the steps of the round, without their groups."""
        steps = AlignedRound.from_bytes(self.plan, self.tasks)
        sizes = None if self.held is None else self.held[0]
        wrong_sizes = sizes is not None and len(sizes) != len(steps) - self.emitted + 2
        if wrong_sizes or self.emitted > min(len(steps), self.step):
            raise StateError("the round of `RankAligner` is damaged. Use an earlier checkpoint.")
        return steps

    @property
    def totals_digest(self) -> int:
        """A number that is the same on all ranks of the same round."""
        return AlignedRound.from_bytes(self.plan, self.tasks).digest()

    def is_at_end(self, steps: AlignedRound) -> bool:
        """Tell whether this is after the last step of the epoch, where `steps` are the round's."""
        return self.last and self.emitted == len(steps)


class RankAligner(EpochNode[AlignedGroup, AlignerState]):
    """Yields the groups of its source so that all ranks take the same steps.

    It works in rounds. In each round it pulls up to `round_size` groups, and all ranks exchange
    the costs of their groups in one message. Every rank then computes the same plan: groups of
    like cost share a step, one permutation shuffles the steps of all ranks, and the groups of the
    next round are cut to costs that are the same on all ranks.

    At the end of the data, a rank with fewer groups than others splits some of its own. A rank
    with fewer samples than steps fills a step with a real sample whose loss has no weight.

    State: the source's, the plan of the round, the number of its steps taken, and key, length and
    digest of each sample in the remaining steps: 56 bytes per step and 16 per sample. A restore
    reads these samples again, without a message to other ranks. If the source cannot read samples
    again, the state holds the samples themselves. If a state is restored with more keys in
    `exclude`, or with a lower budget, the samples of the remaining optimizer steps return to the
    pool, and a new round begins.

    Args:
        source: node that yields groups, each a sequence of `Sample`: a `WindowBucketer`.
        process_group: the ranks that share steps: a process group of any backend, or a
            `DeviceMesh`. Of several dimensions, those named `dp`, `fsdp`, `replicate`, `shard` or
            alike (also joined, `dp_shard`) share steps; ranks that differ only in others (`tp`,
            `cp`, `pp`, `ep`) get the same batches. Default: all ranks of the job, or one rank if
            torch.distributed is not initialised.
        round_size: steps between two messages, after rounds of 4, 5, 6, 7, 8, 10, ...; rounded up
            to a multiple of `accumulate`. Larger rounds match costs better and hold more groups.
        uneven: what to do when ranks have different amounts of data. `"fill"`: as above.
            `"stop"`: all ranks end with the first; `unemitted_samples` counts the rest.
        loss_scaling: the weight in `StepInfo.loss_scale`. `"exact"`: the mean of the ranks'
            gradients is the gradient of the mean over all supervised tokens. `"approx"`: each
            rank's mean is weighted by its samples. `"none"`: 1.0 (0.0 in filler steps).
        accumulate: steps of an optimizer step, which share one denominator.
        seed: seed of the permutations, the same on all ranks.
        timeout_s: seconds after which a missing rank is an error on the others.
        cost_fn: group -> cost of a step with it, an integer in any unit. Default: its cost under
            the budget of the `WindowBucketer` below. With a `cost_fn`, groups are not cut.
        modalities: name -> function that tells whether a sample has it. Default: `"image"`, for
            samples with patches.
        tasks: names of all tasks of the samples; `StepInfo.task_targets` counts the targets of
            each.

    Raises:
        TypeError, ValueError: an argument is not valid.
    """

    STATE = AlignerState
    keeps_failed_items = True

    def __init__(
        self,
        source: BaseNode[SampleBlock] | BaseNode[list[Sample]],
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
        budget = budget_below(source)
        default_cost: CostFn = padded_tokens if budget is None else BudgetCost(budget)
        self.measure = GroupCostEstimator(cost_fn or default_cost, modalities, tasks)
        self.source = source
        accumulate = check_count("accumulate", accumulate)
        self.round_size = round_up(check_count("round_size", round_size), accumulate)
        self.uneven = uneven
        self.rule = LossRule(world_size=1, accumulate=accumulate, scaling=loss_scaling)
        self._seed = check_integer("seed", seed)
        most = CostReport.message_size(self.round_size, len(self.measure.tasks))
        self._number = 0
        if isinstance(process_group, VirtualRank):
            self.peers = process_group.team.peers_of(most, len(self.measure.tasks))
            self._number = process_group.number
        else:
            self.peers = Peers(process_group, timeout_s, most, len(self.measure.tasks))
        self.replayed_samples = 0
        """Samples of the round that the last restore processed again."""
        self.requested_max_tokens = 0
        self._at = AlignerState()
        self.where = "reset"
        """The place that an error of this rank names."""
        self._filler: SampleBlock | None = None
        self._held: HeldSamples | None = None  # what the next state holds
        self._pool = source if isinstance(source, WindowBucketer) else None
        if self._pool is not None:
            self._pool.planner.follows_ranks = self._pool.keeps_planned = True
        self._clear()

    @property
    def rank(self) -> int:
        """This rank, of those that share steps."""
        return self.peers.rank + self._number

    @property
    def accumulate(self) -> int:
        """Steps of an optimizer step."""
        return self.rule.accumulate

    @property
    def unemitted_samples(self) -> int:
        """Samples of this rank and epoch that `uneven="stop"` left over."""
        return self._at.unemitted_samples

    @property
    def exchange_wait_s(self) -> float:
        """Seconds spent waiting for other ranks so far."""
        return self.peers.channel.wait_s

    @property
    def has_workers(self) -> bool:
        """Tell whether threads run for the connections to other ranks."""
        return self.peers.are_connected

    def ask_for_tokens(self, tokens: int) -> None:
        """Ask all ranks for groups of at most `tokens`, from the next round on.

        The smallest number that a rank asks for is taken. May be called from any thread.
        """
        self.requested_max_tokens = min(self.requested_max_tokens or tokens, tokens)

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
        batches = self.peers.hosted
        world_size = self.peers.world_size // batches
        self.rule = replace(self.rule, world_size=world_size, batch=self._number, batches=batches)
        self._clear()
        check_sharing(self.source, self.rank, self.peers.world_size)

    def begin_epoch(self) -> None:
        """Begin the epoch of the source, with the limits and the window of the one before."""
        before = RoundSettings(*self._at.settings)
        if self._pool is not None:
            self._pool.planner.use(before._replace(caps=()))
        self._at = AlignerState()
        self.source.reset(None)
        self._at.source = snapshot(self.source)

    def restore(self, state: AlignerState) -> None:
        """Go to a step of a round, and make what is left of the round again."""
        self._at, self._steps = state, state.steps()
        self.requested_max_tokens = state.requested_max_tokens
        self.source.reset(copy_state(state.source))
        self._rounds.has_ended = state.source_exhausted
        at_end = state.is_at_end(self._steps)
        if state.filler is not None:
            self._filler = SampleBlock.of([decode_sample(state.filler)])
        if state.held is not None and not at_end:
            in_round = state.emitted < len(self._steps)  # whose totals all ranks have counted
            held, self.replayed_samples = groups_again(
                state.held, self.source, type(self).__name__, may_differ=not in_round
            )
            *groups, lookahead, filler = held
            self._rounds.lookahead = lookahead or None
            self._filler = filler or self._filler
            self._steps.fill_rest(state.emitted, groups, self._filler)
        self._use_present_options(at_end=at_end)
        if not at_end and state.held is not None:
            self._hold()

    def save(self) -> AlignerState:
        """Return the source's state, the plan of the round, and what is held of it."""
        at = copy(self._at)
        at.requested_max_tokens = self.requested_max_tokens
        at.tasks = len(self.measure.tasks)
        held: Any = self._held
        at.held = held
        at.left_out = [(*one,) for one in at.left_out]
        return at

    def fixed_fields(self, state: AlignerState) -> Collection[str]:
        """Return what would let the ranks take different steps, were it another in mid-epoch."""
        steps = state.steps()
        if state.is_at_end(steps):
            return ()
        of_the_plan = ("cost_fn", "modalities", "tasks") if len(steps) else ()
        return ("world_size", "round_size", "accumulate", "uneven", *of_the_plan)

    def fingerprint(self) -> dict[str, Any]:
        """Return what decides the output: a state fits only if it is equal."""
        return {
            "rank": self.rank,
            "world_size": self.peers.world_size,
            "round_size": self.round_size,
            "uneven": self.uneven,
            "loss_scaling": self.rule.scaling,
            "accumulate": self.rule.accumulate,
            "seed": self._seed,
            **self.measure.fingerprint(),
        }

    def next(self) -> AlignedGroup:
        """Return the next group and its `StepInfo`.

        Raises:
            PeerError: another rank failed, left, or did not come within `timeout_s`.
            StateError: the ranks do not go on from the same place.
            WorkerError: the connections belong to the process that this one was forked from.
        """
        at, rule = self._at, self.rule
        self.peers.check_process()
        if at.emitted == len(self._steps) or not self.peers.channel.agreed:
            if not self.peers.drive([self.prepare_step()], lambda: self.where)[0]:
                raise StopIteration
            at = self._at
        index, step = at.emitted, at.step
        at.emitted, at.step = at.emitted + 1, at.step + 1
        item = self._steps.take(
            index,
            rule,
            self.measure,
            step=step * rule.batches + rule.batch,
            epoch=self._epochs.epoch,
            ends_epoch=at.is_at_end(self._steps) and rule.batch == rule.batches - 1,
            left_out=tuple(self.take_left_out()),
        )
        if self._held is not None:
            self._held = self._held.after(1)
        if at.emitted == len(self._steps):
            self._end_round()
        return item

    def prepare_step(self) -> Exchanges[bool]:
        """Settle rounds with the other ranks until there is a step; tell whether there is one."""
        at = self._at
        while at.emitted == len(self._steps):
            if at.last:
                return False
            yield from self._begin_round()
        yield from self._agree()
        return True

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

    # --------------------------------------------------------------------------------------------

    def _clear(self) -> None:
        fills, world_size = self.uneven == "fill", self.peers.world_size
        balancer = None
        if fills and world_size > 1 and self._pool is not None and self._pool.has_keys:
            balancer = TailBalancer(self._pool, self.rank, world_size)
        tasks = len(self.measure.tasks)
        self._rounds = _Rounds(self.source, self._pool, balancer, self.measure, tasks, fills)
        has_caps = world_size > 1 and type(self.measure.cost_fn) is BudgetCost
        self._offered = self.round_size if has_caps else 0
        self._steps = AlignedRound(tasks=tasks)
        self._filler, self._held = None, None
        self.where = "reset"

    def _agree(self) -> Exchanges[None]:
        """Make sure, once after a reset, that all ranks go on from the same place."""
        if self.peers.channel.agreed:
            return
        at, name = self._at, type(self).__name__
        is_within = at.emitted < len(self._steps)
        below = [node for node in walk(self.source) if isinstance(node, WindowBucketer)]
        settings = RoundSettings(*at.settings)
        config = {
            "step": at.step,
            "epoch": self._epochs.epoch,
            "tokens of the next round": settings.max_tokens,
            "caps of the next round": [*settings.caps],
            "window of the next round": settings.window,
            "whether the next round is the last": settings.is_last,
            "totals of the round": self._steps.digest() if is_within else 0,
            "exclude": ", ".join(repr(node.excluded) for node in below),
            name: {**self.fingerprint(), "rank": None},
            **sharing_configs(self.source),
        }
        yield Ask(config, self.where)

    def _begin_round(self) -> Exchanges[None]:
        """Settle the next round with the other ranks."""
        at, epoch = self._at, self._epochs.epoch
        settings = RoundSettings(*at.settings)
        self.where = where = f"round {at.round} of epoch {epoch} (from step {at.step})"
        if self._pool is not None:
            still = (self._rounds.lookahead, self._filler)
            self._pool.release([block for block in still if block is not None])
        groups, most, left_out, ahead = yield from self._read_groups(settings, where)
        report = self._rounds.report(
            groups, most, self._offered, has_filler=self._filler is not None
        )
        report = replace(report, max_tokens=self.requested_max_tokens)
        yield from self._agree()
        reports: Sequence[CostReport] = yield Ask(report, where, steps=most)
        if not at.step and not any(one.groups for one in reports):
            raise SampleError(
                f"no rank has a sample in epoch {epoch}. {describe_empty_epoch(self.source)}"
            )
        if groups and self.peers.world_size > 1:  # One rank fills no step.
            samples = SampleBlock.joined(groups)
            self._filler, at.filler = samples.take([best_filler(samples)]).alone(), None
        if self.uneven == "fill":
            yield from self._share_filler(reports, where)
        key = hash_ints(self._seed, epoch, at.round)
        self._stand_at(plan_round(reports, uneven=self.uneven, key=key))
        at.settings = next_settings(
            reports,
            settings,
            next_steps=self._round_steps(at.round + 1),
            planned_steps=at.step + len(self._steps),
            round_size=self.round_size,
        ).to_state()
        at.left_out = [*at.left_out, *at.left_out_ahead, *left_out]
        at.left_out_ahead = [(*one,) for one in ahead]
        if self.uneven == "stop" and at.last:
            self._drop(groups[len(self._steps) :])
        at.source = snapshot(self.source)
        self._hold()
        if not len(self._steps):
            self._end_round()

    def _read_groups(
        self, settings: RoundSettings, where: str
    ) -> Exchanges[tuple[list[SampleBlock], int, list[LeftOut], list[LeftOut]]]:
        """Return groups and most steps of the next round, and what it and the next one leave out.

        The state stays that of before, should the exchange fail.
        """
        if settings.is_last and (balancer := self._rounds.balancer) is not None:
            yield from self._agree()
            rest = self._rounds.read_rest(settings)
            left_out, ahead = self._rounds.take_left_out(), list[LeftOut]()
            groups, most = yield from balancer.groups(rest, where)
            left_out += balancer.left_out
        else:
            most = self._round_steps(self._at.round)
            groups = self._rounds.read(most, settings)
            left_out = self._rounds.take_left_out()
            self._rounds.read_ahead(groups, most)
            ahead = self._rounds.take_left_out()
            if self._rounds.lookahead is None:  # The source has ended.
                left_out, ahead = [*left_out, *ahead], []
        return groups, most, left_out, ahead

    def _stand_at(self, plan: RoundPlan) -> None:
        """Stand before the first step of a plan."""
        at = self._at
        self._steps = AlignedRound.of(plan, self.rank)
        self._steps.fill(self._rounds.groups(plan.splits[self.rank]), self._filler)
        at.last, at.emitted, at.plan = plan.last, 0, self._steps.to_bytes()
        at.source_exhausted = self._rounds.lookahead is None

    def _share_filler(self, reports: Sequence[CostReport], where: str) -> Exchanges[None]:
        """Give ranks that never had a sample one of another rank's to fill with."""
        if all(one.has_filler for one in reports) or not any(one.groups for one in reports):
            return
        donor = next(rank for rank, one in enumerate(reports) if one.groups)
        data = b""
        if self.rank == donor and self._filler is not None:
            self.where = f"{where}, sending a sample to a rank that has none"
            data = encode_sample(self._filler[0]._replace(ordinal=None))  # a number of this rank
        texts: Sequence[bytes] = yield Ask(data, where)
        if not reports[self.rank].has_filler:
            self._at.filler = texts[donor]
            self._filler = SampleBlock.of([decode_sample(texts[donor])])

    def _drop(self, groups: list[SampleBlock]) -> None:
        """Count the samples that this rank has left, as another one has ended, with a warning."""
        at = self._at
        left = [*chain(*groups, self._rounds.lookahead or ())]
        dropped = [LeftOut(one.key, one.source, "unemitted") for one in left]
        count = len(left) + remaining_samples(self.source)
        pooled = [] if self._pool is None else self._pool.drop_remaining()
        at.left_out, at.left_out_ahead = [*at.left_out, *at.left_out_ahead, *dropped, *pooled], []
        at.unemitted_samples += count
        self._rounds.lookahead, at.source_exhausted = None, True
        if count:
            warn_user(
                f'`uneven="stop"`: another rank has ended, so {count} samples of rank {self.rank} '
                f"are not emitted in epoch {self._epochs.epoch}."
            )

    def _hold(self) -> None:
        at = self._at
        filler = self._filler if self._filler is not None and at.filler is None else NO_SAMPLES
        groups = self._steps.groups()[at.emitted :]
        held = [*groups, self._rounds.lookahead or NO_SAMPLES, filler]
        self._held = HeldSamples.of(held, as_records=can_restore(self.source))

    def _end_round(self) -> None:
        """Stand at the beginning of the next round, or at the end of the epoch."""
        at = self._at
        if at.last:
            if self._pool is not None:
                self._pool.release()
            self._steps.fill([], None)
            at.source, self._held = snapshot(self.source), None
            return
        self._steps = AlignedRound(tasks=len(self.measure.tasks))
        at.emitted, at.plan = 0, None
        at.round += 1

    def _use_present_options(self, *, at_end: bool) -> None:
        """Plan the further steps anew, where keys or limits are others than in the state."""
        at, name = self._at, type(self).__name__
        below = [node for node in walk(self.source) if isinstance(node, WindowBucketer)]
        has_keys = any(node.keys_changed for node in below)
        has_limits = any(node.limits_changed for node in below)
        if at_end or at.held is None or loading().leaves_epoch or not (has_keys or has_limits):
            return
        inside = at.emitted % self.accumulate
        if has_keys and (self._pool is None or inside):
            why = (
                f"it is within an optimizer step of {self.accumulate} steps, of which {inside} "
                "were weighed by a total that counts these samples. Resume from a state that was "
                "saved after an optimizer step, or without the new keys in `exclude`"
            )
            if self._pool is None:
                why = (
                    "its source must be the `WindowBucketer` itself, since a node in between may "
                    "hold some. Resume from a state that was saved after the last step of an epoch"
                )
            raise StateError(
                f"{name} cannot exclude more samples at step {at.step} of epoch {at.epoch}: {why}."
            )
        if self._pool is not None:
            self._plan_anew(at.emitted + -inside % self.accumulate)

    def _plan_anew(self, steps: int) -> None:
        """End the round after so many steps, and put the samples of the others into the pool."""
        at, pool = self._at, self._pool
        assert pool is not None
        was_in_round, steps = len(self._steps) > 0, min(steps, len(self._steps))
        cut = [*self._steps.cut(steps), self._rounds.lookahead or NO_SAMPLES]
        if self._filler is not None and self._filler[0] in pool.excluded:
            self._filler, at.filler, self._steps.filler = None, None, None
        still = [*self._steps.groups(), self._filler or NO_SAMPLES]
        pool.put_back(SampleBlock.joined(cut), still)
        self._rounds.lookahead, self._rounds.has_ended = None, False
        at.plan, at.last, at.source_exhausted = self._steps.to_bytes(), False, False
        at.left_out, at.left_out_ahead = at.left_out + at.left_out_ahead, []
        at.source = snapshot(self.source)
        if was_in_round and at.emitted == len(self._steps):
            self._end_round()

    def _round_steps(self, number: int) -> int:
        return round_steps(number, self.peers.world_size, self.round_size, self.accumulate)


class _Rounds(RoundPlanner):
    """The rounds of an aligner, of the groups of the node below it."""

    def __init__(
        self,
        node: BaseNode[Any],
        pool: WindowBucketer | None,
        balancer: TailBalancer | None,
        *options: Any,
    ) -> None:
        # A node in between might read ahead, and groups would depend on how far it has come.
        super().__init__(None if pool is None else pool.planner, *options)
        self._node, self.balancer = node, balancer
        self.has_ended = False

    def next_group(self) -> SampleBlock | None:
        """Return the next group; `None` where the epoch has no more."""
        if self.has_ended:
            return None
        try:
            group: Any = next(self._node)
        except StopIteration:
            self.has_ended = True
            return None
        if isinstance(group, SampleBlock) and group:
            return group
        if isinstance(group, list) and group and all(isinstance(one, Sample) for one in group):
            return SampleBlock.of(group)
        kind = "an empty list" if group == [] else f"`{type(group).__name__}`"
        raise TypeError(
            "`source` of RankAligner must yield groups, `list[Sample]`, but yielded "
            f"{kind} instead. Put a `WindowBucketer` before it."
        )

    def left(self) -> int:
        """Return how many samples this rank has left; -1 where it cannot share them.

        Of data that each rank has for itself, some may have far more left.
        """
        lookahead, balancer = self.lookahead, self.balancer
        if balancer is None:
            return -1
        if lookahead is None:
            return 0
        if not balancer.are_shared(lookahead).all():
            return -1
        known = balancer.pool.known_remaining()
        return UNKNOWN_LEFT if known is None else len(lookahead) + known

    def take_left_out(self) -> list[LeftOut]:
        """Return the samples that were left out since the last call."""
        return call_member(self._node, "take_left_out") or []
