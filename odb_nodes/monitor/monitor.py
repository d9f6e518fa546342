"""Write down what a run does, while it trains."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from odb_nodes._core.checks import check_bool, check_count, check_seconds, check_type
from odb_nodes.alignment.exchange import group_rank
from odb_nodes.alignment.peers import PEER_TIMEOUT_S
from odb_nodes.contract.state import seal_whole, unseal_whole
from odb_nodes.monitor.batch_order import BatchOrder
from odb_nodes.monitor.device_memory import note_memory
from odb_nodes.monitor.loss_book import LossBook, SampleLoss
from odb_nodes.monitor.meeting import Meeting
from odb_nodes.monitor.metrics import timed
from odb_nodes.monitor.notices import Notices
from odb_nodes.monitor.numbers import Number, Told, not_negative
from odb_nodes.monitor.records import EPOCH, STEPS, Record
from odb_nodes.monitor.resharding import reshard_monitor
from odb_nodes.monitor.row_losses import RowLosses
from odb_nodes.monitor.settings import checked_config, loader_settings, versions
from odb_nodes.monitor.state import MonitorState
from odb_nodes.monitor.watched import AnyLoader, RunProgress, Watched
from odb_nodes.monitor.window import Share, Totals, Window
from odb_nodes.monitor.writers import RecordWriter, Writers
from odb_nodes.step_info import STEP_INFO_KEY, StepInfo

__all__ = ["Monitor"]


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
        writers: what records are written as: `"jsonl"`, which `read_run` and `report` read, and
            `"tensorboard"`, which needs the extra `tools`; and any `RecordWriter` of your own.
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
        self._meeting = Meeting(process_group, timeout_s)
        self._notices = Notices()
        self._writers = Writers(self.folder, writers)
        self._config = checked_config(config)
        self._has_book = check_bool("losses_by_sample", losses_by_sample)
        self._book: LossBook | None = None
        self._watched: Watched | None = None
        self._watch: object = None  # the newest call of `watch`
        self._is_closed = False
        self._order = BatchOrder()
        self._wait_s = 0.0  # for the next batch
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
        watched = self.attach(loader)
        self._watch = watch = object()
        self.start_clock()
        try:
            for batch, wait_s in timed(iter(loader)):
                self._progress.begin(watched, batch)
                self.waited(wait_s)
                self._order.follow(batch[STEP_INFO_KEY])
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

    def attach(self, loader: AnyLoader) -> Watched:
        """Take from a loader how long ranks wait for each other's plans; `watch` does so, too.

        The next batch that `step` is told of may be any of the loader's.

        Args:
            loader: the loader of this rank.

        Raises:
            TypeError: it is none.
        """
        if self._watched is None or loader is not self._watched.loader:
            self._watched = Watched(loader)
        self._order.begin()
        return self._watched

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
        told = Told.of(loss, weight, loss_by_source, grad_norm, lr, values)
        check_count("ooms", ooms, 0)
        if wait_s is not None:
            not_negative("wait_s", wait_s)
        if self._is_closed:
            raise ValueError("the monitor is closed: it records nothing. Make a new one.")
        self._order.note(info)
        at = self._at
        if info.epoch != at.epoch:
            self._end_epoch()
            at.epoch = info.epoch
        window = self._window  # a record begins another
        waited_s, self._wait_s = self._wait_s, 0.0
        window.add_batch(batch, info, waited_s if wait_s is None else wait_s)
        if row_losses is not None:
            window.rank = group_rank(self._process_group)[0]
            window.add_rows(row_losses, info)
            if loss is None:
                told = told._replace(loss=row_losses.sums.detach().sum() / max(told.weight, 1))
        window.add_told(told)
        if ooms:
            window.count("ooms", ooms)
        at.step += info.ends_optimizer_step
        if at.step - at.written >= self._every:
            self._write()
        if info.ends_epoch:
            self._end_epoch()
        self._progress.update(info, at.step, self._watched)

    def state_dict(self) -> dict[str, Any]:
        """Return where this rank stands; waits for losses that are being computed."""
        share = self._window.share(time.perf_counter() - self._start_s)
        state = replace(
            self._at,
            share=asdict(share),
            totals=asdict(self._totals),
            samples=[tuple(one) for one in self._window.samples or ()],  # type: ignore[misc]
        )
        return seal_whole(type(self).__name__, state)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a state. All ranks do so before the same step.

        Raises:
            StateError: it is damaged, or no state of a monitor.
        """
        self._restart(unseal_whole(state_dict, type(self).__name__, MonitorState))

    reshard_states = staticmethod(reshard_monitor)

    def reset(self, step: int = 0) -> None:
        """Begin a run, or go on with one without a state. Also after `close`.

        Args:
            step: optimizer steps of the run that are done.

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
        self._writers.close()
        if self._book is not None:
            self._book.close()
        self._book, self._is_closed = None, True

    @property
    def place(self) -> tuple[int, int] | None:
        """The epoch, and the number in it, of the batch that was counted last."""
        return self._order.place

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *error: object) -> None:
        self.close(write=not any(error))

    # --- parts ------------------------------------------------------------------------------------

    def _restart(self, at: MonitorState) -> None:
        self._at, self._totals = at, Totals(**at.totals)
        share = Share(**at.share)
        self._window = self._new_window(share, [SampleLoss(*one) for one in at.samples])
        self._start_s = time.perf_counter() - share.seconds
        self._resumed_at = at.step
        self._order.begin()
        self._has_begun = self._is_closed = False
        self._meeting.begin()

    def _write(self) -> None:
        """Have rank 0 write a record of the steps since the last one. All ranks call it."""
        at, window, meeting = self._at, self._window, self._meeting
        self._meet()
        note_memory(window)
        if self._watched is not None:
            window.count("rank_wait_s", self._watched.take_rank_wait_s())
        now_s = time.perf_counter()
        share = window.share(now_s - self._start_s)
        waited_s = meeting.wait_s
        shares = meeting.gather(share, f"the monitor's record of optimizer step {at.step}")
        if window.samples is not None:
            self._book = self._book or LossBook(self.folder, meeting.rank or 0)
            self._book.write(window.samples, at.written, at.step)
        first, at.written = at.written + 1, at.step
        at.seconds += share.seconds
        self._window, self._start_s = self._new_window(Share(), []), now_s
        self._window.count("record_wait_s", meeting.wait_s - waited_s)
        if meeting.rank == 0:
            totals = Totals.of(shares)
            self._record(STEPS, first, totals, {"shapes": share.shapes})
            self._totals.add(totals)
            self._notices.look(shares, totals, self._watched)
            self._progress.note(totals)

    def _new_window(self, share: Share, samples: list[SampleLoss]) -> Window:
        return Window(share, samples if self._has_book else None)

    def _meet(self) -> None:
        at = self._at
        self._meeting.meet({"step": at.step, "written": at.written, "every": self._every})

    def _record(self, kind: str, first: int, totals: Totals, more: dict[str, Any]) -> None:
        at = self._at
        if not self._has_begun:
            self._has_begun = True
            step = first - 1 if kind == STEPS else at.written
            attempt: Record = {"step": step, "resumed_at": self._resumed_at, "every": self._every}
            attempt["world_size"] = self._meeting.world_size
            attempt["loader"] = loader_settings(self._watched and self._watched.loader)
            self._writers.begin(attempt | {"config": self._config, "versions": versions()})
        place = {"first_step": first, "step": at.written, "epoch": at.epoch, "seconds": at.seconds}
        self._writers.write({"kind": kind} | place | totals.groups() | more)

    def _end_epoch(self) -> None:
        """Write the record of an epoch that has ended. All ranks call it."""
        if len(self._window):
            self._write()
        at = self._at
        if at.written > at.epoch_written:  # of all ranks alike, also right after a resume
            self._meet()
        if self._meeting.rank == 0 and self._totals.sums:
            self._record(EPOCH, at.epoch_written + 1, self._totals, {})
            self._notices.look_at_epoch(at.epoch, self._totals)
        self._totals, at.epoch_written = Totals(), at.written
