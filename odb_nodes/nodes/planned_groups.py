"""Node: groups of samples whose lengths are known before they are read."""

from __future__ import annotations

import hashlib
import zlib
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from odb_nodes._core.checks import check_bool, check_callable, check_count, check_integer
from odb_nodes._core.hashing import hash_ints, stable_name
from odb_nodes._core.processes import resolve_rank
from odb_nodes._core.seeds import declares_draws
from odb_nodes._core.user_warning import warn_user
from odb_nodes.collate.protocol import Collate, takes_step
from odb_nodes.contract import EpochNode, EpochState
from odb_nodes.errors import SampleError, StateError
from odb_nodes.nodes.exclusions import Exclude, ExcludedKeys, ExcludedState, ExclusionCounter
from odb_nodes.nodes.lazy_samples import Restored
from odb_nodes.nodes.whole_batch import GroupMaker, MadeGroup, WholeBatch, batch_key
from odb_nodes.planning import TokenBudget
from odb_nodes.planning.budget import Limits
from odb_nodes.planning.known_epochs import plan_key
from odb_nodes.planning.known_lengths import EpochPlan, plan_known
from odb_nodes.planning.pool import grouping_of
from odb_nodes.planning.sample_costs import check_lengths
from odb_nodes.planning.table import IntArray
from odb_nodes.processing import WorkerOptions
from odb_nodes.processing.again import ProcessedAgain
from odb_nodes.processing.chunk import ChunkProcessor, ChunkResult, ChunkTask
from odb_nodes.processing.chunk_runner import ChunkRunner, is_picklable
from odb_nodes.sample import ItemKey, LeftOut
from odb_nodes.sample_block import ITEM, ItemKeys, SampleBlock
from odb_nodes.sources.sharded_sampler import BlockPermutation, epoch_order, shuffle_blocks

_OF_THE_PLAN = (
    *("lengths", "window", "shuffle", "seed", "dearest_first", "rank", "world_size"),
    *("budget.layout", "budget.pad_to_multiple_of", "budget.shapes", "budget.attention_tokens"),
    "budget.row_sizes",
)
"""Fields of the fingerprint that a plan depends on. Limits of a budget are in the state."""
_GROUPS_AHEAD = 2  # for each worker
_LEAST_SEEN = 1024  # samples, before lengths are refused
_MOST_MOVED = 0.25  # share of samples that may not fit into the group that was planned for them

_plans = WeakValueDictionary[Any, EpochPlan]()
"""Plans that are in use, by what they follow from: virtual ranks of a process share them."""

LimitsState = tuple[int, int | None, int | None, int, int | None]
EarlierRanks = list[tuple[list[tuple[bool, bytes | None, int]], LimitsState, bytes | None]]
"""For each number of ranks that an epoch has had before: `is_alone`, `rows` and `taken` of each
rank, the `Limits` of their plans, and the samples that were read and are in no step."""


@dataclass(kw_only=True)
class PlannedState(EpochState):
    """Where a `PlannedGroups` stands."""

    taken: int = 0  # groups of the plan that are out
    is_at_end: bool = False  # whether no group is left
    limits: LimitsState  # `Limits` of the plan
    # whether the plan is of samples of this rank alone, and their numbers, 8 bytes each
    is_alone: bool = False
    rows: bytes | None = None
    # how far other numbers of ranks have come before
    earlier: EarlierRanks = field(default_factory=list)
    # samples that were longer than was told, so that their groups did not hold them: (3, n) numbers
    # of samples, tokens and patches
    later: bytes | None = None
    seen: int = 0  # samples that were processed
    moved: int = 0  # how many of them did not fit into the group that was planned for them
    excluded: ExcludedState
    excluded_samples: int
    dropped_samples: int
    oversize_samples: int
    skipped_samples: dict[str, int]
    left_out: list[tuple[int | None, str, str]]


class PlannedGroups(EpochNode[SampleBlock, PlannedState]):
    """Yields the groups of this rank, planned from lengths that are known before samples are read.

    All steps of an epoch are planned at once, over all ranks: see `plan_known`.
    A worker reads, processes and collates a group as a whole.

    A sample may turn out to be longer than was told. If a group then exceeds its budget, its
    longest samples come at the end of the epoch, by the lengths that they have.

    State: the number of groups that are out, and number and length of each sample that comes later.

    Args:
        tokens: length of each sample of the dataset, (n,).
        process_fn: number of a sample -> the processed `Sample`, or `Skipped`; picklable unless
            workers are forked or threads. If it gives samples keys of their own, it must have an
            attribute `gives_keys = True`: excluded samples are read then.
        budget: padded tokens of a group, or a `TokenBudget`.
        data: the dataset of the samples. If it has `data_id` or `shuffle_blocks`, these count as
            for `ShardedSampler`.
        window: how many samples of each rank are planned together. Default: all of the epoch.
        shuffle: whether to permute the samples, differently in every epoch. The groups of a window
            come in an order drawn from `seed` either way.
        seed: of the orders, and of the random numbers of processing; the same on all ranks.
        exclude: keys of samples that no group holds; see `ODBDataLoader`.
        dearest_first: steps of the longest samples that begin each epoch.
        collate: makes the batch of a group, in the worker, where `why_not_collated` is "". Default:
            nobody does, and the samples come to this process.
        workers: how to run in parallel.
        rank: this rank. Default: from torch.distributed, or `RANK`.
        world_size: number of ranks, likewise.

    Raises:
        TypeError, ValueError: an argument is not valid.
    """

    STATE = PlannedState
    keeps_failed_items = True

    def __init__(
        self,
        tokens: npt.ArrayLike,
        process_fn: Callable[[int], Any],
        budget: int | TokenBudget,
        *,
        data: Any = None,
        window: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        exclude: Exclude = None,
        dearest_first: int = 0,
        collate: Collate | None = None,
        workers: WorkerOptions | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        super().__init__()
        self._tokens = check_lengths(tokens)
        self.budget = TokenBudget.of(budget)
        self._window = None if window is None else check_count("window", window)
        self._shuffle = check_bool("shuffle", shuffle)
        self._seed = check_integer("seed", seed)
        self.exclude = ExcludedKeys.of(exclude)
        self._dearest_first = check_count("dearest_first", dearest_first, 0)
        check_callable("process_fn", process_fn)
        self._name = stable_name(process_fn)
        self._data_id: str | None = getattr(data, "data_id", None)
        self._blocks = None if data is None else shuffle_blocks(data)
        self._gives_keys: bool = getattr(process_fn, "gives_keys", False)
        self._workers = workers or WorkerOptions()
        self._rank, self._world_size = resolve_rank(rank, world_size)
        seeds = None if declares_draws(process_fn) is False else self._seed
        self.why_not_collated = _why_not_collated(collate, self._workers)
        """Why batches are left to this process; "" where workers make them."""
        maker = GroupMaker(None if self.why_not_collated else collate)
        self._make_group = GroupMaker(None)  # where a worker could not send what it has made
        processor = ChunkProcessor(
            process_fn,
            seeds,
            self._rank,
            self._world_size,
            self._workers.timeout_s,
            make_group=maker,
        )
        self.runner = ChunkRunner(processor, self._workers, type(self).__name__)
        """Runs the groups."""
        self._lengths_crc = zlib.crc32(self._tokens.astype("<i8").tobytes())
        self._limits, self._group_budget = Limits.of(self.budget), self.budget
        self._counter = ExclusionCounter(self.budget, self.exclude)
        self._plan, self._place = EpochPlan([], self._world_size), self._rank
        self._own_state: bytes | None = None  # its samples, where it is of this rank alone
        self._begin()

    def _begin(self) -> None:
        self.runner.resume()
        self._taken = 0  # groups of the plan that are out
        self._later = _Later()
        self._seen = self._moved = 0  # samples of the epoch, see `PlannedState`
        self._compared = self._observed_tokens = self._told_tokens = 0  # since the last reset
        self._in_flight = deque[_InFlight]()
        self._ahead = 0  # groups of the plan that are in flight or out
        self._rest: deque[IntArray] | None = None  # groups of the samples that come later
        self._own: IntArray | None = None  # the samples of a plan of this rank alone
        # what collating a group has raised in a worker, by the first sample
        self._failures = dict[int, str]()
        self._earlier: EarlierRanks = []
        self.restored = Restored()
        """What the last restore has found."""

    def __len__(self) -> int:
        """Return how many samples this rank has in the epoch, those that are left out included."""
        return len(range(self._rank, len(self._tokens), self._world_size))

    # --- what is asked of it --------------------------------------------------------------------

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the worker processes that run now."""
        return self.runner.pids

    @property
    def has_workers(self) -> bool:
        """Tell whether workers run, in processes or threads."""
        return self.runner.is_started

    @property
    def remaining_samples(self) -> int:
        """Samples of this rank that no group that is out had."""
        return len(self._plan.rows_from(self._taken, self._place)) + len(self._later)

    @property
    def replayed_samples(self) -> int:
        """Samples that a restore makes again: none, since none waits here."""
        return 0

    @property
    def excluded(self) -> ExcludedKeys:
        """The keys that are excluded."""
        return self._counter.keys

    @property
    def excluded_samples(self) -> int:
        """Samples of this epoch that were left out by their keys so far."""
        return self._counter.excluded

    @property
    def dropped_samples(self) -> int:
        """Samples of this epoch that `oversize="drop"` left out so far."""
        return self._counter.dropped

    @property
    def oversize_samples(self) -> int:
        """Samples of this epoch that exceeded the budget on their own so far."""
        return self._counter.oversize

    @property
    def skipped_samples(self) -> dict[str, int]:
        """Samples of this epoch that processing `Skipped` so far, by its reason."""
        return dict(self._counter.skipped)

    def take_left_out(self) -> list[LeftOut]:
        """Return the samples that were left out since the last call."""
        return self._counter.take_left_out()

    def batch_key(self, group: SampleBlock) -> int:
        """Return what the random numbers of a group's batch are drawn from."""
        return batch_key(self._batches_key(), group)

    def take_failure(self, group: SampleBlock) -> str:
        """Return, once, what collating a group has raised in a worker; "" where it did not."""
        return self._failures.pop(int(group.facts[ITEM, 0]), "")

    # --- the contract of a node -----------------------------------------------------------------

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        """Begin the next epoch, or go to where `initial_state` stands.

        Raises:
            StateError: the state is damaged, or was saved with other lengths or another
                configuration.
            WorkerError: a worker could not be started, or the workers belong to the process that
                this one was forked from.
        """
        self.runner.check_process()
        super().reset(initial_state)
        self.runner.start(self._epochs.epoch)

    def prepare_reset(self) -> None:
        """Leave what is in flight."""
        if self._in_flight or self.runner.has_backlog:
            self.runner.discard()
        self._begin()

    def begin_epoch(self) -> None:
        """Plan the epoch."""
        self._counter = self._counter.of_next_epoch(
            self._limits.of_samples(self.budget), self._counter.keys | self.exclude
        )
        rows = self._order()
        is_out = self._are_excluded(rows)
        self._counter.exclude_keys(rows[is_out][self._rank :: self._world_size].tolist())
        self._make_plan()

    def restore(self, state: PlannedState) -> None:
        """Go past the groups that are out."""
        self._counter.restore(state)
        self._limits = Limits(*state.limits)
        try:
            self._earlier = state.earlier
            self._own = self._valid(state.rows) if state.is_alone else None
            self._make_plan()
            # At the end of an epoch, the plan may be another one.
            taken = len(self._plan) if state.is_at_end else state.taken
            if not 0 <= taken <= len(self._plan):
                raise ValueError(f"it has {taken} groups of {len(self._plan)}.")
            self._later = _Later.of_state(state.later, len(self._tokens))
        except (ValueError, TypeError) as error:
            raise StateError(
                f"the state of {type(self).__name__} is damaged: {error} Use an earlier checkpoint."
            ) from error
        self._taken = self._ahead = taken
        self._seen, self._moved = state.seen, state.moved
        self._use_present_options()

    def save(self) -> PlannedState:
        """Return the number of groups that are out, and what comes later."""
        return PlannedState(
            taken=self._taken,
            is_at_end=self._taken == len(self._plan) and not len(self._later),
            limits=(*self._limits,),
            is_alone=self._own is not None,
            rows=self._own_state,
            earlier=self._earlier,
            later=self._later.to_state(),
            seen=self._seen,
            moved=self._moved,
            **self._counter.to_state(),
        )

    def next(self) -> SampleBlock:
        """Return the next group.

        Raises:
            SampleError: processing raised for a sample; too many are longer than was told; one is
                too long under `oversize="error"`; or all of the epoch were left out.
            WorkerError: a worker died, did not answer in time, or belongs to another process.
        """
        while True:
            self.runner.check()  # before anything is sent to workers that another process has
            self._read_ahead()
            if not self._in_flight:
                self._taken = len(self._plan)  # also where the last step has no group of this rank
                unread = 0 if self._gives_keys else self._counter.excluded
                self._counter.check_not_all(self._seen + unread)
                self._counter.warn_of_summary(self._seen)
                raise StopIteration
            if len(group := self._take_group()):
                return group

    @property
    def can_restore(self) -> bool:
        """Any rank can make the samples again, by their keys."""
        return True

    def make_again(self, items: Sequence[ItemKey]) -> ProcessedAgain:
        """Return samples of this epoch that are made again when taken, or by idle workers."""
        numbers = [item.key for item in items]
        place = self._epochs.epoch, self._epochs.cycle
        task = ChunkTask(numbers, ItemKeys.of(items), *place, range(len(items)), is_again=True)
        order = sorted(range(len(items)), key=numbers.__getitem__)
        return ProcessedAgain(self.runner, task, order)

    def close(self) -> None:
        """Stop the workers. A later reset starts them again."""
        self.runner.close()

    def interrupt(self) -> None:
        """Make a `next` that waits on another thread raise now. A reset takes it back."""
        self.runner.interrupt()

    def fingerprint(self) -> dict[str, Any]:
        """Return what decides the output: a state fits only if it is equal."""
        of_data: dict[str, Any] = {} if self._data_id is None else {"data_id": self._data_id}
        if self._blocks is not None:
            starts, of_data["mixed_blocks"] = self._blocks
            crc = zlib.crc32(np.array(starts, "<i8").tobytes())
            of_data["blocks"] = f"{len(starts)}, CRC-32 {crc}"
        return {
            **of_data,
            "process_fn": self._name,
            "lengths": f"{len(self._tokens)}, CRC-32 {self._lengths_crc:08x}",
            **{f"budget.{name}": value for name, value in self.budget.fingerprint().items()},
            "window": self._window,
            "shuffle": self._shuffle,
            "seed": self._seed,
            "dearest_first": self._dearest_first,
            "rank": self._rank,
            "world_size": self._world_size,
        }

    def fixed_fields(self, state: PlannedState) -> Collection[str]:
        """Return what the plan depends on: in mid-epoch, another plan would repeat samples."""
        return () if state.is_at_end else _OF_THE_PLAN

    # --------------------------------------------------------------------------------------------

    def _batches_key(self) -> int:
        """Return what the random numbers of the batches of this epoch are drawn from."""
        return hash_ints(self._seed, self._epochs.shuffle_key, 2)

    def _order(self) -> IntArray:
        """Return the samples of the epoch in their order, (n,)."""
        count, epoch = len(self._tokens), self._epochs.shuffle_key
        if self._blocks is not None and self._shuffle:
            starts, mixed = self._blocks
            permutation = BlockPermutation(count, starts, mixed, hash_ints(self._seed, epoch))
            return permutation(np.arange(count))
        return epoch_order(count, self._seed, epoch, shuffle=self._shuffle)

    def _are_excluded(self, rows: IntArray) -> npt.NDArray[np.bool_]:
        """Tell which samples are excluded, as far as that is known before they are read, (n,)."""
        if self._gives_keys:
            return np.zeros(len(rows), np.bool_)
        return np.isin(rows, np.array(self._counter.keys.of_source(""), np.int64))

    def _valid(self, rows: bytes | None) -> IntArray:
        """Return the samples that a state names."""
        found = np.frombuffer(rows or b"", "<i8").astype(np.int64)
        if len(found) and not 0 <= found.min() <= found.max() < len(self._tokens):
            raise ValueError("it names a sample that there is not.")
        return found

    def _make_plan(self) -> None:
        """Plan the samples of this rank alone, or with the other ranks."""
        self._group_budget = self._limits.of_groups(self.budget)
        self._own_state = None
        if self._own is not None:
            self._own_state = self._own.astype("<i8").tobytes() or None
            self._plan, self._place = self._planned(self._own, 1, self._limits), 0
            return
        rows, ranks = self._shared(), self._world_size
        is_whole = not self._earlier
        self._plan = self._planned(rows, ranks, self._limits, is_whole=is_whole)
        self._place = self._rank

    def _shared(self) -> IntArray:
        """Return the samples that the ranks plan together."""
        order = self._order()
        rows = order[~self._are_excluded(order)]
        for number, (ranks, limits_state, waiting) in enumerate(self._earlier):
            limits = Limits(*limits_state)
            plan = self._planned(rows, len(ranks), limits, is_whole=not number)
            parts = [self._valid(waiting)]
            for rank, (is_alone, own, taken) in enumerate(ranks):
                if is_alone:
                    alone = self._planned(self._valid(own), 1, limits)
                    parts.append(alone.rows_from(taken, 0))
                else:
                    parts.append(plan.rows_from(taken, rank))
            is_left = np.zeros(len(order), np.bool_)
            is_left[np.concatenate(parts)] = True
            rows = order[is_left[order]]
        return rows

    def _planned(
        self, rows: IntArray, ranks: int, limits: Limits, *, is_whole: bool = False
    ) -> EpochPlan:
        """Plan samples of the epoch; `is_whole`: from its first step on."""
        tokens, budget = self._tokens[rows], limits.of_groups(self.budget)
        dearest_first = self._dearest_first if is_whole else 0
        key = plan_key(self._seed, self._epochs.shuffle_key)
        digest = hashlib.sha256(np.concatenate((rows, tokens)).tobytes()).digest()
        arguments = digest, budget, ranks, self._window, dearest_first, key
        if (plan := _plans.get(arguments)) is None:
            plan = plan_known(
                rows,
                tokens,
                budget,
                world_size=ranks,
                window=self._window,
                dearest_first=dearest_first,
                key=key,
            )
            _plans[arguments] = plan
        return plan

    def _use_present_options(self) -> None:
        """Exclude the keys, and lower the limits, that the state does not know of."""
        counter, keys = self._counter, self._counter.keys
        limits = self._limits.tightened(Limits.of(self.budget))
        has_keys, has_limits = (keys | self.exclude) != keys, limits != self._limits
        self.restored = Restored(0, {}, has_keys, has_limits)
        if not (has_keys or has_limits):
            return
        counter.use_present(limits.of_samples(self.budget), keys | self.exclude)
        rows = self._plan.rows_from(self._taken, self._place)
        is_out = self._are_excluded(rows)
        counter.exclude_keys(rows[is_out].tolist())
        later = self._later.numbers()
        gone = later[self._are_excluded(later)]
        counter.exclude_keys(gone.tolist())
        self._later.remove(gone)
        self._plan_alone(rows[~is_out], limits)

    def _plan_alone(self, rows: IntArray, limits: Limits) -> None:
        """Plan what this rank has left anew."""
        self._limits, self._own, self._earlier = limits, rows, []
        self._taken = self._ahead = 0
        self._rest = None
        self._make_plan()

    # --- what a `RankAligner` asks of it --------------------------------------------------------

    def lower_tokens(self, tokens: int) -> None:
        """Yield groups of at most so many tokens from now on."""
        if tokens >= self._limits.tokens:
            return
        self._leave_in_flight()
        if self._own is None and not len(self._plan):  # no epoch has begun
            self._limits = self._limits._replace(tokens=tokens)
            return
        limits = self._limits._replace(tokens=tokens)
        self._plan_alone(self._plan.rows_from(self._taken, self._place), limits)

    def end_early(self) -> None:
        """End the epoch before its last sample, as another rank has ended; leave out the rest."""
        rows = self._plan.rows_from(self._taken, self._place).tolist()
        numbers = [*rows, *self._later.numbers().tolist()]
        self._counter.leave_out(LeftOut(number, "", "unemitted") for number in numbers)
        self._leave_in_flight()
        self._later = _Later()
        self._taken = self._ahead = len(self._plan)

    def put_back(self, samples: SampleBlock) -> None:
        """Yield samples of groups that are out again, later, without those that are excluded."""
        is_out = self._counter.exclude_from(samples)
        if self._rest is not None:  # Those in flight come later, too: all are grouped anew.
            self._leave_in_flight()
            self._rest = None
        self._later.add(samples.take(np.flatnonzero(~is_out)))

    # --- groups in flight -----------------------------------------------------------------------

    def _leave_in_flight(self) -> None:
        if self._in_flight:
            self.runner.discard()
            self._in_flight.clear()

    def _read_ahead(self) -> None:
        """Give workers the next groups."""
        most = max(1, _GROUPS_AHEAD * self._workers.num_workers)
        while len(self._in_flight) < most and (planned := self._next_planned()) is not None:
            step, rows = planned
            task = self._task(rows)
            self._in_flight.append(_InFlight(step, rows, task, self.runner.submit(task)))

    def _next_planned(self) -> tuple[int, IntArray] | None:
        """Return the step and the samples of the next group; `None` where there is none yet."""
        while self._ahead < len(self._plan):
            step, self._ahead = self._ahead, self._ahead + 1
            if len(rows := self._plan.group(step, self._place)):
                return step, rows
        if self._rest is None and not self._in_flight:  # Now all that comes later is known.
            self._rest = self._later.groups(self._group_budget)
        return (len(self._plan), self._rest.popleft()) if self._rest else None

    def _task(self, rows: IntArray) -> ChunkTask:
        repeats = np.full_like(rows, self._epochs.cycle)
        keys = ItemKeys(rows, repeats, np.zeros_like(rows), [("", self._world_size)])
        place, numbers = (self._epochs.epoch, self._epochs.cycle), rows.tolist()
        return ChunkTask(
            numbers,
            keys,
            *place,
            numbers,
            group=(self._batches_key(), self._group_budget),
        )

    def _take_group(self) -> SampleBlock:
        """Return the group that is due, without samples that come later or never."""
        step, rows, task, future = self._in_flight[0]
        runs, failure = self.runner.results(task, future)
        if failure is not None:
            bad = sum(map(len, runs))
            raise failure.explained(f"sample {task.items[bad]} of epoch {task.epoch}")
        made = runs[0][0] if runs else None
        if not isinstance(made, MadeGroup):  # The worker could not send it.
            results = [result for run in runs for result in run]
            assert task.group is not None
            made = self._make_group(results, *task.group)
        is_later = step == len(self._plan)
        seen, moved = self._seen, self._moved
        if not is_later:
            seen, moved = seen + len(rows), moved + len(made.later)
        self._check(made, seen, moved, is_later=is_later)
        group = self._admitted(made)
        # Only now, so that no state loses a group that raises, or counts it twice.
        self._in_flight.popleft()
        if made.failure and len(group):
            self._failures[int(group.facts[ITEM, 0])] = made.failure
        if is_later:
            self._later.remove(rows)
        self._later.add(made.later)
        self._seen, self._moved = seen, moved
        self._taken = min(step + 1, len(self._plan))
        return group

    def _check(self, made: MadeGroup, seen: int, moved: int, *, is_later: bool) -> None:
        """Raise where lengths are of no use, or a sample is too long under `oversize="error"`.

        seen, moved: how many samples of the epoch were processed, and did not fit, with these.
        is_later: whether the group is of samples that have come before.
        """
        later, items = made.later, made.later.facts[ITEM]
        if is_later and len(later):
            told, now = self._later.tokens[int(items[0])], later.lengths[0]
            raise SampleError(
                f"sample {items[0]} had {told} tokens when it was first processed in this epoch, "
                f"but has {now} now, or others of its group differ: processing is not "
                "deterministic. Let it draw only from the global generators, which "
                "are seeded, or leave `lengths` out."
            )
        if len(later) and seen >= _LEAST_SEEN and moved > _MOST_MOVED * seen:
            raise SampleError(
                f"`lengths` must be those of processed samples, but of the first {seen} "
                f"samples of the epoch, {moved} did not fit into the batch that was planned "
                f"for them, such as sample {items[0]}, which has {later.lengths[0]} tokens in "
                f"place of {self._tokens[items[0]]}. Save them anew with `odb-nodes profile "
                "--save-lengths`, or leave `lengths` out."
            )
        if not is_later:
            self._compare(made.group)
        if self._counter.budget.oversize == "error":
            for block in (made.group, later):
                if not len(block) or self._counter.admits_all(block):
                    continue
                for at, sample in enumerate(block.without_data()):
                    if self._counter.budget.is_oversize(sample.tokens, sample.patches):
                        self._counter.admit(sample, int(block.facts[ITEM, at]))  # raises

    def _compare(self, group: SampleBlock) -> None:
        """Warn, once, where samples are much shorter than was told: batches are not full then."""
        self._compared += len(group)
        self._observed_tokens += int(group.tokens.sum())
        self._told_tokens += int(self._tokens[group.facts[ITEM]].sum())
        if self._compared >= _LEAST_SEEN and 2 * self._observed_tokens < self._told_tokens:
            warn_user(
                f"`lengths` say that the first {self._compared} samples have {self._told_tokens} "
                f"tokens, but they have {self._observed_tokens}: batches are less than half full. "
                "Pass the lengths of processed samples, or leave `lengths` out.",
                once="lengths",
            )

    def _admitted(self, made: MadeGroup) -> SampleBlock:
        """Return the samples of a group that are to be trained on; count the others."""
        counter, group = self._counter, made.group
        for skipped in made.skipped:
            counter.admit(skipped, -1 if skipped.key is None else skipped.key)
        if not len(group):
            return group
        for holder in group.sources.values():
            if isinstance(holder, WholeBatch):
                holder.made_again_by(self, group)
        if counter.admits_all(group):
            return group
        admitted = [
            at
            for at, sample in enumerate(group.without_data())
            if counter.admit(sample, int(group.facts[ITEM, at]))
        ]
        return group if len(admitted) == len(group) else group.take(admitted)


def _why_not_collated(collate: Collate | None, workers: WorkerOptions) -> str:
    if collate is None or takes_step(collate):
        return "`collate_fn` takes the step" if collate is not None else "there is no `collate_fn`"
    if not workers.num_workers:
        return ""  # There is one thread, which would make the batch a little later.
    if workers.method == "thread" and declares_draws(collate) is not False:
        # A batch seeds the global generators, from which the trainer draws meanwhile.
        return "`collate_fn` may draw random numbers, for which threads disturb the trainer"
    if workers.method == "process" and not (workers.forks or is_picklable(collate)):
        return "`collate_fn` cannot be pickled, as workers need that are not forked"
    return ""


class _InFlight(NamedTuple):
    """A group that workers have."""

    step: int  # of the plan; their number for samples that come later
    rows: IntArray
    task: ChunkTask
    future: Future[ChunkResult]


class _Later:
    """Samples that were longer than was told, so that their groups did not hold them."""

    def __init__(self) -> None:
        self.tokens = dict[int, int]()  # by the number of the sample, as observed
        self._patches = dict[int, int]()

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, samples: SampleBlock) -> None:
        """Take up samples."""
        numbers = samples.facts[ITEM].tolist()
        self.tokens.update(zip(numbers, samples.lengths, strict=True))
        self._patches.update(zip(numbers, samples.patches.tolist(), strict=True))

    def numbers(self) -> IntArray:
        """Return the numbers of the samples, (n,)."""
        return np.array([*self.tokens], np.int64)

    def remove(self, rows: IntArray) -> None:
        """Let go of samples."""
        for number in rows.tolist():
            del self.tokens[number], self._patches[number]

    def groups(self, budget: TokenBudget) -> deque[IntArray]:
        """Return the groups that they form. Without the first, the rest form the others."""
        if not self.tokens:
            return deque()
        rows = np.array([*self.tokens])
        table = np.array([[*self.tokens.values()], range(len(rows)), [*self._patches.values()]])
        table = table.take(np.lexsort((rows, table[0])), axis=1)
        return deque(rows[np.sort(group)] for group in grouping_of(budget).partition(table))

    def to_state(self) -> bytes | None:
        """Return number, tokens and patches of each."""
        rows = [[*self.tokens], [*self.tokens.values()], [*self._patches.values()]]
        return np.array(rows, "<i8").tobytes() or None

    @classmethod
    def of_state(cls, state: bytes | None, samples: int) -> _Later:
        """Return what a state holds, of a dataset of so many samples."""
        later = cls()
        table = _later_table(state).tolist()
        if any(not 0 <= number < samples for number in table[0]):
            raise ValueError("it names a sample that there is not.")
        later.tokens = dict(zip(table[0], table[1], strict=True))
        later._patches = dict(zip(table[0], table[2], strict=True))
        return later


def _later_table(state: bytes | None) -> IntArray:
    return np.frombuffer(state or b"", "<i8").astype(np.int64).reshape(3, -1)


def later_rows(state: bytes | None) -> IntArray:
    """Return the numbers of the samples that come later, of a `PlannedState.later`, (n,)."""
    try:
        rows: IntArray = _later_table(state)[0]
    except ValueError as error:
        raise StateError(
            f"the state of `PlannedGroups` is damaged: {error} Use an earlier checkpoint."
        ) from error
    return rows
