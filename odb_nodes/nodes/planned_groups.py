"""Node: groups of samples whose lengths are known before they are read."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from odb_nodes._core.checks import check_bool, check_count, check_integer, check_type
from odb_nodes._core.hashing import hash_ints
from odb_nodes.collate.protocol import Collate, takes_step
from odb_nodes.contract import EpochState
from odb_nodes.errors import SampleError, StateError
from odb_nodes.nodes.exclusions import Exclude, ExcludedKeys, ExcludedState, ExclusionCounter
from odb_nodes.nodes.lazy_samples import Restored
from odb_nodes.nodes.whole_batch import GroupMaker, MadeGroup, WholeBatch, batch_key
from odb_nodes.planning import StepTime, TokenBudget
from odb_nodes.planning.budget import Limits
from odb_nodes.planning.known_epochs import KnownJob
from odb_nodes.planning.later_samples import LaterSamples
from odb_nodes.planning.resumed_plan import (
    EarlierRanks,
    EarlierState,
    KnownEpoch,
    LimitsState,
    ResumedPlan,
)
from odb_nodes.planning.sample_costs import check_lengths
from odb_nodes.planning.table import IntArray
from odb_nodes.planning.told_lengths import ToldLengths
from odb_nodes.processing import WorkerOptions
from odb_nodes.processing.again import ProcessedAgain
from odb_nodes.processing.chunk import ChunkResult, ChunkTask
from odb_nodes.processing.chunk_node import ChunkNode
from odb_nodes.processing.chunk_runner import cannot_collate
from odb_nodes.sample import ItemKey, LeftOut, name_of
from odb_nodes.sample_block import ITEM, KEY, ItemKeys, SampleBlock
from odb_nodes.sources.sharded_sampler import BlockPermutation, epoch_order, shuffle_blocks

_OF_THE_PLAN = (
    *("lengths", "window", "shuffle", "seed", "largest_first", "rank", "world_size"),
    *("accumulate", "step_time"),
    *("budget.layout", "budget.pad_to_multiple_of", "budget.shapes", "budget.attention_tokens"),
    "budget.row_sizes",
)
"""Fields of the fingerprint that a plan depends on. Limits of a budget are in the state."""


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
    earlier: list[EarlierState] = field(default_factory=list)
    later: bytes | None = None  # `LaterSamples`
    seen: int = 0  # samples that were processed
    moved: int = 0  # how many of them did not fit into the group that was planned for them
    excluded: ExcludedState
    excluded_samples: int
    dropped_samples: int
    oversize_samples: int
    skipped_samples: dict[str, int]
    left_out: list[tuple[int | None, str, str]]


class PlannedGroups(ChunkNode[SampleBlock, PlannedState]):
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
        largest_first: steps of the longest samples that begin each epoch.
        accumulate: steps of an optimizer step, which have groups of unlike lengths.
        step_time: what a step takes, as for `RankAligner`, by lengths alone.
        collate: makes the batch of a group, in the worker, where `why_not_collated` is "". Default:
            nobody does, and the samples come to this process.
        workers: how to run in parallel.
        rank: this rank. Default: from torch.distributed, or `RANK`.
        world_size: number of ranks, likewise.

    Raises:
        TypeError, ValueError: an argument is not valid.
    """

    STATE = PlannedState

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
        largest_first: int = 0,
        accumulate: int = 1,
        step_time: StepTime | None = None,
        collate: Collate | None = None,
        workers: WorkerOptions | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self._tokens = check_lengths(tokens)
        self.budget = TokenBudget.of(budget)
        seed = check_integer("seed", seed)
        window = None if window is None else check_count("window", window)
        self._shuffle = check_bool("shuffle", shuffle)
        check_type("step_time", step_time, StepTime | None)
        self.exclude = ExcludedKeys.of(exclude)
        self._data_id: str | None = getattr(data, "data_id", None)
        self._blocks = None if data is None else shuffle_blocks(data)
        self._gives_keys: bool = getattr(process_fn, "gives_keys", False)
        self.why_not_collated = _why_not_collated(collate, workers or WorkerOptions())
        """Why batches are left to this process; "" where workers make them."""
        maker = GroupMaker(None if self.why_not_collated else collate)
        super().__init__(process_fn, seed, workers, rank, world_size, maker)
        self._job = KnownJob(
            budget=self.budget,
            world_size=self._world_size,
            window=window,
            largest_first=largest_first,
            accumulate=accumulate,
            seed=seed,
            step_time=step_time,
        )
        self._make_group = GroupMaker(None)  # where a worker could not send what it has made
        self._lengths_crc = zlib.crc32(self._tokens.astype("<i8").tobytes())
        self._counter = ExclusionCounter(self.budget, self.exclude, "sample {}")
        limits = Limits.of(self.budget)
        self._plan = ResumedPlan(self._epoch(), self._rank, limits, self._tokens[:0])
        self._clear()

    def _clear(self) -> None:
        self._later = LaterSamples()
        self._lengths = ToldLengths()
        # what collating a group has raised in a worker, by the first sample
        self._failures = dict[int, str]()
        self.restored = Restored()
        """What the last restore has found."""

    def __len__(self) -> int:
        """Return how many samples this rank has in the epoch, those that are left out included."""
        return len(range(self._rank, len(self._tokens), self._world_size))

    # --- what is asked of it --------------------------------------------------------------------

    @property
    def remaining_samples(self) -> int:
        """Samples of this rank that no group that is out had."""
        return len(self._plan.remaining()) + len(self._later)

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

    def prepare_reset(self) -> None:
        """Leave what is in flight."""
        super().prepare_reset()
        self._clear()

    def begin_epoch(self) -> None:
        """Plan the epoch."""
        limits = self._plan.limits
        self._counter = self._counter.of_next_epoch(
            limits.of_samples(self.budget), self._counter.keys | self.exclude
        )
        order = self._order()
        are_out = self._are_excluded(order)
        self._counter.exclude_keys(order[are_out][self._rank :: self._world_size].tolist())
        self._plan = ResumedPlan(self._epoch(), self._rank, limits, order[~are_out])

    def restore(self, state: PlannedState) -> None:
        """Go past the groups that are out."""
        self._counter.restore(state)
        try:
            if state.is_alone:
                rows = np.frombuffer(state.rows or b"", "<i8").astype(np.int64)
            else:
                order = self._order()
                rows = order[~self._are_excluded(order)]
            self._plan = ResumedPlan(
                self._epoch(),
                self._rank,
                Limits(*state.limits),
                rows,
                is_alone=state.is_alone,
                earlier=[*map(EarlierRanks.of_state, state.earlier)],
            )
            self._plan.go_to(state.taken, is_at_end=state.is_at_end)
            self._later = LaterSamples.of_states(state.later, samples=len(self._tokens))
        except (ValueError, TypeError) as error:
            raise StateError(
                f"the state of {type(self).__name__} is damaged: {error} Use an earlier checkpoint."
            ) from error
        self._lengths = ToldLengths(state.seen, state.moved)
        self._use_present_options()

    def save(self) -> PlannedState:
        """Return the number of groups that are out, and what comes later."""
        return PlannedState(
            is_at_end=self._plan.taken == len(self._plan) and not len(self._later),
            later=self._later.to_state(),
            seen=self._lengths.seen,
            moved=self._lengths.moved,
            **self._plan.to_state(),
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
                self._plan.go_to_end()  # also where the last step has no group of this rank
                unread = 0 if self._gives_keys else self._counter.excluded
                self._counter.check_not_all(self._lengths.seen + unread)
                self._counter.warn_of_summary(self._lengths.seen)
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
            "window": self._job.window,
            "shuffle": self._shuffle,
            "seed": self._job.seed,
            "largest_first": self._job.largest_first,
            "accumulate": self._job.accumulate,
            "step_time": repr(self._job.step_time),
            "rank": self._rank,
            "world_size": self._world_size,
        }

    def fixed_fields(self, state: PlannedState) -> Collection[str]:
        """Return what the plan depends on: in mid-epoch, another plan would repeat samples."""
        return () if state.is_at_end else _OF_THE_PLAN

    # --------------------------------------------------------------------------------------------

    def _batches_key(self) -> int:
        """Return what the random numbers of the batches of this epoch are drawn from."""
        return hash_ints(self._job.seed, self._epochs.shuffle_key, 2)

    def _epoch(self) -> KnownEpoch:
        return KnownEpoch(self._job, self._epochs.shuffle_key, self._tokens)

    def _order(self) -> IntArray:
        """Return the samples of the epoch in their order, (n,)."""
        count, epoch, seed = len(self._tokens), self._epochs.shuffle_key, self._job.seed
        if self._blocks is not None and self._shuffle:
            starts, mixed = self._blocks
            permutation = BlockPermutation(count, starts, mixed, hash_ints(seed, epoch))
            return permutation(np.arange(count))
        return epoch_order(count, seed, epoch, shuffle=self._shuffle)

    def _are_excluded(self, rows: IntArray) -> npt.NDArray[np.bool_]:
        """Tell which samples are excluded, as far as that is known before they are read, (n,)."""
        if self._gives_keys:
            return np.zeros(len(rows), np.bool_)
        return np.isin(rows, np.array(self._counter.keys.of_source(""), np.int64))

    def _use_present_options(self) -> None:
        """Exclude the keys, and lower the limits, that the state does not know of."""
        counter, keys, plan = self._counter, self._counter.keys, self._plan
        limits = plan.limits.tightened(Limits.of(self.budget))
        has_keys, has_limits = (keys | self.exclude) != keys, limits != plan.limits
        self.restored = Restored(0, {}, has_keys, has_limits)
        if not (has_keys or has_limits):
            return
        counter.use_present(limits.of_samples(self.budget), keys | self.exclude)
        rows, later = plan.remaining(), self._later.rows
        are_out, later_out = self._are_excluded(rows), self._are_excluded(later)
        counter.exclude_keys([*rows[are_out].tolist(), *later[later_out].tolist()])
        self._later.remove(later[later_out])
        self._plan = plan.alone(rows[~are_out], limits)

    # --- what a `RankAligner` asks of it --------------------------------------------------------

    def lower_tokens(self, tokens: int) -> None:
        """Yield groups of at most so many tokens from now on."""
        if tokens < self._plan.limits.tokens:
            self._leave_in_flight()
            self._plan = self._plan.lowered(tokens)

    def end_early(self) -> None:
        """End the epoch before its last sample, as another rank has ended; leave out the rest."""
        rows = [*self._plan.remaining().tolist(), *self._later.rows.tolist()]
        self._counter.leave_out(LeftOut(row, "", "unemitted") for row in rows)
        self._leave_in_flight()
        self._later = LaterSamples()
        self._plan.go_to_end()

    def put_back(self, samples: SampleBlock) -> None:
        """Yield samples of groups that are out again, later, without those that are excluded."""
        are_out = self._counter.exclude_from(samples)
        if self._later.are_grouped:  # Those in flight come later, too: all are grouped anew.
            self._leave_in_flight()
        self._put_off(samples.take(np.flatnonzero(~are_out)), were_in_group=True)

    def _put_off(self, samples: SampleBlock, *, were_in_group: bool = False) -> None:
        rows = samples.facts[ITEM]
        self._later.add(rows, samples.tokens, samples.patches, were_in_group=were_in_group)

    # --- groups in flight -----------------------------------------------------------------------

    def _leave_in_flight(self) -> None:
        """Take back the groups that workers have."""
        if self._in_flight and not self.runner.has_backlog:  # which has samples of other groups
            self.runner.discard()
        self._in_flight.clear()
        self._later.group_anew()

    def _read_ahead(self) -> None:
        """Give workers the next groups."""
        samples = sum(len(group.rows) for group in self._in_flight)
        has_room = self.runner.fit.has_room_for_group
        while has_room(len(self._in_flight), samples) and (planned := self._next_planned()):
            step, rows = planned
            task = self._task(rows)
            self._in_flight.append(_InFlight(step, rows, task, self.runner.submit(task)))
            samples += len(rows)

    def _next_planned(self) -> tuple[int, IntArray] | None:
        """Return the step and the samples of the next group; `None` where there is none yet."""
        end = len(self._plan)
        step = self._in_flight[-1].step + 1 if self._in_flight else self._plan.taken
        if step < end and len(rows := self._plan.group(step)):  # Only the last may have none.
            return step, rows
        if self._in_flight and not self._later.are_grouped:
            return None  # More samples may have to come later.
        later = self._later.next_group(self._plan.group_budget)
        return None if later is None else (end, later)

    def _task(self, rows: IntArray) -> ChunkTask:
        repeats = np.full_like(rows, self._epochs.cycle)
        keys = ItemKeys(rows, repeats, np.zeros_like(rows), [("", self._world_size)])
        place, numbers = (self._epochs.epoch, self._epochs.cycle), rows.tolist()
        group = self._batches_key(), self._plan.group_budget
        return ChunkTask(numbers, keys, *place, numbers, group=group)

    def _take_group(self) -> SampleBlock:
        """Return the group that is due, without samples that come later or never."""
        step, rows, task, future = self._in_flight[0]
        made = self._made(task, future)
        lengths, is_later = self._lengths, step == len(self._plan)
        if is_later:
            self._check_alike(made.later)
        else:
            fitting, moved = ((one.facts[ITEM], one.tokens) for one in (made.group, made.later))
            lengths = lengths.with_group(self._tokens, len(rows), fitting, moved)
        counter, group = self._admitted(made)
        # Only now, so that no state loses a group that raises, or counts it twice.
        self._counter, self._lengths = counter, lengths
        self._in_flight.popleft()
        if made.failure and len(group):
            self._failures[int(group.facts[ITEM, 0])] = made.failure
        if is_later:
            self._later.remove(rows)
            self._plan.go_to_end()  # where the last step has no group of this rank
        else:
            self._put_off(made.later)
            self._plan.taken = step + 1
        return group

    def _made(self, task: ChunkTask, future: Future[ChunkResult]) -> MadeGroup:
        runs, failure = self.runner.results(task, future)
        if failure is not None:
            bad = sum(map(len, runs))
            raise failure.explained(f"sample {task.items[bad]} in epoch {task.epoch}")
        made = runs[0][0] if runs else None
        if isinstance(made, MadeGroup):
            return made
        assert task.group is not None  # The worker could not send it.
        return self._make_group([result for run in runs for result in run], *task.group)

    def _check_alike(self, longer: SampleBlock) -> None:
        """Raise where samples do not fit into a group of the lengths that they had before."""
        if len(longer):
            row, now = int(longer.facts[ITEM, 0]), longer.lengths[0]
            raise SampleError(
                f"sample {row} had {self._later.tokens_of(row)} tokens when it was first processed "
                f"in this epoch, but has {now} now, or others of its group differ: processing is "
                "not deterministic. Let it draw only from the global generators, which are seeded, "
                "or leave `lengths` out."
            )

    def _admitted(self, made: MadeGroup) -> tuple[ExclusionCounter, SampleBlock]:
        """Return the samples of a group that are to be trained on, and what counts the others."""
        counter, group = self._counter, made.group
        for holder in group.sources.values():
            if isinstance(holder, WholeBatch):
                holder.made_again_by(self, group)
        blocks = [block for block in (group, made.later) if len(block)]
        for block in blocks:
            self._check_keys(block)
        if not made.skipped and all(map(counter.admits_all, blocks)):
            return counter, group
        counter = counter.copy()
        for skipped in made.skipped:
            counter.admit(skipped, -1 if skipped.key is None else skipped.key)
        rows = group.facts[ITEM]
        are_counted = self._later.were_in_group(rows) | self._plan.were_in_group(rows)
        facts = zip(group.without_data(), rows.tolist(), are_counted.tolist(), strict=True)
        admitted = [
            at
            for at, (sample, row, is_counted) in enumerate(facts)
            if counter.admit(sample, row, is_counted=is_counted)
        ]
        if counter.budget.oversize == "error":  # now, and not at the end of the epoch
            for sample, row in zip(made.later, made.later.facts[ITEM].tolist(), strict=True):
                counter.copy().admit(sample, row)
        return counter, group if len(admitted) == len(group) else group.take(admitted)

    def _check_keys(self, samples: SampleBlock) -> None:
        """Raise where samples have other keys than those by which they are left out unread."""
        if self._gives_keys or "" not in self._counter.keys.sources:
            return
        are_named = samples.facts[KEY] != samples.facts[ITEM]
        are_named |= np.array([kind.source != "" for kind in samples.kinds])
        if are_named.any():
            at = int(are_named.argmax())
            raise SampleError(
                "`process_fn` must not give samples other names where `exclude` has numbers of "
                "rows, which are left out before they are read, but sample "
                f"{samples.facts[ITEM, at]} has one{name_of(samples.without_data()[at])}. Set "
                "`process_fn.gives_keys = True`: samples are then read, and excluded by their keys."
            )


def _why_not_collated(collate: Collate | None, workers: WorkerOptions) -> str:
    if collate is None:
        return "there is no `collate_fn`"
    if takes_step(collate):
        return "`collate_fn` takes the step"
    return cannot_collate(collate, workers, as_processed=True)


class _InFlight(NamedTuple):
    """A group that workers have."""

    step: int  # of the plan; their number for samples that come later
    rows: IntArray
    task: ChunkTask
    future: Future[ChunkResult]
