"""What a loader tells beside its batches, and the bar that shows how far it is."""

from __future__ import annotations

from typing import Any

from tqdm import tqdm

from odb_nodes._core.checks import check_type
from odb_nodes.alignment import RankAligner
from odb_nodes.contract.graph import walk
from odb_nodes.loader.dataloader import ODBDataLoader
from odb_nodes.loader.loader import Loader
from odb_nodes.monitor.window import Totals
from odb_nodes.sources import SourceMixer
from odb_nodes.step_info import STEP_INFO_KEY, StepInfo

AnyLoader = ODBDataLoader | Loader[Any]


class Watched:
    """The loader that a monitor watches.

    Args:
        loader: the loader of this rank.
        world_size: number of ranks that share the monitor.

    Raises:
        TypeError: it is none.
        ValueError: its ranks end an epoch apart.
    """

    def __init__(self, loader: AnyLoader, world_size: int) -> None:
        check_type("loader", loader, ODBDataLoader | Loader)
        self.loader = loader
        nodes = [*walk(loader.root)]
        self._aligner = next((one for one in nodes if isinstance(one, RankAligner)), None)
        self._mixers = [one for one in nodes if isinstance(one, SourceMixer)]
        if world_size > 1 and self._aligner is not None and self._aligner.uneven == "join":
            raise ValueError(
                '`loader` must not have `uneven="join"` under a `Monitor` of several ranks: those '
                "that end an epoch first would wait for the others where a record is written. Use "
                '`uneven="fill"` or `uneven="stop"`.'
            )
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

    def bar(self, first: Any, *, is_shown: bool) -> tqdm[Any]:
        """Return a progress bar of the epoch; none is seen where stderr is no terminal.

        Args:
            first: the first batch, which is not counted yet.
            is_shown: whether to show one.
        """
        info, total = first[STEP_INFO_KEY], self._total()
        return tqdm(
            desc=f"epoch {info.epoch}",
            total=total,
            initial=self._done_before(info) if total else 0,
            unit="sample",
            disable=None if is_shown else True,
        )

    def _done_before(self, info: StepInfo) -> int:
        return int(self.loader.samples_done) - info.local_samples  # type: ignore[union-attr]

    def _total(self) -> int | None:
        """Return the samples of an epoch on this rank, where they are known."""
        try:
            return self.loader.num_samples if isinstance(self.loader, ODBDataLoader) else None
        except TypeError:
            return None


def show(bar: tqdm[Any] | None, totals: Totals) -> None:
    """Show the rates of a record beside a progress bar, if there is one."""
    if bar is None or bar.disable:
        return
    mean = totals.groups()["mean"]
    shown = {"padding": f"{mean['padding_share']:.1%}"}
    shown["tokens/s"] = f"{mean['real_tokens_per_s']:,.0f}"
    if mean.get("loss") is not None:
        shown["loss"] = f"{mean['loss']:.4g}"
    bar.set_postfix(shown, refresh=False)
