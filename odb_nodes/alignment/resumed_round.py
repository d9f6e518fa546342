"""A round that a state stands in: its groups, and what was excluded since it was planned."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from functools import reduce
from operator import or_
from typing import Any

from torchdata.nodes import BaseNode

from odb_nodes.alignment.aligned_round import AlignedRound
from odb_nodes.alignment.aligner_state import AlignerState
from odb_nodes.alignment.group_reader import GroupReader, report_steps
from odb_nodes.alignment.held_samples import HeldSamples
from odb_nodes.alignment.peers import Peers
from odb_nodes.contract import copy_state
from odb_nodes.contract.config import allow_mismatch
from odb_nodes.contract.graph import walk
from odb_nodes.contract.node import state_to_keep
from odb_nodes.errors import StateError
from odb_nodes.nodes.excluded_keys import ExcludedKeys, exclude_later
from odb_nodes.nodes.payload import decode_sample
from odb_nodes.planning.alignment import Uneven, step_totals
from odb_nodes.planning.group_costs import best_filler
from odb_nodes.sample import LeftOut, Sample

_NODE = "RankAligner"


class ResumedRound:
    """Makes what is left of a round again, and leaves out of it what is excluded now.

    Args:
        at: the state of a `RankAligner`, which changes with what is excluded.
        steps: the steps of its round.
        reader: the reader of its source.
        accumulate: steps of an optimizer step.
        uneven: see `RankAligner`.
    """

    def __init__(
        self,
        at: AlignerState,
        steps: AlignedRound,
        reader: GroupReader,
        accumulate: int,
        uneven: Uneven,
    ) -> None:
        self._at, self._steps, self._reader = at, steps, reader
        self._accumulate, self._stops = accumulate, uneven == "stop"
        self.filler: Sample | None = None
        """The sample that this rank fills with."""
        self.held: HeldSamples | None = None
        """What the next state holds."""
        self.replayed_samples = 0
        """Samples of the round that were processed again."""

    def restore(self, most: int) -> None:
        """Bring the source to where the state stands, and the steps.

        Args:
            most: the groups that were asked for in the round.

        Raises:
            StateError: the source does not yield them again; or `exclude` adds keys where it
                cannot.
        """
        at = self._at
        at_end = at.is_at_end(self._steps)
        forms_again = len(self._steps) and not at_end and at.held is None
        # The plan of a round names groups by number: within one, they must be the same again.
        with exclude_later(), allow_mismatch(False) if forms_again else nullcontext():
            self._reader.source.reset(copy_state(at.source))
        if not at_end:
            self._form(most)
        self._reader.terms.budget.change(at)
        if self._reader.recalls and self._reader.ahead is None:  # Nothing was formed before.
            self._reader.terms.budget.tighten(at.next_limits)
        self._exclude(at_end)

    def _form(self, most: int) -> None:
        """Make the groups of the further steps again, and the sample to fill with."""
        at, steps = self._at, self._steps
        if at.filler is not None:
            self.filler = decode_sample(at.filler)
        if at.held is not None:
            in_round = at.emitted < len(steps)  # whose totals all ranks have counted
            with allow_mismatch(False) if in_round else nullcontext():
                groups, own = self._reader.recall(at, _NODE)
            self.filler = own or self.filler
            steps.fill_rest(at.emitted, groups, self.filler, may_lack_filler=at.unsettled)
            self.held = HeldSamples.from_state(at)
            self.replayed_samples = sum(at.sizes)
        elif at.filler is not None:
            steps.fill([], self.filler)
            self._reader.see_end(at.epoch, _NODE)
        elif at.drained or len(steps):
            needed = steps.groups_needed
            groups, self.filler = self._reader.read_again(at, most, needed, _NODE)
            steps.fill(groups, self.filler)
            self.replayed_samples = sum(map(len, groups))

    def _exclude(self, at_end: bool) -> None:
        """Leave out what is excluded, as the run before did, and then what has been added."""
        at, kept, accumulate = self._at, excluded_below(self._reader.source), self._accumulate
        before = kept | ExcludedKeys.from_state(at.excluded)
        now = before | _named_below(self._reader.source)
        can = callable(getattr(self._reader.source, "exclude_more", None))
        at.unsettled = at.unsettled and not at_end
        if now == kept or (at_end and not can):  # The next epoch excludes what is to be added.
            return
        if not can:
            raise StateError(
                f"{_NODE} cannot exclude more samples within epoch {at.epoch}: its source must be "
                "the `WindowBucketer` itself, since a node in between may hold some. Resume from a "
                "state that was saved after the last step of an epoch."
            )
        if at_end:
            self._reader.exclude(now, ends=True)
            at.source, at.excluded = state_to_keep(self._reader.source), {}
            return
        if now != before and at.emitted % accumulate:
            raise StateError(
                f"{_NODE} cannot exclude more samples at step {at.step} of epoch {at.epoch}: "
                f"it is within an optimizer step of {accumulate} steps, of which "
                f"{at.emitted % accumulate} were weighed by a total that counts these samples. "
                "Resume from a state that was saved after an optimizer step, or without the new "
                "keys in `exclude`."
            )
        if before != kept:
            self._leave_out(before, is_new=False)
        if now != before:
            self._leave_out(now, is_new=True)
        self._replace_filler(now)
        self._stand(now)

    def settle(self, peers: Peers) -> Sample | None:
        """Tell the other ranks what is left of the round, and learn what they have.

        Args:
            peers: the other ranks.

        Returns:
            The sample to fill with.

        Raises:
            PeerError: a rank failed, left, or did not come.
        """
        at, steps = self._at, self._steps
        where = f"the rest of round {at.round} of epoch {at.epoch} (from step {at.step})"
        with peers.reporting_failure(where):
            groups = steps.groups()[at.emitted :]
            report = report_steps(
                groups, self._reader.measure, ended=at.last, has_filler=self.filler is not None
            )
        reports = peers.reports(report, where, len(groups))
        self.filler = peers.share_filler(reports, at, self.filler, where)
        steps.filler, at.unsettled = self.filler, False
        steps.settle(at.emitted, step_totals(reports), self._accumulate)
        at.plan = steps.to_bytes()
        return self.filler

    def _leave_out(self, keys: ExcludedKeys, *, is_new: bool) -> None:
        """Take samples out of the groups and out of the source; report them where that is new."""
        at = self._at
        gone = self._steps.leave_out(at.emitted, keys)
        gone += self._reader.exclude(keys, ends=at.last and self._stops)
        if self._reader.ahead is None and is_new:
            # The run before has reported what came with the end of the source, if it is not new.
            at.left_out = [*at.left_out, *self._reader.left_out_ahead]
        if self._reader.ahead is None:
            self._reader.left_out_ahead = []
        if is_new:
            at.excluded_samples += len(gone)
            at.left_out += [LeftOut(one.key, one.source, "excluded") for one in gone]
            at.unsettled = at.unsettled or at.emitted < len(self._steps)

    def _replace_filler(self, keys: ExcludedKeys) -> None:
        if self.filler is None or self.filler not in keys:
            return
        ahead = [sample for sample in self._reader.ahead or [] if sample not in keys]
        groups = [*self._steps.groups_left(), ahead]
        self.filler = best_filler(groups) if any(groups) else None
        self._steps.filler = self.filler
        self._at.filler = None

    def _stand(self, keys: ExcludedKeys) -> None:
        """Let the next state stand after the exclusion, or say what is excluded since it."""
        at, reader = self._at, self._reader
        in_round = len(self._steps) > 0
        needs_filler = (at.drained or in_round) and self.filler is None
        if reader.recalls:
            own = None if at.filler is not None else self.filler
            self.held = reader.held(self._steps.groups()[at.emitted :], own)
        elif needs_filler:  # There is none where the round began, and no group for it either.
            at.drained = False
            self._steps.forget_groups()
        if reader.recalls or needs_filler or not (at.drained or in_round):
            at.source, at.excluded = state_to_keep(reader.source), {}
        else:
            at.excluded = keys.to_state()
        at.plan = self._steps.to_bytes()


def excluded_below(source: BaseNode[Any]) -> ExcludedKeys:
    """Return the keys that the nodes of a graph exclude."""
    return _union(getattr(node, "excluded", None) for node in walk(source))


def _named_below(source: BaseNode[Any]) -> ExcludedKeys:
    """Return the keys that the arguments of its nodes name."""
    return _union(getattr(node, "exclude", None) for node in walk(source))


def _union(found: Iterable[Any]) -> ExcludedKeys:
    return reduce(or_, (keys for keys in found if isinstance(keys, ExcludedKeys)), ExcludedKeys())
