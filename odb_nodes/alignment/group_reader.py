"""The groups below an aligner: those of a round, and what they cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchdata.nodes import BaseNode

from odb_nodes._core.user_warning import warn_user
from odb_nodes.alignment.aligner_state import AlignerState
from odb_nodes.alignment.held_samples import HeldSamples
from odb_nodes.alignment.round_terms import RoundTerms
from odb_nodes.contract import copy_state
from odb_nodes.contract.graph import blame_sources, budget_below, remaining_samples
from odb_nodes.contract.node import call_member, state_to_keep
from odb_nodes.contract.recall import recalls
from odb_nodes.errors import SampleError, StateError
from odb_nodes.nodes.bucketer_state import LimitsState
from odb_nodes.nodes.excluded_keys import ExcludedKeys, exclude_later
from odb_nodes.planning.alignment import (
    CostReport,
    GroupCost,
    SplitLadder,
    as_table,
    make_report,
    row_of,
)
from odb_nodes.planning.group_costs import (
    BudgetCost,
    CostFn,
    GroupCostEstimator,
    best_filler,
    padded_tokens,
    tokens_of,
)
from odb_nodes.sample import LeftOut, Sample


class GroupReader:
    """Reads groups of a source, one further than asked for.

    Without that, a rank would find out too late that its data has ended: it could then no longer
    keep a sample to fill with.

    Args:
        source: node that yields groups, `list[Sample]`.
        measure: tells what groups cost.
        terms: what groups are formed by.
        may_split: groups may be split where there are fewer than steps.
    """

    def __init__(
        self,
        source: BaseNode[list[Sample]],
        measure: GroupCostEstimator,
        terms: RoundTerms,
        may_split: bool,
    ) -> None:
        self.source, self.measure, self.terms = source, measure, terms
        self._may_split = may_split
        self.recalls = recalls(source)
        """Whether the source can make samples again by their keys."""
        self.ahead: list[Sample] | None = None
        """First group of the next round; `None` where there is none, and before the first read."""
        self.next_state: Any = None
        """The source's state before that group, unless it recalls samples."""
        self.left_out: list[LeftOut] = []
        """Samples that were left out among those of the last read."""
        self.left_out_ahead: list[LeftOut] = []
        """Those that come with the first group of the next round."""

    def read_next(self, at: AlignerState, most: int) -> list[list[Sample]]:
        """Return the groups of a round that begins; none where the source had ended before it."""
        if at.drained:
            self.left_out = []
            return []
        return self.read(most, at.next_limits, at.next_caps, at.next_window)

    def read(
        self,
        most: int,
        limits: LimitsState | None = None,
        caps: bytes | None = None,
        window: int = 0,
    ) -> list[list[Sample]]:
        """Return the next groups, `most` of them, or all that are left.

        Args:
            most: how many.
            limits: what all of them but the first are formed under.
            caps: what these are cut to, see `RoundCaps.use`.
            window: samples that wait, see `RoundWindow.use`.
        """
        first = self._read_one() if self.ahead is None else self.ahead
        groups = [] if first is None else [first]
        self.terms.use(limits, caps, window)
        while groups and len(groups) < most and (group := self._read_one()) is not None:
            groups.append(group)
        self.left_out = [*self.left_out_ahead, *self._take_left_out()]
        self.terms.caps.use(caps, ahead=True)
        if not self.recalls:
            self.next_state = state_to_keep(self.source)
        self.ahead = self._read_one() if len(groups) == most else None
        self.left_out_ahead = self._take_left_out()
        if self.ahead is None:  # The source has ended.
            self.left_out, self.left_out_ahead = [*self.left_out, *self.left_out_ahead], []
        return groups

    def read_rest(self, at: AlignerState, where: str) -> tuple[list[list[Sample]], int]:
        """Share out what is left of the epoch with the other ranks; see `LastRound.groups`."""
        found = self.terms.last_round.groups(lambda: self._take_rest(at), where)
        self.left_out = [*self.left_out, *self.terms.last_round.left_out]
        return found

    def _take_rest(self, at: AlignerState) -> list[Sample]:
        """Return all samples that this rank has left."""
        self.terms.use(at.next_limits, None, at.next_window)
        rest, self.ahead = [*(self.ahead or [])], None
        while (group := self._read_one()) is not None:
            rest += group
        self.left_out = [*self.left_out_ahead, *self._take_left_out()]
        self.left_out_ahead = []
        return rest

    def held(self, groups: list[list[Sample]], filler: Sample | None) -> HeldSamples:
        """Return what a state holds of the groups of a round, the one ahead, and the filler."""
        waiting = [*groups, self.ahead or [], [] if filler is None else [filler]]
        return HeldSamples.of(waiting, self.left_out_ahead)

    def leave(self, groups: list[list[Sample]], of_whom: str) -> tuple[int, list[LeftOut]]:
        """Leave groups out, and what comes after them, with a warning.

        Returns:
            How many samples that are, and those that were read.
        """
        left = [sample for group in [*groups, self.ahead or []] for sample in group]
        left_out = [LeftOut(one.key, one.source, "unemitted") for one in left]
        pooled = call_member(self.source, "leave_rest") or []
        if count := len(left) + remaining_samples(self.source):
            warn_user(f'`uneven="stop"`: another rank has ended, so {count} samples {of_whom}.')
        return count, [*left_out, *pooled]

    def exclude(self, keys: ExcludedKeys, *, ends: bool) -> list[Sample]:
        """Leave samples out of the group ahead and of what comes after it.

        Args:
            keys: their keys.
            ends: the group ahead, and what is pooled, come to no step.

        Returns:
            Those of the group ahead, unless it is formed again.
        """
        exclude_more: Any = self.source.exclude_more  # type: ignore[attr-defined]
        if ends:
            exclude_more(keys, pooled=False)
            return []
        if not self.recalls and self.ahead is not None:
            with exclude_later():
                self.source.reset(copy_state(self.next_state))
            self.ahead, self.left_out_ahead = [], []
        exclude_more(keys)
        if self.ahead is None:
            return []
        gone = [sample for sample in self.ahead if sample in keys]
        self.ahead = [sample for sample in self.ahead if sample not in keys]
        if not self.ahead:
            if not self.recalls:
                self.next_state = state_to_keep(self.source)
            self.ahead = self._read_one()
            self.left_out_ahead = [*self.left_out_ahead, *self._take_left_out()]
        return gone

    def see_end(self, epoch: int, node: str) -> None:
        """Let the source see its end: its next epoch follows that.

        Raises:
            StateError: it does not end here.
        """
        if self.read(1):
            raise StateError(
                f"{node} cannot restore epoch {epoch}: its source had no sample when the state "
                "was saved, but has some now. Resume over the data that it was saved on."
            )

    def recall(self, at: AlignerState, node: str) -> tuple[list[list[Sample]], Sample | None]:
        """Return the groups of a round's further steps, and the sample to fill with.

        Raises:
            StateError: the source cannot make their samples again, or not as they were.
        """
        if not self.recalls or at.held is None:
            raise StateError(
                f"{node} cannot restore round {at.round} of epoch {at.epoch}: the state has keys "
                "of its samples, but its source cannot make samples again by their keys. Build "
                "the graph as it was."
            )
        held = HeldSamples.from_state(at)
        *groups, ahead, filler = held.recall(self.source, node)
        self.ahead = ahead or None
        self.left_out_ahead = [LeftOut(*one) for one in at.left_out_ahead]
        return groups, (*filler, None)[0]

    def read_again(
        self, at: AlignerState, most: int, needed: int, node: str
    ) -> tuple[list[list[Sample]], Sample | None]:
        """Read the groups of a round that a state stands in, or those to fill from.

        Args:
            at: the state.
            most: groups that were asked for.
            needed: how many of them, after splits, the round's steps refer to.
            node: name of the node that restores itself, for errors.

        Returns:
            The groups after splits, and the sample to fill with.

        Raises:
            StateError: the source does not yield as many again.
        """
        groups = self.read(most, at.limits, at.caps, at.window)
        least = 1 if at.drained else needed - at.splits
        if len(groups) < least:
            raise StateError(
                f"{node} cannot restore round {at.round} of epoch {at.epoch}: its source yielded "
                f"{least} groups or more when the state was saved, but yields {len(groups)} now. "
                "Resume over the data that it was saved on."
            )
        filler = best_filler(groups) if groups else None
        split = self.report(groups, most, filler)[1].groups(at.splits)
        if len(split) < needed:
            raise StateError(
                f"the state of {node} is damaged: `splits` is {at.splits}, after which its "
                f"source's groups are {len(split)}, but the round needs {needed}. Use an earlier "
                "checkpoint."
            )
        return split, filler

    def _take_left_out(self) -> list[LeftOut]:
        return call_member(self.source, "take_left_out") or []

    def report(
        self, groups: list[list[Sample]], most: int, filler: Sample | None
    ) -> tuple[CostReport, SplitLadder[Sample]]:
        """Return what this rank tells of the groups of a round, and how they may be split.

        Args:
            groups: the last that were read, or none.
            most: how many were asked for.
            filler: a sample for the steps that none of them is for.
        """
        report, ladder = make_report(
            groups,
            most=most,
            ended=self.ahead is None,
            has_filler=filler is not None,
            may_split=self._may_split,
            measure=self.measure,
            tokens=tokens_of,
            tasks=len(self.measure.tasks),
        )
        return self.terms.complete(report, self.ahead), ladder

    def check_has_samples(self, reports: Sequence[CostReport], epoch: int) -> None:
        """Raise a `SampleError` where no rank has a sample in the first round of an epoch."""
        if not any(report.groups for report in reports):
            raise SampleError(
                f"no rank has a sample in epoch {epoch}. {blame_sources(self.source)}"
            )

    def _read_one(self) -> list[Sample] | None:
        try:
            group = next(self.source)
        except StopIteration:
            return None
        if isinstance(group, list) and {*map(type, group)} == {Sample}:
            return group
        if group and isinstance(group, list) and all(isinstance(one, Sample) for one in group):
            return group
        kind = "an empty list" if group == [] else f"`{type(group).__name__}`"
        raise TypeError(
            "`source` of RankAligner must yield groups, `list[Sample]`, but yielded "
            f"{kind} instead. Put a `WindowBucketer` before it."
        )


def report_steps(
    groups: Sequence[list[Sample]], measure: GroupCostEstimator, *, ended: bool, has_filler: bool
) -> CostReport:
    """Return what a rank has in each step that is planned already.

    Args:
        groups: its group of each step; an empty one where it fills.
        measure: tells what groups cost.
        ended: whether the rank settles no further round.
        has_filler: whether it has a sample that it fills with.
    """
    nothing = GroupCost(0, 0, 0, tasks=(0,) * len(measure.tasks))
    rows = [row_of(measure(group) if group else nothing) for group in groups]
    table = as_table(rows, len(measure.tasks))
    return CostReport(table, sum(map(bool, groups)), ended, has_filler)


def cost_below(source: BaseNode[Any]) -> CostFn:
    """Return the cost of a group under the budget below; where there is none, its padded tokens."""
    budget = budget_below(source)
    return padded_tokens if budget is None else BudgetCost(budget)
