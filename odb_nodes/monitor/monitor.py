"""Write down what a run does, while it trains."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from odb_nodes._core.checks import check_bool, check_count, check_seconds, check_type
from odb_nodes._core.user_warning import warn_user
from odb_nodes.alignment.exchange import Meeting, group_rank
from odb_nodes.alignment.peers import PEER_TIMEOUT_S
from odb_nodes.contract import NodeState
from odb_nodes.contract.state import seal_whole, unseal_whole
from odb_nodes.errors import StateError
from odb_nodes.loader.dataloader import ODBDataLoader
from odb_nodes.loader.reshard_nodes import Ranks, check_same
from odb_nodes.monitor.losses import RowLosses, SampleLoss, SampleLossWriter
from odb_nodes.monitor.records import (
    ATTEMPT,
    EPOCH,
    STEPS,
    VERSION,
    Record,
    checked_config,
    loader_settings,
    versions,
)
from odb_nodes.monitor.watching import AnyLoader, LoaderStats, RunProgress, RunWarnings
from odb_nodes.monitor.window import (
    Counts,
    Number,
    Window,
    check_row_losses,
    not_negative,
    timed,
    told_last,
    told_values,
)
from odb_nodes.monitor.writers import RecordWriter, check_writers, make_writer
from odb_nodes.planning import StepTime
from odb_nodes.planning.step_time import TYPICAL
from odb_nodes.step_info import STEP_INFO_KEY, StepInfo

logger = logging.getLogger("odb_nodes")


@dataclass(kw_only=True)
class MonitorState(NodeState):
    """Where a monitor stands on one rank."""

    step: int = 0  # optimizer steps of the run so far
    written: int = 0  # those that are in records
    epoch: int = 0
    epoch_written: int = 0  # optimizer steps in records before this epoch
    seconds: float = 0.0  # duration of the steps that are in records
    # What was counted since, of this rank; then of all ranks, in the records of this epoch.
    counts: dict[str, Any] = field(default_factory=lambda: asdict(Counts()))
    totals: dict[str, Any] = field(default_factory=lambda: asdict(Counts()))
    samples: list[tuple[str, int, int, int, int, float, int]] = field(default_factory=list)


class Monitor:
    """Writes down what a run does: loss, tokens, padding, balance, waiting, speed, memory.

        monitor = Monitor("run", every=10)
        for batch in monitor.watch(loader):
            info = pop_step_info(batch)
            ...  # train
            monitor.step(batch, info, loss=loss, lr=optimizer.param_groups[0]["lr"])
        monitor.close()

    All ranks call `step` for each batch. After `every` optimizer steps, and at the end of an epoch,
    they exchange what they have counted, and rank 0 appends a record to `monitor.jsonl`; at the end
    of an epoch, one of all of it. See `read_run`, and the guide for what is in a record.

    A run that is resumed goes on in its folder: give the monitor's state to its checkpoint. Records
    of later steps than the checkpoint's do not count any more. A run that begins anew needs a
    folder of its own.

    State: of this rank, what was counted since the last record, plain data.

    Args:
        folder: where the records are; the same for all restarts of a run, and for no other run.
        every: optimizer steps in a record.
        writers: what takes the records: `"jsonl"`, which `read_run` and `report` read,
            `"tensorboard"`, which needs the extra `tools`, a `WandbWriter`, a `MlflowWriter`, or a
            `RecordWriter` of your own.
        config: settings of your own by name, such as `vars(args)`, which records and reports show
            beside the options of the loader and versions. What JSON does not have is kept as text.
        losses_by_sample: whether the losses that `step(row_losses=)` is told are kept for each
            sample and epoch, in a file of each rank; see `read_losses`.
        progress: whether rank 0 shows how far it is: by a progress bar of `watch` in a terminal;
            where stderr is none, by a line in the log after 10, 20 and 40 s, and then each minute.
        process_group: the ranks that share the steps, as for `RankAligner`. Default: all of the
            job.
        timeout_s: seconds until a rank that does not come is an error on the others.

    Raises:
        ImportError: TensorBoard is asked for, and not installed.
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
        process_group: Any = None,
        timeout_s: float = PEER_TIMEOUT_S,
    ) -> None:
        check_type("folder", folder, str | os.PathLike)
        check_seconds("timeout_s", timeout_s)
        self.folder = Path(folder)
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"`folder` must be a folder, but `{folder}` is a file.")
        self._every = check_count("every", every)
        self._progress = RunProgress(check_bool("progress", progress), process_group)
        self._process_group = process_group
        self._meeting = Meeting("Monitor", process_group, timeout_s)
        self._warnings = RunWarnings()
        self._kinds, self._writers = check_writers(writers), list[RecordWriter]()
        self._config = checked_config(config)
        self._keeps_losses = check_bool("losses_by_sample", losses_by_sample)
        self._losses: SampleLossWriter | None = None
        self._stats: LoaderStats | None = None
        self._watch: object = None  # the newest call of `watch`
        self._order = _BatchOrder()
        self._wait_s = 0.0  # for the next batch
        self._is_closed = False
        self._restart(MonitorState())

    def watch(self, loader: AnyLoader) -> Iterator[Any]:
        """Yield the batches of an epoch, measure the wait for each, and show a progress bar.

        The clock begins here, so that what is between two epochs counts for neither. At the end it
        warns, once, where `step` was not called.

        Args:
            loader: the loader of this rank.

        Raises:
            RuntimeError: another `watch` of this monitor has begun meanwhile.
            TypeError, ValueError: see `attach`.
        """
        stats = self.attach(loader)
        self._watch = watch = object()
        self.start_clock()
        try:
            for batch, wait_s in timed(iter(loader)):
                self._progress.begin(stats, batch[STEP_INFO_KEY])
                self.waited(wait_s)
                self._order.yielded = batch[STEP_INFO_KEY]
                yield batch
                if self._watch is not watch:
                    raise RuntimeError(
                        "another `watch` of this monitor began before this epoch had ended. For an "
                        "evaluation, iterate its loader as it is, or make a `Monitor` with a "
                        "folder of its own."
                    )
        finally:
            self._progress.end()
        self._order.end()
        self._end_epoch()

    def start_clock(self) -> None:
        """Let the time of the next record begin now, unless it has steps already."""
        if not len(self._window):
            self._start_s = time.perf_counter()

    def waited(self, wait_s: float) -> None:
        """Add to the seconds of waiting for the next batch, as `watch` does."""
        self._wait_s += wait_s

    def attach(self, loader: AnyLoader) -> LoaderStats:
        """Take from a loader how long ranks wait for each other's plans; `watch` does so, too.

        The next batch that `step` is told of may be any of the loader's.

        Raises:
            TypeError: it is no loader.
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
        """Count a batch that was trained on: call it for each, after the optimizer step if any.

        Tensors are kept as they are, and read only when a record is written.

        Args:
            batch: the batch; the shape of `input_ids` counts.
            info: its `StepInfo`.
            loss: mean over the supervised tokens of the batch, before `StepInfo.loss_scale`.
            loss_weight: what `loss` is a mean over. Default: `StepInfo.local_targets`.
            loss_by_source: name of the task, or of the source where `observe` tells no task -> sum
                of the losses, and number of its supervised tokens in the batch.
            row_losses: the loss of each sample, in place of `loss` and `loss_by_source`.
            grad_norm: norm of the gradient of the optimizer step.
            lr: learning rate of the optimizer step.
            values: further numbers of the optimizer step by name, such as weights of tasks; not by
                that of a value that `last` of a record has anyway.
            ooms: how often memory ran out on this rank.
            wait_s: seconds of waiting for the batch, for batches that do not come from `watch`.

        Raises:
            PeerError: a rank failed, or did not come, where a record is written.
            RuntimeError: another process writes into the folder.
            StateError: the ranks stand at different steps.
            TypeError, ValueError: an argument is not valid.
            ValueError: the monitor is closed, was told of this batch before, or watches another
                loader than the batch's.
        """
        check_type("info", info, StepInfo, "Pass `pop_step_info(batch)`.")
        weight = info.local_targets if loss_weight is None else loss_weight
        if row_losses is not None:
            check_row_losses(row_losses, info)
            if loss is None:
                loss = row_losses.sums.detach().sum() / max(weight, 1)
        values_told = told_values(loss, weight, loss_by_source, grad_norm)
        last_told = told_last(lr, values)
        ooms = check_count("ooms", ooms, 0)
        waited_s = self._wait_s if wait_s is None else not_negative("wait_s", wait_s)
        if self._is_closed:
            raise ValueError("the monitor is closed: it records nothing. Make a new one.")
        self._order.note(info)
        self._wait_s, at = 0.0, self._at
        if info.epoch != at.epoch:
            self._end_epoch()
            at.epoch = info.epoch
        window = self._window  # a record begins another
        window.add_batch(batch, info, waited_s, ooms)
        window.add_values(values_told, last_told)
        if row_losses is not None:
            window.add_rows(row_losses, info, group_rank(self._process_group)[0])
        at.step += info.ends_optimizer_step
        if at.step - at.written >= self._every:
            self._write()
        if info.ends_epoch:
            self._end_epoch()
        self._progress.update(info, at.step, self._stats)

    def state_dict(self) -> dict[str, Any]:
        """Return where this rank stands; waits for losses that are being computed."""
        counts = self._window.read(time.perf_counter() - self._start_s)
        samples: list[Any] = [tuple(one) for one in self._window.samples or ()]
        parts: dict[str, Any] = {"counts": asdict(counts), "totals": asdict(self._totals)}
        state = replace(self._at, samples=samples, **parts)
        return seal_whole(type(self).__name__, state)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a state. All ranks do so before the same step.

        Raises:
            StateError: it is damaged, or no state of a monitor.
        """
        self._restart(unseal_whole(state_dict, type(self).__name__, MonitorState))

    @staticmethod
    def reshard_states(
        states: Sequence[Mapping[str, Any]], world_size: int
    ) -> list[dict[str, Any]]:
        """Return the states of a job that goes on with another number of ranks.

        What was counted since the last record is of ranks that are no more: it counts in the record
        of the epoch, and the next record of steps begins after it. Losses of samples are dealt.

        Raises:
            StateError: the states are damaged, or were not saved at the same step.
        """
        found = [unseal_whole(state, "Monitor", MonitorState) for state in states]
        check_same("Monitor", found, "step", "written", "epoch", "epoch_written")
        first, ranks = found[0], [Counts(**one.counts) for one in found]
        totals = Counts(**first.totals)
        if ranks[0].rows:
            if len({len(one.rows) for one in ranks}) > 1:
                raise StateError(
                    "the states of Monitor are of different places: the ranks have counted "
                    "different numbers of steps. Reshard the states of one checkpoint."
                )
            totals.add(Counts.over_ranks(ranks))
        at = MonitorState(
            step=first.step,
            written=first.step,
            epoch=first.epoch,
            epoch_written=first.epoch_written,
            seconds=first.seconds + ranks[0].sums.get("rank_seconds", 0.0),
            totals=asdict(totals),
        )
        return [
            seal_whole("Monitor", replace(at, samples=[one for s in own for one in s.samples]))
            for own in Ranks(len(states), world_size).redistribute(found)
        ]

    def reset(self, step: int = 0) -> None:
        """Begin a run, or go on without a state after `step` optimizer steps; also after `close`.

        Raises:
            TypeError, ValueError: it is no number of steps.
        """
        step = check_count("step", step, 0)
        self._restart(MonitorState(step=step, written=step, epoch_written=step))

    def close(self, *, write: bool = True) -> None:
        """Write what was counted since the last record, and close the files. Idempotent.

        All ranks call it. `with` does so where its block ends, without writing where that raises.

        Args:
            write: whether to write; if not, no rank is waited for, and these counts are lost.
        """
        if write and not self._is_closed and len(self._window):
            self._write()
        for writer in self._writers:
            writer.close()
        if self._losses is not None:
            self._losses.close()
        self._writers, self._losses, self._is_closed = [], None, True

    @property
    def place(self) -> tuple[int, int] | None:
        """The epoch, and the number in it, of the batch that was counted last."""
        return None if self._order.last is None else _place(self._order.last)

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *error: object) -> None:
        self.close(write=not any(error))

    # --- parts ------------------------------------------------------------------------------------

    def _restart(self, at: MonitorState) -> None:
        self._at, self._totals = at, Counts(**at.totals)
        counts = Counts(**at.counts)
        samples = [SampleLoss(*one) for one in at.samples]
        self._window = Window(counts, samples if self._keeps_losses else None)
        self._start_s = time.perf_counter() - counts.sums.get("rank_seconds", 0.0)
        self._resumed_at = at.step
        self._order.begin()
        self._has_begun = self._is_closed = False
        self._meeting.begin()

    def _write(self) -> None:
        """Have rank 0 write a record of the steps since the last one. All ranks call it."""
        at, window, meeting = self._at, self._window, self._meeting
        self._meet()
        window.note_memory()
        if self._stats is not None:
            window.counts.count("rank_wait_s", self._stats.take_rank_wait_s())
        now_s, waited_s = time.perf_counter(), meeting.wait_s
        counts = window.read(now_s - self._start_s)
        where = f"the monitor's record of optimizer step {at.step}"
        parts = meeting.gather_bytes(json.dumps(asdict(counts)).encode(), where)
        if window.samples is not None:
            self._losses = self._losses or SampleLossWriter(self.folder, meeting.rank)
            self._losses.write(window.samples, at.written, at.step)
        first, at.written = at.written + 1, at.step
        at.seconds += counts.sums["rank_seconds"]
        self._window = Window(Counts(), [] if self._keeps_losses else None)
        self._start_s = now_s
        self._window.counts.count("record_wait_s", meeting.wait_s - waited_s)
        if meeting.rank == 0:
            ranks = [Counts(**json.loads(part)) for part in parts]
            whole = Counts.over_ranks(ranks, self._step_time)
            self._progress.note(self._record(STEPS, first, whole, {"shapes": counts.shapes}))
            self._totals.add(whole)
            self._warnings.look(ranks, whole, self._stats)

    @property
    def _step_time(self) -> StepTime:
        return TYPICAL if self._stats is None else self._stats.step_time

    def _meet(self) -> None:
        at = self._at
        self._meeting.agree({"step": at.step, "written": at.written, "every": self._every})

    def _record(self, kind: str, first: int, whole: Counts, more: Record) -> Record:
        """Write a record, on rank 0, and before the first one since a start what begins there."""
        at, time_s = self._at, time.time()
        if not self._has_begun:
            self._has_begun = True
            loader = None if self._stats is None else self._stats.loader
            options = loader.options if isinstance(loader, ODBDataLoader) else None
            attempt = {
                "kind": ATTEMPT,
                "version": VERSION,
                "step": first - 1 if kind == STEPS else at.written,
                "resumed_at": self._resumed_at,
                "time_s": time_s,
                "every": self._every,
                "world_size": self._meeting.world_size,
                "loader": {} if options is None else loader_settings(options),
                "step_time": vars(self._step_time),
                "config": self._config,
                "versions": versions(),
            }
            self._writers = self._writers or [make_writer(one, self.folder) for one in self._kinds]
            for writer in self._writers:
                writer.begin(attempt)
        place = {"first_step": first, "step": at.written, "epoch": at.epoch, "seconds": at.seconds}
        record = {"kind": kind, **place, **whole.groups(), **more, "time_s": time_s}
        for writer in self._writers:
            writer.write(record)
        return record

    def _end_epoch(self) -> None:
        """Write the record of an epoch that has ended. All ranks call it."""
        if len(self._window):
            self._write()
        at = self._at
        if at.written > at.epoch_written:  # of all ranks alike, also right after a resume
            self._meet()
        if self._meeting.rank == 0 and self._totals.sums:
            self._record(EPOCH, at.epoch_written + 1, self._totals, {})
            self._warnings.look_at_epoch(at.epoch, self._totals)
            level = self._totals.groups()["mean"].get("time_balance")
            if level is not None and self._meeting.world_size > 1:
                text = "epoch %d: ranks are level in time to %.1f %%; `odb-nodes report` says more"
                logger.info(text, at.epoch, 100 * level)
        self._totals, at.epoch_written = Counts(), at.written


class _BatchOrder:
    """Makes sure that a monitor is told of each batch of its loader once, and of no other."""

    def __init__(self) -> None:
        self.last: StepInfo | None = None  # of the batch that was told last
        self.yielded: StepInfo | None = None  # of the last batch of `watch`, before the next
        self._is_warned = False

    def begin(self) -> None:
        """Let the next batch be any one: a loader begins, or goes on from a state."""
        self.last = self.yielded = None

    def note(self, info: StepInfo) -> None:
        """Note that a batch is told. Warn, once, where others are missing before it."""
        last, end, now = self.last, self.yielded, _place(info)
        problem = ""
        if end is not None and now > _place(end):
            problem = f", but its loader stands at step {end.step} of epoch {end.epoch}"
        elif last is not None and now < _place(last):
            problem = f" after step {last.step} of epoch {last.epoch}"
        # A step that a trainer repeats has further micro-steps.
        elif last is not None and (now, info.micro_step) == (_place(last), last.micro_step):
            problem = ", for which it was called again: call it once for each batch"
        if problem:
            raise ValueError(
                f"`step` of the monitor came for step {info.step} of epoch {info.epoch}{problem}. "
                "A monitor counts the batches of one loader: do not call `step` for those of an "
                "evaluation, or give that a `Monitor` with a folder of its own. Where the loader "
                "begins anew without `watch`, call `attach` before."
            )
        self.last = info
        expected = last.step + 1 if last is not None and info.epoch == last.epoch else 0
        if last is not None and info.step > expected:
            self._warn(f"step {expected} of epoch {info.epoch}")

    def end(self) -> None:
        """Note that the epoch of `watch` ends. Warn, once, if its last batch was not told."""
        last, end = self.last, self.yielded
        if end is not None and (last is None or _place(last) != _place(end)):
            step = "any step" if last is None else f"step {end.step}"
            self._warn(f"{step} of epoch {end.epoch}")

    def _warn(self, untold: str) -> None:
        if not self._is_warned:
            self._is_warned = True
            warn_user(
                f"`step` of the monitor was not called for {untold}: its samples are missing in "
                "the records. Call it for each batch; without `loss` for one that you leave out."
            )


def _place(info: StepInfo) -> tuple[int, int]:
    return info.epoch, info.step
