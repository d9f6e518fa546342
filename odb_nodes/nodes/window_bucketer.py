"""Node: forms groups from a rolling pool, and keeps a recipe of the pool as its state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, get_args

import numpy as np
from torchdata.nodes import BaseNode

from odb_nodes._core.checks import check_choice, check_count
from odb_nodes._core.progress import SlowProgress
from odb_nodes._core.user_warning import warn_user
from odb_nodes.contract import StatefulNode, copy_state
from odb_nodes.contract.config import smaller_budget_is_allowed
from odb_nodes.contract.graph import known_length_of
from odb_nodes.contract.node import check_node
from odb_nodes.contract.recall import recall, recalls
from odb_nodes.contract.state import made
from odb_nodes.errors import StateError
from odb_nodes.nodes.bucketer_state import BucketerState, PoolState
from odb_nodes.nodes.excluded_keys import Exclude, ExcludedKeys, excludes_later
from odb_nodes.nodes.exclusions import CountsExclusions, ExclusionCounter
from odb_nodes.nodes.payload import encode_samples
from odb_nodes.nodes.pool_check import PoolCheck
from odb_nodes.nodes.pool_filler import PoolFiller
from odb_nodes.nodes.pool_records import PoolRecords
from odb_nodes.nodes.pool_window import PoolWindow
from odb_nodes.nodes.replay import expect_end, pooled_again
from odb_nodes.nodes.sample_records import NO_RECORDS
from odb_nodes.nodes.snapshots import Snapshots
from odb_nodes.planning import RollingPool, TokenBudget
from odb_nodes.planning.auto_window import WindowSize
from odb_nodes.planning.caps import NO_CAPS
from odb_nodes.planning.diversity import check_diversity
from odb_nodes.planning.limits import Limits
from odb_nodes.planning.options import PlanOptions
from odb_nodes.planning.table import IntArray
from odb_nodes.sample import ItemKey, LeftOut, Sample, Skipped


class WindowBucketer(CountsExclusions, StatefulNode[list[Sample], BucketerState]):
    """Yields groups of samples under a token budget, from a rolling pool of `window` samples.

    No pooled sample gets older than 5 windows (see `RollingPool`).

    State, `"replay"`: the source's, and key, length and digest of each pooled sample, 17 bytes.
    Restoring makes these samples again, at most `window`, and compares the digests. Where a source
    cannot read items by their keys (an iterable), its state is that at or before the oldest pooled
    sample, and at most 5.25 windows of raw items are read again; a `ParallelProcessor` processes
    only those that were pooled.
    State, `"payload"`: the pooled samples themselves. Nothing is processed again, so it is right
    also where processing is not deterministic, as long as the order of the source is; they must be
    dicts, lists and tuples of tensors, arrays, numbers and strings.

    Args:
        source: node that yields `Sample`: a `LengthObserver`. Where it yields `Skipped`, that is
            counted and left out.
        budget: padded tokens of a group, or a `TokenBudget`, which may be of another layout.
        window: samples in the pool. Larger fills groups better, and waits longer for the first.
            `"auto"`: as many as fill 32 groups, see `PoolWindow`.
        state: `"replay"` or `"payload"`.
        exclude: keys of samples that no group holds from now on; see `ODBDataLoader`.
        dearest_first: number of groups at the beginning of each epoch that are made of the longest
            pooled samples, so that a run that does not fit into memory fails in its first steps.
        diversity: weight, in 0..1, of an even mix of tasks in the choice of a group; 0 for none.
            Needs padded groups, and the task of each sample: see `Sample.task_name`.
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
        self._budget = TokenBudget.of(budget)
        self._limits = Limits.of(self._budget)
        self.window = PoolWindow(window, self._budget)
        """How many samples wait in the pool: `window.samples`."""
        self._dearest_first = check_count("dearest_first", dearest_first, 0)
        self._diversity = check_diversity(diversity, self._budget)
        self._mode = state
        self._name = type(self).__name__
        self._pool_check = PoolCheck(self._budget)
        self.exclude = ExcludedKeys.of(exclude)
        """The keys that the argument names. A state may name others beside them."""
        self._exclusions = ExclusionCounter(self._budget, self.exclude)
        self._summary = ""  # of the exclusions of the last epoch
        self.replayed_samples = 0
        """Samples that the last restore processed again."""
        self._config = self._decides_output()
        self._clear()

    @property
    def budget(self) -> TokenBudget:
        """What a group may cost."""
        return self._budget

    @property
    def limits(self) -> Limits:
        """What groups are formed under now: the limits of the budget, or tighter ones."""
        return self._limits

    def tighten(self, limits: Limits) -> None:
        """Form groups under tighter limits from now on; a state keeps them."""
        self._limits = self._limits.tightened(limits)
        self._pool.limit(self._limits)
        self._exclusions.budget = self._limits.of_samples(self._budget)

    def offer_costs(self, count: int) -> IntArray:
        """Return what is offered for the caps of the next round; see `offered_costs`."""
        return NO_CAPS if self._ended else self._pool.offer(count)

    def use_caps(self, caps: IntArray) -> None:
        """Cut further groups to these costs, ascending, one each; a state keeps them."""
        self._pool.caps = caps

    def use_window(self, samples: int) -> None:
        """Let so many samples wait from now on, where the window is `"auto"`; 0: as before."""
        if samples:
            self.window.use(samples)
            self._follow_window()

    @property
    def pulled_samples(self) -> int:
        """Samples of this epoch that were pulled so far, those that were left out included."""
        return self._pool.pulled

    @property
    def remaining_samples(self) -> int:
        """Samples of this epoch in the pool, and those not yet pulled where that is known."""
        known = self.known_remaining()
        return len(self._pool) if known is None else known

    def known_remaining(self) -> int | None:
        """Return the same; `None` where it is not known, whatever an epoch before has found out."""
        length = self._pool.pulled if self._ended else known_length_of(self.source)
        return None if length is None else len(self._pool) + max(0, length - self._pool.pulled)

    @property
    def recalls(self) -> bool:
        """Whether `recall` can make samples again: where the source can, and the state does."""
        return self._mode == "replay" and recalls(self.source)

    def recall(self, items: Sequence[ItemKey]) -> Iterator[Sample]:
        """Yield samples of this epoch again."""
        return recall(self.source, items)

    def leave_rest(self) -> list[LeftOut]:
        """Return the pooled samples as what is left out, where no further group is asked for."""
        return [LeftOut(one.key, one.source, "unemitted") for one in self._pool.items().values()]

    def exclude_more(self, keys: ExcludedKeys | None = None, *, pooled: bool = True) -> None:
        """Exclude what the argument names, and further keys.

        Args:
            keys: the further keys.
            pooled: whether to take samples out of the pool, too, and count them.
        """
        counter = self._exclusions
        counter.keys = counter.keys | self.exclude | (keys or ExcludedKeys())
        if pooled and counter.keys:
            waiting = self._pool.items()
            counter.exclude(
                self._pool.remove([at for at in waiting if waiting[at] in counter.keys])
            )

    def begin_epoch(self) -> None:
        """Begin the epoch of the source, with an empty pool."""
        self.use_window(self.window.choose_alone())  # if the epoch before had but one group
        self.window.begin_epoch()
        self._clear()
        self.source.reset(None)
        self._snapshots.take(0)

    def restore(self, state: BucketerState) -> None:
        """Go back to where the source stood, and pull again what was pooled.

        Raises:
            StateError: the source does not yield the samples again that it yielded then.
        """
        # Groups that are formed again are formed under the limits of then.
        as_saved = state.has_own_limits or smaller_budget_is_allowed()
        self._limits = Limits(*state.limits) if as_saved else Limits.of(self._budget)
        self.window.restore(state.window)
        self._clear()
        self.replayed_samples = 0
        if self._mode == "replay" and state.payload:  # loaded with `strict=False`
            raise StateError(
                f'a pool that was saved with `state="payload"` cannot go into a {self._name} with '
                '`state="replay"`, which could not replay it. Change this between epochs.'
            )
        self.source.reset(copy_state(state.source))
        self._payload.update(state.payload or ())
        kept, self.replayed_samples = pooled_again(self.source, self._snapshots, state, self._name)
        self._filler.add(list(kept), list(kept.values()))
        self._pool.pulled = state.pulled
        self._pool.caps = np.frombuffer(state.caps or b"", np.int64)
        self._dearest_groups = state.dearest_groups
        self._exclusions.restore(state)
        if state.ended:
            expect_end(self.source, state.pulled, self._name)
            self._ended = True
        if not excludes_later():
            self.exclude_more()
            self.tighten(Limits.of(self._budget))

    def save(self) -> BucketerState:
        """Return where to pull from again, and which of the samples pulled are waiting."""
        return made(self.save_to_keep())

    def save_to_keep(self) -> BucketerState:
        """Return the same, with what is to be said of the samples made later."""
        pool, replay = self._pool, self._mode == "replay"
        if self._keeps_present and not self._refilling:
            self._snapshots.take(pool.pulled, only=True)
        base, source_state = self._snapshots.at_or_before(self._needed_from)
        recipe, waiting = self._records.later() if replay else (NO_RECORDS, None)
        return BucketerState(
            source=source_state,
            mode=self._mode,
            pulled=pool.pulled,
            pulled_since_source=pool.pulled - base,
            ended=self._ended,
            limits=(*self._limits,),
            has_own_limits=self._limits != Limits.of(self._budget),
            pool=recipe,
            waiting=waiting,
            payload=None if replay else self._encoded(),
            dearest_groups=self._dearest_groups,
            caps=pool.caps.tobytes() or None,
            window=self.window.save(),
            **self._exclusions.to_state(),
        )

    def next(self) -> list[Sample]:
        """Return the next group, oldest sample first.

        Raises:
            SampleError: the next sample is no `Sample`, or too large under `oversize="error"`; or
                the epoch ends, and all of it was dropped or skipped. This, and whatever the source
                raises, is raised again until the next reset.
        """
        self.use_window(self.window.choose_alone())
        self._refilling = True  # Should the source raise, it may stand after an item that is lost.
        self._refill()
        if not len(self._pool):
            self._end()
            self._exclusions.check_not_all(self._pool.pulled)
        self._refilling = False
        if not len(self._pool):
            raise StopIteration
        dearest = self._dearest_groups < self._dearest_first
        group = self._pool.take(draining=self._ended, dearest=dearest)
        self._dearest_groups += dearest
        if not self._ended and not dearest and self.window.is_chosen:
            self._pool_check.note(group, self.window.samples)
        if self._ended and not len(self._pool):
            self._end()
        self._snapshots.at_or_before(self._needed_from)  # forgets earlier ones
        return group

    def _clear(self) -> None:
        self._pool = RollingPool[Sample](self._budget, self.window.samples, self._diversity)
        self._pool.limit(self._limits)
        self._snapshots = Snapshots(self.source, self.window.snapshot_interval)
        self._payload: dict[int, Any] = {}
        self._ended = self._refilling = False
        self._dearest_groups = 0
        budget = self._limits.of_samples(self._budget)
        said = self._exclusions.said
        self._exclusions = ExclusionCounter(budget, self.excluded | self.exclude, said)
        self._filler: PoolFiller = PoolFiller(
            self.source,
            self._pool,
            self.window,
            self._snapshots,
            self._exclusions,
            has_tasks=self._diversity > 0,
            node=self._name,
        )
        self._by_key = self.recalls
        self._keeps_present = self._by_key or self._mode == "payload"
        self._records = PoolRecords(self._pool, with_items=self._by_key)

    def _follow_window(self) -> None:
        self._pool.window = self.window.samples
        self._snapshots.interval = self.window.snapshot_interval

    @property
    def _needed_from(self) -> int:
        """The first sample of the epoch that a restore has to pull again."""
        return self._pool.pulled if self._keeps_present else self._pool.oldest

    def _refill(self) -> None:
        if self._ended:
            return
        progress = None
        if not self._pool.pulled:
            most = min(self.window.samples, self.remaining_samples or self.window.samples)
            progress = SlowProgress("samples in the pool before the first batch", most)
        self._ended = self._filler.fill(progress)
        if not self._ended and self.window.grow_alone(known_length_of(self.source)):
            self._follow_window()
            self._ended = self._filler.fill(progress)

    def _end(self) -> None:
        """Stand at the end of the epoch: nothing is left to pull again."""
        self._snapshots.take(self._pool.pulled, only=True)
        summary, before = self._exclusions.summary(self._pool.pulled), self._summary
        if summary and summary != before:  # most epochs are alike
            self._summary = summary
            warn_user(summary)

    def _encoded(self) -> list[Any]:
        self._payload = encode_samples(self._pool.items(), self._payload)
        return [*self._payload.items()]

    def fingerprint(self) -> dict[str, Any]:
        """Return what decides the output: a state fits only where it is equal."""
        return {**self._config}

    def _decides_output(self) -> dict[str, Any]:
        return {
            **{f"budget.{name}": value for name, value in self._budget.fingerprint().items()},
            "window": self.window.given,
            "state": self._mode,
            # Absent where unset, as in states that were saved before they existed.
            **({"dearest_first": self._dearest_first} if self._dearest_first else {}),
            **({"diversity": self._diversity} if self._diversity else {}),
        }
