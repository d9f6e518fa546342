"""Warnings of what holds a run up, once of each kind."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

import numpy as np

from odb_nodes._core.user_warning import warn_user
from odb_nodes.monitor.metrics import COLUMNS
from odb_nodes.monitor.watched import Watched
from odb_nodes.monitor.window import Share, Totals

_WAIT_SHARE = 0.25  # of the time; above, the device starves
_MORE_WAIT = 0.2  # of the time, than the other ranks
_LEAST_S = 5.0  # of waiting for data, before it is worth a word
_LATE_SHARE = 0.1  # of the time, by which a rank is late
_RECORDS = 2  # in a row, before it is no accident
_END_OF_EPOCH = 0.95  # share of the samples; afterwards all sources run dry


class Notices:
    """Looks at each record, on rank 0."""

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}
        self._said: set[str] = set()
        self._waited_s = 0.0  # for data, in all records

    def look(self, shares: Sequence[Share], totals: Totals, watched: Watched | None) -> None:
        """Warn of what holds the run up."""
        self._waited_s += totals.sums["data_wait_s"]
        loss = totals.totals.get("loss", 0.0)
        self._note(
            "loss",
            not math.isfinite(loss),
            f"the loss is {loss} in a record: it is not finite in one of its steps or more.",
            records=1,
        )
        self._look_at_waits(shares, totals)
        self._look_at_lateness(shares)
        if watched is not None:
            self._look_at_sources(shares[0], watched)

    def look_at_epoch(self, epoch: int, totals: Totals) -> None:
        """Warn of tasks that an epoch had nothing of."""
        counts = {name: count for name, count in totals.sums.items() if name.startswith("samples/")}
        for task in (name.removeprefix("samples/") for name, count in counts.items() if not count):
            self._note(
                f"task {task}",
                True,
                f"task {task!r} had no sample in epoch {epoch}. Look at what its source yields and "
                "`observe` returns, or leave it out of `tasks`.",
                records=1,
            )

    def _look_at_waits(self, shares: Sequence[Share], totals: Totals) -> None:
        waits = [sum(one.rows[COLUMNS - 1 :: COLUMNS]) / 1e6 for one in shares]
        parts = [wait_s / max(one.seconds, 1e-6) for wait_s, one in zip(waits, shares, strict=True)]
        rank, others = _highest(parts)
        self._note(
            f"rank {rank} waits for data",
            parts[rank] > others + _MORE_WAIT and self._waited_s > _LEAST_S,
            f"rank {rank} waits for batches {parts[rank]:.0%} of its time, the other ranks "
            f"{others:.0%}, and all wait for it in each step. Look at what its host reads from, "
            "and at what else runs there.",
        )
        waited = totals.sums["data_wait_s"] / max(totals.sums["rank_seconds"], 1e-6)
        self._note(
            "data",
            waited > _WAIT_SHARE and self._waited_s > _LEAST_S,
            f"{waited:.0%} of the time goes into waiting for batches: samples are processed more "
            "slowly than they are trained on. Give the loader more workers (`num_workers`, "
            "`WorkerOptions`), or do less per sample in `process_fn`.",
        )

    def _look_at_lateness(self, shares: Sequence[Share]) -> None:
        """Compare how long ranks wait at a record for the rank that comes last."""
        waits = [one.sums.get("record_wait_s", 0.0) / max(one.seconds, 1e-6) for one in shares]
        rank, others = _highest([-wait for wait in waits])
        self._note(
            f"rank {rank} is late",
            -others - waits[rank] > _LATE_SHARE,
            f"rank {rank} is slower than the others: they wait {-others:.0%} of their time for it "
            "where a record is written. Look at what else it does between steps.",
        )

    def _look_at_sources(self, share: Share, watched: Watched) -> None:
        for source in watched.dry_sources:
            done = watched.share_done
            self._note(
                f"source {source}",
                done < _END_OF_EPOCH and not share.sources.get(source),
                f"source {source!r} ran dry before {done:.0%} of the epoch: the other sources are "
                "all that comes now. Its weight is too high for its number of samples: give "
                '`Mixing(weights="proportional")`, or `stop="cycle"`, which begins it again.',
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
