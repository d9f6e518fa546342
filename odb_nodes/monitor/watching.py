"""What a loader tells beside its batches, how far a run is, and warnings of what holds it up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from statistics import median
from typing import Any

import numpy as np

from odb_nodes._core.checks import check_type
from odb_nodes._core.progress import Bar, SlowProgress, is_terminal
from odb_nodes._core.user_warning import warn_user
from odb_nodes.alignment import RankAligner
from odb_nodes.alignment.exchange import group_rank
from odb_nodes.contract.graph import walk
from odb_nodes.loader.dataloader import ODBDataLoader
from odb_nodes.loader.loader import Loader
from odb_nodes.monitor.window import COLUMNS, Counts
from odb_nodes.planning import StepTime
from odb_nodes.planning.step_time import TYPICAL
from odb_nodes.sources import SourceMixer
from odb_nodes.step_info import StepInfo

AnyLoader = ODBDataLoader | Loader[Any]


class LoaderStats:
    """The loader that a monitor watches."""

    def __init__(self, loader: AnyLoader) -> None:
        check_type("loader", loader, ODBDataLoader | Loader)
        self.loader = loader
        nodes = [*walk(loader.root)]
        self._aligners = [one for one in nodes if isinstance(one, RankAligner)]
        self._mixers = [one for one in nodes if isinstance(one, SourceMixer)]
        self._taken_s = 0.0
        self.take_rank_wait_s()

    def take_rank_wait_s(self) -> float:
        """Return the seconds that the plans of other ranks were waited for since the last call."""
        before_s = self._taken_s
        self._taken_s = self._aligners[0].exchange_wait_s if self._aligners else 0.0
        return self._taken_s - before_s

    @property
    def step_time(self) -> StepTime:
        """What ranks are levelled by; that of a typical model where it is not known."""
        given = self._aligners[0].measure.step_time if self._aligners else None
        return given if isinstance(given, StepTime) else TYPICAL

    @property
    def dry_sources(self) -> list[str]:
        """The sources of this rank that have no more items in the epoch, where others have."""
        return [name for mixer in self._mixers for name in mixer.dry_sources]

    def samples(self) -> tuple[int, int] | None:
        """Return the samples done, and those of the epoch on this rank, where they are known."""
        with suppress(TypeError):  # a dataset without a length
            if isinstance(self.loader, ODBDataLoader):
                return self.loader.samples_done, self.loader.num_samples
        return None


class RunProgress:
    """Shows how far a run is: by a bar in a terminal, under `watch`, and elsewhere by lines."""

    def __init__(self, is_on: bool, process_group: Any) -> None:
        self._is_on, self._process_group = is_on, process_group
        self._bar: Bar | None = None
        self._lines: SlowProgress | None = None
        self._figures: dict[str, str] = {}

    @property
    def _is_shown(self) -> bool:
        return self._is_on and group_rank(self._process_group)[0] == 0

    def begin(self, stats: LoaderStats, first: StepInfo) -> None:
        """Draw the bar of an epoch, unless it is drawn, or nobody would see it."""
        if self._bar is None and is_terminal():
            done, total = stats.samples() or (first.local_samples, None)
            options = {"initial": done - first.local_samples, "unit": "sample", "leave": True}
            what = f"epoch {first.epoch}"
            self._bar = Bar(None, what, total, is_shown=self._is_shown, **options)

    def end(self) -> None:
        """Leave the bar as it is: the epoch has ended, or is left."""
        if self._bar is not None:
            self._bar.close()
        self._bar = None

    def note(self, record: dict[str, Any]) -> None:
        """Show the figures of a record from now on."""
        mean = record["mean"]
        shown = {"loss": f"{mean['loss']:.4g}"} if mean.get("loss") is not None else {}
        shown["tokens/s"] = f"{mean['real_tokens_per_s']:,.0f}"
        shown["padding"] = f"{mean['padding_share']:.1%}"
        self._figures = shown | {"waiting": f"{mean['data_wait_share']:.0%}"}

    def update(self, info: StepInfo, step: int, stats: LoaderStats | None) -> None:
        """Show that a batch is done."""
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

_WAIT_SHARE = 0.25  # of the time; above, the device starves
_MORE_WAIT = 0.2  # of the time, than the other ranks
_LEAST_S = 5.0  # of waiting for data, before it is worth a word
_LATE_SHARE = 0.1  # of the time, by which a rank is late
_RECORDS = 2  # in a row, before it is no accident
_END_OF_EPOCH = 0.95  # share of the samples; afterwards all sources run dry


class RunWarnings:
    """Looks at each record, on rank 0, and warns once of each kind of thing that holds a run up."""

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}  # how often in a row
        self._said: set[str] = set()
        self._waited_s = 0.0  # for data, in all records

    def look(self, ranks: Sequence[Counts], whole: Counts, stats: LoaderStats | None) -> None:
        """Look at what the ranks have counted, and all of them together."""
        loss = whole.totals.get("loss", 0.0)
        text = f"the loss is {loss} in a record: it is not finite in one of its steps or more."
        self._note("loss", not math.isfinite(loss), text, records=1)
        self._look_at_waits(ranks, whole.sums)
        if stats is not None and (samples := stats.samples()):
            done = samples[0] / max(samples[1], 1)
            for source in stats.dry_sources:
                self._note(
                    f"source {source}",
                    done < _END_OF_EPOCH and not ranks[0].sources.get(source),
                    f"source {source!r} ran dry before {done:.0%} of the epoch: the other sources "
                    "are all that comes now. Its weight is too high for its number of samples: "
                    'give `Mixing(weights="proportional")`, or `stop="cycle"`, which begins it '
                    "again.",
                )

    def look_at_epoch(self, epoch: int, whole: Counts) -> None:
        """Look for tasks that an epoch had nothing of."""
        for name, count in whole.sums.items():
            if name.startswith("samples/"):
                task = name.removeprefix("samples/")
                text = f"task {task!r} had no sample in epoch {epoch}. Look at what its source "
                text += "yields and `observe` returns, or leave it out of `tasks`."
                self._note(f"task {task}", not count, text, records=1)

    def _look_at_waits(self, ranks: Sequence[Counts], sums: dict[str, float]) -> None:
        seconds = [max(one.sums["rank_seconds"], 1e-6) for one in ranks]
        waits = [sum(one.rows[COLUMNS - 1 :: COLUMNS]) / 1e6 for one in ranks]
        shares = [wait_s / one for wait_s, one in zip(waits, seconds, strict=True)]
        rank, others = _highest(shares)
        self._waited_s += sum(waits)
        self._note(
            f"rank {rank} waits for data",
            shares[rank] > others + _MORE_WAIT and self._waited_s > _LEAST_S,
            f"rank {rank} waits for batches {shares[rank]:.0%} of its time, the other ranks "
            f"{others:.0%}, and all wait for it in each step. Look at what its host reads from, "
            "and at what else runs there.",
        )
        waited = sums["data_wait_s"] / max(sums["rank_seconds"], 1e-6)
        self._note(
            "data",
            waited > _WAIT_SHARE and self._waited_s > _LEAST_S,
            f"{waited:.0%} of the time goes into waiting for batches: samples are processed more "
            "slowly than they are trained on. Give the loader more workers (`num_workers`, "
            "`WorkerOptions`), or do less per sample in `process_fn`.",
        )
        # How long ranks wait at a record for the rank that comes last.
        late = [one.sums.get("record_wait_s", 0.0) for one in ranks]
        rank, others = _highest([-wait_s / one for wait_s, one in zip(late, seconds, strict=True)])
        self._note(
            f"rank {rank} is late",
            -others - late[rank] / seconds[rank] > _LATE_SHARE,
            f"rank {rank} is slower than the others: they wait {-others:.0%} of their time for it "
            "where a record is written. Look at what else it does between steps.",
        )

    def _note(self, kind: str, is_seen: bool, message: str, *, records: int = _RECORDS) -> None:
        """Warn once of what was seen in so many records in a row."""
        self._seen[kind] = self._seen.get(kind, 0) + 1 if is_seen else 0
        if self._seen[kind] >= records and kind not in self._said:
            self._said.add(kind)
            warn_user(message)


def _highest(values: Sequence[float]) -> tuple[int, float]:
    """Return which value is the highest, and the median of the others; itself if it is alone."""
    index = int(np.argmax(values))
    return index, median([*values[:index], *values[index + 1 :]] or values)
