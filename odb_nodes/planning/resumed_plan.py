"""The plan of an epoch as a rank follows it: also after lower limits, and on other ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from odb_nodes.planning.budget import Limits, TokenBudget
from odb_nodes.planning.known_epochs import KnownJob
from odb_nodes.planning.known_lengths import EpochPlan
from odb_nodes.planning.later_samples import check_rows
from odb_nodes.planning.table import IntArray

_plans = WeakValueDictionary[Any, EpochPlan]()
"""Plans that are in use, by what they follow from: virtual ranks of a process share them."""

_NONE = np.empty(0, np.int64)

LimitsState = tuple[int, int | None, int | None, int, int | None]
EarlierState = tuple[list[tuple[bool, bytes | None, int]], LimitsState, bytes | None]
"""`EarlierRanks` in a state."""


class RankProgress(NamedTuple):
    """How far a rank has come in an epoch."""

    is_alone: bool  # whether its plan is of samples of this rank alone
    rows: bytes | None  # the numbers of these, 8 bytes each
    taken: int  # groups of its plan that are out


class EarlierRanks(NamedTuple):
    """The ranks that an epoch had before it went on with another number of them."""

    ranks: Sequence[RankProgress]
    limits: Limits  # of their plans
    waiting: bytes | None  # (2, n) numbers and tokens of samples that were in groups, and no step

    def to_state(self) -> EarlierState:
        """Return this as plain data."""
        return [(*rank,) for rank in self.ranks], (*self.limits,), self.waiting

    @classmethod
    def of_state(cls, state: EarlierState) -> EarlierRanks:
        """Return what `to_state` was called on."""
        ranks, limits, waiting = state
        return cls([RankProgress(*rank) for rank in ranks], Limits(*limits), waiting)


@dataclass(frozen=True)
class KnownEpoch:
    """An epoch of samples whose lengths are known.

    job: the job on the present ranks.
    number: what the order of the steps is drawn from, beside the seed.
    tokens: length of each sample of the dataset, (n,).
    """

    job: KnownJob
    number: int
    tokens: IntArray

    def plan(
        self, rows: IntArray, limits: Limits, ranks: int, *, is_whole: bool = False
    ) -> EpochPlan:
        """Plan samples of the epoch, in their order; `is_whole`: from its first step on."""
        job = replace(
            self.job,
            budget=limits.of_groups(self.job.budget),
            world_size=ranks,
            largest_first=self.job.largest_first if is_whole else 0,
        )
        content = np.concatenate((rows, self.tokens[rows])).tobytes()
        known_by = hashlib.sha256(content).digest(), job, self.number
        if (plan := _plans.get(known_by)) is None:
            _plans[known_by] = plan = job.plan_all(rows, self.tokens, self.number)
        return plan

    def with_lengths_of(self, earlier: EarlierRanks) -> KnownEpoch:
        """Return this with the lengths that samples were seen to have on earlier ranks."""
        rows, observed = self.waiting_of(earlier)
        if not len(rows):
            return self
        tokens = self.tokens.copy()
        tokens[rows] = observed
        return replace(self, tokens=tokens)

    def waiting_of(self, earlier: EarlierRanks) -> IntArray:
        """Return numbers and tokens of the samples that waited on earlier ranks, (2, n)."""
        table = np.frombuffer(earlier.waiting or b"", "<i8").astype(np.int64).reshape(2, -1)
        self.checked(table[0])
        return table

    def remaining_of(self, earlier: EarlierRanks, rows: IntArray, *, is_whole: bool) -> IntArray:
        """Return the samples that earlier ranks, which had these rows, have left, (n,)."""
        waiting, _ = self.waiting_of(earlier)
        parts, ranks, limits = [waiting], earlier.ranks, earlier.limits
        if not all(progress.is_alone for progress in ranks):
            shared = self.plan(rows, limits, len(ranks), is_whole=is_whole)
        for rank, (is_alone, own_rows, taken) in enumerate(ranks):
            if is_alone:
                alone = self.plan(self.checked(own_rows), limits, ranks=1)
                parts.append(alone.rows_from(taken, 0))
            else:
                parts.append(shared.rows_from(taken, rank))
        return np.concatenate(parts)

    def checked(self, rows: bytes | IntArray | None) -> IntArray:
        """Return the samples that a state names."""
        if not isinstance(rows, np.ndarray):
            rows = np.frombuffer(rows or b"", "<i8").astype(np.int64)
        return check_rows(rows, len(self.tokens))


class ResumedPlan:
    """The groups of a rank in an epoch, and how many of them are out.

    All ranks plan an epoch together. After lower limits or more excluded keys, a rank plans alone
    what it has left. Another number of ranks plans together what the ranks before have left, which
    follows from their plans.

    Args:
        epoch: the epoch, with the lengths that were told.
        rank: this rank.
        limits: of the groups.
        rows: the samples of the epoch, in their order, without those that are excluded, (n,).
        is_alone: whether these are what this rank has left, and plans alone.
        earlier: the numbers of ranks that the epoch had before.

    Raises:
        ValueError: what comes from a state is damaged.
    """

    def __init__(
        self,
        epoch: KnownEpoch,
        rank: int,
        limits: Limits,
        rows: IntArray,
        *,
        is_alone: bool = False,
        earlier: Sequence[EarlierRanks] = (),
    ) -> None:
        self.limits = limits
        self.taken = 0
        """Groups that are out."""
        self._told, self._rank, self._is_alone, self._earlier = epoch, rank, is_alone, earlier
        self._rows_state = rows.astype("<i8").tobytes() or None if is_alone else None
        order = epoch.checked(rows)
        for number, ranks in enumerate(earlier):
            if not is_alone:
                is_left = np.zeros(len(epoch.tokens), np.bool_)
                is_left[epoch.remaining_of(ranks, rows, is_whole=not number)] = True
                rows = order[is_left[order]]
            epoch = epoch.with_lengths_of(ranks)
        self._rank_of_plan = 0 if is_alone else rank
        ranks_of_plan = 1 if is_alone else epoch.job.world_size
        is_whole = not (is_alone or earlier)
        self._plan = epoch.plan(rows, limits, ranks_of_plan, is_whole=is_whole)

    def __len__(self) -> int:
        """Return how many groups there are, or one more than this rank has."""
        return len(self._plan)

    @property
    def group_budget(self) -> TokenBudget:
        """The budget of the groups."""
        return self.limits.of_groups(self._told.job.budget)

    def group(self, number: int) -> IntArray:
        """Return the samples of a group, (n,); none where the last step has none of this rank."""
        return self._plan.group(number, self._rank_of_plan)

    def remaining(self) -> IntArray:
        """Return the samples of the groups that are not out, (n,)."""
        return self._plan.rows_from(self.taken, self._rank_of_plan)

    def were_in_group(self, rows: IntArray) -> npt.NDArray[np.bool_]:
        """Tell which samples have been in a group before, on earlier ranks, (n,)."""
        tables = [self._told.waiting_of(ranks)[0] for ranks in self._earlier]
        return np.isin(rows, np.concatenate([*tables, rows[:0]]))

    def alone(self, rows: IntArray, limits: Limits) -> ResumedPlan:
        """Return a plan of samples that this rank has left."""
        # Of earlier ranks, only the lengths that they have seen still count.
        earlier = [ranks._replace(ranks=[]) for ranks in self._earlier]
        return ResumedPlan(self._told, self._rank, limits, rows, is_alone=True, earlier=earlier)

    def lowered(self, tokens: int) -> ResumedPlan:
        """Return a plan of what this rank has left, in groups of at most so many tokens."""
        limits = self.limits._replace(tokens=tokens)
        if self._is_alone or len(self):
            return self.alone(self.remaining(), limits)
        return ResumedPlan(self._told, self._rank, limits, _NONE)  # No epoch has begun.

    def go_to_end(self) -> None:
        """Go past all groups."""
        self.taken = len(self)

    def go_to(self, taken: int, *, is_at_end: bool) -> None:
        """Go past the groups that are out; `is_at_end`: past all, as many as they are now."""
        self.taken = len(self) if is_at_end else taken
        if not 0 <= self.taken <= len(self):
            raise ValueError(f"it has {self.taken} groups of {len(self)}.")

    def to_state(self) -> dict[str, Any]:
        """Return the fields of a `PlannedState` that say where this stands."""
        return {
            "taken": self.taken,
            "limits": (*self.limits,),
            "is_alone": self._is_alone,
            "rows": self._rows_state,
            "earlier": [ranks.to_state() for ranks in self._earlier],
        }
