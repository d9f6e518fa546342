"""The limit, the other ranks and the counts of an `OomGuard`, which its steps share."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, get_args

from torch import nn

from odb_nodes._support.checks import check_choice, check_count, check_number, check_type
from odb_nodes.core.alignment import RankAligner
from odb_nodes.core.alignment.aligned_round import LossRule
from odb_nodes.core.alignment.exchange import Channel, FailureWatch
from odb_nodes.core.alignment.peers import Peers
from odb_nodes.core.alignment.virtual_ranks import VirtualRanks
from odb_nodes.core.contract.graph import budget_below, walk
from odb_nodes.core.loader.dataloader import ODBDataLoader
from odb_nodes.core.loader.loader import Loader
from odb_nodes.core.nodes import GroupCollator
from odb_nodes.core.planning import TokenBudget
from odb_nodes.core.planning.group_costs import cost_of_group
from odb_nodes.core.step_info import StepInfo, pop_step_info
from odb_nodes.errors import PeerError
from odb_nodes.training.memory.meter import MemoryMeter, check_meter, is_out_of_memory, measuring
from odb_nodes.training.memory.step_parts import StepPart

logger = logging.getLogger("odb_nodes")

OnOom = Literal["split", "skip", "raise"]

_LEAST_FAILED_SHARE = 0.25  # share of the limit: `shrink` counts a failed part as at least this


class GuardContext:
    """What the steps of an `OomGuard` share: the limit, the other ranks, and the counts."""

    def __init__(
        self,
        loader: ODBDataLoader | Loader[Any],
        on_oom: OnOom,
        guard_above: float,
        limit: int | None,
        shrink: float | None,
        meter: MemoryMeter | None,
    ) -> None:
        check_choice("on_oom", on_oom, get_args(OnOom))
        check_number("guard_above", guard_above, "[0, 1]")
        self.collator, self.aligner = _nodes_of(loader)
        budget = budget_below(self.collator)
        if shrink is not None:
            check_number("shrink", shrink, "(0, 1)")
        _check_graph(budget, self.aligner, shrink)
        budget_tokens = None if budget is None else budget.tokens
        self.on_oom, self._shrink = on_oom, shrink
        self.guard_above = guard_above
        self.limit = budget_tokens if limit is None else check_count("limit", limit)
        self.fitting_cost = self.limit  # a batch of this cost fits on this rank
        self.cost = partial(cost_of_group, budget=budget)
        self.meter = None if meter is None else check_meter(meter)
        self.rule = LossRule(accumulate=1, world_size=1)
        self._peers: Peers | None = None  # `None` on a single rank
        self.channel: Channel | None = None
        self.rank = 0
        self.watch: FailureWatch | None = None
        # Models that passed `check_has_all`. The guard must not keep a model alive: freeing DDP
        # after `destroy_process_group` may hang, holding the GIL that DDP's threads need.
        self.checked_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._skipped_in_a_row = 0  # samples of all ranks, in the last steps, all skipped whole
        self.ooms = self.split_steps = self.skipped_samples = 0
        self.peak_share = 0.0
        # Since the last `take_counts`:
        self._new_ooms = self._new_parts = self._new_batches = 0
        self._new_share = 0.0  # like `peak_share`

    def take_counts(self) -> tuple[int, int, int, float]:
        """Return the out-of-memory errors, parts, batches and peak share since the last call."""
        counts = self._new_ooms, self._new_parts, self._new_batches, self._new_share
        self._new_ooms = self._new_parts = self._new_batches = 0
        self._new_share = 0.0
        return counts

    # --- the other ranks --------------------------------------------------------------------------

    def connect(self, owner: str) -> None:
        """Connect to the other ranks, and compare the options that all ranks must share."""
        if self.aligner is None:
            return
        self.rule = self.aligner.rule
        if self.rule.world_size == 1:
            return
        if self._peers is None:
            message_size = 2 * self.aligner.accumulate
            self._peers = self.aligner.peers.with_new_connections(message_size)
        self.stop_watching()
        self._peers.begin()
        self.channel, self.rank = self._peers.channel, self._peers.channel.rank
        options = {
            "on_oom": self.on_oom,
            "guard_above": self.guard_above,
            "limit": self.limit,
            "shrink": self._shrink,
        }
        self.channel.agree({owner: options})
        self.watch = FailureWatch(self.channel)

    def stop_watching(self) -> None:
        """End the watch: the loop is over, and this rank waits for no other rank."""
        if self.watch is not None:
            self.watch.close()

    def fail(self, error: BaseException, where: str) -> None:
        """Tell the other ranks why this rank fails, wherever they wait for it."""
        if self._peers is None:
            return
        if self.watch is not None:
            reason = f"{where}: {type(error).__name__}: {error}"
            self.watch.publish(PeerError(f"rank {self.rank} failed in {reason}"))
        self._peers.fail(error, where)

    def raise_published(self, error: BaseException) -> None:
        """Raise the error that another rank has published, if any: it is the cause of `error`."""
        published = None if self.watch is None else self.watch.read()
        if published is not None:
            raise published from error

    # --- the parts of a step ----------------------------------------------------------------------

    def is_guarded(self, infos: Sequence[StepInfo]) -> bool:
        """Tell whether a step may run out of memory; the answer is equal on all ranks."""
        most = max(info.most_cost for info in infos)
        return self.limit is None or most > self.guard_above * self.limit

    def collate(self, part: StepPart) -> Any:
        """Return the batch of a part."""
        batch = self.collator.collate(part.samples, part.info, part.number)
        pop_step_info(batch)
        return batch

    @contextmanager
    def computing(self, part: StepPart) -> Iterator[None]:
        """Measure a part; with `on_oom="raise"`, count out-of-memory errors here."""
        meter = self.meter
        try:
            with measuring(meter):
                if meter is not None:
                    meter.reset()
                yield
                if meter is not None:
                    share = meter.peak_bytes() / meter.limit_bytes
                    self._new_share = max(self._new_share, share)
                    self.peak_share = max(self.peak_share, share)
        except Exception as error:
            if self.on_oom == "raise" and is_out_of_memory(error):
                self.note_oom(part, "the error is raised", shrinks=False)
            raise

    def note_oom(self, failed: StepPart, remedy: str, *, shrinks: bool = True) -> None:
        """Count and log an out-of-memory error, and request a smaller budget."""
        self.ooms += 1
        self._new_ooms += 1
        logger.warning(
            "rank %d ran out of memory in step %d of epoch %d, with %d samples, %d tokens: %s",
            self.rank,
            failed.info.step,
            failed.info.epoch,
            len(failed.samples),
            sum(sample.tokens for sample in failed.samples),
            remedy,
        )
        if self._shrink is not None and shrinks:
            least = _LEAST_FAILED_SHARE * (self.limit or 0)
            tokens = max(1, int(self._shrink * max(failed.cost, least)))
            self.fitting_cost = min(tokens, self.fitting_cost or tokens)
            if self.aligner is not None:
                self.aligner.request_budget(self.fitting_cost)

    def note_step(self, parts: int, batches: int) -> None:
        """Count a step of `batches` batches that was computed in `parts` parts."""
        self.split_steps += parts > batches
        self._new_parts += parts
        self._new_batches += batches

    def count_skipped_in_a_row(self, info: StepInfo, *, is_skipped: bool) -> int:
        """Count a step; return the samples of all ranks in the last steps, if all were skipped."""
        samples = self._skipped_in_a_row + info.optimizer_samples
        self._skipped_in_a_row = samples if is_skipped else 0
        return self._skipped_in_a_row


def _nodes_of(loader: Any) -> tuple[GroupCollator, RankAligner | None]:
    """Return the `GroupCollator` of a loader, and its `RankAligner` if any."""
    remedy = "To make one of a `DataLoader` of torch, see `ODBDataLoader.from_dataloader`."
    if isinstance(getattr(loader, "loader", None), ODBDataLoader | Loader):
        remedy = f"Pass the `.loader` of this `{type(loader).__name__}`."
    check_type("loader", loader, ODBDataLoader | Loader, remedy)
    nodes = [*walk(loader.root)]
    if any(isinstance(node, VirtualRanks) for node in nodes):
        raise TypeError(
            "`loader` must not have `virtual_ranks` under a guard, which computes the parts of a "
            "step on real ranks. Make the budget fit the smallest device."
        )
    collators = [node for node in nodes if isinstance(node, GroupCollator)]
    if len(collators) != 1:
        raise TypeError(
            "`loader` must yield the batches of a `GroupCollator`, but its graph has "
            f"{len(collators)}."
        )
    return collators[0], next((node for node in nodes if isinstance(node, RankAligner)), None)


def _check_graph(
    budget: TokenBudget | None, aligner: RankAligner | None, shrink: float | None
) -> None:
    """Raise a `ValueError` if batches cannot be split, or `shrink` cannot be used."""
    if budget is not None and budget.shapes is not None and budget.layout == "padded":
        raise ValueError(
            "a budget with `shapes` has no smaller batches: each part would be padded to a whole "
            "shape again. Leave `shapes` out, or the guard."
        )
    can_shrink = budget is not None and aligner is not None and budget.shapes is None
    if shrink is not None and not can_shrink:
        raise ValueError(
            "`shrink` needs a `RankAligner` over a `WindowBucketer`, whose budget has no `shapes`: "
            "batches of fixed shapes cannot become smaller. Leave it out."
        )
