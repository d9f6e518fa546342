"""What the steps of a loop that runs out of memory have in common, and how its ranks meet."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from odb_nodes._core.checks import check_count, check_type
from odb_nodes.alignment import RankAligner
from odb_nodes.alignment.aligned_round import LossRule
from odb_nodes.alignment.exchange import Channel, Exchange, LocalExchange
from odb_nodes.alignment.virtual_ranks import VirtualRanks
from odb_nodes.contract.graph import budget_below, walk
from odb_nodes.errors import PeerError
from odb_nodes.loader.dataloader import ODBDataLoader
from odb_nodes.loader.loader import Loader
from odb_nodes.memory.failures import is_out_of_memory
from odb_nodes.memory.meter import MemoryMeter
from odb_nodes.memory.model import MemoryModel
from odb_nodes.memory.notice import FailureNotice
from odb_nodes.memory.parts import Part
from odb_nodes.memory.run_meter import RunMeter
from odb_nodes.nodes import GroupCollator
from odb_nodes.planning import TokenBudget
from odb_nodes.planning.group_costs import BudgetCost, CostFn, padded_tokens
from odb_nodes.step_info import StepInfo, pop_step_info

logger = logging.getLogger("odb_nodes")

OnOom = Literal["split", "skip", "raise"]
GUARD_ABOVE = 0.8
"""Default of `guard_above`: share of the limit."""

_GRACE_S = 5.0  # for the others to hear of a failure at once
_LEAST = 4  # of the limit at least one part in so many is asked for


@dataclass(kw_only=True)
class GuardContext:
    """What the steps of a loop have in common.

    Attributes:
        collator: makes batches of samples.
        aligner: the `RankAligner` of the graph; `None` where there is none.
        rule: how the losses of all ranks and micro-steps become one.
        cost: samples -> what computing them at once costs.
        limit: the cost that is known to fit; `None` where none is.
        on_oom, guard_above, shrink: see `OomGuard`.
        channel: to the other ranks; `None` where there are none.
        notice: likewise, for steps that all ranks compute together.
        run_meter: measures what is computed; `None` where nothing does.
        ooms, split_steps, skipped_samples: see `OomGuard`.
        left_out: samples, of all ranks, of the last steps in a row that were left out whole.
    """

    collator: GroupCollator
    aligner: RankAligner | None
    rule: LossRule
    cost: CostFn
    limit: int | None
    on_oom: OnOom
    guard_above: float
    shrink: float | None
    channel: Channel | None = None
    notice: FailureNotice | None = None
    run_meter: RunMeter | None = None
    ooms: int = 0
    split_steps: int = 0
    skipped_samples: int = 0
    left_out: int = 0

    def __post_init__(self) -> None:
        self.fits = self.limit
        """The cost that is known to fit on this rank."""
        self.checked: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        """The models that were found to be the whole of what is trained. They must not live on for
        our sake: a DDP model that is freed after `destroy_process_group` may hang, as torch then
        waits for the threads of its group with the GIL, which those want, too."""
        self._exchange: Exchange = LocalExchange()
        self._telling: threading.Thread | None = None  # that says why this rank fails

    @classmethod
    def of(
        cls,
        loader: ODBDataLoader | Loader[Any],
        *,
        on_oom: OnOom,
        guard_above: float,
        limit: int | None,
        shrink: float | None,
        meter: MemoryMeter | None = None,
        memory: MemoryModel | None = None,
    ) -> GuardContext:
        """Return the context of the batches of a loader."""
        check_type("loader", loader, ODBDataLoader | Loader, _remedy_of(loader))
        nodes = [*walk(loader.root)]
        if any(isinstance(node, VirtualRanks) for node in nodes):
            raise TypeError(
                "`loader` must not have `virtual_ranks` under a guard, which computes a step in "
                "parts on the ranks that there are. Make the budget fit the smallest device."
            )
        collators = [node for node in nodes if isinstance(node, GroupCollator)]
        if len(collators) != 1:
            raise TypeError(
                "`loader` must yield the batches of a `GroupCollator`, but its graph has "
                f"{len(collators)}."
            )
        aligner = next((node for node in nodes if isinstance(node, RankAligner)), None)
        budget = budget_below(collators[0])
        known = None if budget is None else budget.tokens
        check_guard_above(guard_above)
        _check_graph(budget, aligner)
        if shrink is not None:
            check_shrink(shrink)
            _check_can_shrink(budget, aligner)
        if meter is None and memory is not None:
            raise ValueError("`memory` needs a `meter` to learn from: pass `meter=CudaMeter()`.")
        return cls(
            run_meter=None if meter is None else RunMeter(meter, memory, budget),
            collator=collators[0],
            aligner=aligner,
            rule=LossRule(world_size=1, accumulate=1),
            cost=padded_tokens if budget is None else BudgetCost(budget),
            limit=known if limit is None else check_count("limit", limit),
            on_oom=on_oom,
            guard_above=guard_above,
            shrink=shrink,
        )

    def meet(self, holder: str) -> None:
        """Meet the other ranks, and compare what all must have in common."""
        aligner = self.aligner
        if aligner is None:
            return
        self.rule = aligner.rule
        if aligner.rule.world_size == 1:
            return
        if self.channel is None:
            exchange = aligner.peers.new_exchange()
            self.channel, self._exchange = Channel(exchange, 2 * aligner.accumulate), exchange
        if self._telling is not None:
            self._telling.join()  # Ends: an exchange has a limit.
        exchange = self._exchange
        # A new one each time: the last one may hold what has failed then.
        number = exchange.ranks[exchange.rank]
        self.notice = FailureNotice(exchange.ranks, number, exchange.timeout_s)
        self.channel.begin()
        fields = ("on_oom", "guard_above", "limit", "shrink")
        own = {name: getattr(self, name) for name in fields}
        self.channel.agree({holder: own})

    def fail(self, error: BaseException, where: str) -> None:
        """Tell the other ranks why this one cannot go on, wherever they wait for it.

        After a while on a thread: they may need a long time until they listen.
        """
        if self.channel is None:
            return
        if self.notice is not None:
            reason = f"{where}: {type(error).__name__}: {error}"
            self.notice.give(PeerError(f"rank {self.rank} failed in {reason}"))
        self._telling = threading.Thread(
            target=self.channel.fail, args=(error, where), name="odb_nodes-guard", daemon=True
        )
        self._telling.start()
        self._telling.join(_GRACE_S)

    def leave(self) -> None:
        """The loop is over: no rank waits for this one any more."""
        if self.notice is not None:
            self.notice.leave()

    def raise_told(self, error: BaseException) -> None:
        """Raise what another rank has told, if any has; it is why this one has failed."""
        if self.notice is not None and (told := self.notice.read()) is not None:
            raise told from error

    def note(self, failed: Part, remedy: str, *, shrinks: bool = True) -> None:
        """Count and log that memory ran out, and ask for a smaller budget."""
        self.ooms += 1
        logger.warning(
            "rank %d ran out of memory in step %d of epoch %d, with %d samples, %d tokens: %s",
            self.rank,
            failed.info.step,
            failed.info.epoch,
            len(failed.samples),
            sum(sample.tokens for sample in failed.samples),
            remedy,
        )
        if self.shrink is not None and shrinks:
            most = failed.cost if self.limit is None else max(failed.cost, self.limit // _LEAST)
            asked = max(1, int(self.shrink * most))
            self.fits = min(asked, self.fits or asked)
            if self.aligner is not None:
                self.aligner.ask_for_tokens(self.fits)

    @property
    def rank(self) -> int:
        """This rank, of those that share the data."""
        return 0 if self.channel is None else self.channel.rank

    def measuring(self, part: Part) -> AbstractContextManager[None]:
        """Return the context within which a part is measured, if anything measures.

        With `on_oom="raise"`, it counts that memory ran out: nobody else handles that.
        """
        measured = nullcontext() if self.run_meter is None else self.run_meter.measuring(part)
        return self._counting(part, measured) if self.on_oom == "raise" else measured

    @contextmanager
    def _counting(self, part: Part, measured: AbstractContextManager[None]) -> Iterator[None]:
        try:
            with measured:
                yield
        except Exception as error:
            if is_out_of_memory(error):
                self.note(part, "the error is raised", shrinks=False)
            raise

    def guards(self, infos: Sequence[StepInfo]) -> bool:
        """Tell whether a step may run out of memory: the same on all ranks."""
        most = max(info.most_cost for info in infos)
        return self.limit is None or most > self.guard_above * self.limit

    def collate(self, part: Part) -> Any:
        """Return the batch of a part."""
        batch = self.collator.collate(part.samples, part.info, part.number)
        pop_step_info(batch)
        return batch


def _remedy_of(loader: Any) -> str:
    """Return what to pass in place of something that is no loader."""
    if isinstance(getattr(loader, "loader", None), ODBDataLoader | Loader):
        return f"Pass the `.loader` of this `{type(loader).__name__}`."
    return "To make one of a `DataLoader` of torch, see `ODBDataLoader.from_dataloader`."


def check_guard_above(guard_above: Any) -> None:
    """Raise a `ValueError` if `guard_above` is no share."""
    if not isinstance(guard_above, (int, float)) or not 0 <= guard_above <= 1:
        raise ValueError(f"`guard_above` must be in 0..1, but is {guard_above!r} instead.")


def check_shrink(shrink: Any) -> None:
    """Raise a `ValueError` if `shrink` is no share below 1."""
    if not isinstance(shrink, float) or not 0 < shrink < 1:
        raise ValueError(f"`shrink` must be above 0 and below 1, but is {shrink!r} instead.")


def _check_graph(budget: TokenBudget | None, aligner: RankAligner | None) -> None:
    """Raise a `ValueError` where batches cannot be computed in parts."""
    if budget is not None and budget.shapes is not None and budget.layout == "padded":
        raise ValueError(
            "a budget with `shapes` has no smaller batches: each part would be padded to a whole "
            "shape again. Leave `shapes` out, or the guard."
        )
    if aligner is not None and type(aligner.measure.cost_fn) is not BudgetCost:
        if aligner.measure.cost_fn is not padded_tokens:
            raise ValueError(
                "`cost_fn` of the `RankAligner` must be the default with a guard, which compares "
                "costs with the budget. Say what attention adds as "
                "`TokenBudget(attention_tokens=...)`."
            )


def _check_can_shrink(budget: TokenBudget | None, aligner: RankAligner | None) -> None:
    if budget is None or aligner is None or budget.shapes is not None:
        raise ValueError(
            "`shrink` needs a `RankAligner` over a `WindowBucketer`, whose budget has no `shapes`: "
            "batches of a fixed shape have no smaller one. Leave it out."
        )
