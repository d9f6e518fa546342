"""Node: forms groups from a rolling pool of samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import numpy as np
from torchdata.nodes import BaseNode

from odb_nodes._support.arrays import IntArray, int64_state
from odb_nodes._support.checks import check_choice, check_count
from odb_nodes._support.progress import SlowProgress
from odb_nodes.core.contract import SourceState, StatefulNode, copy_state
from odb_nodes.core.contract.again import ItemsAgain, make_again
from odb_nodes.core.contract.config import loading
from odb_nodes.core.contract.graph import known_length_of, walk
from odb_nodes.core.contract.node import call_member, can_restore, check_node
from odb_nodes.core.contract.numbered_items import NumberedItems
from odb_nodes.core.contract.state import integers_of
from odb_nodes.core.nodes.exclusions import (
    CountsExclusions,
    Exclude,
    ExcludedKeys,
    ExclusionCounter,
    ExclusionState,
)
from odb_nodes.core.nodes.lazy_samples import Restored, samples_again
from odb_nodes.core.nodes.pulled_samples import PulledSamples
from odb_nodes.core.nodes.sample_records import decode_sample, from_records
from odb_nodes.core.nodes.sample_store import (
    SampleStore,
    StoreContent,
    StoredSamples,
    facts_of,
    from_bits,
)
from odb_nodes.core.planning import TokenBudget
from odb_nodes.core.planning.auto_window import PoolCheck, WindowSize, WindowStart, check_window
from odb_nodes.core.planning.budget import Limits
from odb_nodes.core.planning.facts import Facts
from odb_nodes.core.planning.group_planner import GroupPlanner, WindowState
from odb_nodes.core.planning.options import PlanOptions
from odb_nodes.core.planning.runs import check_diversity, check_has_task
from odb_nodes.core.planning.table import ORDINALS
from odb_nodes.core.sample import ItemKey, Sample, Skipped
from odb_nodes.core.sample_block import SampleBlock
from odb_nodes.errors import SampleError, StateError

StateMode = Literal["replay", "payload"]
"""Whether a state holds samples as records, from which they are made again, or as payload."""

_SNAPSHOTS_PER_WINDOW = 4


@dataclass(kw_only=True)
class BucketerState(ExclusionState):
    """The state of a `WindowBucketer`."""

    source: SourceState  # before the oldest sample that is read again, or else the present state
    mode: str  # `"replay"` or `"payload"`
    pulled: int  # samples pulled in the epoch
    pulled_since_source: int  # samples pulled after `source`
    ended: bool  # whether all samples of the epoch were pulled, or it was cut
    is_cut: bool  # whether the epoch was ended before its last sample
    limits: tuple[int, int | None, int | None, int, int | None]  # `Limits`
    has_own_limits: bool  # whether `limits` differ from the limits of the budget
    held: StoreContent  # the samples of the pool, and of groups that a `RankAligner` has planned
    numbered: bool  # whether `held` samples are made again by number instead of by key
    caps: bytes | None  # caps of the next groups, ascending
    largest_groups: int  # groups of `largest_first` formed in the epoch
    window: WindowState | None  # `None` if the window is a number of samples


class WindowBucketer(CountsExclusions, StatefulNode[SampleBlock, BucketerState]):
    """Yields groups under a token budget, from a rolling pool of `window` samples.

    A group is a `SampleBlock`: a sequence of `Sample`. No sample stays in the pool while more than
    5 windows of later samples are pulled (see `RollingPool`).

    `excluded_samples`, `dropped_samples`, `oversize_samples` and `skipped_samples` count the
    samples of the epoch.

    State, `"replay"`: the state of the source, and the facts of each pooled sample without its
    data, 17 to 24 bytes for text. After a restore, each sample is made again before its group is
    yielded, and its digest is compared.
    If the source cannot read items by their keys (an iterable), the state holds an older state of
    the source, and raw items are read again, from the oldest sample on: at most 5.25 windows, and
    the samples of planned groups, of two rounds at most. A `ParallelProcessor` directly below
    processes only the samples of the pool again.
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
        exclude: keys of samples to exclude from all further groups; see `ODBDataLoader`.
        largest_first: number of groups at the beginning of each epoch that are made of the longest
            pooled samples, so that a run that does not fit into memory fails in its first steps.
        diversity: weight, in 0..1, of an even mix of tasks in the choice of a group; 0 ignores
            tasks. Needs padded groups, and samples with a task: see `Sample.task_name`.
        window_start: `"full"`: the first group waits for the whole window. `"early"`: the first
            group waits for samples that fill two budgets. The pool then grows to the window: of
            four samples pulled, three stay in the pool. `"auto"`: `"early"` if the epoch is known
            to have 32 windows or more, and `largest_first` is 0, so that padding costs no more
            than 0.002 of the efficiency.
    """

    STATE = BucketerState
    keeps_failed_items = True

    def __init__(
        self,
        source: BaseNode[Sample | Skipped],
        budget: int | TokenBudget,
        window: WindowSize = PlanOptions.window,
        state: StateMode = "replay",
        exclude: Exclude = None,
        largest_first: int = PlanOptions.largest_first,
        diversity: float = PlanOptions.diversity,
        window_start: WindowStart = PlanOptions.window_start,
    ) -> None:
        super().__init__()
        check_choice("state", state, get_args(StateMode))
        check_node("source", source)
        once = [node for node in walk(source) if getattr(node, "yields_once", False)]
        if once and state == "replay":
            raise ValueError(
                f'`state` must be "payload" over a `{type(once[0]).__name__}`, whose items cannot '
                "be made again."
            )
        self.source = source
        self.budget = TokenBudget.of(budget)
        """The limits of a group."""
        window = check_window("window", window)
        check_choice("window_start", window_start, get_args(WindowStart))
        largest_first = check_count("largest_first", largest_first, 0)
        diversity = check_diversity(diversity, self.budget)
        self._has_tasks = diversity > 0
        self.planner = GroupPlanner(
            self.budget,
            window,
            largest_first,
            diversity,
            partial(known_length_of, source),
            PoolCheck(self.budget),
            window_start,
        )
        """Decides which samples form the next group."""
        self._mode = state
        self._name = type(self).__name__
        self.exclude = ExcludedKeys.of(exclude)
        """The keys of the argument. A loaded state may have further keys."""
        self._exclusions = ExclusionCounter(self.budget, self.exclude)
        self._task_numbers: dict[str, int] = {}  # The order of tasks has no effect on groups.
        self._config: dict[str, Any] = {
            **{f"budget.{name}": value for name, value in self.budget.fingerprint().items()},
            "window": window,
            "window_start": window_start,
            "largest_first": largest_first,
            "diversity": diversity,
            "state": state,
        }
        self._clear()

    def _clear(self) -> None:
        self._items: NumberedItems[Any] = NumberedItems(self.source, self._name, self._interval)
        self._is_cut = False
        budget = self.planner.limits.sample_budget(self.budget)
        self._exclusions = self._exclusions.for_next_epoch(budget, self.excluded | self.exclude)
        self.store = SampleStore()
        """The samples of the pool, and of groups that a `RankAligner` has planned."""
        self._encoded: dict[int, bytes] = {}
        self._state_before_group: BucketerState | None = None  # while a group's data is made again
        self.restored = Restored()
        """Result of the last restore."""

    @property
    def window(self) -> int:
        """Present size of the window, in samples."""
        return self.planner.window

    @property
    def limits(self) -> Limits:
        """The present limits of groups: the limits of the budget, or lower limits."""
        return self.planner.limits

    @property
    def remaining_samples(self) -> int:
        """Samples of this epoch in the pool, and, if their number is known, samples not pulled."""
        remaining = self.planner.samples_left()
        return len(self.planner.pool) if remaining is None else remaining

    @property
    def replayed_samples(self) -> int:
        """Samples that the last restore makes again, at once or later."""
        return self.restored.samples

    @property
    def can_restore(self) -> bool:
        """Whether any rank can make the samples of groups again, by their keys."""
        return self._mode == "replay" and can_restore(self.source)

    def make_again(self, items: Sequence[ItemKey]) -> ItemsAgain:
        """Return samples of this epoch that are made again when `take` is called."""
        return make_again(self.source, items)

    # --- methods for a `RankAligner` ------------------------------------------------------------

    def facts_of(self, ordinals: IntArray) -> Facts:
        """Return the facts of samples in the store, for planning."""
        return self._facts_of(self.store.look(ordinals), ordinals)

    def take_over(self, samples: SampleBlock) -> Facts:
        """Add samples that another rank has given to this rank; return their facts."""
        first = max(self.store.next_ordinal, self.planner.pool.pulled)
        ordinals = np.arange(first, first + len(samples))
        self.store.add(ordinals, samples)
        return self._facts_of(samples, ordinals)

    def put_back(self, samples: Facts) -> None:
        """Put samples of planned groups back into the pool, unless they are excluded."""
        are_excluded = self._exclusions.exclude_from(self.store.look(samples.ordinal))
        self.store.drop(samples.ordinal[are_excluded])
        self.planner.put_back(samples.take(np.flatnonzero(~are_excluded)))

    def end_early(self, samples: Facts) -> None:
        """End the epoch before its last sample; leave out `samples` and the pool."""
        ordinals = np.concatenate((samples.ordinal, self.planner.pool.ordinals()))
        self._exclusions.leave_unemitted(self.store, ordinals)
        self.planner.remove(ordinals)
        self.planner.end()
        self._is_cut = True

    def fill(self) -> None:
        """Pull samples until the pool is full, or until its oldest sample must not get older.

        Raises:
            SampleError: the next sample is no `Sample`, or is too large under `oversize="error"`;
                or all samples of the epoch were dropped or skipped. The error, like any error of
                the source, is raised again until the next reset.
        """
        pool = self.planner.pool
        progress = None
        if not pool.pulled:
            most = min(self.window, self.remaining_samples or self.window)
            progress = SlowProgress("samples in the pool before the first batch", most)
        while (room := self.planner.room()) > 0:
            pulling = PulledSamples(pool.pulled)
            try:
                while (lacking := room + pool.pulled - pulling.stop) > 0:
                    self._admit(self._items.take(lacking)[0], pulling)
                    if progress is not None:
                        progress.update(pulling.stop)
            except StopIteration:
                self._exclusions.check_not_all(pulling.stop)
                self.planner.end()
            finally:  # Samples before an error go into the pool.
                self._add(pulling)
        if self.planner.ended:
            self._exclusions.warn_of_summary(pool.pulled)
        self._keep_items()
        self._items.forget(pool.pulled)

    # --- the contract of a node -----------------------------------------------------------------

    def begin_epoch(self) -> None:
        """Begin the epoch of the source, with an empty pool."""
        self.planner.choose_window_alone()  # if the previous epoch had only one group
        self.planner.begin_epoch()
        self._clear()
        self.source.reset(None)
        self._items.begin()
        self._keep_items()

    def restore(self, state: BucketerState) -> None:
        """Go to the position of the state, and make the samples of its store again."""
        if self._mode == "replay" and state.mode == "payload":  # loaded with `strict=False`
            raise StateError(
                f'a pool that was saved with `state="payload"` cannot go into a {self._name} with '
                '`state="replay"`, which could not replay it. Change this between epochs.'
            )
        self._clear()
        self._exclusions.restore(state)
        self.source.reset(copy_state(state.source))
        self._items.restore(state.source, state.pulled - state.pulled_since_source, state.pulled)
        stored, pooled = from_bits(state.held)
        *_, records_state, payload = state.held
        records = from_records(records_state, is_numbered=state.numbered)
        if len(stored) != len(records if payload is None else payload):
            raise StateError(f"the pool of {self._name} is damaged. Use an earlier checkpoint.")
        if payload is None:
            samples = self._read_again(state, records, stored)
        else:
            samples = self._decoded(state, payload, stored)
        self.store.add(stored, samples)
        keeps_limits = state.has_own_limits or loading().smaller_budget
        self.planner.restore(
            self.facts_of(pooled),
            pulled=state.pulled,
            ended=state.ended,
            limits=Limits(*state.limits) if keeps_limits else None,
            window=state.window,
            caps=integers_of(state.caps, "caps"),
            largest_groups=state.largest_groups,
        )
        self._is_cut = state.is_cut
        if state.ended and not state.is_cut:
            self._items.expect_end()
        self._use_present_options(Limits(*state.limits))

    def save(self) -> BucketerState:
        """Return the position of the source, and the samples of the store."""
        if self._state_before_group is not None:
            return self._state_before_group
        planner = self.planner
        pool = planner.pool
        limits = planner.limits
        self._keep_items()
        if self._items.position == pool.pulled:  # No item was refused.
            self._items.note_state()
        first, source_state = self._items.state_at(pool.pulled)
        pooled = pool.table()[ORDINALS]
        stored: Any
        if self._mode == "replay":
            stored = self.store.state(pooled, is_numbered=self._numbers_samples)
        else:
            stored = StoredSamples(self.store, pooled, self._encoded)
        return BucketerState(
            source=source_state,
            mode=self._mode,
            pulled=pool.pulled,
            pulled_since_source=pool.pulled - first,
            ended=planner.ended,
            is_cut=self._is_cut,
            limits=(*limits,),
            has_own_limits=limits != Limits.of(self.budget),
            held=stored,
            numbered=self._numbers_samples,
            caps=int64_state(pool.caps),
            largest_groups=planner.largest_groups,
            window=planner.window_state(),
            **self._exclusions.to_state(),
        )

    def next(self) -> SampleBlock:
        """Return the next group, oldest sample first. It raises the errors of `fill`."""
        self.planner.choose_window_alone()
        if not self.planner.ended:
            self.fill()
        if self.planner.is_done:
            raise StopIteration
        state_before = self.save() if self.store.may_lack_data else None
        group = self.planner.next_group().ordinal
        self._state_before_group = state_before  # If `make` raises, no state loses the group.
        self.store.make(group)
        self._state_before_group = None
        return self.store.take(group)

    def fingerprint(self) -> dict[str, Any]:
        """Return the configuration that decides the output."""
        return self._config

    # --------------------------------------------------------------------------------------------

    def _keep_items(self, oldest: int | None = None) -> None:
        """Have a source without keys, or else `_items`, keep the samples from `oldest` on.

        oldest: the first sample that a restore may need. Default: the oldest of the store.
        """
        pulled = self.planner.pool.pulled
        if oldest is None:
            oldest = pulled if self._mode == "payload" else self.store.oldest(pulled)
        first = None
        if not can_restore(self.source):
            source_keeps = call_member(self.source, "keep_items", oldest, self._interval)
            first = None if source_keeps else oldest
        self._items.keep_from(first, self._interval)

    @property
    def _numbers_samples(self) -> bool:
        """Whether samples are made again by number instead of by key."""
        return self._mode == "replay" and not can_restore(self.source)

    def _read_again(
        self, state: BucketerState, records: SampleBlock, ordinals: IntArray
    ) -> SampleBlock:
        """Return the stored samples, which the source makes again, and go to its position."""
        self._keep_items(int(ordinals[0]) if len(ordinals) else state.pulled)
        again = partial(samples_again, is_numbered=state.numbered)
        if self._items.can_read_again:  # All stored samples were pulled after `state.source`.
            samples, restored = again(records, self._items, ordinals, self._name)
            self.restored = restored._replace(samples=state.pulled_since_source)
            return samples
        self._items.catch_up()
        samples, restored = again(records, self.source, ordinals, self._name)
        self.restored = restored._replace(samples=restored.samples + state.pulled_since_source)
        return samples

    def _decoded(
        self, state: BucketerState, payload: list[bytes], ordinals: IntArray
    ) -> SampleBlock:
        """Return the samples in a state, and read the source up to its position."""
        self._keep_items(state.pulled)
        self._items.catch_up()
        if not can_restore(self.source):
            make_again(self.source, ())  # A `ParallelProcessor` reads up to its position.
        self._encoded.update(zip(ordinals.tolist(), payload, strict=True))
        self.restored = Restored(state.pulled_since_source)
        return SampleBlock.of([*map(decode_sample, payload)])

    def _use_present_options(self, saved: Limits) -> None:
        """Apply keys in `exclude` and lower limits of the budget that are new since the state."""
        self.planner.lower_limits(Limits.of(self.budget))
        keys = self.excluded | self.exclude
        keys_changed = keys != self.excluded
        self._exclusions.use_present(self.planner.limits.sample_budget(self.budget), keys)
        if keys_changed:
            ordinals = self.planner.pool.ordinals()
            excluded = ordinals[self._exclusions.exclude_from(self.store.look(ordinals))]
            self.planner.remove(excluded)
            self.store.drop(excluded)
        self.restored = self.restored._replace(
            keys_changed=keys_changed, limits_changed=self.planner.limits != saved
        )

    @property
    def _interval(self) -> int:
        return max(1, self.planner.window // _SNAPSHOTS_PER_WINDOW)

    def _admit(self, pulled: Sequence[Sample | Skipped], pulling: PulledSamples) -> None:
        """Count the samples that were pulled, and note which of them go into the pool."""
        if isinstance(pulled, SampleBlock) and not self._has_tasks:
            if self._exclusions.admits_all(pulled):
                pulling.add(pulled, range(len(pulled)), len(pulled))
                return
        rows: list[int] = []
        count = 0  # samples before an error
        try:
            for row, sample in enumerate(pulled):
                self._check(sample)
                if self._exclusions.admit(sample, pulling.stop + row):
                    rows.append(row)
                count += 1
        finally:
            pulling.add(pulled, rows, count)

    def _add(self, pulling: PulledSamples) -> None:
        ordinals = np.array(pulling.ordinals, np.int64)
        block = pulling.block()
        if len(block) and self._numbers_samples:
            block = block.with_facts(ordinal=ordinals)
        self.store.add(ordinals, block)
        pulled = pulling.stop - self.planner.pool.pulled
        self.planner.add(self._facts_of(block, ordinals), pulled)

    def _facts_of(self, samples: SampleBlock, ordinals: IntArray) -> Facts:
        if not self._has_tasks:
            return facts_of(samples, ordinals)
        numbers = self._task_numbers
        tasks = [numbers.setdefault(kind.task_name, len(numbers)) for kind in samples.kinds]
        return facts_of(samples, ordinals, tasks)

    def _check(self, sample: Any) -> None:
        if not isinstance(sample, (Sample, Skipped)):
            raise SampleError(
                f"`source` of {self._name} must yield `Sample`, but `{type(self.source).__name__}` "
                f"yielded `{type(sample).__name__}` instead. Put a `LengthObserver` directly below "
                f"{self._name}."
            )
        if self._has_tasks:
            check_has_task(sample)
