"""The plan that a rank follows in an epoch, even after lower limits or a change of ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from odb_nodes._support.arrays import IntArray, int64_array, int64_state
from odb_nodes.core.planning.budget import Limits, TokenBudget
from odb_nodes.core.planning.known_epochs import KnownJob
from odb_nodes.core.planning.known_lengths import EpochPlan
from odb_nodes.core.planning.later_samples import LaterSamples, check_numbers
from odb_nodes.core.planning.table import NO_ROWS

_plans = WeakValueDictionary[Any, EpochPlan]()
"""Plans in use, by a digest of their input: virtual ranks of a process share them."""

LimitsState = tuple[int, int | None, int | None, int, int | None]
EarlierState = tuple[list[tuple[bool, bytes | None, int]], LimitsState, bytes | None]
"""`EarlierRanks` in a state."""


class RankProgress(NamedTuple):
    """How far a rank has come in an epoch."""

    is_alone: bool  # whether its plan has only samples of this rank
    numbers: bytes | None  # if so, the numbers of these samples, 8 bytes each
    taken: int  # emitted groups of its plan


class EarlierRanks(NamedTuple):
    """The ranks of an epoch before it was resumed on another number of ranks."""

    ranks: Sequence[RankProgress]
    limits: Limits  # the limits of their plans
    waiting: bytes | None  # (2, n) numbers and tokens of the samples of groups without a step

    def to_state(self) -> EarlierState:
        """Return this as plain data."""
        return [(*rank,) for rank in self.ranks], (*self.limits,), self.waiting

    @classmethod
    def from_state(cls, state: EarlierState) -> EarlierRanks:
        """Return the ranks of a state."""
        ranks, limits, waiting = state
        return cls([RankProgress(*rank) for rank in ranks], Limits(*limits), waiting)


@dataclass(frozen=True)
class KnownEpoch:
    """An epoch of samples whose lengths are known.

    job: the job on the present number of ranks; shuffle_key: decides, with the seed, the order of
    the steps; tokens: length of each sample of the dataset, (n,).
    """

    job: KnownJob
    shuffle_key: int
    tokens: IntArray

    def plan(
        self, numbers: IntArray, limits: Limits, ranks: int, *, is_whole: bool = False
    ) -> EpochPlan:
        """Plan samples of the epoch, in this order; `is_whole`: whether these are all samples."""
        job = replace(
            self.job,
            budget=limits.group_budget(self.job.budget),
            world_size=ranks,
            largest_first=self.job.largest_first if is_whole else 0,
        )
        content = hashlib.sha256(np.ascontiguousarray(numbers).data)
        content.update(self.tokens[numbers].data)
        key = content.digest(), job, self.shuffle_key
        if (plan := _plans.get(key)) is None:
            _plans[key] = plan = job.plan_all(numbers, self.tokens, self.shuffle_key)
        return plan

    def with_lengths_of(self, earlier: EarlierRanks) -> KnownEpoch:
        """Return the epoch with the lengths that earlier ranks observed."""
        numbers, observed = self.waiting_of(earlier)
        if not len(numbers):
            return self
        tokens = self.tokens.copy()
        tokens[numbers] = observed
        return replace(self, tokens=tokens)

    def waiting_of(self, earlier: EarlierRanks) -> IntArray:
        """Return numbers and tokens of the samples that waited on earlier ranks, (2, n)."""
        table = int64_array(earlier.waiting).reshape(2, -1)
        self.checked(table[0])
        return table

    def remaining_of(self, earlier: EarlierRanks, numbers: IntArray, *, is_whole: bool) -> IntArray:
        """Return which samples of `numbers` earlier ranks have not emitted, (n,)."""
        waiting, _ = self.waiting_of(earlier)
        parts = [waiting]
        ranks = earlier.ranks
        limits = earlier.limits
        if not all(progress.is_alone for progress in ranks):
            shared = self.plan(numbers, limits, len(ranks), is_whole=is_whole)
        for rank, progress in enumerate(ranks):
            if progress.is_alone:
                alone = self.plan(self.checked(progress.numbers), limits, ranks=1)
                parts.append(alone.numbers_from(progress.taken, 0))
            else:
                parts.append(shared.numbers_from(progress.taken, rank))
        return np.concatenate(parts)

    def checked(self, numbers: bytes | IntArray | None) -> IntArray:
        """Return the samples of a state, checked."""
        if not isinstance(numbers, np.ndarray):
            numbers = int64_array(numbers)
        return check_numbers(numbers, len(self.tokens))


class ResumedPlan:
    """The groups of a rank in an epoch: planned groups, and then groups of later samples.

    All ranks plan an epoch together. With lower limits or more excluded keys, a rank plans its
    remaining samples alone. Another number of ranks plans together the samples that the earlier
    ranks have not emitted, which follow from the plans of the earlier ranks.

    Args:
        epoch: the epoch, with the given lengths.
        rank: this rank.
        limits: limits of the groups.
        numbers: the samples of the epoch that are not excluded, in their order, (n,).
        is_alone: whether `numbers` are only the remaining samples of this rank.
        earlier: the earlier ranks of the epoch, an entry for each change of their number.
        later: samples that come last in the epoch.

    Raises:
        ValueError: a part of a state is damaged.
    """

    def __init__(
        self,
        epoch: KnownEpoch,
        rank: int,
        limits: Limits,
        numbers: IntArray,
        *,
        is_alone: bool = False,
        earlier: Sequence[EarlierRanks] = (),
        later: LaterSamples | None = None,
    ) -> None:
        self.limits = limits
        self.taken = 0
        """Number of planned groups that are emitted."""
        self.later = LaterSamples() if later is None else later
        """The samples that come last."""
        self._given_epoch = epoch
        self._rank, self._is_alone, self._earlier = rank, is_alone, earlier
        self._numbers_state = int64_state(numbers) if is_alone else None
        order = epoch.checked(numbers)
        for change, ranks in enumerate(earlier):
            if not is_alone:
                are_remaining = np.zeros(len(epoch.tokens), np.bool_)
                are_remaining[epoch.remaining_of(ranks, numbers, is_whole=not change)] = True
                numbers = order[are_remaining[order]]
            epoch = epoch.with_lengths_of(ranks)
        self._rank_of_plan = 0 if is_alone else rank
        ranks_of_plan = 1 if is_alone else epoch.job.world_size
        is_whole = not (is_alone or earlier)
        self._plan = epoch.plan(numbers, limits, ranks_of_plan, is_whole=is_whole)

    def __len__(self) -> int:
        """Return the number of planned groups, or one more than this rank has."""
        return len(self._plan)

    @property
    def group_budget(self) -> TokenBudget:
        """The budget of the groups."""
        return self.limits.group_budget(self._given_epoch.job.budget)

    def group(self, step: int) -> IntArray:
        """Return the samples of a planned group, (n,); the last step may have none of this rank."""
        return self._plan.group(step, self._rank_of_plan)

    def next_group(self, last_step: int | None) -> tuple[int, IntArray] | None:
        """Return step and samples of the next group; `None` if no group is ready.

        Groups of later samples have the number of steps as their step. last_step: step of the last
        group in flight; `None` if no group is in flight.
        """
        step = self.taken if last_step is None else last_step + 1
        if step < len(self):
            numbers = self.group(step)
            if len(numbers):  # Only the last group may be empty.
                return step, numbers
        if last_step is not None and not self.later.are_grouped:
            return None  # Samples of the groups in flight may have to come later, too.
        later = self.later.next_group(self.group_budget)
        return None if later is None else (len(self), later)

    def emit(self, step: int, numbers: IntArray) -> None:
        """Count a result of `next_group` as emitted."""
        if step == len(self):
            self.later.remove(numbers)
            self.go_to_end()  # even if the last step has no group of this rank
        else:
            self.taken = step + 1

    def remaining(self) -> IntArray:
        """Return the samples of the planned groups that are not emitted, (n,)."""
        return self._plan.numbers_from(self.taken, self._rank_of_plan)

    def end(self) -> list[int]:
        """End the epoch early; return all samples that are not emitted."""
        numbers: list[int] = np.concatenate((self.remaining(), self.later.numbers)).tolist()
        self.later = LaterSamples()
        self.go_to_end()
        return numbers

    def were_in_group(self, numbers: IntArray) -> npt.NDArray[np.bool_]:
        """Return which samples were in a group before, also on earlier ranks, (n,)."""
        tables = [self._given_epoch.waiting_of(ranks)[0] for ranks in self._earlier]
        on_earlier_ranks = np.isin(numbers, np.concatenate([*tables, numbers[:0]]))
        return on_earlier_ranks | self.later.were_in_group(numbers)

    def alone(self, numbers: IntArray, limits: Limits) -> ResumedPlan:
        """Return a plan of the remaining samples of this rank alone."""
        # Earlier ranks matter only for the lengths that they observed.
        earlier = [ranks._replace(ranks=[]) for ranks in self._earlier]
        return ResumedPlan(
            self._given_epoch,
            self._rank,
            limits,
            numbers,
            is_alone=True,
            earlier=earlier,
            later=self.later,
        )

    def lowered(self, tokens: int) -> ResumedPlan:
        """Return a plan of this rank's remaining samples, in groups of at most `tokens`."""
        limits = self.limits._replace(tokens=tokens)
        if self._is_alone or len(self):
            return self.alone(self.remaining(), limits)
        # There is nothing to plan: no epoch has begun, or only later samples remain.
        return ResumedPlan(self._given_epoch, self._rank, limits, NO_ROWS, later=self.later)

    def go_to_end(self) -> None:
        """Count all planned groups as emitted."""
        self.taken = len(self)

    def go_to(self, taken: int, *, is_at_end: bool) -> None:
        """Count `taken` planned groups as emitted; `is_at_end`: all groups of the present plan."""
        self.taken = len(self) if is_at_end else taken
        if not 0 <= self.taken <= len(self):
            raise ValueError(f"it has {self.taken} groups of {len(self)}.")

    def to_state(self) -> dict[str, Any]:
        """Return the fields of a `PlannedState` for this position."""
        return {
            "is_at_end": self.taken == len(self) and not len(self.later),
            "later": self.later.to_state(),
            "taken": self.taken,
            "limits": (*self.limits,),
            "is_alone": self._is_alone,
            "rows": self._numbers_state,
            "earlier": [ranks.to_state() for ranks in self._earlier],
        }
