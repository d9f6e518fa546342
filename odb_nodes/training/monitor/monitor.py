"""Record a run while it trains."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from odb_nodes._support.checks import check_bool, check_count, check_seconds, check_type
from odb_nodes._support.files import check_folder
from odb_nodes.core.alignment.exchange import Meeting, group_rank
from odb_nodes.core.alignment.peers import PEER_TIMEOUT_S
from odb_nodes.core.contract import NodeState
from odb_nodes.core.contract.state import seal_whole, unseal_whole
from odb_nodes.core.loader.dataloader import ODBDataLoader
from odb_nodes.core.loader.reshard_states import Ranks, check_same
from odb_nodes.core.planning import StepTime
from odb_nodes.core.planning.step_time import TYPICAL
from odb_nodes.core.step_info import STEP_INFO_KEY, StepInfo
from odb_nodes.errors import StateError
from odb_nodes.training.monitor.batch_order import BatchOrder
from odb_nodes.training.monitor.counts import (
    Counts,
    Number,
    PendingCounts,
    check_row_losses,
    checked_last,
    checked_means,
    not_negative,
    timed,
)
from odb_nodes.training.monitor.losses import RowLosses, SampleLoss, SampleLossWriter
from odb_nodes.training.monitor.records import (
    ATTEMPT,
    EPOCH,
    STEPS,
    VERSION,
    Record,
    checked_config,
    loader_settings,
    versions,
)
from odb_nodes.training.monitor.watching import AnyLoader, LoaderStats, RunProgress, RunWarnings
from odb_nodes.training.monitor.writers import RecordWriter, check_writers, make_writer

if TYPE_CHECKING:
    from odb_nodes.core.alignment.exchange.base import ProcessGroupLike

logger = logging.getLogger("odb_nodes")


@dataclass(kw_only=True)
class MonitorState(NodeState):
    """The position of a monitor on one rank, and its counts."""

    step: int = 0  # optimizer steps of the run so far
    written: int = 0  # optimizer steps in records
    epoch: int = 0
    epoch_written: int = 0  # optimizer steps in records before this epoch
    seconds: float = 0.0  # duration of the steps in records
    # Counts of this rank since the last record.
    counts: dict[str, Any] = field(default_factory=lambda: asdict(Counts()))
    # Counts of all ranks in the records of this epoch, on rank 0.
    totals: dict[str, Any] = field(default_factory=lambda: asdict(Counts()))
    samples: list[tuple[str, int, int, int, int, float, int]] = field(default_factory=list)


class Monitor:
    """Records a run: loss, tokens, padding, balance, waiting, speed, memory.

        monitor = Monitor("run", every=10)
        for batch in monitor.watch(loader):
            info = pop_step_info(batch)
            ...  # train
            monitor.step(batch, info, loss=loss, lr=optimizer.param_groups[0]["lr"])
        monitor.close()

    All ranks call `step` for each batch. After `every` optimizer steps, and at the end of an epoch,
    the ranks exchange their counts, and rank 0 appends a record to `monitor.jsonl`. At the end of
    an epoch it appends a second record, of the whole epoch. `read_run` reads the records; the guide
    lists their values.

    A resumed run continues in the same folder: save the monitor's state in its checkpoints. Records
    of steps after the checkpoint then no longer count. A new run needs a new folder.

    State: the counts of this rank since the last record, plain data.

    Args:
        folder: folder of the records: the same for all restarts of a run, and for no other run.
        every: optimizer steps in a record.
        writers: where records are written: `"jsonl"`, which `read_run` and `report` need;
            `"tensorboard"` (extra `tools`); a `WandbWriter`, a `MlflowWriter` or another
            `RecordWriter`.
        config: your settings by name, such as `vars(args)`. Records and reports show them beside
            the options of the loader and the versions. Objects that JSON lacks are kept as text.
        losses_by_sample: keep the losses of `step(row_losses=)` for each sample and epoch, in a
            file for each rank; see `read_losses`.
        progress: show progress on rank 0: a bar of `watch` in a terminal; elsewhere a line in the
            log after 10, 20 and 40 s, and then each minute.
        process_group: the ranks that share the steps, as for `RankAligner`. Default: all ranks of
            the job.
        timeout_s: seconds to wait for another rank before it is an error.

    Raises:
        ImportError: `writers` has `"tensorboard"`, which is not installed.
        TypeError, ValueError: an argument is not valid.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        every: int = 10,
        writers: Sequence[str | RecordWriter] = ("jsonl",),
        config: Mapping[str, Any] | None = None,
        losses_by_sample: bool = False,
        progress: bool = True,
        process_group: ProcessGroupLike = None,
        timeout_s: float = PEER_TIMEOUT_S,
    ) -> None:
        check_seconds("timeout_s", timeout_s)
        self.folder = check_folder(folder)
        self._every = check_count("every", every)
        self._progress = RunProgress(check_bool("progress", progress), process_group)
        self._process_group = process_group
        self._meeting = Meeting("Monitor", process_group, timeout_s)
        self._warnings = RunWarnings()
        self._kinds = check_writers(writers)
        self._writers: list[RecordWriter] = []  # made with the first record
        self._config = checked_config(config)
        self._keeps_losses = check_bool("losses_by_sample", losses_by_sample)
        self._losses: SampleLossWriter | None = None
        self._stats: LoaderStats | None = None
        self._watch: object = None  # the latest call of `watch`
        self._order = BatchOrder()
        self._wait_s = 0.0  # waiting for the next batch
        self._is_closed = False
        self._restart(MonitorState())

    def watch(self, loader: AnyLoader) -> Iterator[Any]:
        """Yield the batches of an epoch, measure the wait for each, and show a progress bar.

        The clock starts here: time between two epochs counts for neither. At the end, a missing
        call of `step` is a warning.

        Args:
            loader: the loader of this rank.

        Raises:
            RuntimeError: another `watch` of this monitor began before the end of the epoch.
            TypeError: `loader` is not a loader.
        """
        stats = self.attach(loader)
        self._watch = watch = object()
        self.start_clock()
        try:
            for batch, wait_s in timed(iter(loader)):
                self._progress.begin(stats, batch[STEP_INFO_KEY])
                self.add_wait(wait_s)
                self._order.last_yielded = batch[STEP_INFO_KEY]
                yield batch
                if self._watch is not watch:
                    raise RuntimeError(
                        "another `watch` of this monitor began before this epoch had ended. For an "
                        "evaluation, iterate its loader without a monitor, or with its own "
                        "`Monitor` and folder."
                    )
        finally:
            self._progress.end()
        self._order.end()
        self._end_epoch()

    def start_clock(self) -> None:
        """Start the time of the next record now, unless a step is counted already."""
        if not len(self._pending):
            self._start_s = time.perf_counter()

    def add_wait(self, wait_s: float) -> None:
        """Add to the seconds of waiting for the next batch; `watch` does this itself."""
        self._wait_s += wait_s

    def attach(self, loader: AnyLoader) -> LoaderStats:
        """Watch the statistics of a loader without `watch`; call it before each epoch.

        The next `step` may then be for any batch of the loader.

        Raises:
            TypeError: `loader` is not a loader.
        """
        if self._stats is None or loader is not self._stats.loader:
            self._stats = LoaderStats(loader)
        self._order.begin()
        return self._stats

    def step(
        self,
        batch: Mapping[str, Any],
        info: StepInfo,
        *,
        loss: Number | None = None,
        loss_weight: float | None = None,
        loss_by_source: Mapping[str, tuple[Number, float]] | None = None,
        row_losses: RowLosses | None = None,
        grad_norm: Number | None = None,
        lr: Number | None = None,
        values: Mapping[str, Number] | None = None,
        ooms: int = 0,
        wait_s: float | None = None,
    ) -> None:
        """Count a batch. Call it once for each batch, after the optimizer step if there is one.

        It waits for no device: tensors are read when a record is written.

        Args:
            batch: the batch; its tokens are counted by the shape of `input_ids`.
            info: the `StepInfo` of the batch.
            loss: mean over the supervised tokens of the batch, before `StepInfo.loss_scale`.
            loss_weight: number of tokens that `loss` is a mean over. Default:
                `StepInfo.local_targets`.
            loss_by_source: task -> (sum of its losses, number of its supervised tokens) in the
                batch. Without tasks in `observe`, pass sources in place of tasks.
            row_losses: the loss of each sample, in place of `loss` and `loss_by_source`.
            grad_norm: norm of the gradient of the optimizer step.
            lr: learning rate of the optimizer step.
            values: further numbers of the optimizer step by name, such as weights of tasks. A
                record shows the last of each.
            ooms: number of times that memory ran out on this rank.
            wait_s: seconds of waiting for the batch, if it does not come from `watch`.

        Raises:
            PeerError: a rank failed, or did not answer, while a record was written.
            RuntimeError: another process writes into the folder.
            StateError: the ranks are at different steps.
            TypeError, ValueError: an argument is not valid.
            ValueError: the monitor is closed, or the batch was counted already or comes from
                another loader.
        """
        check_type("info", info, StepInfo, "Pass `pop_step_info(batch)`.")
        weight = info.local_targets if loss_weight is None else loss_weight
        if row_losses is not None:
            check_row_losses(row_losses, info)
            if loss is None:
                loss = row_losses.sums.detach().sum() / max(weight, 1)
        means = checked_means(loss, weight, loss_by_source, grad_norm)
        last = checked_last(lr, values)
        ooms = check_count("ooms", ooms, 0)
        waited_s = self._wait_s if wait_s is None else not_negative("wait_s", wait_s)
        if self._is_closed:
            raise ValueError("the monitor is closed: it records nothing. Make a new `Monitor`.")
        self._order.note(info)
        self._wait_s = 0.0
        state = self._state
        if info.epoch != state.epoch:
            self._end_epoch()
            state.epoch = info.epoch
        pending = self._pending  # `_write` replaces it
        pending.add_batch(batch, info, waited_s, ooms)
        pending.add_values(means, last)
        if row_losses is not None:
            pending.add_rows(row_losses, info, group_rank(self._process_group)[0])
        state.step += info.ends_optimizer_step
        if state.step - state.written >= self._every:
            self._write()
        if info.ends_epoch:
            self._end_epoch()
        self._progress.update(info, state.step, self._stats)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank; waits for losses that are being computed."""
        counts = self._pending.read(time.perf_counter() - self._start_s)
        samples: list[Any] = [tuple(loss) for loss in self._pending.samples or ()]
        parts: dict[str, Any] = {"counts": asdict(counts), "totals": asdict(self._totals)}
        state = replace(self._state, samples=samples, **parts)
        return seal_whole(type(self).__name__, state)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a state. All ranks call it before the same step.

        Raises:
            StateError: the state is damaged, or not the state of a monitor.
        """
        self._restart(unseal_whole(state_dict, type(self).__name__, MonitorState))

    @staticmethod
    def reshard_states(
        states: Sequence[Mapping[str, Any]], world_size: int
    ) -> list[dict[str, Any]]:
        """Return the states for another number of ranks.

        The counts since the last record go into the record of the epoch; the next record of steps
        begins after them. The losses of samples are divided among the new ranks.

        Raises:
            StateError: the states are damaged, or were not saved at the same step.
        """
        saved = [unseal_whole(state, "Monitor", MonitorState) for state in states]
        check_same("Monitor", saved, "step", "written", "epoch", "epoch_written")
        first = saved[0]
        ranks = [Counts(**state.counts) for state in saved]
        totals = Counts(**first.totals)
        if ranks[0].rows:
            if len({len(counts.rows) for counts in ranks}) > 1:
                raise StateError(
                    "the states of `Monitor` were saved at different steps: the ranks have counted "
                    "different numbers of batches. Reshard the states of one checkpoint."
                )
            totals.add(Counts.over_ranks(ranks))
        new = MonitorState(
            step=first.step,
            written=first.step,
            epoch=first.epoch,
            epoch_written=first.epoch_written,
            seconds=first.seconds + ranks[0].sums.get("rank_seconds", 0.0),
            totals=asdict(totals),
        )
        resharded = []
        for old_states in Ranks(len(states), world_size).redistribute(saved):
            samples = [loss for state in old_states for loss in state.samples]
            resharded.append(seal_whole("Monitor", replace(new, samples=samples)))
        return resharded

    def reset(self, step: int = 0) -> None:
        """Begin a run, or continue after `step` optimizer steps without a state.

        It may be called after `close`.

        Raises:
            TypeError, ValueError: `step` is not a number of steps.
        """
        step = check_count("step", step, 0)
        self._restart(MonitorState(step=step, written=step, epoch_written=step))

    def close(self, *, write: bool = True) -> None:
        """Write the counts since the last record, and close the files. Idempotent.

        All ranks call it. `with` calls it at the end of its block, with `write=False` if the block
        raises.

        Args:
            write: whether to write a record, for which the ranks wait for each other. If not, the
                counts since the last record are lost.
        """
        if write and not self._is_closed and len(self._pending):
            self._write()
        for writer in self._writers:
            writer.close()
        if self._losses is not None:
            self._losses.close()
        self._writers, self._losses = [], None
        self._is_closed = True

    @property
    def last_step(self) -> tuple[int, int] | None:
        """The epoch and step of the last counted batch."""
        last = self._order.last_counted
        return None if last is None else (last.epoch, last.step)

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *error: object) -> None:
        self.close(write=not any(error))

    def _restart(self, state: MonitorState) -> None:
        self._state, self._totals = state, Counts(**state.totals)
        counts = Counts(**state.counts)
        samples = [SampleLoss(*fields) for fields in state.samples]
        self._pending = PendingCounts(counts, samples if self._keeps_losses else None)
        self._start_s = time.perf_counter() - counts.sums.get("rank_seconds", 0.0)
        self._resumed_at = state.step
        self._order.begin()
        self._has_begun = self._is_closed = False
        self._meeting.begin()

    def _write(self) -> None:
        """Write a record of the steps since the last record. All ranks call it; rank 0 writes."""
        state, pending, meeting = self._state, self._pending, self._meeting
        self._meet()
        pending.note_memory()
        if self._stats is not None:
            pending.counts.count("rank_wait_s", self._stats.take_rank_wait_s())
        now_s = time.perf_counter()
        waited_s = meeting.wait_s  # in all meetings so far
        counts = pending.read(now_s - self._start_s)
        where = f"the monitor's record of optimizer step {state.step}"
        parts = meeting.gather_bytes(json.dumps(asdict(counts)).encode(), where)
        if pending.samples is not None:
            self._losses = self._losses or SampleLossWriter(self.folder, meeting.rank)
            self._losses.write(pending.samples, state.written, state.step)
        first = state.written + 1
        state.written = state.step
        state.seconds += counts.sums["rank_seconds"]
        self._pending = PendingCounts(Counts(), [] if self._keeps_losses else None)
        self._start_s = now_s
        self._pending.counts.count("record_wait_s", meeting.wait_s - waited_s)
        if meeting.rank == 0:
            ranks = [Counts(**json.loads(part)) for part in parts]
            whole = Counts.over_ranks(ranks, self._step_time)
            self._progress.show(self._record(STEPS, first, whole, {"shapes": counts.shapes}))
            self._totals.add(whole)
            self._warnings.check(ranks, whole, self._stats)

    @property
    def _step_time(self) -> StepTime | None:
        return TYPICAL if self._stats is None else self._stats.step_time

    def _meet(self) -> None:
        state = self._state
        self._meeting.agree({"step": state.step, "written": state.written, "every": self._every})

    def _record(self, kind: str, first: int, whole: Counts, more: Record) -> Record:
        """Write a record on rank 0, after the record of the attempt if that is not written yet."""
        state = self._state
        if not self._has_begun:
            self._has_begun = True
            self._begin_attempt(first - 1 if kind == STEPS else state.written)
        record = {
            "kind": kind,
            "first_step": first,
            "step": state.written,
            "epoch": state.epoch,
            "seconds": state.seconds,
            **whole.groups(),
            **more,
            "time_s": time.time(),
        }
        for writer in self._writers:
            writer.write(record)
        return record

    def _begin_attempt(self, step: int) -> None:
        """Make the writers, and pass them the record of the attempt."""
        loader = None if self._stats is None else self._stats.loader
        attempt = {
            "kind": ATTEMPT,
            "version": VERSION,
            "step": step,
            "resumed_at": self._resumed_at,
            "time_s": time.time(),
            "every": self._every,
            "world_size": self._meeting.world_size,
            "loader": loader_settings(loader.options) if isinstance(loader, ODBDataLoader) else {},
            "step_time": None if self._step_time is None else vars(self._step_time),
            "config": self._config,
            "versions": versions(),
        }
        if not self._writers:
            self._writers = [make_writer(kind, self.folder) for kind in self._kinds]
        for writer in self._writers:
            writer.begin(attempt)

    def _end_epoch(self) -> None:
        """Write the record of an epoch that has ended. All ranks call it."""
        if len(self._pending):
            self._write()
        state = self._state
        if state.written > state.epoch_written:  # equal on all ranks, even right after a resume
            self._meet()
        if self._meeting.rank == 0 and self._totals.sums:
            self._record(EPOCH, state.epoch_written + 1, self._totals, {})
            self._warnings.check_epoch(state.epoch, self._totals)
            balance = self._totals.groups()["mean"].get("time_balance")
            if balance is not None and self._meeting.world_size > 1:
                text = "epoch %d: ranks are level in time to %.1f %%; `odb-nodes report` says more"
                logger.info(text, state.epoch, 100 * balance)
        self._totals = Counts()
        state.epoch_written = state.written
