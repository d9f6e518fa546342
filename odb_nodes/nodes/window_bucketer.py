"""Node: forms groups from a rolling pool, and keeps a recipe of the pool as its state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby
from typing import Any, Literal, get_args

import numpy as np
from torchdata.nodes import BaseNode

from odb_nodes._core.checks import check_choice, check_count
from odb_nodes._core.progress import SlowProgress
from odb_nodes.contract import NodeState, SourceState, StatefulNode, copy_state
from odb_nodes.contract.again import ItemsAgain, make_again
from odb_nodes.contract.config import loading
from odb_nodes.contract.graph import known_length_of
from odb_nodes.contract.node import call_member, can_restore, check_node
from odb_nodes.contract.numbered_items import NumberedItems
from odb_nodes.errors import SampleError, StateError
from odb_nodes.nodes.exclusions import (
    Exclude,
    ExcludedKeys,
    ExcludedState,
    ExclusionCounter,
)
from odb_nodes.nodes.lazy_samples import Restored, samples_again
from odb_nodes.nodes.sample_records import decode_sample, from_records
from odb_nodes.nodes.sample_store import HeldSamples, SampleStore, StoreContent, facts_of, from_bits
from odb_nodes.planning import TokenBudget
from odb_nodes.planning.auto_window import PoolCheck, WindowSize, WindowStart, check_window
from odb_nodes.planning.budget import Limits
from odb_nodes.planning.facts import Facts
from odb_nodes.planning.group_planner import GroupPlanner
from odb_nodes.planning.options import PlanOptions
from odb_nodes.planning.runs import check_diversity, check_has_task
from odb_nodes.planning.table import ORDINALS
from odb_nodes.sample import ItemKey, LeftOut, Sample, Skipped
from odb_nodes.sample_block import IntArray, SampleBlock

PoolState = Literal["replay", "payload"]
"""What a state may hold of the pool: how to make its samples again, or the samples."""

_SNAPSHOTS_PER_WINDOW = 4


@dataclass(kw_only=True)
class BucketerState(NodeState):
    """The state of a `WindowBucketer`."""

    source: SourceState  # at or before all samples that this node reads again, if any
    mode: str  # what the state holds of the pool, `"replay"` or `"payload"`
    pulled: int  # samples pulled in the epoch
    pulled_since_source: int  # how many of them were pulled after `source`
    ended: bool  # whether no more samples are pulled in this epoch
    is_cut: bool  # whether that is so because the epoch was ended before its last sample
    limits: tuple[int, int | None, int | None, int, int | None]  # `Limits`
    has_own_limits: bool  # whether these differ from the limits of the budget
    held: StoreContent  # the samples of the pool, and of groups that a `RankAligner` has planned
    numbered: bool  # whether these are made again by their numbers, in place of keys
    excluded: ExcludedState
    excluded_samples: int  # samples of the epoch left out by their keys
    dropped_samples: int  # samples of the epoch left out by `oversize="drop"`
    oversize_samples: int  # samples of the epoch that exceeded the budget on their own
    skipped_samples: dict[str, int]  # samples of the epoch that processing skipped, by reason
    # key, source and reason of each sample left out since the last group
    left_out: list[tuple[int | None, str, str]]
    caps: bytes | None  # cost limits of the next groups, ascending
    largest_groups: int  # how many groups of `largest_first` the epoch has had
    # samples of an `"auto"` window, whether it is chosen for the epoch, and the `PulledLengths` it
    # is chosen by; `None` if the window is a number of samples
    window: tuple[int, bool, int, int, int] | None


class WindowBucketer(StatefulNode[SampleBlock, BucketerState]):
    """Yields groups under a token budget, from a rolling pool of `window` samples.

    A group is a `SampleBlock`: a sequence of `Sample`. No pooled sample gets older than 5 windows
    (see `RollingPool`).

    State, `"replay"`: the source's, and all of each pooled sample but its data, 17 to 24 bytes for
    text. These samples are made again after a restore, each before the group that holds it, and
    their digests compared.
    If the source cannot read items by their keys (an iterable), there is an older state of it, and
    raw items are read again, from the oldest sample on: at most 5.25 windows, and the samples of
    planned groups, which are those of two rounds at most. A `ParallelProcessor` right below
    processes only those that wait.
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
        largest_first: number of groups at the beginning of each epoch that are made of the longest
            pooled samples, so that a run that does not fit into memory fails in its first steps.
        diversity: weight, in 0..1, of an even mix of tasks in the choice of a group; 0 ignores
            tasks. Needs padded groups, and samples with a task: see `Sample.task_name`.
        window_start: `"full"`: the first group waits for the whole window. `"early"`: it waits for
            samples that fill two budgets, and the pool then grows: three of four samples pulled
            wait, until they are the window. `"auto"`: `"early"` where the epoch is known to have 32
            windows or more, and `largest_first` is 0, so that padding costs no more than 0.002 of
            the efficiency.
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
        largest_first: int = PlanOptions.largest_first,
        diversity: float = PlanOptions.diversity,
        window_start: WindowStart = PlanOptions.window_start,
    ) -> None:
        super().__init__()
        check_choice("state", state, get_args(PoolState))
        check_node("source", source)
        self.source = source
        self.budget = TokenBudget.of(budget)
        """What a group may cost."""
        window = check_window("window", window)
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
        """Decides which samples wait, and which form the next group."""
        self._mode = state
        self._name = type(self).__name__
        self.exclude = ExcludedKeys.of(exclude)
        """The keys that the argument names. A state may name others beside them."""
        self._exclusions = ExclusionCounter(self.budget, self.exclude)
        self._task_numbers: dict[str, int] = {}  # which task has which decides nothing
        self.restored = Restored()
        """What the last restore has found."""
        check_choice("window_start", window_start, get_args(WindowStart))
        options: dict[str, Any] = {"window": window, "window_start": window_start}
        options |= {"largest_first": largest_first, "diversity": diversity}
        limits = {f"budget.{name}": value for name, value in self.budget.fingerprint().items()}
        self._config: dict[str, Any] = {**limits, **options, "state": state}
        self._clear()

    def _clear(self) -> None:
        self._items: NumberedItems[Any] = NumberedItems(self.source, self._name, self._interval)
        self._is_cut = False
        budget = self.planner.limits.of_samples(self.budget)
        self._exclusions = self._exclusions.of_next_epoch(budget, self.excluded | self.exclude)
        self.store = SampleStore()
        """The samples of the pool, and of groups that a `RankAligner` has planned."""
        self._encoded: dict[int, bytes] = {}
        self._before: BucketerState | None = None  # of before a group whose data cannot be made
        self.restored = Restored()

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
        known = self.planner.samples_left()
        return len(self.planner.pool) if known is None else known

    @property
    def replayed_samples(self) -> int:
        """Samples that the last restore makes again, at once or later."""
        return self.restored.samples

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
        """Return the samples that were left out since the last call."""
        return self._exclusions.take_left_out()

    @property
    def can_restore(self) -> bool:
        """Whether any rank can make the samples of groups again, by their keys."""
        return self._mode == "replay" and can_restore(self.source)

    def make_again(self, items: Sequence[ItemKey]) -> ItemsAgain:
        """Return samples of this epoch that are made again when they are taken."""
        return make_again(self.source, items)

    # --- what a `RankAligner` asks of it --------------------------------------------------------

    def facts_of(self, ordinals: IntArray) -> Facts:
        """Return what planning knows of samples that are held."""
        return self._facts_of(self.store.look(ordinals), ordinals)

    def take_over(self, samples: SampleBlock) -> Facts:
        """Hold samples that another rank has given to this one; return what planning knows."""
        first = max(self.store.next_ordinal, self.planner.pool.pulled)
        ordinals = np.arange(first, first + len(samples))
        self.store.add(ordinals, samples)
        return self._facts_of(samples, ordinals)

    def put_back(self, samples: Facts) -> None:
        """Put samples of planned groups back into the pool, without those that are excluded."""
        is_out = self._exclusions.exclude_from(self.store.look(samples.ordinal))
        self.store.drop(samples.ordinal[is_out])
        self.planner.put_back(samples.take(np.flatnonzero(~is_out)))

    def end_early(self, samples: Facts) -> None:
        """End the epoch before its last sample; leave out these samples and the pooled ones."""
        gone = np.concatenate((samples.ordinal, self.planner.pool.ordinals()))
        self._exclusions.leave_unemitted(self.store, gone)
        self.planner.remove(gone)
        self.planner.end()
        self._is_cut = True

    def fill(self) -> None:
        """Pull until the pool is full, or as full as the age of its oldest sample allows.

        Raises:
            SampleError: the next sample is no `Sample`, or too large under `oversize="error"`; or
                the epoch ends, and all of it was dropped or skipped. This, and whatever the source
                raises, is raised again until the next reset.
        """
        pool, progress = self.planner.pool, None
        if not pool.pulled:
            most = min(self.window, self.remaining_samples or self.window)
            progress = SlowProgress("samples in the pool before the first batch", most)
        while (room := self.planner.room()) > 0:
            pulling = _Pulling(pool.pulled)
            try:
                while (lacking := room + pool.pulled - pulling.stop) > 0:
                    self._admit(self._items.take(lacking)[0], pulling)
                    if progress is not None:
                        progress.update(pulling.stop)
            except StopIteration:
                self._exclusions.check_not_all(pulling.stop)
                self.planner.end()
            finally:  # Those before an error are in the pool.
                self._add(pulling)
        if self.planner.ended:
            self._exclusions.warn_of_summary(pool.pulled)
        self._keep_items(self._oldest_needed)
        self._items.forget(pool.pulled)

    # --- the contract of a node -----------------------------------------------------------------

    def begin_epoch(self) -> None:
        """Begin the epoch of the source, with an empty pool."""
        self.planner.choose_window_alone()  # if the epoch before had but one group
        self.planner.begin_epoch()
        self._clear()
        self.source.reset(None)
        self._items.begin()
        self._keep_items(self._oldest_needed)

    def restore(self, state: BucketerState) -> None:
        """Go back to where the source stood, and make the samples that are held again."""
        if self._mode == "replay" and state.mode == "payload":  # loaded with `strict=False`
            raise StateError(
                f'a pool that was saved with `state="payload"` cannot go into a {self._name} with '
                '`state="replay"`, which could not replay it. Change this between epochs.'
            )
        self._clear()
        self._exclusions.restore(state)
        self.source.reset(copy_state(state.source))
        self._items.restore(state.source, state.pulled - state.pulled_since_source, state.pulled)
        held, pooled = from_bits(state.held)
        *_, records_state, payload = state.held
        records = from_records(records_state, is_numbered=state.numbered)
        if len(held) != len(records if payload is None else payload):
            raise StateError(f"the pool of {self._name} is damaged. Use an earlier checkpoint.")
        if payload is None:
            samples = self._read_again(state, records, held)
        else:
            samples = self._unpacked(state, payload, held)
        self.store.add(held, samples)
        keeps_limits = state.has_own_limits or loading().smaller_budget
        self.planner.restore(
            self.facts_of(pooled),
            pulled=state.pulled,
            ended=state.ended,
            limits=Limits(*state.limits) if keeps_limits else None,
            window=state.window,
            caps=np.frombuffer(state.caps or b"", np.int64),
            largest_groups=state.largest_groups,
        )
        self._is_cut = state.is_cut
        if state.ended and not state.is_cut:
            self._items.expect_end()
        self._use_present_options(Limits(*state.limits))

    def save(self) -> BucketerState:
        """Return where to pull from again, and which of the samples pulled are held."""
        if self._before is not None:
            return self._before
        planner, pool, limits = self.planner, self.planner.pool, self.planner.limits
        self._keep_items(self._oldest_needed)
        if self._items.position == pool.pulled:  # else an item was refused
            self._items.note_state()
        first, source_state = self._items.state_at(pool.pulled)
        pooled = pool.table()[ORDINALS]
        if self._mode == "replay":
            held: Any = self.store.state(pooled, is_numbered=self._numbers_samples)
        else:
            held = HeldSamples(self.store, pooled, self._encoded)
        return BucketerState(
            source=source_state,
            mode=self._mode,
            pulled=pool.pulled,
            pulled_since_source=pool.pulled - first,
            ended=planner.ended,
            is_cut=self._is_cut,
            limits=(*limits,),
            has_own_limits=limits != Limits.of(self.budget),
            held=held,
            numbered=self._numbers_samples,
            caps=pool.caps.tobytes() or None,
            largest_groups=planner.largest_groups,
            window=planner.window_state(),
            **self._exclusions.to_state(),
        )

    def next(self) -> SampleBlock:
        """Return the next group, oldest sample first. Raises what `fill` raises."""
        self.planner.choose_window_alone()
        if not self.planner.ended:
            self.fill()
        if self.planner.is_done:
            raise StopIteration
        before = self.save() if self.store.may_lack_data else None
        group = self.planner.next_group().ordinal
        self._before = before  # should a sample not be what it was, no state loses the group
        self.store.make(group)
        self._before = None
        return self.store.take(group)

    def fingerprint(self) -> dict[str, Any]:
        """Return what decides the output: a state fits only if it is equal."""
        return self._config

    # --------------------------------------------------------------------------------------------

    def _keep_items(self, oldest: int) -> None:
        """Have this sample, and all after it, be found again, where that is not by their keys."""
        first = None
        if not can_restore(self.source):
            source_keeps = call_member(self.source, "keep_items", oldest, self._interval)
            first = None if source_keeps else oldest
        self._items.keep_from(first, self._interval)

    @property
    def _oldest_needed(self) -> int:
        pulled = self.planner.pool.pulled
        return pulled if self._mode == "payload" else self.store.oldest(pulled)

    @property
    def _numbers_samples(self) -> bool:
        """Whether samples are made again by their numbers, in place of keys."""
        return self._mode == "replay" and not can_restore(self.source)

    def _read_again(
        self, state: BucketerState, records: SampleBlock, ordinals: IntArray
    ) -> SampleBlock:
        """Return the samples that were held, which the source makes again; it stands after them."""
        self._keep_items(int(ordinals[0]) if len(ordinals) else state.pulled)
        again = partial(samples_again, is_numbered=state.numbered)
        if self._items.can_read_again:  # Then all that are held are among those read since.
            samples, restored = again(records, self._items, ordinals, self._name)
            self.restored = restored._replace(samples=state.pulled_since_source)
            return samples
        self._items.catch_up()
        samples, restored = again(records, self.source, ordinals, self._name)
        self.restored = restored._replace(samples=restored.samples + state.pulled_since_source)
        return samples

    def _unpacked(
        self, state: BucketerState, payload: list[bytes], ordinals: IntArray
    ) -> SampleBlock:
        """Return the samples that are in a state, and bring the source to where it stood."""
        self._keep_items(state.pulled)
        self._items.catch_up()
        if not can_restore(self.source):
            make_again(self.source, ())  # for which a `ParallelProcessor` reads on to its place
        self._encoded.update(zip(ordinals.tolist(), payload, strict=True))
        self.restored = Restored(state.pulled_since_source)
        return SampleBlock.of([*map(decode_sample, payload)])

    def _use_present_options(self, saved: Limits) -> None:
        """Exclude the keys, and lower the limits, that the state does not know of."""
        counter, keys = self._exclusions, self._exclusions.keys
        self.planner.lower_limits(Limits.of(self.budget))
        counter.use_present(self.planner.limits.of_samples(self.budget), keys | self.exclude)
        if keys_changed := counter.keys != keys:
            ordinals = self.planner.pool.ordinals()
            gone = ordinals[counter.exclude_from(self.store.look(ordinals))]
            self.planner.remove(gone)
            self.store.drop(gone)
        self.restored = self.restored._replace(
            keys_changed=keys_changed, limits_changed=self.planner.limits != saved
        )

    @property
    def _interval(self) -> int:
        return max(1, self.planner.window // _SNAPSHOTS_PER_WINDOW)

    def _admit(self, pulled: Sequence[Sample | Skipped], pulling: _Pulling) -> None:
        """Count what was pulled, and note what goes into the pool."""
        exclusions = self._exclusions
        block = pulled if isinstance(pulled, SampleBlock) else None
        if block is not None and not self._has_tasks and exclusions.admits_all(block):
            pulling.add_all(block)
            return

        def admits(sample: Any, number: int) -> bool:
            self._check(sample)
            return exclusions.admit(sample, number)

        pulling.add(pulled, admits)

    def _add(self, pulling: _Pulling) -> None:
        """Put the samples that were admitted into the pool."""
        ordinals, block = np.array(pulling.ordinals, np.int64), pulling.block()
        if len(block) and self._numbers_samples:
            block = block.with_facts(ordinal=ordinals)
        self.store.add(ordinals, block)
        pulled = pulling.stop - self.planner.pool.pulled
        self.planner.add(self._facts_of(block, ordinals), pulled)

    def _facts_of(self, samples: SampleBlock, ordinals: IntArray) -> Facts:
        """Return what decides groups."""
        if not self._has_tasks:
            return facts_of(samples, ordinals)
        known = self._task_numbers
        tasks = [known.setdefault(kind.task_name, len(known)) for kind in samples.kinds]
        return facts_of(samples, ordinals, tasks)

    def _check(self, sample: Any) -> None:
        if not isinstance(sample, (Sample, Skipped)):
            raise SampleError(
                f"`source` of {self._name} must yield `Sample`, but `{type(self.source).__name__}` "
                f"yielded `{type(sample).__name__}` instead. Put a `LengthObserver` below it, and "
                "let no node after that yield anything else."
            )
        if self._has_tasks:
            check_has_task(sample)


class _Pulling:
    """What has been pulled, and is not in the pool yet."""

    def __init__(self, pulled: int) -> None:
        self.stop = pulled  # samples of the epoch that were pulled so far
        self.ordinals: list[int] = []  # of those that were admitted
        self._admitted: list[Any] = []  # blocks, and lists of samples

    def add_all(self, block: SampleBlock) -> None:
        """Add samples that are all admitted."""
        self.ordinals += range(self.stop, self.stop + len(block))
        self._admitted.append(block)
        self.stop += len(block)

    def add(self, pulled: Sequence[Any], admits: Callable[[Any, int], bool]) -> None:
        """Add those that are admitted, and before an error those that come before it."""
        first, rows = self.stop, list[int]()
        try:
            for row, sample in enumerate(pulled):
                if admits(sample, first + row):
                    rows.append(row)
                self.stop += 1
        finally:
            self.ordinals += [first + row for row in rows]
            if isinstance(pulled, SampleBlock):
                self._admitted.append(pulled.take(rows))
            else:
                self._admitted.append([pulled[row] for row in rows])

    def block(self) -> SampleBlock:
        """Return the samples that were admitted."""
        blocks = list[SampleBlock]()
        for kind, run in groupby(self._admitted, type):
            parts = [*run]
            blocks += parts if kind is SampleBlock else [SampleBlock.of([*chain(*parts)])]
        return SampleBlock.joined(blocks)
