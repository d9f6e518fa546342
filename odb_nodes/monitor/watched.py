"""What a loader tells beside its batches, and the bar that shows how far it is."""

from __future__ import annotations

from typing import Any

from odb_nodes._core.checks import check_type
from odb_nodes._core.progress import Bar, Interval, is_terminal, logger
from odb_nodes.alignment import RankAligner
from odb_nodes.alignment.exchange import group_rank
from odb_nodes.contract.graph import walk
from odb_nodes.loader.dataloader import ODBDataLoader
from odb_nodes.loader.loader import Loader
from odb_nodes.monitor.window import Totals
from odb_nodes.sources import SourceMixer
from odb_nodes.step_info import STEP_INFO_KEY, StepInfo

AnyLoader = ODBDataLoader | Loader[Any]


class Watched:
    """The loader that a monitor watches."""

    def __init__(self, loader: AnyLoader) -> None:
        check_type("loader", loader, ODBDataLoader | Loader)
        self.loader = loader
        nodes = [*walk(loader.root)]
        self._aligner = next((one for one in nodes if isinstance(one, RankAligner)), None)
        self._mixers = [one for one in nodes if isinstance(one, SourceMixer)]
        self._taken_s = self._rank_wait_s

    @property
    def _rank_wait_s(self) -> float:
        return 0.0 if self._aligner is None else self._aligner.exchange_wait_s

    def take_rank_wait_s(self) -> float:
        """Return the seconds that the plans of other ranks were waited for since the last call."""
        before_s, self._taken_s = self._taken_s, self._rank_wait_s
        return self._taken_s - before_s

    @property
    def dry_sources(self) -> list[str]:
        """The sources of this rank that have no more items in the epoch, where others have."""
        return [name for mixer in self._mixers for name in mixer.dry_sources]

    @property
    def share_done(self) -> float:
        """Share of the epoch's samples that is done on this rank; 1.0 where it is not known."""
        total = self._total()
        return self.loader.samples_done / total if total else 1.0  # type: ignore[union-attr]

    def bar(self, first: Any, *, is_shown: bool) -> Bar:
        """Return a progress bar of the epoch."""
        info, total = first[STEP_INFO_KEY], self._total()
        done = self._done_before(info) if total else 0
        options = {"initial": done, "unit": "sample", "leave": True}
        return Bar(None, f"epoch {info.epoch}", total, is_shown=is_shown, **options)

    def samples(self) -> str:
        """Return how many samples of the epoch are done on this rank; "" where it is not known."""
        total = self._total()
        return "" if total is None else f"{self.loader.samples_done:,} of {total:,} samples"  # type: ignore[union-attr]

    def _done_before(self, info: StepInfo) -> int:
        return int(self.loader.samples_done) - info.local_samples  # type: ignore[union-attr]

    def _total(self) -> int | None:
        """Return the samples of an epoch on this rank, where they are known."""
        try:
            return self.loader.num_samples if isinstance(self.loader, ODBDataLoader) else None
        except TypeError:
            return None


class RunProgress:
    """Shows how far a run is: by a bar in a terminal, under `watch`, and elsewhere by lines."""

    def __init__(self, is_on: bool, process_group: Any) -> None:
        self._is_on, self._process_group = is_on, process_group
        self._bar: Bar | None = None
        self._interval: Interval | None = None
        self._figures: dict[str, str] = {}

    @property
    def _is_shown(self) -> bool:
        return self._is_on and group_rank(self._process_group)[0] == 0

    def begin(self, watched: Watched, first: Any) -> None:
        """Draw the bar of an epoch, unless it is drawn, or nobody would see it."""
        if self._bar is None and is_terminal():
            self._bar = watched.bar(first, is_shown=self._is_shown)

    def end(self) -> None:
        """Leave the bar as it is: the epoch has ended, or is left."""
        if self._bar is not None:
            self._bar.close()
        self._bar = None

    def note(self, totals: Totals) -> None:
        """Show the figures of a record from now on."""
        mean = totals.groups()["mean"]
        shown = {"loss": f"{mean['loss']:.4g}"} if mean.get("loss") is not None else {}
        shown["tokens/s"] = f"{mean['real_tokens_per_s']:,.0f}"
        shown["padding"] = f"{mean['padding_share']:.1%}"
        shown["waiting"] = f"{mean['data_wait_share']:.0%}"
        self._figures = shown

    def update(self, info: StepInfo, step: int, watched: Watched | None) -> None:
        """Show that a batch is done."""
        if self._bar is not None:
            self._bar.set_postfix({"step": str(step)} | self._figures, refresh=False)
            self._bar.update(info.local_samples)
            return
        if self._interval is None:
            self._interval = Interval()
        passed_s = self._interval.due_s()
        if passed_s is None or is_terminal() or not self._is_shown:
            return
        samples = watched.samples() if watched is not None else ""
        parts = [
            f"step {step} after {passed_s:.0f} s: epoch {info.epoch}",
            *[samples] * bool(samples),
        ]
        parts += [f"{name} {value}" for name, value in self._figures.items()]
        logger.warning("%s", ", ".join(parts))
