"""Node: gives all ranks the same number of steps, of about the same cost, and one loss."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torchdata.nodes import BaseNode

from odb_nodes._support.checks import check_count
from odb_nodes._support.user_warning import warn_user
from odb_nodes.core.alignment.aligned_round import (
    AlignerState,
    LossRule,
    LossScaling,
    PlannedOrdinals,
    digest_of_totals,
    info_of_step,
    ordinals_of,
    totals_to_bytes,
)
from odb_nodes.core.alignment.exchange import ProcessGroupLike
from odb_nodes.core.alignment.filler import Filler
from odb_nodes.core.alignment.last_round import level_last_round
from odb_nodes.core.alignment.peers import (
    PEER_TIMEOUT_S,
    Exchanges,
    Message,
    Peers,
    VirtualRank,
    check_sharing,
    sharing_configs,
)
from odb_nodes.core.alignment.restored_groups import (
    checked_groups,
    group_nodes,
    use_present_options,
)
from odb_nodes.core.alignment.user_groups import GroupReader
from odb_nodes.core.contract import EpochNode, copy_state
from odb_nodes.core.contract.graph import budget_below, describe_empty_epoch
from odb_nodes.core.contract.node import check_node, snapshot
from odb_nodes.core.nodes import WindowBucketer
from odb_nodes.core.nodes.planned_groups import PlannedGroups
from odb_nodes.core.planning.budget import round_up
from odb_nodes.core.planning.facts import Facts
from odb_nodes.core.planning.group_costs import GroupCostEstimator
from odb_nodes.core.planning.group_planner import RoundSettings
from odb_nodes.core.planning.options import JobOptions
from odb_nodes.core.planning.rank_plan import RankPlan, SettledRound
from odb_nodes.core.planning.rounds import CostReport, GroupCost, Uneven
from odb_nodes.core.planning.step_time import StepTime, TimeFn, step_time_of
from odb_nodes.core.sample import LeftOut, Sample
from odb_nodes.core.sample_block import NO_SAMPLES, SampleBlock
from odb_nodes.core.step_info import AlignedGroup
from odb_nodes.errors import SampleError


class RankAligner(EpochNode[AlignedGroup, AlignerState]):
    """Yields the groups of its source so that all ranks take the same steps.

    The aligner works in rounds. Before each round, all ranks exchange the costs of up to
    `round_size` groups in one message. Every rank then computes the same plan: groups of similar
    time share a step, one permutation shuffles the steps of all ranks, and the groups of the next
    round are formed for costs, or times, that are equal on all ranks.

    At the end of the data, a rank with fewer groups than other ranks splits some of its groups. A
    rank with fewer samples than steps fills a step with one of its samples; the loss of that step
    has weight 0.

    The groups of a round are formed during the steps of the previous round.

    State: the state of the source, which has the samples of planned groups; the totals of the
    round, 32 bytes a step; and the ordinals of the samples in planned groups, 8 bytes each. A
    restore needs no message to other ranks. For a source that is no `WindowBucketer`, the state has
    key, length and digest of each sample, or the sample itself if the source cannot make it again.
    If a state is restored with more keys in `exclude`, or with a lower budget, the samples of the
    remaining optimizer steps return to the pool, and a new round begins.

    Args:
        source: node that yields groups, each a sequence of `Sample`: a `WindowBucketer`.
        process_group: the ranks that share steps: a process group of any backend, or a
            `DeviceMesh`. In a mesh of several dimensions, the ranks along dimensions named `dp`,
            `fsdp`, `replicate`, `shard` and similar (also joined, `dp_shard`) share steps; ranks
            along `tp`, `cp`, `pp` and `ep` get the same batches. Default: all ranks of the job, or
            a single rank if torch.distributed is not initialised.
        round_size: steps between two messages, after rounds of 1, 2, 3 and so on; rounded up
            to a multiple of `accumulate`. Larger rounds match costs better and hold more groups.
        uneven: what to do when ranks have different amounts of data. `"fill"`: split groups and
            fill steps, as above. `"stop"`: all ranks end with the first rank that has no group
            left; `unemitted_samples` counts the remaining samples.
        loss_scaling: the weight in `StepInfo.loss_scale`. `"exact"`: the mean of the ranks'
            gradients is the gradient of the mean over all supervised tokens. `"approx"`: each
            rank's mean is weighted by its samples. `"none"`: 1.0 (0.0 in filler steps).
        accumulate: steps of an optimizer step, whose losses are divided by one total.
        seed: seed of the permutations, the same on all ranks.
        timeout_s: seconds after which a missing rank is an error on the other ranks.
        step_time: the time of a step, to which ranks are levelled: a `StepTime`, or a function,
            group -> time of its step, an integer in any unit. A `StepTime` also decides how groups
            are formed; a function only decides which groups share a step. Default:
            `StepTime.typical` for packed groups; for padded groups the cost under the budget,
            because padded groups of equal time would have samples of equal length.
        modalities: name -> function that returns whether a sample has the modality. Default:
            `"image"`, for samples with patches.
        tasks: names of all tasks of the samples, whose targets `StepInfo.task_targets` counts.

    Raises:
        TypeError, ValueError: an argument is not valid.
    """

    STATE = AlignerState
    keeps_failed_items = True

    def __init__(
        self,
        source: BaseNode[SampleBlock] | BaseNode[list[Sample]],
        process_group: ProcessGroupLike = None,
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
        options = JobOptions(
            round_size=round_size,
            uneven=uneven,
            accumulate=accumulate,
            seed=seed,
            step_time=step_time,
        )
        self._options = replace(
            options,
            round_size=round_up(options.round_size, options.accumulate),
            step_time=step_time_of(step_time, budget_below(source)),
        )
        self.cost_estimator = GroupCostEstimator(
            budget_below(source), self._options.step_time, modalities, tasks
        )
        self.source = source
        tasks_count = len(self.cost_estimator.tasks)
        message_size = CostReport.message_size(self._options.round_size, tasks_count)
        self._number = 0  # number of the virtual rank in this process
        self._rule = LossRule(accumulate=options.accumulate, scaling=loss_scaling)
        if isinstance(process_group, VirtualRank):
            self.peers = process_group.team.peers_of(message_size, tasks_count)
            self._number = process_group.number
            self._rule = process_group.loss_rule(self._rule)
        else:
            self.peers = Peers(process_group, timeout_s, message_size, tasks_count)
        # Only a direct source: groups would depend on how far a node in between reads ahead.
        self._bucketer = source if isinstance(source, WindowBucketer) else None
        self.requested_max_tokens = 0
        self.unemitted_samples = 0
        """Samples of this rank and epoch that `uneven="stop"` left out."""
        self._clear()

    def _clear(self) -> None:
        self._reader = GroupReader(self.source) if self._bucketer is None else self._bucketer
        self._filler = Filler(self._reader)
        self._left_out: list[LeftOut] = []  # `StepInfo.left_out` of the next step
        self._failure: Exception | None = None  # error of reading ahead, raised after the round
        # Whether to exchange a message at the end of the epoch: after a restore, another rank may
        # have failed to make a sample again in the last step.
        self._confirms_end = False
        self._plan = RankPlan(
            self._reader.planner,
            self._options,
            self._measured,
            rank=self.rank,
            world_size=self.peers.world_size,
            epoch=self._epochs.epoch,
            shares_rest=self._bucketer is not None and self._bucketer.can_restore,
            tasks=len(self.cost_estimator.tasks),
        )

    @property
    def rank(self) -> int:
        """Number of this rank among the ranks that share steps."""
        return self.peers.rank + self._number

    @property
    def accumulate(self) -> int:
        """Steps of an optimizer step."""
        return self._rule.accumulate

    @property
    def rule(self) -> LossRule:
        """How the losses of all ranks and micro-steps are combined."""
        world_size = self._rule.world_size or self.peers.world_size
        return replace(self._rule, world_size=world_size)

    @property
    def where(self) -> str:
        """Present round or step, for errors."""
        plan = self._plan
        epoch = self._epochs.epoch
        if plan.is_between_rounds:
            return f"round {plan.round} of epoch {epoch} (from step {plan.step})"
        place = "the end" if plan.is_at_end else f"step {plan.step}"
        return f"{place} of epoch {epoch}"

    @property
    def replayed_samples(self) -> int:
        """Samples that the last restore makes again for groups of a node of the user."""
        return 0 if self._bucketer is not None else self._reader.restored.samples

    @property
    def exchange_wait_s(self) -> float:
        """Seconds spent waiting for other ranks so far."""
        return self.peers.channel.wait_s

    @property
    def has_workers(self) -> bool:
        """Whether threads run for the connections to other ranks."""
        return self.peers.are_connected

    def request_budget(self, tokens: int) -> None:
        """Request groups of at most `tokens` tokens on all ranks, from the next round on.

        The smallest request of all ranks applies. May be called from any thread.
        """
        tokens = check_count("tokens", tokens)
        self.requested_max_tokens = min(self.requested_max_tokens or tokens, tokens)

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        """Begin the next epoch, or go to the position of `initial_state`.

        Raises:
            StateError: the state is damaged or does not fit, or the source does not yield the
                groups again. The other ranks raise a `PeerError` at their next exchange, for which
                this rank waits up to 5 s.
            RuntimeError: the job has several ranks, but torch.distributed is not initialised.
        """
        self.peers.begin()
        with self.peers.reporting_failure("reset"):
            super().reset(initial_state)

    def prepare_reset(self) -> None:
        """Check that the sources have this rank and number of ranks."""
        check_sharing(self.source, self.rank, self.peers.world_size)

    def begin_epoch(self) -> None:
        """Begin the epoch of the source, with the limits and the window of the previous epoch."""
        self._reader.planner.use(self._plan.settings._replace(caps=()))
        self._clear()
        self.unemitted_samples = 0
        self.source.reset(None)

    def restore(self, state: AlignerState) -> None:
        """Go to a step of a round, and restore the planned groups."""
        self._clear()
        totals = state.steps()
        ordinals = ordinals_of(state.groups)
        self.requested_max_tokens = state.requested_max_tokens
        self.unemitted_samples = state.unemitted_samples
        self._left_out = [LeftOut(*fields) for fields in state.left_out]
        self.source.reset(copy_state(state.source))
        reader = self._reader
        if isinstance(reader, GroupReader):
            if state.given is not None:
                reader.restore(state.given)
            if state.given_ended:
                reader.planner.end()
        remaining = len(totals) - state.emitted
        groups = checked_groups(reader, state, ordinals, in_round=remaining)
        step_groups: list[Facts | None] = [None] * state.emitted
        step_groups += [group if len(group) else None for group in groups[:remaining]]
        self._plan.restore(
            round=state.round,
            step=state.step,
            settings=RoundSettings(*state.settings),
            settled=SettledRound(totals, step_groups, state.emitted),
            is_last=state.last,
            formed=groups[remaining:],
        )
        self._filler.restore(state, groups, is_needed=None in step_groups[state.emitted :])
        self._confirms_end = not state.is_at_end
        if not state.is_at_end:
            use_present_options(
                self._plan,
                reader,
                self._filler,
                group_nodes(self.source),
                self.accumulate,
                self._epochs.epoch,
            )
        self._want_groups()

    def save(self) -> AlignerState:
        """Return the state of the source, the totals of the round, and the planned groups."""
        plan = self._plan
        reader = self._reader
        user_groups = reader if isinstance(reader, GroupReader) else None
        groups: Any = PlannedOrdinals([*plan.settled.remaining, *plan.formed])
        return AlignerState(
            source=snapshot(self.source),
            round=plan.round,
            step=plan.step,
            emitted=plan.settled.emitted,
            totals=totals_to_bytes(plan.settled.totals),
            tasks=len(self.cost_estimator.tasks),
            last=plan.is_last,
            settings=plan.settings.to_state(),
            groups=groups,
            requested_max_tokens=self.requested_max_tokens,
            filler=reader.store.filler,
            filler_of_another=self._filler.encoded,
            given=None if user_groups is None else user_groups.content(),
            given_ended=user_groups is not None and user_groups.planner.ended,
            left_out=[(*sample,) for sample in self._left_out],
            unemitted_samples=self.unemitted_samples,
        )

    def fixed_fields(self, state: AlignerState) -> Collection[str]:
        """Return the fields that would let ranks take different steps if changed in mid-epoch."""
        if state.is_at_end:
            return ()
        names = ["world_size", "round_size", "accumulate", "uneven"]
        if len(state.steps()):  # within a round
            names += ["step_time", "modalities", "tasks"]
        return names

    def fingerprint(self) -> dict[str, Any]:
        """Return the configuration that decides the output."""
        return {
            "rank": self.rank,
            "world_size": self.peers.world_size,
            "round_size": self._options.round_size,
            "uneven": self._options.uneven,
            "loss_scaling": self._rule.scaling,
            "accumulate": self._rule.accumulate,
            "seed": self._options.seed,
            **self.cost_estimator.fingerprint(),
        }

    def next(self) -> AlignedGroup:
        """Return the next group and its `StepInfo`.

        Raises:
            PeerError: another rank failed, left, or did not answer within `timeout_s`.
            StateError: the ranks do not continue from the same place, or a sample differs from its
                record in the state. The other ranks raise a `PeerError`.
            WorkerError: the connections belong to the parent of this process.
        """
        self.peers.check_process()
        if not self.peers.drive([self.prepare_step()], lambda: self.where)[0]:
            raise StopIteration
        plan, rule, store = self._plan, self.rule, self._reader.store
        settled = plan.settled
        index = settled.emitted
        step = plan.step
        facts = settled.groups[index]
        with self.peers.reporting_failure(self.where):
            if facts is not None:
                store.make(facts.ordinal)
            else:
                self._filler.make_data()
        plan.next_step()  # only now, so that no state loses a group that cannot be made
        group = NO_SAMPLES if facts is None else store.take(facts.ordinal)
        info = info_of_step(
            settled,
            index,
            group,
            rule,
            self.cost_estimator,
            step=step * rule.batches + rule.batch,
            epoch=self._epochs.epoch,
            ends_epoch=plan.is_at_end and rule.batch == rule.batches - 1,
            left_out=tuple(self._left_out),
        )
        self._left_out = []
        if facts is None and self._filler.block is not None:
            group = self._filler.block
        if plan.is_at_end:
            self._filler.keep(None)
        return AlignedGroup(group, info)

    def prepare_step(self) -> Exchanges[bool]:
        """Settle rounds with the other ranks until there is a step; return whether there is one."""
        plan = self._plan
        self._form_groups()
        while plan.is_between_rounds:
            yield from self._begin_round()
            self._form_groups()
        if not plan.is_at_end:
            yield from self._agree()
            return True
        if self._confirms_end:
            yield Message([plan.step], self.where)
            self._confirms_end = False
        return False

    def take_left_out(self) -> list[LeftOut]:
        """Return the samples that were left out since the last step."""
        left_out = self._left_out + self._reader.take_left_out()
        self._left_out = []
        return left_out

    def interrupt(self) -> None:
        """Let a `next` that waits for other ranks on another thread raise, until the next reset.

        The connections stay open.
        """
        self.peers.interrupt()

    close = interrupt

    # --------------------------------------------------------------------------------------------

    def _measured(self, group: Facts) -> GroupCost:
        return self.cost_estimator(self._reader.store.look(group.ordinal))

    def _form_groups(self) -> None:
        """Form the groups that are due before the next step.

        An error of the source is raised after the last step of the round, when all ranks are at the
        same step.
        """
        plan = self._plan
        try:
            while self._failure is None and plan.lacks() > 0:
                self._reader.fill()
        except Exception as error:
            if not getattr(self.source, "keeps_failed_items", False):  # The source has no state.
                raise
            self._failure = error
        if self._failure is not None and plan.is_between_rounds:
            raise self._failure

    def _agree(self) -> Exchanges[None]:
        """Raise an error, once after a reset, unless all ranks continue at the same step."""
        if self.peers.channel.agreed:
            return
        plan = self._plan
        nodes = group_nodes(self.source)
        are_known = any(isinstance(node, PlannedGroups) for node in nodes)
        config = {
            "lengths": "known before samples are read" if are_known else "observed",
            "step": plan.step,
            "epoch": self._epochs.epoch,
            "tokens of the next round": plan.settings.max_tokens,
            "caps of the next round": [*plan.settings.caps],
            "window of the next round": plan.settings.window,
            "whether the next round is the last": plan.settings.is_last,
            "totals of the round": digest_of_totals(plan.settled.totals),
            "exclude": ", ".join(repr(node.excluded) for node in nodes),
            type(self).__name__: {**self.fingerprint(), "rank": None},
            **sharing_configs(self.source),
        }
        yield Message(config, self.where)

    def _begin_round(self) -> Exchanges[None]:
        """Settle the next round with the other ranks."""
        plan, store, where = self._plan, self._reader.store, self.where
        last_round = None
        skipped: list[LeftOut] = []
        first_received = store.next_ordinal
        try:
            if plan.settings.is_last and self._bucketer is not None:
                yield from self._agree()
                last_round = plan.last_round()
                skipped = yield from level_last_round(
                    last_round, self._bucketer, self.rank, self.peers.world_size, where
                )
            report = plan.report(
                last_round,
                has_filler=self._filler.block is not None,
                max_tokens=self.requested_max_tokens,
            )
            yield from self._agree()
            most_steps = plan.most_steps if last_round is None else last_round.steps
            reports: Sequence[CostReport] = yield Message(report, where, steps=most_steps)
            if not plan.step and not any(report.groups for report in reports):
                raise SampleError(
                    f"no rank has a sample in epoch {self._epochs.epoch}. "
                    f"{describe_empty_epoch(self.source)}"
                )
            groups = plan.groups_of_round(last_round)
            if groups and self.peers.world_size > 1:  # A single rank has no filler steps.
                self._filler.choose(groups)
            if self._options.uneven == "fill":
                yield from self._filler.share(reports, self.rank, where)
        except BaseException:  # Drop received samples: the state is again as before the round.
            ordinals = store.ordinals()
            store.drop(ordinals[ordinals >= first_received])
            raise
        self._leave_out_remaining(plan.settle(plan.agree(reports)))
        # Collected once in a round, so it does not matter when the groups were formed.
        self._left_out += self._reader.take_left_out() + skipped
        self._want_groups()
        if last_round is not None:
            store.take(last_round.given_away.ordinal)

    def _want_groups(self) -> None:
        """Queue the lazy data of planned groups after a restore, in the order of steps."""
        groups = [*self._plan.settled.remaining, *self._plan.formed]
        self._reader.store.want(group.ordinal for group in groups if group is not None)

    def _leave_out_remaining(self, groups: list[Facts]) -> None:
        """If another rank has ended the epoch, leave out the remaining samples, with a warning."""
        if self._options.uneven != "stop" or not self._plan.is_last:
            return
        count = sum(map(len, groups)) + self._reader.remaining_samples
        self._reader.end_early(Facts.joined(groups))
        self.unemitted_samples += count
        if count:
            warn_user(
                f'`uneven="stop"`: another rank has ended, so {count} samples of rank {self.rank} '
                f"are not emitted in epoch {self._epochs.epoch}."
            )
