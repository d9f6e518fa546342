"""Node: forms groups from a rolling pool, and keeps a recipe of the pool as its state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, Literal, get_args

import numpy as np
from torchdata.nodes import BaseNode

from odb_nodes._core.checks import MAX_KEY, check_choice, check_count
from odb_nodes._core.progress import SlowProgress
from odb_nodes._core.user_warning import warn_user
from odb_nodes.contract import NodeState, SourceState, StatefulNode, copy_state
from odb_nodes.contract.config import loading
from odb_nodes.contract.graph import known_length_of
from odb_nodes.contract.node import can_restore, check_node, restore_items, take
from odb_nodes.errors import SampleError, StateError
from odb_nodes.nodes.exclusions import (
    Exclude,
    ExcludedKeys,
    ExcludedState,
    ExclusionCounter,
)
from odb_nodes.nodes.pooled_table import PoolContent, PooledSamples, PooledTable, from_bits
from odb_nodes.nodes.replay import Snapshots
from odb_nodes.nodes.sample_records import Remaking, are_numbered, decode_sample, from_records
from odb_nodes.planning import TokenBudget
from odb_nodes.planning.auto_window import PoolCheck, WindowSize, check_window
from odb_nodes.planning.budget import Limits
from odb_nodes.planning.group_planner import GroupPlanner
from odb_nodes.planning.options import PlanOptions
from odb_nodes.planning.runs import check_diversity, check_has_task
from odb_nodes.planning.table import ORDINALS
from odb_nodes.sample import ItemKey, LeftOut, Sample, Skipped
from odb_nodes.sample_block import NONE, ORDINAL, IntArray, SampleBlock

PoolState = Literal["replay", "payload"]
"""What a state may hold of the pool: how to make its samples again, or the samples."""

_SNAPSHOTS_PER_WINDOW = 4


@dataclass(kw_only=True)
class BucketerState(NodeState):
    """The state of a `WindowBucketer`."""

    # if samples have no keys, one taken at or before the oldest pooled or planned sample
    source: SourceState
    mode: str  # what the state holds of the pool, `"replay"` or `"payload"`
    pulled: int  # samples pulled in the epoch
    pulled_since_source: int  # how many of them were pulled after `source`
    ended: bool  # whether no more samples are pulled in this epoch
    is_cut: bool  # whether that is so because the epoch was ended before its last sample
    limits: tuple[int, int | None, int | None, int, int | None]  # `Limits`
    has_own_limits: bool  # whether these differ from the limits of the budget
    pool: PoolContent
    # if samples have no keys, the numbers of those in groups that a `RankAligner` holds
    planned: bytes | None
    excluded: ExcludedState
    excluded_samples: int  # samples of the epoch left out by their keys
    dropped_samples: int  # samples of the epoch left out by `oversize="drop"`
    oversize_samples: int  # samples of the epoch that exceeded the budget on their own
    skipped_samples: dict[str, int]  # samples of the epoch that processing skipped, by reason
    # key, source and reason of each sample left out since the last group
    left_out: list[tuple[int | None, str, str]]
    caps: bytes | None  # cost limits of the next groups, ascending
    dearest_groups: int  # how many groups of `dearest_first` the epoch has had
    # samples of an `"auto"` window, whether it is chosen for the epoch, and the `PulledLengths` it
    # is chosen by; `None` if the window is a number of samples
    window: tuple[int, bool, int, int, int] | None


class WindowBucketer(StatefulNode[SampleBlock, BucketerState]):
    """Yields groups under a token budget, from a rolling pool of `window` samples.

    A group is a `SampleBlock`: a sequence of `Sample`. No pooled sample gets older than 5 windows
    (see `RollingPool`).

    State, `"replay"`: the source's, and key, length and digest of each pooled sample, 17 bytes.
    A restore reads and processes these samples again, at most `window`, and compares the digests.
    If the source cannot read items by their keys (an iterable), the state holds an older state of
    it, and at most 5.25 windows of raw items are read again; a `ParallelProcessor` processes only
    those that were pooled.
    State, `"payload"`: the pooled samples themselves. Nothing is processed again, so processing
    need not be deterministic, but the order of the source must be. Samples must be dicts, lists
    and tuples of tensors, arrays, numbers and strings.

    Args:
        source: node that yields `Sample`, such as a `LengthObserver`. A `Skipped` is counted and
            left out.
        budget: padded tokens of a group, or a `TokenBudget`.
        window: samples in the pool. A larger window fills groups better, and the first group takes
            longer. `"auto"`: as many samples as fill 32 groups, see `GroupPlanner`.
        state: `"replay"` or `"payload"`.
        exclude: keys of samples that no group holds from now on; see `ODBDataLoader`.
        dearest_first: number of groups at the beginning of each epoch that are made of the longest
            pooled samples, so that a run that does not fit into memory fails in its first steps.
        diversity: weight, in 0..1, of an even mix of tasks in the choice of a group; 0 ignores
            tasks. Needs padded groups, and samples with a task: see `Sample.task_name`.
    """

    STATE = BucketerState
    keeps_failed_items = True

    def __init__(
        self,
        source: BaseNode[Sample | Skipped],
        budget: int | TokenBudget,
        window: WindowSize = PlanOptions.window,
        state: PoolState = "replay",
        exclude: Exclude = None,
        dearest_first: int = PlanOptions.dearest_first,
        diversity: float = PlanOptions.diversity,
    ) -> None:
        super().__init__()
        check_choice("state", state, get_args(PoolState))
        check_node("source", source)
        self.source = source
        self.budget = TokenBudget.of(budget)
        """What a group may cost."""
        window = check_window("window", window)
        dearest_first = check_count("dearest_first", dearest_first, 0)
        diversity = check_diversity(diversity, self.budget)
        self._has_tasks = diversity > 0
        self.planner = GroupPlanner(
            self.budget,
            window,
            dearest_first,
            diversity,
            partial(known_length_of, source),
        )
        """Decides which samples wait, and which form the next group."""
        self._mode = state
        self._name = type(self).__name__
        self._pool_check = PoolCheck(self.budget)
        self.exclude = ExcludedKeys.of(exclude)
        """The keys that the argument names. A state may name others beside them."""
        self._exclusions = ExclusionCounter(self.budget, self.exclude)
        self._summary = ""  # of the exclusions of the last epoch
        self._task_numbers: dict[str, int] = {}  # which task has which decides nothing
        self.keeps_planned = False
        """Whether a node above holds groups until it calls `release`."""
        self.replayed_samples = 0
        """Samples that the last restore processed again."""
        self.keys_changed = self.limits_changed = False
        """Whether keys are excluded, or limits lower, that the restored state does not know of."""
        options = {"window": window, "dearest_first": dearest_first, "diversity": diversity}
        limits = {f"budget.{name}": one for name, one in self.budget.fingerprint().items()}
        self._config: dict[str, Any] = {**limits, **options, "state": state}
        self._clear()

    def _clear(self) -> None:
        self._pool = self.planner.pool
        self._snapshots = Snapshots(self.source, self._name)
        self._refilling = self._is_cut = False
        budget = self.planner.limits.of_samples(self.budget)
        keys, said = self.excluded | self.exclude, self._exclusions.said
        self._exclusions = ExclusionCounter(budget, keys, said)
        self._table = PooledTable(self._pool)
        self._encoded: dict[int, bytes] = {}
        self._has_keys = can_restore(self.source) or self._mode == "payload"
        self._floor_until = 0  # age of the samples whose numbers may be as low as `_floor`
        self._floor = 0
        self.release()
        self.keys_changed = self.limits_changed = False

    @property
    def window(self) -> int:
        """How many samples wait in the pool now."""
        return self.planner.window

    @property
    def limits(self) -> Limits:
        """What groups are formed under now: the limits of the budget, or lower ones."""
        return self.planner.limits

    @property
    def remaining_samples(self) -> int:
        """Samples of this epoch in the pool, and those not yet pulled where that is known."""
        known = self.known_remaining()
        return len(self._pool) if known is None else known

    def known_remaining(self) -> int | None:
        """Return the samples that remain, or `None` where the source has no length."""
        length = self._pool.pulled if self.planner.ended else known_length_of(self.source)
        return None if length is None else len(self._pool) + max(0, length - self._pool.pulled)

    @property
    def excluded(self) -> ExcludedKeys:
        """The keys that are excluded: those of the argument, and those of a loaded state."""
        return self._exclusions.keys

    @property
    def excluded_samples(self) -> int:
        """Samples of this epoch that were left out by their keys so far."""
        return self._exclusions.excluded

    @property
    def dropped_samples(self) -> int:
        """Samples of this epoch that `oversize="drop"` left out so far."""
        return self._exclusions.dropped

    @property
    def oversize_samples(self) -> int:
        """Samples of this epoch that exceeded the budget on their own so far."""
        return self._exclusions.oversize

    @property
    def skipped_samples(self) -> dict[str, int]:
        """Samples of this epoch that processing `Skipped` so far, by its reason."""
        return dict(self._exclusions.skipped)

    def take_left_out(self) -> list[LeftOut]:
        """Return the samples that were skipped or dropped since the last call."""
        taken, self._exclusions.left_out = self._exclusions.left_out, []
        return taken

    # --- what a `RankAligner` asks of it --------------------------------------------------------

    @property
    def has_keys(self) -> bool:
        """Whether any rank can make the samples of groups again, by their keys."""
        return self._mode == "replay" and can_restore(self.source)

    @property
    def can_restore(self) -> bool:
        """Whether samples of groups can be made again: by their keys, or their numbers."""
        return self._mode == "replay"

    def restore_items(self, items: Sequence[ItemKey]) -> Iterator[Sample]:
        """Yield samples of this epoch again, those without keys right after a restore."""
        if can_restore(self.source):
            return restore_items(self.source, items)
        missing = [item.key for item in items if item.key not in self._planned]
        if missing:
            raise StateError(
                f"{self._name} cannot be restored: samples {missing[:5]} of the epoch are in a "
                "group, but not in the state of the source, which is damaged. Use an earlier "
                "checkpoint."
            )
        return iter([self._planned[item.key] for item in items])

    def release(self, still: Sequence[SampleBlock] = ()) -> None:
        """Forget the groups that were held above, but for these samples."""
        numbers = [at for block in still for at in block.facts[ORDINAL].tolist() if at != NONE]
        self._plan(dict.fromkeys(numbers))
        if self.planner.ended and not (self._planned or len(self._pool)):
            self._snapshots.take(self._pool.pulled)

    def put_back(self, samples: SampleBlock, still: Sequence[SampleBlock] = ()) -> None:
        """Put samples of groups back into the pool, without those that are excluded.

        Groups with the samples of `still` are held above.
        """
        samples = samples.take(np.flatnonzero(~self._exclusions.exclude_from(samples)))
        waiting, pool = self._table.all(), self._pool
        self._floor, self._floor_until = self._needed_from, pool.pulled  # before new ages
        pool.put_back(samples.tokens, samples.patches, self._tasks_of(samples))
        self._table = PooledTable(pool)
        ordinals = np.arange(pool.pulled - len(pool), pool.pulled)
        self._table.add(ordinals, SampleBlock.joined([samples, waiting]))
        self._encoded.clear()
        self.release(still)

    def drop_remaining(self) -> list[LeftOut]:
        """End the epoch before its last sample, and return the pooled ones as left out."""
        gone = self._table.all()
        self._remove(self._pool.table()[ORDINALS])
        self.planner.ended = self._is_cut = True
        return [LeftOut(one.key, one.source, "unemitted") for one in gone]

    # --- the contract of a node -----------------------------------------------------------------

    def begin_epoch(self) -> None:
        """Begin the epoch of the source, with an empty pool."""
        self.planner.choose_window_alone()  # if the epoch before had but one group
        self.planner.begin_epoch()
        self._clear()
        self.source.reset(None)
        self._snapshots.take(0)

    def restore(self, state: BucketerState) -> None:
        """Go back to where the source stood, and make the pooled samples again."""
        if self._mode == "replay" and state.mode == "payload":  # loaded with `strict=False`
            raise StateError(
                f'a pool that was saved with `state="payload"` cannot go into a {self._name} with '
                '`state="replay"`, which could not replay it. Change this between epochs.'
            )
        own = state.has_own_limits or loading().smaller_budget
        self.planner.restart(Limits(*state.limits) if own else None, state.window)
        self._clear()
        self.replayed_samples = 0
        self._exclusions.restore(state)
        self.source.reset(copy_state(state.source))
        ordinals = from_bits(state.pool[0], state.pulled)
        samples, pool = SampleBlock.of(self._pooled_again(state, ordinals)), self._pool
        pool.pulled = state.pulled
        # What an "auto" window is chosen by has them already, where the state has it.
        add = self.planner.add if state.window is None else pool.add
        add(ordinals, samples.tokens, samples.patches, self._tasks_of(samples))
        self._table.add(np.array(ordinals, np.int64), samples)
        pool.caps = np.frombuffer(state.caps or b"", np.int64)
        self.planner.dearest_groups = state.dearest_groups
        self._is_cut = state.is_cut
        if state.ended and not state.is_cut:
            self._snapshots.expect_end(state.pulled)
        self.planner.ended = state.ended
        self._use_present_options(Limits(*state.limits))

    def save(self) -> BucketerState:
        """Return where to pull from again, and which of the samples pulled are waiting."""
        pool, limits = self._pool, self.planner.limits
        if self._has_keys and not self._refilling:
            self._snapshots.take(pool.pulled)
        base, source_state = self._snapshots.at_or_before(self._needed_from)
        planned = np.array([] if self._has_keys else [*self._planned], dtype="<i8")
        if self._mode == "replay":
            content: Any = self._table.state()
        else:
            ordinals = np.sort(pool.table()[ORDINALS])
            content = PooledSamples(ordinals, self._table.all(), self._encoded, pool.pulled)
        return BucketerState(
            source=source_state,
            mode=self._mode,
            pulled=pool.pulled,
            pulled_since_source=pool.pulled - base,
            ended=self.planner.ended,
            is_cut=self._is_cut,
            limits=(*limits,),
            has_own_limits=limits != Limits.of(self.budget),
            pool=content,
            planned=planned.tobytes() or None,
            caps=pool.caps.tobytes() or None,
            dearest_groups=self.planner.dearest_groups,
            window=self.planner.window_state(),
            **self._exclusions.to_state(),
        )

    def next(self) -> SampleBlock:
        """Return the next group, oldest sample first.

        Raises:
            SampleError: the next sample is no `Sample`, or too large under `oversize="error"`; or
                the epoch ends, and all of it was dropped or skipped. This, and whatever the source
                raises, is raised again until the next reset.
        """
        planner, pool = self.planner, self._pool
        planner.choose_window_alone()
        self._refilling = True  # Should the source raise, it may stand after an item that is lost.
        self._fill()
        if not len(pool):
            self._end()
            self._exclusions.check_not_all(pool.pulled)
        self._refilling = False
        if not len(pool):
            raise StopIteration
        is_chosen_freely = not (planner.ended or planner.is_dearest)
        group = self._table.take(planner.next_group())
        if is_chosen_freely and planner.window_is_chosen:
            self._pool_check.note(group.lengths, planner.window)
        if self.keeps_planned and not self._has_keys:
            self._plan({**self._planned, **dict.fromkeys(group.facts[ORDINAL].tolist())})
        if planner.ended and not len(pool):
            self._end()
        self._snapshots.at_or_before(self._needed_from)  # forgets earlier ones
        return group

    def fingerprint(self) -> dict[str, Any]:
        """Return what decides the output: a state fits only if it is equal."""
        return self._config

    # --------------------------------------------------------------------------------------------

    @property
    def _needed_from(self) -> int:
        """The first sample of the epoch that a restore has to pull again."""
        if self._has_keys:
            return self._pool.pulled
        oldest = self._floor if self._pool.oldest < self._floor_until else self._pool.oldest
        return min(oldest, self._planned_from)

    def _pooled_again(self, state: BucketerState, ordinals: list[int]) -> list[Sample]:
        """Bring the source to where it stood, and return the samples that were pooled."""
        _, records_state, payload = state.pool
        start, name = state.pulled - state.pulled_since_source, self._name
        records = from_records(records_state)
        remaking = Remaking(records, name)
        numbers = records.facts[ORDINAL].tolist() if are_numbered(records) else []
        planned = np.frombuffer(state.planned or b"", "<i8").tolist()
        wanted = {*numbers, *planned}
        first = min(wanted, default=start)
        found = len(records if payload is None else payload)
        if len(ordinals) != found or min([*ordinals, first, start]) < 0 or first < start:
            raise StateError(f"the pool of {name} is damaged. Use an earlier checkpoint.")
        if wanted and can_restore(self.source):
            raise StateError(
                f"{name} cannot restore its pool: the state has no keys of its samples, but the "
                "source reads items by their keys now. Build the graph as it was."
            )
        self._snapshots.put(start, state.source)
        samples: list[Sample] = []
        if payload is not None:
            samples = [*map(decode_sample, payload)]
            self._encoded.update(zip(ordinals, payload, strict=True))
        elif len(records) and not numbers:
            if not can_restore(self.source):
                raise StateError(
                    f"{name} cannot restore its pool: the state has keys of its samples, but the "
                    "source cannot read items by their keys any more. Build the graph as it was."
                )
            samples = remaking.all(self.source)
            self.replayed_samples = len(samples)
        again, processed = self._snapshots.read_again(start, state.pulled, wanted, self._interval)
        self.replayed_samples += processed
        if numbers:
            samples = [remaking.checked(at, again[number]) for at, number in enumerate(numbers)]
            self._floor, self._floor_until = min(numbers), state.pulled
        # One that is `Skipped` now is named where the groups are made.
        self._plan({number: again[number] for number in planned})
        return samples

    def _plan(self, planned: dict[int, Any]) -> None:
        """Note which samples without keys are in groups above, and those made again for them."""
        self._planned, self._planned_from = planned, min(planned, default=MAX_KEY)

    def _use_present_options(self, saved: Limits) -> None:
        """Exclude the keys, and lower the limits, that the state does not know of."""
        counter, keys = self._exclusions, self._exclusions.keys
        counter.keys = keys | self.exclude
        self.keys_changed = counter.keys != keys
        if self.keys_changed:
            ordinals = np.sort(self._pool.table()[ORDINALS])
            self._remove(ordinals[counter.exclude_from(self._table.all())])
        self.planner.lower_limits(Limits.of(self.budget))
        counter.budget = self.planner.limits.of_samples(self.budget)
        self.limits_changed = self.planner.limits != saved

    @property
    def _interval(self) -> int:
        return max(1, self.planner.window // _SNAPSHOTS_PER_WINDOW)

    def _fill(self) -> None:
        """Pull until the pool is full, or as full as the age of its oldest sample allows."""
        if self.planner.ended:
            return
        progress = None
        if not self._pool.pulled:
            most = min(self.window, self.remaining_samples or self.window)
            progress = SlowProgress("samples in the pool before the first batch", most)
        while (room := self.planner.room()) > 0:
            ordinals, admitted = list[int](), list[SampleBlock | Sample]()
            try:
                while room > 0:
                    due = self._snapshots.take_if_due(self._pool.pulled, self._interval)
                    pulled = take(self.source, min(room, due))[0]
                    room -= len(pulled)
                    self._admit(pulled, ordinals, admitted)
                    if progress is not None:
                        progress.update(self._pool.pulled)
            except StopIteration:
                self.planner.ended = True
            finally:  # Those before an error are in the pool.
                self._add(ordinals, admitted)

    def _admit(
        self,
        pulled: Sequence[Sample | Skipped],
        ordinals: list[int],
        admitted: list[SampleBlock | Sample],
    ) -> None:
        """Count what was pulled, and note what goes into the pool."""
        pool, exclusions = self._pool, self._exclusions
        block = pulled if isinstance(pulled, SampleBlock) else None
        if block is not None and not self._has_tasks and exclusions.admits_all(block):
            ordinals += range(pool.pulled, pool.pulled + len(block))
            admitted.append(block)
            pool.pulled += len(block)
            return
        rows: list[int] = []
        try:
            for row, sample in enumerate(pulled):
                self._check(sample)
                if exclusions.admit(sample, pool.pulled):
                    ordinals.append(pool.pulled)
                    rows.append(row)
                    if block is None:
                        admitted.append(sample)
                pool.pulled += 1
        finally:
            if block is not None:
                admitted.append(block.take(rows))

    def _add(self, numbers: Sequence[int], admitted: Sequence[SampleBlock | Sample]) -> None:
        """Put samples into the pool, by their ordinals."""
        if not numbers:
            return
        ordinals, blocks = np.array(numbers, np.int64), list[SampleBlock]()
        for are_blocks, some in groupby(admitted, lambda one: isinstance(one, SampleBlock)):
            run: Any = [*some]
            blocks += run if are_blocks else [SampleBlock.of(run)]
        block = SampleBlock.joined(blocks)
        if not self._has_keys:
            block = block.with_facts(ordinal=ordinals)
        self.planner.add(ordinals, block.tokens, block.patches, self._tasks_of(block))
        self._table.add(ordinals, block)

    def _check(self, sample: Any) -> None:
        if not isinstance(sample, (Sample, Skipped)):
            raise SampleError(
                f"`source` of {self._name} must yield `Sample`, but `{type(self.source).__name__}` "
                f"yielded `{type(sample).__name__}` instead. Put a `LengthObserver` below it, and "
                "let no node after that yield anything else."
            )
        if self._has_tasks:
            check_has_task(sample)

    def _remove(self, ordinals: IntArray) -> None:
        """Take samples out of the pool that no group will hold."""
        self._pool.remove(ordinals)
        self._table.take(np.sort(ordinals))

    def _tasks_of(self, samples: SampleBlock) -> list[int]:
        """Return the numbers of the tasks of samples, where they decide groups."""
        known = self._task_numbers
        kinds = samples.kinds if self._has_tasks else ()
        return [known.setdefault(kind.task_name, len(known)) for kind in kinds]

    def _end(self) -> None:
        """Stand at the end of the epoch: no pooled sample is left to pull again."""
        if not self._planned:
            self._snapshots.take(self._pool.pulled)
        summary, before = self._exclusions.summary(self._pool.pulled), self._summary
        if summary and summary != before:  # most epochs are alike
            self._summary = summary
            warn_user(summary)
