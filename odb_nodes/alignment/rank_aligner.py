"""Node: gives all ranks the same number of steps, of about the same cost, and one loss."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, get_args

import numpy as np
from torchdata.nodes import BaseNode

from odb_nodes._core.checks import check_choice, check_count, check_integer
from odb_nodes._core.user_warning import warn_user
from odb_nodes.alignment.aligned_round import (
    GroupsContent,
    LossRule,
    LossScaling,
    PlannedOrdinals,
    digest_of_totals,
    info_of_step,
    ordinals_of,
    totals_from_bytes,
    totals_to_bytes,
)
from odb_nodes.alignment.given_groups import GroupReader
from odb_nodes.alignment.last_round import share_rest
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
from odb_nodes.contract.graph import budget_below, describe_empty_epoch, walk
from odb_nodes.contract.node import check_node, snapshot
from odb_nodes.errors import SampleError, StateError
from odb_nodes.nodes import WindowBucketer
from odb_nodes.nodes.lazy_samples import with_data_made
from odb_nodes.nodes.planned_groups import PlannedGroups
from odb_nodes.nodes.sample_records import decode_sample, encode_sample
from odb_nodes.nodes.sample_store import StoreContent
from odb_nodes.planning.budget import round_up
from odb_nodes.planning.facts import Facts
from odb_nodes.planning.group_costs import GroupCostEstimator, best_filler
from odb_nodes.planning.group_planner import RoundSettings
from odb_nodes.planning.options import JobOptions
from odb_nodes.planning.rank_plan import RankPlan, SettledRound
from odb_nodes.planning.rounds import CostReport, GroupCost, Uneven
from odb_nodes.planning.step_time import StepTime, TimeFn, check_step_time, step_time_of
from odb_nodes.planning.table import IntArray
from odb_nodes.sample import LeftOut, Sample
from odb_nodes.sample_block import NO_SAMPLES, SampleBlock
from odb_nodes.step_info import AlignedGroup

_FORMS_GROUPS = (WindowBucketer, PlannedGroups)


@dataclass(kw_only=True)
class AlignerState(EpochState):
    """The state of a `RankAligner`. The samples of its groups are in that of a `WindowBucketer`."""

    source: SourceState = field(default_factory=dict)
    round: int = 0  # the number of the coming one in the epoch
    step: int = 0  # the number of the next one in the epoch
    emitted: int = 0  # the steps of the settled round that are out
    totals: bytes | None = None  # of the steps of the round; `None` between rounds
    tasks: int = 0  # number of the tasks whose targets these have
    last: bool = False  # there is no round after this one
    # the `RoundSettings` of the next round
    settings: tuple[int, list[int], int, bool] = field(
        default_factory=lambda: RoundSettings().to_state()
    )
    # the groups of the round's further steps, and those that are formed of the next round
    groups: GroupsContent = field(default_factory=lambda: ([], None))
    requested_max_tokens: int = 0  # the `tokens` that this rank asks all ranks for; 0 for none
    filler: int | None = None  # the ordinal of the sample that this rank fills with
    filler_of_another: bytes | None = None  # that sample, encoded, where it came from another rank
    # the samples of the groups of a source that is no `WindowBucketer`, and whether it has ended
    given: StoreContent | None = None
    given_ended: bool = False
    # key, source and reason of what the next step says that it is left out
    left_out: list[tuple[int | None, str, str]] = field(default_factory=list)
    unemitted_samples: int = 0  # the samples that `uneven="stop"` left over

    def steps(self) -> IntArray:
        """Return the totals of the steps of the round."""
        totals = totals_from_bytes(self.totals, self.tasks)
        remaining = len(totals) - self.emitted
        if not 0 <= remaining <= len(self.groups[0]) or self.emitted > self.step:
            raise StateError("the round of `RankAligner` is damaged. Use an earlier checkpoint.")
        return totals

    @property
    def totals_digest(self) -> int:
        """A number that is the same on all ranks of the same round."""
        return digest_of_totals(self.steps())

    @property
    def is_at_end(self) -> bool:
        """Whether this is after the last step of the epoch."""
        return self.last and self.emitted == len(self.steps())


class _Filler(NamedTuple):
    """The sample that a rank fills steps with."""

    samples: SampleBlock  # one
    encoded: bytes | None = None  # as another rank has sent it

    @classmethod
    def of_another_rank(cls, encoded: bytes) -> _Filler:
        return cls(SampleBlock.of([decode_sample(encoded)]), encoded)


class RankAligner(EpochNode[AlignedGroup, AlignerState]):
    """Yields the groups of its source so that all ranks take the same steps.

    It works in rounds. Before each round, all ranks exchange the costs of up to `round_size` groups
    in one message. Every rank then computes the same plan: groups of like time share a step, one
    permutation shuffles the steps of all ranks, and the groups of the next round are formed for
    costs, or times, that are the same on all ranks.

    At the end of the data, a rank with fewer groups than others splits some of its own. A rank
    with fewer samples than steps fills a step with a real sample whose loss has no weight.

    The groups of a round are formed while the one before is emitted, some with each step.

    State: the source's, which has the samples of planned groups, too; the totals of the round, 32
    bytes a step; and the ordinals of the samples in planned groups, 8 bytes each. A restore needs
    no message to other ranks. Of a source that is no `WindowBucketer`, the state has key, length
    and digest of each sample, or the sample itself where the source cannot make it again. If a
    state is restored with more keys in `exclude`, or with a lower budget, the samples of the
    remaining optimizer steps return to the pool, and a new round begins.

    Args:
        source: node that yields groups, each a sequence of `Sample`: a `WindowBucketer`.
        process_group: the ranks that share steps: a process group of any backend, or a
            `DeviceMesh`. Of several dimensions, those named `dp`, `fsdp`, `replicate`, `shard` or
            alike (also joined, `dp_shard`) share steps; ranks that differ only in others (`tp`,
            `cp`, `pp`, `ep`) get the same batches. Default: all ranks of the job, or one rank if
            torch.distributed is not initialised.
        round_size: steps between two messages, after rounds of 1, 2, 3 and so on; rounded up
            to a multiple of `accumulate`. Larger rounds match costs better and hold more groups.
        uneven: what to do when ranks have different amounts of data. `"fill"`: as above.
            `"stop"`: all ranks end with the first; `unemitted_samples` counts the rest.
        loss_scaling: the weight in `StepInfo.loss_scale`. `"exact"`: the mean of the ranks'
            gradients is the gradient of the mean over all supervised tokens. `"approx"`: each
            rank's mean is weighted by its samples. `"none"`: 1.0 (0.0 in filler steps).
        accumulate: steps of an optimizer step, which share one denominator.
        seed: seed of the permutations, the same on all ranks.
        timeout_s: seconds after which a missing rank is an error on the others.
        step_time: what a step takes, by which ranks are levelled: a `StepTime`, or a function,
            group -> time of a step with it, an integer in any unit. Groups are formed for a
            `StepTime`, too, and only matched by a function. Default: `StepTime.typical` for packed
            groups. Padded ones are matched by their cost under the budget, since steps of those
            that take equally long have samples of one length.
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
        step_time: StepTime | TimeFn | None = None,
        modalities: Mapping[str, Callable[[Sample], bool]] | None = None,
        tasks: Sequence[str] = (),
    ) -> None:
        super().__init__()
        check_node("source", source)
        check_choice("uneven", uneven, get_args(Uneven))
        budget = budget_below(source)
        accumulate = check_count("accumulate", accumulate)
        check_step_time(step_time)
        step_time = step_time_of(step_time, budget)
        self.measure = GroupCostEstimator(budget, step_time, modalities, tasks)
        self.source = source
        self.round_size = round_up(check_count("round_size", round_size), accumulate)
        self.uneven = uneven
        self._seed = check_integer("seed", seed)
        most = CostReport.message_size(self.round_size, len(self.measure.tasks))
        self._number, self._rule = 0, LossRule(accumulate=accumulate, scaling=loss_scaling)
        if isinstance(process_group, VirtualRank):
            self.peers = process_group.team.peers_of(most, len(self.measure.tasks))
            self._number = process_group.number
            self._rule = process_group.weighed(self._rule)
        else:
            self.peers = Peers(process_group, timeout_s, most, len(self.measure.tasks))
        # A node in between might read ahead, and groups would depend on how far it has come.
        self._pool = source if isinstance(source, WindowBucketer) else None
        self.requested_max_tokens = 0
        self.unemitted_samples = 0
        """Samples of this rank and epoch that `uneven="stop"` left over."""
        self._clear()

    def _clear(self) -> None:
        self._groups = GroupReader(self.source) if self._pool is None else self._pool
        self._filler: _Filler | None = None
        self._left_out: list[LeftOut] = []  # what the next step says
        self._failure: Exception | None = None  # of reading ahead, until the round is out
        # Whether this rank may not have heard that another could not make a sample again.
        self._confirms_end = False
        self._plan = self._new_plan()

    def _new_plan(self) -> RankPlan:
        options = JobOptions(
            round_size=self.round_size,
            uneven=self.uneven,
            accumulate=self.accumulate,
            seed=self._seed,
            step_time=self.measure.step_time,
        )
        return RankPlan(
            self._groups.planner,
            options,
            self._measured,
            rank=self.rank,
            world_size=self.peers.world_size,
            epoch=self._epochs.epoch,
            shares_rest=self._pool is not None and self._pool.can_restore,
            tasks=len(self.measure.tasks),
        )

    @property
    def rank(self) -> int:
        """This rank, of those that share steps."""
        return self.peers.rank + self._number

    @property
    def accumulate(self) -> int:
        """Steps of an optimizer step."""
        return self._rule.accumulate

    @property
    def rule(self) -> LossRule:
        """How the losses of all ranks and micro-steps become one."""
        known = self._rule.world_size
        return replace(self._rule, world_size=known or self.peers.world_size)

    @property
    def where(self) -> str:
        """The place that an error of this rank names."""
        plan, epoch = self._plan, self._epochs.epoch
        if plan.is_between_rounds:
            return f"round {plan.round} of epoch {epoch} (from step {plan.step})"
        place = "the end" if plan.is_at_end else f"step {plan.step}"
        return f"{place} of epoch {epoch}"

    @property
    def replayed_samples(self) -> int:
        """Samples in groups of a node of the user that the last restore makes again."""
        return 0 if self._pool is not None else self._groups.restored.samples

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
                groups again. The other ranks raise a `PeerError` when they next meet this one,
                which waits for them for up to 5 s.
            RuntimeError: the job has several ranks, but torch.distributed is not initialised.
        """
        self.peers.begin()
        with self.peers.reporting_failure("reset"):
            super().reset(initial_state)

    def prepare_reset(self) -> None:
        """Make sure that the sources share this rank's place among the others."""
        check_sharing(self.source, self.rank, self.peers.world_size)

    def begin_epoch(self) -> None:
        """Begin the epoch of the source, with the limits and the window of the one before."""
        self._groups.planner.use(self._plan.settings._replace(caps=()))
        self._clear()
        self.unemitted_samples = 0
        self.source.reset(None)

    def restore(self, state: AlignerState) -> None:
        """Go to a step of a round, and to the groups that are planned."""
        self._clear()
        totals, ordinals = state.steps(), ordinals_of(state.groups)
        self.requested_max_tokens = state.requested_max_tokens
        self.unemitted_samples = state.unemitted_samples
        self._left_out = [LeftOut(*one) for one in state.left_out]
        self.source.reset(copy_state(state.source))
        reader = self._groups
        if isinstance(reader, GroupReader):
            if state.given is not None:
                reader.restore(state.given)
            if state.given_ended:
                reader.planner.end()
        to_come = len(totals) - state.emitted
        groups = self._checked_groups(state, ordinals, in_round=to_come)
        of_steps: list[Facts | None] = [None] * state.emitted
        of_steps += [group if len(group) else None for group in groups[:to_come]]
        self._plan.restore(
            round=state.round,
            step=state.step,
            settings=RoundSettings(*state.settings),
            settled=SettledRound(totals, of_steps, state.emitted),
            is_last=state.last,
            formed=groups[to_come:],
        )
        self._restore_filler(state, groups, needs_one=None in of_steps[state.emitted :])
        self._confirms_end = not state.is_at_end
        self._use_present_options(at_end=state.is_at_end)
        self._want_groups()

    def _checked_groups(
        self, state: AlignerState, groups: list[IntArray], in_round: int
    ) -> list[Facts]:
        """Return what is known of the groups of a state, once it is sure that they are whole."""
        reader, pool = self._groups, self._pool
        pooled = [] if pool is None else pool.planner.pool.ordinals().tolist()
        held = reader.store.ordinals().tolist()
        planned = np.concatenate([*groups, np.empty(0, np.int64)]).tolist()
        emitted = {state.filler} - {None, *planned, *pooled}  # the filler, once a step has had it
        is_whole = sorted([*planned, *pooled, *(emitted & {*held})]) == held
        if not is_whole or any(not len(group) for group in groups[in_round:]):
            raise StateError("the groups of RankAligner are damaged. Use an earlier checkpoint.")
        settled = {ordinal for group in groups[:in_round] for ordinal in group.tolist()}
        for ordinal, change in reader.restored.changed.items():
            if ordinal in settled:
                raise StateError(change)
        return [reader.facts_of(group) for group in groups]

    def _restore_filler(
        self, state: AlignerState, groups: Sequence[Facts], *, needs_one: bool
    ) -> None:
        if state.filler_of_another is not None:
            self._filler = _Filler.of_another_rank(state.filler_of_another)
        elif state.filler is not None and state.filler in self._groups.store:
            waits = self._pool is not None and state.filler in self._pool.planner.pool.ordinals()
            is_planned = any(state.filler in group.ordinal for group in groups)
            self._keep_filler(state.filler, is_out=not (waits or is_planned))
        elif needs_one and not self._groups.restored.keys_changed:
            raise StateError("the groups of RankAligner are damaged. Use an earlier checkpoint.")

    def save(self) -> AlignerState:
        """Return the source's state, the totals of the round, and what is planned."""
        plan, reader = self._plan, self._groups
        given = reader if isinstance(reader, GroupReader) else None
        groups: Any = PlannedOrdinals([*plan.settled.remaining, *plan.formed])
        return AlignerState(
            source=snapshot(self.source),
            round=plan.round,
            step=plan.step,
            emitted=plan.settled.emitted,
            totals=totals_to_bytes(plan.settled.totals),
            tasks=len(self.measure.tasks),
            last=plan.is_last,
            settings=plan.settings.to_state(),
            groups=groups,
            requested_max_tokens=self.requested_max_tokens,
            filler=reader.store.filler,
            filler_of_another=None if self._filler is None else self._filler.encoded,
            given=None if given is None else given.content(),
            given_ended=given is not None and given.planner.ended,
            left_out=[(*one,) for one in self._left_out],
            unemitted_samples=self.unemitted_samples,
        )

    def fixed_fields(self, state: AlignerState) -> Collection[str]:
        """Return what would let the ranks take different steps, were it another in mid-epoch."""
        if state.is_at_end:
            return ()
        of_the_plan = ("step_time", "modalities", "tasks") if len(state.steps()) else ()
        return ("world_size", "round_size", "accumulate", "uneven", *of_the_plan)

    def fingerprint(self) -> dict[str, Any]:
        """Return what decides the output: a state fits only if it is equal."""
        return {
            "rank": self.rank,
            "world_size": self.peers.world_size,
            "round_size": self.round_size,
            "uneven": self.uneven,
            "loss_scaling": self._rule.scaling,
            "accumulate": self._rule.accumulate,
            "seed": self._seed,
            **self.measure.fingerprint(),
        }

    def next(self) -> AlignedGroup:
        """Return the next group and its `StepInfo`.

        Raises:
            PeerError: another rank failed, left, or did not come within `timeout_s`.
            StateError: the ranks do not go on from the same place, or a sample is not what it was
                when the state was saved. The other ranks are told.
            WorkerError: the connections belong to the process that this one was forked from.
        """
        self.peers.check_process()
        if not self.peers.drive([self.prepare_step()], lambda: self.where)[0]:
            raise StopIteration
        plan, rule, store = self._plan, self.rule, self._groups.store
        settled, index, step = plan.settled, plan.settled.emitted, plan.step
        with self.peers.reporting_failure(self.where):
            if (facts := settled.groups[index]) is not None:
                store.make(facts.ordinal)
            elif self._filler is not None:
                self._filler = self._filler._replace(samples=with_data_made(self._filler.samples))
        plan.next_step()  # only now, so that no state loses a group that cannot be made
        group = NO_SAMPLES if facts is None else store.take(facts.ordinal)
        info = info_of_step(
            settled,
            index,
            group,
            rule,
            self.measure,
            step=step * rule.batches + rule.batch,
            epoch=self._epochs.epoch,
            ends_epoch=plan.is_at_end and rule.batch == rule.batches - 1,
            left_out=tuple(self._left_out),
        )
        self._left_out = []
        if facts is None and self._filler is not None:
            group = self._filler.samples
        if plan.is_at_end:
            self._keep_filler(None)
        return AlignedGroup(group, info)

    def prepare_step(self) -> Exchanges[bool]:
        """Settle rounds with the other ranks until there is a step; tell whether there is one."""
        plan = self._plan
        self._form_groups()
        while plan.is_between_rounds:
            yield from self._begin_round()
            self._form_groups()
        if not plan.is_at_end:
            yield from self._agree()
            return True
        if self._confirms_end:
            yield Ask([plan.step], self.where)
            self._confirms_end = False
        return False

    def take_left_out(self) -> list[LeftOut]:
        """Return the samples that were left out since the last step."""
        taken, self._left_out = [*self._left_out, *self._groups.take_left_out()], []
        return taken

    def interrupt(self) -> None:
        """Make a `next` that waits for other ranks on another thread raise. A reset takes it back.

        The connections stay.
        """
        self.peers.interrupt()

    close = interrupt

    # --------------------------------------------------------------------------------------------

    def _measured(self, group: Facts) -> GroupCost:
        return self.measure(self._groups.store.look(group.ordinal))

    def _form_groups(self) -> None:
        """Form the groups that are due before the next step.

        What the source raises meanwhile is raised once the steps of the round are out, so that all
        ranks stand at the same step then.
        """
        plan = self._plan
        try:
            while self._failure is None and plan.lacks() > 0:
                self._groups.fill()
        except Exception as error:
            if not getattr(self.source, "keeps_failed_items", False):  # It has no state now.
                raise
            self._failure = error
        if self._failure is not None and plan.is_between_rounds:
            raise self._failure

    def _agree(self) -> Exchanges[None]:
        """Make sure, once after a reset, that all ranks go on from the same place."""
        if self.peers.channel.agreed:
            return
        plan, name = self._plan, type(self).__name__
        below = [node for node in walk(self.source) if isinstance(node, _FORMS_GROUPS)]
        config = {
            "step": plan.step,
            "epoch": self._epochs.epoch,
            "tokens of the next round": plan.settings.max_tokens,
            "caps of the next round": [*plan.settings.caps],
            "window of the next round": plan.settings.window,
            "whether the next round is the last": plan.settings.is_last,
            "totals of the round": digest_of_totals(plan.settled.totals),
            "exclude": ", ".join(repr(node.excluded) for node in below),
            name: {**self.fingerprint(), "rank": None},
            **sharing_configs(self.source),
        }
        yield Ask(config, self.where)

    def _begin_round(self) -> Exchanges[None]:
        """Settle the next round with the other ranks."""
        plan, epoch, store, where = self._plan, self._epochs.epoch, self._groups.store, self.where
        rest, skipped, first_received = None, list[LeftOut](), store.next_ordinal
        try:
            if plan.settings.is_last and self._pool is not None:
                yield from self._agree()
                rest = plan.rest()
                place = self.rank, self.peers.world_size, where
                skipped = yield from share_rest(rest, self._pool, *place)
            report = plan.report(
                rest,
                has_filler=self._filler is not None,
                max_tokens=self.requested_max_tokens,
            )
            yield from self._agree()
            most = plan.most_steps if rest is None else rest.steps
            reports: Sequence[CostReport] = yield Ask(report, where, steps=most)
            if not plan.step and not any(one.groups for one in reports):
                raise SampleError(
                    f"no rank has a sample in epoch {epoch}. {describe_empty_epoch(self.source)}"
                )
            groups = plan.groups_of_round(rest)
            if groups and self.peers.world_size > 1:  # One rank fills no step.
                ordinals = np.concatenate([group.ordinal for group in groups])
                self._keep_filler(int(ordinals[best_filler(store.look(ordinals))]))
            if self.uneven == "fill":
                yield from self._share_filler(reports, where)
        except BaseException:  # The state stays that of before.
            ordinals = store.ordinals()
            store.drop(ordinals[ordinals >= first_received])
            raise
        self._drop(plan.settle(plan.agree(reports)))
        # Of all that was read for the round: the same whenever its groups were formed.
        self._left_out += [*self._groups.take_left_out(), *skipped]
        self._want_groups()
        if rest is not None:
            store.take(rest.given.ordinal)

    def _want_groups(self) -> None:
        """Have the data of the next steps made first, where a restore has left that for later."""
        groups = [*self._plan.settled.remaining, *self._plan.formed]
        self._groups.store.want(group.ordinal for group in groups if group is not None)

    def _keep_filler(self, ordinal: int | None, *, is_out: bool = False) -> None:
        """Fill steps with a sample of this rank from now on, or with none.

        is_out: whether a step has had the sample.
        """
        store = self._groups.store
        store.keep_filler(ordinal, is_out=is_out)
        self._filler = None
        if ordinal is not None:
            self._filler = _Filler(store.look(np.array([ordinal])).alone())

    def _share_filler(self, reports: Sequence[CostReport], where: str) -> Exchanges[None]:
        """Give ranks that never had a sample one of another rank's to fill with."""
        if all(one.has_filler for one in reports) or not any(one.groups for one in reports):
            return
        donor = next(rank for rank, one in enumerate(reports) if one.groups)
        data = b""
        if self.rank == donor and self._filler is not None:
            sample = self._filler.samples[0]._replace(ordinal=None)  # which is of this rank
            try:
                data = encode_sample(sample)
            except SampleError as error:
                raise SampleError(f"a rank without samples is sent one: {error}") from error
        texts: Sequence[bytes] = yield Ask(data, where)
        if not reports[self.rank].has_filler:
            self._filler = _Filler.of_another_rank(texts[donor])

    def _drop(self, groups: list[Facts]) -> None:
        """Leave out the samples that this rank has left, as another one has ended; warn of them."""
        if self.uneven != "stop" or not self._plan.is_last:
            return
        count = sum(map(len, groups)) + self._groups.remaining_samples
        self._groups.end_early(Facts.joined(groups))
        self.unemitted_samples += count
        if count:
            warn_user(
                f'`uneven="stop"`: another rank has ended, so {count} samples of rank {self.rank} '
                f"are not emitted in epoch {self._epochs.epoch}."
            )

    def _use_present_options(self, *, at_end: bool) -> None:
        """Plan the further steps anew, where keys or limits are others than in the state."""
        plan, name = self._plan, type(self).__name__
        below = [node for node in walk(self.source) if isinstance(node, _FORMS_GROUPS)]
        has_keys = any(node.restored.keys_changed for node in below)
        has_limits = any(node.restored.limits_changed for node in below)
        is_planned = len(plan.settled) or plan.formed
        if has_keys and not at_end and self._filler is not None:
            filler = self._filler.samples.without_data()[0]
            if any(filler in node.excluded for node in below):
                self._keep_filler(None)
        if at_end or not is_planned or loading().leaves_epoch or not (has_keys or has_limits):
            return
        inside = plan.settled.emitted % self.accumulate
        groups = self._groups
        plans_anew = not isinstance(groups, GroupReader) or groups.plans_anew
        if has_keys and (not plans_anew or inside):
            why = (
                f"it is within an optimizer step of {self.accumulate} steps, of which {inside} "
                "were weighed by a total that counts these samples. Resume from a state that was "
                "saved after an optimizer step, or without the new keys in `exclude`"
            )
            if not plans_anew:
                why = (
                    "its source must be a `WindowBucketer` or `PlannedGroups` itself, since a "
                    "node in between may hold some. Resume from a state that was saved after the "
                    "last step of an epoch"
                )
            raise StateError(
                f"{name} cannot exclude more samples at step {plan.step} of epoch "
                f"{self._epochs.epoch}: {why}."
            )
        if plans_anew:
            samples = plan.replan(plan.settled.emitted + -inside % self.accumulate)
            groups.put_back(samples)
