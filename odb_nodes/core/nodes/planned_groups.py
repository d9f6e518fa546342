"""Node: groups of samples whose lengths are known before they are read."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from odb_nodes._support.arrays import IntArray, int64_array, int64_bytes
from odb_nodes._support.checks import check_bool, check_count, check_integer, check_type
from odb_nodes._support.hashing import hash_ints
from odb_nodes.core.collate.protocol import Collate, takes_step
from odb_nodes.core.contract import EpochState
from odb_nodes.core.nodes.exclusions import (
    CountsExclusions,
    Exclude,
    ExcludedKeys,
    ExclusionCounter,
    ExclusionState,
)
from odb_nodes.core.nodes.lazy_samples import Restored
from odb_nodes.core.nodes.whole_batch import GroupMaker, MadeGroup, WholeBatch, batch_key
from odb_nodes.core.planning import StepTime, TokenBudget
from odb_nodes.core.planning.budget import Limits
from odb_nodes.core.planning.known_epochs import KnownJob
from odb_nodes.core.planning.later_samples import LaterSamples
from odb_nodes.core.planning.length_check import LengthCheck
from odb_nodes.core.planning.resumed_plan import (
    EarlierRanks,
    EarlierState,
    KnownEpoch,
    LimitsState,
    ResumedPlan,
)
from odb_nodes.core.planning.sample_costs import check_lengths
from odb_nodes.core.processing import WorkerOptions
from odb_nodes.core.processing.again import ProcessedAgain
from odb_nodes.core.processing.chunk import ChunkResult, ChunkTask
from odb_nodes.core.processing.chunk_node import ChunkNode
from odb_nodes.core.processing.chunk_runner import cannot_collate
from odb_nodes.core.sample import ItemKey, LeftOut, name_of
from odb_nodes.core.sample_block import ITEM, KEY, ItemKeys, SampleBlock
from odb_nodes.core.sources.dataset_order import DatasetOrder
from odb_nodes.errors import SampleError, StateError

_FIELDS_OF_PLAN = (
    "lengths",
    "window",
    "shuffle",
    "seed",
    "largest_first",
    "rank",
    "world_size",
    "accumulate",
    "step_time",
    "budget.layout",
    "budget.pad_to_multiple_of",
    "budget.shapes",
    "budget.attention_tokens",
    "budget.row_sizes",
)
"""Fields of the fingerprint that a plan depends on. The limits of the budget are in the state."""

_SENT_AT_ONCE = 2
"""Groups for each worker that one call sends."""


@dataclass(kw_only=True)
class PlannedState(EpochState, ExclusionState):
    """The state of a `PlannedGroups`."""

    taken: int = 0  # groups of the plan that were yielded
    is_at_end: bool = False  # whether all groups of the epoch were yielded
    limits: LimitsState  # `Limits` of the plan
    is_alone: bool = False  # whether the plan has only samples of this rank
    rows: bytes | None = None  # if so, the numbers of these samples, 8 bytes each
    earlier: list[EarlierState] = field(default_factory=list)  # see `EarlierRanks`
    later: bytes | None = None  # `LaterSamples`
    seen: int = 0  # samples that were processed
    moved: int = 0  # processed samples that did not fit into the group planned for them


class PlannedGroups(CountsExclusions, ChunkNode[SampleBlock, PlannedState]):
    """Yields the groups of this rank, planned from lengths that are known before samples are read.

    All steps of an epoch are planned at once, over all ranks: see `plan_known`. A worker reads,
    processes and collates a whole group.

    A sample may be longer than `tokens` says. If its group then exceeds the budget, the longest
    samples of the group move to groups at the end of the epoch, formed by observed lengths.

    `excluded_samples`, `dropped_samples`, `oversize_samples` and `skipped_samples` count the
    samples of the epoch.

    State: the number of groups yielded, and the number and length of each sample that comes later.

    Args:
        tokens: length of each sample of the dataset, (n,).
        process_fn: number of a sample -> the processed `Sample`, or `Skipped`; picklable unless
            workers are forked or threads. If it sets the keys of samples, it must have an
            attribute `gives_keys = True`: excluded samples are then read.
        budget: padded tokens of a group, or a `TokenBudget`.
        data: the dataset of the samples. Its attributes `data_id` and `shuffle_blocks` are used as
            by `ShardedSampler`.
        window: samples of each rank that are planned together. Default: the whole epoch.
        shuffle: whether to permute the samples, differently in every epoch. The order of the groups
            in a window is drawn from `seed` in either case.
        seed: seed of the orders, and of the random numbers of processing; the same on all ranks.
        exclude: keys of samples to exclude from all groups; see `ODBDataLoader`.
        largest_first: number of steps of the longest samples that begin each epoch.
        accumulate: steps of an optimizer step, which get groups of different lengths.
        step_time: the time of a step by lengths, as for `RankAligner`.
        collate: makes the batch of a group in the worker, if `why_not_collated` is "". Default:
            the samples are sent to this process.
        workers: how to run in parallel.
        rank: this rank. Default: from torch.distributed, or `RANK`.
        world_size: number of ranks. Default: from torch.distributed, or `WORLD_SIZE`.

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
        self._dataset_order = DatasetOrder(data)
        self._gives_keys: bool = getattr(process_fn, "gives_keys", False)
        self.why_not_collated = _why_not_collated(collate, workers or WorkerOptions())
        """The reason why this process makes the batches; "" if workers make them."""
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
        self._make_group = GroupMaker(None)  # for a group that a worker could not send
        self._lengths_crc = zlib.crc32(int64_bytes(self._tokens))
        self._exclusions = ExclusionCounter(self.budget, self.exclude, "sample {}")
        limits = Limits.of(self.budget)
        self._plan = ResumedPlan(self._epoch(), self._rank, limits, self._tokens[:0])
        self._clear()

    def _clear(self) -> None:
        self._lengths = LengthCheck()
        # Errors of collating in a worker, by number of the group's first sample.
        self._failures: dict[int, str] = {}
        self.restored = Restored()
        """Result of the last restore."""

    def __len__(self) -> int:
        """Return how many samples this rank has in the epoch, including samples left out."""
        return len(range(self._rank, len(self._tokens), self._world_size))

    @property
    def remaining_samples(self) -> int:
        """Samples of this rank that are in no group yielded so far."""
        return len(self._plan.remaining()) + len(self._plan.later)

    @property
    def replayed_samples(self) -> int:
        """Samples that a restore makes again: 0, because no sample waits here."""
        return 0

    def batch_key(self, group: SampleBlock) -> int:
        """Return the seed for the batch of a group."""
        return batch_key(self._batches_key(), group)

    def take_failure(self, group: SampleBlock) -> str:
        """Return, once, the error of collating a group in a worker; "" without an error."""
        return self._failures.pop(int(group.facts[ITEM, 0]), "")

    # --- the contract of a node -----------------------------------------------------------------

    def prepare_reset(self) -> None:
        """Forget groups in flight."""
        super().prepare_reset()
        self._clear()

    def begin_epoch(self) -> None:
        """Plan the epoch."""
        limits = self._plan.limits
        self._exclusions = self._exclusions.for_next_epoch(
            limits.sample_budget(self.budget), self.excluded | self.exclude
        )
        order = self._order()
        excluded = self._are_excluded(order)
        self._exclusions.exclude_keys(order[excluded][self._rank :: self._world_size].tolist())
        self._plan = ResumedPlan(self._epoch(), self._rank, limits, order[~excluded])

    def restore(self, state: PlannedState) -> None:
        """Skip the groups that were yielded."""
        self._exclusions.restore(state)
        try:
            if state.is_alone:
                numbers = int64_array(state.rows)
            else:
                order = self._order()
                numbers = order[~self._are_excluded(order)]
            self._plan = ResumedPlan(
                self._epoch(),
                self._rank,
                Limits(*state.limits),
                numbers,
                is_alone=state.is_alone,
                earlier=[*map(EarlierRanks.from_state, state.earlier)],
                later=LaterSamples.from_states(state.later, samples=len(self._tokens)),
            )
            self._plan.go_to(state.taken, is_at_end=state.is_at_end)
        except (ValueError, TypeError) as error:
            raise StateError(
                f"the state of {type(self).__name__} is damaged: {error} Use an earlier checkpoint."
            ) from error
        self._lengths = LengthCheck(state.seen, state.moved)
        self._use_present_options()

    def save(self) -> PlannedState:
        """Return the number of groups yielded, and the samples that come later."""
        return PlannedState(
            seen=self._lengths.seen,
            moved=self._lengths.moved,
            **self._plan.to_state(),
            **self._exclusions.to_state(),
        )

    def next(self) -> SampleBlock:
        """Return the next group.

        Raises:
            SampleError: processing raised for a sample; too many samples are longer than `tokens`
                says; a sample is too long under `oversize="error"`; or all samples of the epoch
                were left out.
            WorkerError: a worker died, did not answer in time, or belongs to another process.
        """
        while True:
            self.runner.check()  # before anything is sent to the workers of another process
            self._read_ahead()
            if not self._in_flight:
                self._plan.go_to_end()  # even if the last step has no group of this rank
                unread = 0 if self._gives_keys else self._exclusions.excluded
                self._exclusions.check_not_all(self._lengths.seen + unread)
                self._exclusions.warn_of_summary(self._lengths.seen)
                raise StopIteration
            group = self._take_group()
            if len(group):
                return group

    @property
    def can_restore(self) -> bool:
        """Always true: any rank can make the samples again, by their keys."""
        return True

    def make_again(self, items: Sequence[ItemKey]) -> ProcessedAgain:
        """Return samples of this epoch, which workers make again when idle or when asked."""
        numbers = [item.key for item in items]
        task = ChunkTask(
            numbers,
            ItemKeys.of(items),
            self._epochs.epoch,
            self._epochs.cycle,
            range(len(items)),
            is_reprocessed=True,
        )
        order = sorted(range(len(items)), key=numbers.__getitem__)
        return ProcessedAgain(self.runner, task, order)

    def fingerprint(self) -> dict[str, Any]:
        """Return the configuration that decides the output."""
        return {
            **self._dataset_order.fingerprint(),
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
        """Return the fields of the plan: within an epoch, another plan would repeat samples."""
        return () if state.is_at_end else _FIELDS_OF_PLAN

    # --------------------------------------------------------------------------------------------

    def _batches_key(self) -> int:
        """Return the seed of the batches of this epoch."""
        return hash_ints(self._job.seed, self._epochs.shuffle_key, 2)

    def _epoch(self) -> KnownEpoch:
        return KnownEpoch(self._job, self._epochs.shuffle_key, self._tokens)

    def _order(self) -> IntArray:
        """Return the samples of the epoch in their order, (n,)."""
        return self._dataset_order.of_epoch(
            len(self._tokens), self._job.seed, self._epochs.shuffle_key, shuffle=self._shuffle
        )

    def _are_excluded(self, numbers: IntArray) -> npt.NDArray[np.bool_]:
        """Return which samples are excluded by number; none if `process_fn` sets the keys, (n,)."""
        if self._gives_keys:
            return np.zeros(len(numbers), np.bool_)
        return np.isin(numbers, np.array(self.excluded.of_source(""), np.int64))

    def _use_present_options(self) -> None:
        """Apply keys in `exclude` and lower limits of the budget that are new since the state."""
        plan = self._plan
        keys = self.excluded | self.exclude
        limits = plan.limits.tightened(Limits.of(self.budget))
        keys_changed = keys != self.excluded
        limits_changed = limits != plan.limits
        self.restored = Restored(keys_changed=keys_changed, limits_changed=limits_changed)
        if not (keys_changed or limits_changed):
            return
        self._exclusions.use_present(limits.sample_budget(self.budget), keys)
        numbers = plan.remaining()
        excluded = self._are_excluded(numbers)
        later = plan.later.numbers
        later_excluded = later[self._are_excluded(later)]
        self._exclusions.exclude_keys(numbers[excluded].tolist() + later_excluded.tolist())
        plan.later.remove(later_excluded)
        self._plan = plan.alone(numbers[~excluded], limits)

    # --- methods for a `RankAligner` ------------------------------------------------------------

    def lower_tokens(self, tokens: int) -> None:
        """Yield groups of at most `tokens` tokens from now on."""
        if tokens < self._plan.limits.tokens:
            self._leave_in_flight()
            self._plan = self._plan.lowered(tokens)

    def end_early(self) -> None:
        """End the epoch because another rank has ended; leave out the remaining samples."""
        self._leave_in_flight()
        numbers = self._plan.end()
        self._exclusions.left_out += [LeftOut(number, "", "unemitted") for number in numbers]

    def put_back(self, samples: SampleBlock) -> None:
        """Yield samples of earlier groups again, later, unless they are excluded."""
        are_excluded = self._exclusions.exclude_from(samples)
        if self._plan.later.are_grouped:  # Such groups may be in flight: form them anew.
            self._leave_in_flight()
        self._put_off(samples.take(np.flatnonzero(~are_excluded)), were_in_group=True)

    def _put_off(self, samples: SampleBlock, *, were_in_group: bool = False) -> None:
        numbers = samples.facts[ITEM]
        self._plan.later.add(numbers, samples.tokens, samples.patches, were_in_group=were_in_group)

    # --- groups in flight -----------------------------------------------------------------------

    def _leave_in_flight(self) -> None:
        """Take back the groups that workers have."""
        if self._in_flight and not self.runner.has_backlog:  # A backlog has samples of past groups.
            self.runner.discard()
        self._in_flight.clear()
        self._plan.later.group_anew()

    def _read_ahead(self) -> None:
        samples = sum(len(group.numbers) for group in self._in_flight)
        has_room = self.runner.sizer.has_room_for_group
        # A few groups in each call, so that the first group does not wait until many are sent.
        for _ in range(_SENT_AT_ONCE * max(1, self.runner.options.num_workers)):
            if not has_room(len(self._in_flight), samples):
                break
            last_step = self._in_flight[-1].step if self._in_flight else None
            planned = self._plan.next_group(last_step)
            if planned is None:
                break
            step, numbers = planned
            task = self._task(numbers)
            self._in_flight.append(_InFlight(step, numbers, task, self.runner.submit(task)))
            samples += len(numbers)

    def _task(self, numbers: IntArray) -> ChunkTask:
        repeats = np.full_like(numbers, self._epochs.cycle)
        keys = ItemKeys(numbers, repeats, np.zeros_like(numbers), [("", self._world_size)])
        items = numbers.tolist()
        return ChunkTask(
            items,
            keys,
            self._epochs.epoch,
            self._epochs.cycle,
            items,
            group_arguments=(self._batches_key(), self._plan.group_budget),
        )

    def _take_group(self) -> SampleBlock:
        """Return the next group, without samples that come later or are left out."""
        step, numbers, task, future = self._in_flight[0]
        made_group = self._result(task, future)
        later = made_group.later
        lengths = self._lengths
        are_later = step == len(self._plan)  # whether this is a group of later samples
        if are_later:
            self._check_alike(later)
        else:
            fitting = made_group.group.facts[ITEM], made_group.group.tokens
            moved = later.facts[ITEM], later.tokens
            lengths = lengths.with_group(self._tokens, len(numbers), fitting, moved)
        exclusions, group = self._admitted(made_group)
        # Only now, so that no state loses a group that raises, or counts it twice.
        self._exclusions = exclusions
        self._lengths = lengths
        self._in_flight.popleft()
        if made_group.failure and len(group):
            self._failures[int(group.facts[ITEM, 0])] = made_group.failure
        self._plan.emit(step, numbers)
        self._put_off(later)
        return group

    def _result(self, task: ChunkTask, future: Future[ChunkResult]) -> MadeGroup:
        runs, failure = self.runner.results(task, future)
        if failure is not None:
            failed = sum(map(len, runs))
            raise failure.explained(f"sample {task.items[failed]} in epoch {task.epoch}")
        first = runs[0][0] if runs else None
        if isinstance(first, MadeGroup):
            return first
        assert task.group_arguments is not None  # The worker could not send its `MadeGroup`.
        return self._make_group([result for run in runs for result in run], *task.group_arguments)

    def _check_alike(self, longer: SampleBlock) -> None:
        """Raise if later samples do not fit into the group formed by their observed lengths."""
        if len(longer):
            number = int(longer.facts[ITEM, 0])
            tokens = self._plan.later.tokens_of(number)
            raise SampleError(
                f"sample {number} had {tokens} tokens when it was first processed "
                f"in this epoch, but has {longer.lengths[0]} now, or other samples of its group "
                "differ: processing is not deterministic. Let processing draw only from the global "
                "generators, which are seeded, or leave `lengths` out."
            )

    def _admitted(self, made_group: MadeGroup) -> tuple[ExclusionCounter, SampleBlock]:
        """Return the counter after a group, and the samples of the group to train on."""
        exclusions = self._exclusions
        group, later = made_group.group, made_group.later
        for holder in group.holders.values():
            if isinstance(holder, WholeBatch):
                holder.made_again_by(self, group)
        blocks = [block for block in (group, later) if len(block)]
        for block in blocks:
            self._check_keys(block)
        if not made_group.skipped and all(map(exclusions.admits_all, blocks)):
            return exclusions, group
        exclusions = exclusions.copy()
        for skipped in made_group.skipped:
            exclusions.admit(skipped, -1 if skipped.key is None else skipped.key)
        numbers = group.facts[ITEM]
        are_counted = self._plan.were_in_group(numbers).tolist()
        samples = zip(group.without_data(), numbers.tolist(), are_counted, strict=True)
        admitted = [
            index
            for index, (sample, number, is_counted) in enumerate(samples)
            if exclusions.admit(sample, number, is_counted=is_counted)
        ]
        if exclusions.budget.oversize == "error":  # now, and not at the end of the epoch
            for sample, number in zip(later, later.facts[ITEM].tolist(), strict=True):
                exclusions.copy().admit(sample, number)
        return exclusions, group if len(admitted) == len(group) else group.take(admitted)

    def _check_keys(self, samples: SampleBlock) -> None:
        """Raise if `process_fn` sets keys although `exclude` has numbers of rows."""
        if self._gives_keys or "" not in self.excluded.sources:
            return
        has_other_key = samples.facts[KEY] != samples.facts[ITEM]
        has_other_key |= np.array([kind.source != "" for kind in samples.kinds])
        if has_other_key.any():
            index = int(has_other_key.argmax())
            raise SampleError(
                "`process_fn` must not give samples other keys where `exclude` has numbers of "
                "rows, which are left out before they are read, but sample "
                f"{samples.facts[ITEM, index]} has a key{name_of(samples.without_data()[index])}. "
                "Set `process_fn.gives_keys = True`: excluded samples are then read, and left out "
                "by their keys."
            )


def _why_not_collated(collate: Collate | None, workers: WorkerOptions) -> str:
    if collate is None:
        return "there is no `collate_fn`"
    if takes_step(collate):
        return "`collate_fn` takes the step"
    return cannot_collate(collate, workers)


class _InFlight(NamedTuple):
    """A group that a worker makes."""

    step: int  # number of the step in the plan; for later samples, the number of its steps
    numbers: IntArray
    task: ChunkTask
    future: Future[ChunkResult]
