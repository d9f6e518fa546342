"""The statistics of a loader, the progress of a run, and warnings of what slows it down."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from odb_nodes._support.checks import check_type
from odb_nodes._support.progress import Bar, SlowProgress, is_terminal
from odb_nodes._support.user_warning import warn_user
from odb_nodes.core.alignment import RankAligner
from odb_nodes.core.alignment.exchange import group_rank
from odb_nodes.core.contract.graph import walk
from odb_nodes.core.loader.dataloader import ODBDataLoader
from odb_nodes.core.loader.loader import Loader
from odb_nodes.core.planning import StepTime
from odb_nodes.core.planning.step_time import TYPICAL
from odb_nodes.core.sources import SourceMixer
from odb_nodes.core.step_info import StepInfo
from odb_nodes.training.monitor.counts import COLUMNS, WAIT_US, Counts

if TYPE_CHECKING:
    from odb_nodes.core.alignment.exchange.base import ProcessGroupLike

AnyLoader = ODBDataLoader | Loader[Any]


class LoaderStats:
    """Statistics of the loader that a monitor watches."""

    def __init__(self, loader: AnyLoader) -> None:
        check_type("loader", loader, ODBDataLoader | Loader)
        self.loader = loader
        nodes = [*walk(loader.root)]
        self._aligners = [node for node in nodes if isinstance(node, RankAligner)]
        self._mixers = [node for node in nodes if isinstance(node, SourceMixer)]
        self._last_wait_s = 0.0
        self.take_rank_wait_s()

    def take_rank_wait_s(self) -> float:
        """Return the seconds of waiting for the plans of other ranks since the last call."""
        before_s = self._last_wait_s
        self._last_wait_s = self._aligners[0].exchange_wait_s if self._aligners else 0.0
        return self._last_wait_s - before_s

    @property
    def step_time(self) -> StepTime | None:
        """The step times that ranks are levelled by; of a typical model without `step_time`.

        `None` for a function of the user, which needs more than the counts of batches.
        """
        step_time = self._aligners[0].cost_estimator.step_time if self._aligners else None
        if step_time is None:
            return TYPICAL
        return step_time if isinstance(step_time, StepTime) else None

    @property
    def dry_sources(self) -> list[str]:
        """The sources of this rank that have no more items, while other sources have."""
        return [name for mixer in self._mixers for name in mixer.dry_sources]

    def samples(self) -> tuple[int, int] | None:
        """Return (done, total) samples of this rank in the epoch; `None` if unknown."""
        with suppress(TypeError):  # a dataset without a length
            if isinstance(self.loader, ODBDataLoader):
                return self.loader.samples_done, self.loader.num_samples
        return None


class RunProgress:
    """Shows the progress of a run: a bar of `watch` in a terminal, elsewhere lines in the log."""

    def __init__(self, is_on: bool, process_group: ProcessGroupLike) -> None:
        self._is_on, self._process_group = is_on, process_group
        self._bar: Bar | None = None
        self._lines: SlowProgress | None = None
        self._figures: dict[str, str] = {}

    @property
    def _is_shown(self) -> bool:
        return self._is_on and group_rank(self._process_group)[0] == 0

    def begin(self, stats: LoaderStats, first: StepInfo) -> None:
        """Draw the bar of an epoch in a terminal, unless it is drawn already."""
        if self._bar is None and is_terminal():
            done, total = stats.samples() or (first.local_samples, None)
            options = {"initial": done - first.local_samples, "unit": "sample", "leave": True}
            title = f"epoch {first.epoch}"
            self._bar = Bar(None, title, total, is_shown=self._is_shown, **options)

    def end(self) -> None:
        """Close the bar, which stays visible."""
        if self._bar is not None:
            self._bar.close()
        self._bar = None

    def show(self, record: dict[str, Any]) -> None:
        """Show the figures of this record from now on."""
        mean = record["mean"]
        self._figures = {
            "tokens/s": f"{mean['real_tokens_per_s']:,.0f}",
            "padding": f"{mean['padding_share']:.1%}",
            "waiting": f"{mean['data_wait_share']:.0%}",
        }
        if mean.get("loss") is not None:
            self._figures = {"loss": f"{mean['loss']:.4g}"} | self._figures

    def update(self, info: StepInfo, step: int, stats: LoaderStats | None) -> None:
        """Count a batch that is done."""
        if self._bar is not None:
            self._bar.set_postfix({"step": str(step)} | self._figures, refresh=False)
            self._bar.update(info.local_samples)
            return
        self._lines = self._lines or SlowProgress("optimizer steps", None)
        if self._lines.is_due and not is_terminal() and self._is_shown:
            samples = None if stats is None else stats.samples()
            parts = [f"epoch {info.epoch}"]
            if samples is not None:
                total = f" of {samples[1]:,}" if samples[0] <= samples[1] else ""
                parts.append(f"{samples[0]:,}{total} samples")
            parts += [f"{name} {value}" for name, value in self._figures.items()]
            self._lines.update(step, ", ".join(parts))


# --- warnings -------------------------------------------------------------------------------------

_MOST_WAIT_SHARE = 0.25  # warn if more of the time is spent waiting for data
_MOST_EXTRA_WAIT_SHARE = 0.2  # warn if a rank waits for more of its time than other ranks wait
_LEAST_WAIT_S = 5.0  # no warning if the whole run has waited less for data
_MOST_LATE_SHARE = 0.1  # warn if other ranks wait for a late rank for more of their time
_RECORDS_IN_A_ROW = 2  # records that must show a problem before the warning
_END_OF_EPOCH_SHARE = 0.95  # share of the samples after which sources normally run dry


class RunWarnings:
    """Checks each record, on rank 0, and warns once of each problem that slows a run down."""

    def __init__(self) -> None:
        # problem -> number of consecutive records that showed it, and the last of them
        self._in_a_row: dict[str, tuple[int, int]] = {}
        self._record = 0
        self._warned: set[str] = set()
        self._waited_s = 0.0  # waiting for data, in all records

    def check(self, ranks: Sequence[Counts], whole: Counts, stats: LoaderStats | None) -> None:
        """Check the counts of each rank in a record, and the counts of all ranks."""
        self._record += 1
        loss = whole.totals.get("loss", 0.0)
        text = f"the loss is {loss} in a record: it is not finite in at least one of its steps."
        self._warn_if("loss", not math.isfinite(loss), text, records=1)
        self._check_waits(ranks, whole.sums)
        if stats is not None and (samples := stats.samples()):
            done = samples[0] / max(samples[1], 1)
            for source in stats.dry_sources:
                self._warn_if(
                    f"source {source}",
                    done < _END_OF_EPOCH_SHARE and not ranks[0].sources.get(source),
                    f"source {source!r} ran dry before {done:.0%} of the epoch: from here on all "
                    "samples come from the other sources. Its weight is too high for its number "
                    'of samples: give `Mixing(weights="proportional")`, or `stop="cycle"`, which '
                    "begins it again.",
                )

    def check_epoch(self, epoch: int, whole: Counts) -> None:
        """Warn of tasks without a sample in the epoch."""
        for name, count in whole.sums.items():
            if name.startswith("samples/"):
                task = name.removeprefix("samples/")
                text = (
                    f"task {task!r} had no sample in epoch {epoch}. Check its source and the tasks "
                    "that `observe` returns, or leave it out of `tasks`."
                )
                self._warn_if(f"task {task}", not count, text, records=1)

    def _check_waits(self, ranks: Sequence[Counts], sums: dict[str, float]) -> None:
        seconds = [max(counts.sums["rank_seconds"], 1e-6) for counts in ranks]
        waits = [sum(counts.rows[WAIT_US::COLUMNS]) / 1e6 for counts in ranks]
        shares = [wait_s / rank_s for wait_s, rank_s in zip(waits, seconds, strict=True)]
        rank = int(np.argmax(shares))
        typical = _median_without(shares, rank)
        self._waited_s += sum(waits)
        self._warn_if(
            f"rank {rank} waits for data",
            shares[rank] > typical + _MOST_EXTRA_WAIT_SHARE and self._waited_s > _LEAST_WAIT_S,
            f"rank {rank} waits for batches {shares[rank]:.0%} of its time, the other ranks "
            f"{typical:.0%}, and all wait for it in each step. Look at the disk or network that "
            "its host reads from, and at other processes on the host.",
        )
        waited = sums["data_wait_s"] / max(sums["rank_seconds"], 1e-6)
        self._warn_if(
            "data",
            waited > _MOST_WAIT_SHARE and self._waited_s > _LEAST_WAIT_S,
            f"{waited:.0%} of the time goes into waiting for batches: samples are processed more "
            "slowly than they are trained on. Give the loader more workers (`num_workers`, "
            "`WorkerOptions`), or do less per sample in `process_fn`.",
        )
        # At a record, all ranks wait for the rank that comes last: that rank waits least.
        waits = [counts.sums.get("record_wait_s", 0.0) for counts in ranks]
        shares = [wait_s / rank_s for wait_s, rank_s in zip(waits, seconds, strict=True)]
        rank = int(np.argmin(shares))
        typical = _median_without(shares, rank)
        self._warn_if(
            f"rank {rank} is late",
            typical - shares[rank] > _MOST_LATE_SHARE,
            f"rank {rank} is slower than the other ranks: they wait {typical:.0%} of their time "
            "for it at each record. Look at its other work between steps.",
        )

    def _warn_if(
        self, problem: str, is_present: bool, message: str, *, records: int = _RECORDS_IN_A_ROW
    ) -> None:
        """Warn once of a problem that `records` records in a row show."""
        if not is_present:
            return
        count, record = self._in_a_row.get(problem, (0, 0))
        count = count + 1 if record == self._record - 1 else 1
        self._in_a_row[problem] = count, self._record
        if count >= records and problem not in self._warned:
            self._warned.add(problem)
            warn_user(message)


def _median_without(values: Sequence[float], index: int) -> float:
    """Return the median of the other values, or the only value."""
    return median([*values[:index], *values[index + 1 :]] or values)
