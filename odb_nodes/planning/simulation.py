"""Plan the steps of a whole job, on any number of ranks, in one process.

`RankAligner` plans with the same functions, so the steps are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, NamedTuple, TypedDict

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

from odb_nodes._core.checks import check_count
from odb_nodes._core.hashing import hash_ints
from odb_nodes.errors import SampleError
from odb_nodes.planning.alignment import FILLER, CostReport, Uneven, make_report, plan_round
from odb_nodes.planning.auto_window import (
    AUTO,
    LEAST_WINDOW,
    PulledLengths,
    WindowSize,
    chosen_window,
    window_before_ranks_agree,
)
from odb_nodes.planning.budget import TokenBudget, round_up
from odb_nodes.planning.caps import NO_CAPS, agreed_caps, caps_of_round
from odb_nodes.planning.diversity import check_diversity
from odb_nodes.planning.group_costs import BudgetCost, CostFn, GroupCostEstimator, tokens_of
from odb_nodes.planning.levelling import (
    UNKNOWN_LEFT,
    Rest,
    begins_last_round,
    shared_out,
    work_of,
)
from odb_nodes.planning.options import JobOptions
from odb_nodes.planning.pool import RollingPool
from odb_nodes.planning.rounds import round_steps
from odb_nodes.planning.table import IntArray
from odb_nodes.sample import Sample

if TYPE_CHECKING:
    from typing_extensions import Unpack

_FIRST_EPOCH = 0

Step = list[list[Sample] | None]
"""The group of each rank; `None` for one that fills the step."""


class SampleCosts(NamedTuple):
    """What planning needs to know of the samples of a dataset, a row each.

    Attributes:
        tokens: length of each sample, (n,) int64; 0 for one that processing skips.
        targets: supervised tokens of each, (n,) int64.
        patches: image patches of each, (n,) int64.
        tasks: number of the task of each, (n,) int64.
    """

    tokens: IntArray
    targets: IntArray
    patches: IntArray
    tasks: IntArray

    def are_oversize(self, budget: TokenBudget) -> NDArray[np.bool_]:
        """Tell which samples exceed a budget on their own, (n,) bool."""
        over: NDArray[np.bool_] = self.tokens > budget.capacity
        if budget.max_patches is not None:
            over = over | (self.patches > budget.max_patches)
        return over


@dataclass(frozen=True, kw_only=True)
class SimulationOptions(JobOptions):
    """A job to plan without running it. See `ODBDataLoader` for the fields not explained here.

    Args:
        world_size: number of ranks.
        budget: padded tokens of a group, or a `TokenBudget`.
        cost_fn: group -> cost, by which the groups of a step are matched. The samples have their
            tokens, their index into the lengths as `data`, and no patches. Default: the cost under
            the budget.

    Raises:
        TypeError, ValueError: an argument is not valid.
    """

    world_size: int
    budget: int | TokenBudget
    cost_fn: CostFn | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("world_size", self.world_size)
        check_diversity(self.diversity, TokenBudget.of(self.budget))


class PlanKeywords(TypedDict, total=False):
    """Options of a plan, as the types of keyword arguments."""

    round_size: int
    uneven: Uneven
    dearest_first: int
    accumulate: int


class _JobKeywords(TypedDict):
    world_size: int
    budget: int | TokenBudget


class SimulationKeywords(_JobKeywords, PlanKeywords, total=False):
    """The fields of `SimulationOptions`, as the types of keyword arguments."""

    window: WindowSize
    diversity: float
    seed: int
    cost_fn: CostFn | None


def simulate_steps(lengths: npt.ArrayLike, **options: Unpack[SimulationKeywords]) -> Iterator[Step]:
    """Yield the steps of the first epoch. Arguments and errors are those of `simulate`."""
    return steps_of(lengths, SimulationOptions(**options))


def steps_of(lengths: npt.ArrayLike, job: SimulationOptions) -> Iterator[Step]:
    """Yield the steps of the first epoch of a job. See `simulate_steps`."""
    tokens = check_lengths(lengths)
    none = np.zeros_like(tokens)
    samples = SampleCosts(tokens, tokens - 1, patches=none, tasks=none)
    order = np.arange(len(tokens))
    return plan_steps(
        samples, [order[rank :: job.world_size] for rank in range(job.world_size)], job
    )


def plan_epoch(
    lengths: npt.ArrayLike,
    budget: int | TokenBudget,
    *,
    world_size: int = 1,
    window: WindowSize = JobOptions.window,
    seed: int = JobOptions.seed,
    costs: npt.ArrayLike | None = None,
    **options: Unpack[PlanKeywords],
) -> list[list[list[int]]]:
    """Plan the batches of samples whose lengths are known, such as rollouts or a packed dataset.

        for step in plan_epoch([len(ids) for ids in rollouts], 16_384, world_size=8):
            batch = [rollouts[index] for index in step[rank]]

    Each sample is planned exactly once, but for those that `oversize="drop"` or `uneven="stop"`
    leave out. All ranks have the same number of steps, and the groups of a step cost about the
    same. The plan depends on the arguments alone. Without `costs` it is the
    first epoch of an `ODBDataLoader(shuffle=False)` whose samples have these lengths, step by step.

    Args:
        lengths: tokens of each sample, (n,). Rank r reads every `world_size`-th, from the r-th on;
            shuffle them for another order.
        budget: padded tokens of a group, or a `TokenBudget`.
        world_size: number of ranks.
        window: samples that wait on each rank to be grouped; `len(lengths)` chooses among all.
        seed: the seed of the order of steps.
        costs: what a step with each sample takes, (n,) integers of at least 0 in any unit; the
            groups of a step are matched by their sums. Default: what the groups cost under the
            budget, padding included.
        options: `round_size`, `uneven`, `dearest_first`, `accumulate`, as for `ODBDataLoader`.

    Returns:
        For each step the indices into `lengths` of each rank's group; none for a rank that has no
        sample left, and computes a filler batch in training.

    Raises:
        TypeError, ValueError: an argument is not valid.
        SampleError: a sample is too long under `oversize="error"`.
    """
    tokens = check_lengths(lengths)
    cost_fn = None if costs is None else _SummedCosts(costs, len(tokens))
    job = SimulationOptions(
        world_size=world_size, budget=budget, window=window, seed=seed, cost_fn=cost_fn, **options
    )
    return [
        [[sample.data for sample in group or ()] for group in step]
        for step in steps_of(tokens, job)
    ]


class _SummedCosts:
    """Cost of a group: the sum over its samples."""

    def __init__(self, costs: npt.ArrayLike, samples: int) -> None:
        given = np.asarray(costs)
        if given.shape != (samples,) or given.dtype.kind not in "iu" or given.min() < 0:
            raise ValueError(
                f"`costs` must be {samples} integers of at least 0, one for each of `lengths`, but "
                f"is {costs!r:.80} instead."
            )
        self._costs: list[int] = given.tolist()

    def __call__(self, group: Sequence[Sample]) -> int:
        return sum(self._costs[sample.data] for sample in group)


def plan_steps(
    samples: SampleCosts,
    shards: Sequence[IntArray],
    job: SimulationOptions,
    *,
    shares_rest: bool = True,
    knows_length: bool = True,
) -> Iterator[Step]:
    """Yield the steps of an epoch whose samples each rank reads in an order of its own.

    Args:
        samples: what the samples of the data cost.
        shards: of each rank, the rows of `samples` that it reads, in their order. They are the
            `data` of the samples in the steps.
        job: the other options of the job.
        shares_rest: whether ranks can give samples to others at the end.
        knows_length: whether a rank knows how much it has left, before it has read all.

    Raises:
        SampleError: a sample is too long under `oversize="error"`.
    """
    budget = TokenBudget.of(job.budget)
    if budget.oversize == "error" and (is_over := samples.are_oversize(budget)).any():
        first = int(is_over.argmax())
        raise SampleError(
            f"a sample of {samples.tokens[first]} tokens and {samples.patches[first]} patches "
            f"exceeds {budget} on its own."
        )
    cost_fn = job.cost_fn or BudgetCost(budget)
    ranks = [_Rank(samples, shard, job, cost_fn, knows_length) for shard in shards]
    has_caps = job.world_size > 1 and job.cost_fn is None
    shares_rest = shares_rest and job.uneven == "fill"
    caps, window, is_last = NO_CAPS, 0, False
    for number in count():
        most = round_steps(
            number,
            world_size=job.world_size,
            round_size=job.round_size,
            accumulate=job.accumulate,
        )
        if is_last:
            reports = _report_rest(ranks, window)
        else:
            reports = [rank.report(most, caps_of_round(caps, most), window) for rank in ranks]
        if job.window == AUTO and not window:
            window = chosen_window([rank.pulled.report(budget) for rank in ranks])
        if has_caps:
            offered = round_up(job.round_size, job.accumulate)
            caps = agreed_caps([rank.offer(offered) for rank in ranks])
        plan = plan_round(reports, uneven=job.uneven, key=hash_ints(job.seed, _FIRST_EPOCH, number))
        groups = [rank.groups(splits) for rank, splits in zip(ranks, plan.splits, strict=True)]
        for step in plan.groups.T.tolist():
            yield [
                None if index == FILLER else of_rank[index]
                for of_rank, index in zip(groups, step, strict=True)
            ]
        if plan.last:
            return
        next_steps = round_steps(number + 1, job.world_size, job.round_size, job.accumulate)
        is_last = shares_rest and begins_last_round(reports, next_steps)


def _report_rest(ranks: Sequence[_Rank], window: int) -> list[CostReport]:
    """Let ranks share out what is left, and return the costs of the last round's groups."""
    budget = ranks[0].budget
    rests = [rank.take_rest(window) for rank in ranks]
    moves = shared_out([work_of(map(tokens_of, rest), budget) for rest in rests])
    shares = [
        [sample for index, sample in enumerate(rest) if index not in {*given}]
        for rest, (given, _) in zip(rests, moves, strict=True)
    ]
    for rest, (given, to) in zip(rests, moves, strict=True):
        for index, receiver in zip(given, to, strict=True):
            shares[receiver].append(rest[index])
    cuts = [Rest(share, budget) for share in shares]
    steps = max(cut.fewest for cut in cuts)
    return [
        rank.report_groups(
            [[share[index] for index in group] for group in cut.groups(steps)], steps
        )
        for rank, share, cut in zip(ranks, shares, cuts, strict=True)
    ]


class _Rank:
    """Does on one rank what `WindowBucketer` and `RankAligner` do."""

    def __init__(
        self,
        samples: SampleCosts,
        shard: IntArray,
        job: SimulationOptions,
        cost_fn: CostFn,
        knows_length: bool,
    ) -> None:
        self._shard = shard
        columns = (column[shard] for column in samples)
        self._tokens, self._targets, self._patches, self._tasks = columns
        self.budget = TokenBudget.of(job.budget)
        self._left_out = self._tokens == 0
        if self.budget.oversize == "drop":
            self._left_out |= samples.are_oversize(self.budget)[shard]
        self._knows_length = knows_length
        self._estimator = GroupCostEstimator(cost_fn, {})
        self._dearest_left = job.dearest_first
        window = LEAST_WINDOW if job.window == AUTO else job.window
        self._pool: RollingPool[int] = RollingPool(  # of places in the shard
            self.budget, window, job.diversity
        )
        self.pulled = PulledLengths()  # as long as the window is to be chosen
        self._notes_lengths = job.window == AUTO
        self._ahead: list[Sample] | None = None
        self._ended = False  # As in a node, known only when a pull finds nothing.

    def report(self, most: int, caps: IntArray, window: int) -> CostReport:
        """Return the costs of the next round's groups, and form the one after them.

        Args:
            most: number of groups.
            caps: what the groups after the first, and the one after them, may cost.
            window: samples that wait after the first group; 0 for as many as before.
        """
        first = self._ahead or self._take()
        self._use(window)
        groups = [] if first is None else [first]
        self._pool.caps = caps[:-1]
        while groups and len(groups) < most and (group := self._take()):
            groups.append(group)
        self._pool.caps = caps[-1:]
        self._ahead = self._take() if len(groups) == most else None
        return self.report_groups(groups, most)

    def report_groups(self, groups: list[list[Sample]], most: int) -> CostReport:
        """Return the costs of groups, at most `most`, which are those of the next round."""
        report, self._ladder = make_report(
            groups, most=most, ended=self._ahead is None, measure=self._estimator, tokens=tokens_of
        )
        return replace(report, left=self._left())

    def _use(self, window: int) -> None:
        if window:
            self._pool.window, self._notes_lengths = window, False

    def _left(self) -> int:
        if self._ahead is None:
            return 0
        if not (self._knows_length or self._ended):
            return UNKNOWN_LEFT
        return len(self._ahead) + len(self._pool) + len(self._shard) - self._pool.pulled

    def take_rest(self, window: int) -> list[Sample]:
        """Return all samples that are left. See `report` for `window`."""
        rest, self._ahead = [*(self._ahead or [])], None
        self._use(window)
        self._pool.caps = NO_CAPS
        while group := self._take():
            rest += group
        return rest

    def offer(self, count: int) -> IntArray:
        """Return what the rank tells of its pool."""
        return NO_CAPS if self._ended else self._pool.offer(count)

    def _take(self) -> list[Sample] | None:
        """Return the next group, if there is one."""
        if not self._refill():
            return None
        dearest = self._dearest_left > 0
        self._dearest_left -= dearest
        return self._samples(self._pool.take(draining=self._ended, dearest=dearest))

    def groups(self, splits: int) -> list[list[Sample]]:
        """Return the groups of the round after `splits` splits."""
        return self._ladder.groups(splits)

    def _refill(self) -> bool:
        """Fill the pool, and return whether it holds anything."""
        self._pull()
        if not self._ended and self._notes_lengths and self._pool.window == LEAST_WINDOW:
            known = len(self._shard) if self._knows_length else None
            own = window_before_ranks_agree(self.pulled.report(self.budget), known)
            self._pool.window = max(own, LEAST_WINDOW)
            self._pull()
        return len(self._pool) > 0

    def _pull(self) -> None:
        pool = self._pool
        while not self._ended and (room := pool.room()) > 0:
            pulled = slice(pool.pulled, pool.pulled + room)
            places = np.flatnonzero(~self._left_out[pulled]) + pool.pulled
            kept = places.tolist()
            self._ended = pool.pulled + room > len(self._shard)
            pool.pulled = min(pulled.stop, len(self._shard))
            of_each = (self._tokens, self._patches, self._tasks)
            tokens, patches, tasks = (column[places].tolist() for column in of_each)
            pool.add(kept, tokens, patches, kept, tasks)
            if self._notes_lengths:
                self.pulled = self.pulled.and_of(self.budget, tokens, patches)

    def _samples(self, places: list[int]) -> list[Sample]:
        columns = (self._shard, self._tokens, self._targets, self._patches)
        rows = zip(*(column[places].tolist() for column in columns), strict=True)
        return [Sample(*row) for row in rows]


def check_lengths(lengths: npt.ArrayLike) -> IntArray:
    """Return lengths as (n,) int64.

    Raises:
        ValueError: they are not one row of integers of at least 1.
    """
    tokens = np.asarray(lengths)
    if tokens.ndim != 1 or not tokens.size or tokens.dtype.kind not in "iu" or tokens.min() < 1:
        raise ValueError(
            "`lengths` must be one row of integers of at least 1, one for each sample, but is "
            f"{lengths!r:.80} instead."
        )
    return tokens.astype(np.int64)
