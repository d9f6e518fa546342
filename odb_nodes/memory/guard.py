"""Steps of training that lose nothing where memory runs out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from odb_nodes._core.checks import check_choice, check_count
from odb_nodes.alignment import RankAligner
from odb_nodes.alignment.aligned_round import LossRule
from odb_nodes.alignment.exchange import Channel
from odb_nodes.contract.graph import find_budget, walk
from odb_nodes.loader.dataloader import ODBDataLoader
from odb_nodes.loader.loader import Loader
from odb_nodes.memory.guarded_step import GuardContext, GuardedStep, OnOom
from odb_nodes.memory.notice import FailureNotice
from odb_nodes.nodes import GroupCollator
from odb_nodes.planning import TokenBudget
from odb_nodes.planning.group_costs import BudgetCost, padded_tokens
from odb_nodes.step_info import StepInfo, pop_step_info


class OomGuard:
    """Yields the optimizer steps of a loader; one that runs out of memory is computed in parts.

        guard = OomGuard(loader)
        for step in guard:
            step.backward(model, lambda batch: model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()

    Where forward or backward runs out of memory, the gradients of the step are cleared, each batch
    that costs as much as the one that failed is halved, and the step is computed again from its
    first batch; so until it fits. The parts are collated anew from their samples, and weighted so
    that the gradients are those of the whole. Neither the plan of the ranks nor the state of the
    loader changes.

    Under DDP, a step whose dearest batch, of whichever rank, costs more than `guard_above` of the
    limit is computed without messages, then all ranks agree, and average their gradients once. In
    any other step, and with models whose ranks compute together (FSDP, tensor parallelism), nothing
    that one rank has failed in can be taken back: there the step is an error on all ranks.

    Args:
        loader: an `ODBDataLoader`, or a `Loader` whose graph ends with a `GroupCollator`. Nobody
            else may take batches from it meanwhile.
        on_oom: what happens where memory runs out. `"split"`: as above; a sample that does not fit
            alone is an error. `"skip"`: such a sample is left out, the mean is over the others, on
            all ranks. `"raise"`: the error of the model is raised.
        guard_above: share of `limit`, see above.
        limit: cost of a batch that is known to fit, in the unit of `TokenBudget.tokens`; one above
            it is computed in parts from the beginning. Default: that of the loader's budget.
        shrink: share of the cost that ran out of memory, above 0 and below 1, that all ranks form
            their groups under from the next round on; the smallest wins, and states keep it. Not
            for a budget with `shapes`. `None`: the budget stays.

    Raises:
        TypeError, ValueError: an argument is not valid.
    """

    def __init__(
        self,
        loader: ODBDataLoader | Loader[Any],
        on_oom: OnOom = "split",
        *,
        guard_above: float = 0.8,
        limit: int | None = None,
        shrink: float | None = None,
    ) -> None:
        check_choice("on_oom", on_oom, get_args(OnOom))
        if not 0 <= guard_above <= 1:
            raise ValueError(f"`guard_above` must be in 0..1, but is {guard_above!r} instead.")
        self._loader = loader
        nodes = [*walk(loader.root)]
        collators = [node for node in nodes if isinstance(node, GroupCollator)]
        if len(collators) != 1:
            raise TypeError(
                "`loader` must yield the batches of a `GroupCollator`, but its graph has "
                f"{len(collators)}."
            )
        self._aligner = next((node for node in nodes if isinstance(node, RankAligner)), None)
        budget = find_budget(collators[0])
        known = None if budget is None else budget.tokens
        if shrink is not None:
            _check_shrink(shrink, budget, self._aligner)
        self._context = GuardContext(
            collator=collators[0],
            rule=LossRule(world_size=1, accumulate=1),
            cost=padded_tokens if budget is None else BudgetCost(budget),
            limit=known if limit is None else check_count("limit", limit),
            on_oom=on_oom,
            guard_above=guard_above,
            shrink=shrink,
        )
        if self._aligner is not None:
            self._context.ask_for_budget = self._aligner.budget_wishes.ask_for

    @property
    def ooms(self) -> int:
        """How often memory ran out on this rank."""
        return self._context.ooms

    @property
    def split_steps(self) -> int:
        """Optimizer steps that this rank has computed in parts."""
        return self._context.split_steps

    @property
    def skipped_samples(self) -> int:
        """Samples of this rank that were left out, since they did not fit alone."""
        return self._context.skipped_samples

    def __iter__(self) -> Iterator[GuardedStep]:
        """Begin an epoch, or continue from a loaded state, as `iter(loader)` does."""
        self._context.collator.keep_samples()
        batches: list[tuple[Any, StepInfo]] = []
        iterator = iter(self._loader)
        self._begin()
        for batch in iterator:
            info = pop_step_info(batch)
            batches.append((batch, info))
            if info.ends_optimizer_step:
                yield GuardedStep(self._context, batches)
                batches = []
        if batches:
            yield GuardedStep(self._context, batches)

    def _begin(self) -> None:
        """Meet the other ranks."""
        aligner, context = self._aligner, self._context
        if aligner is None:
            return
        context.rule = aligner.rule
        if aligner.rule.world_size == 1:
            return
        if context.channel is None:
            exchange = aligner.peers.new_exchange()
            context.channel = Channel(exchange, 2 * aligner.accumulate)
            number = exchange.ranks[exchange.rank]
            context.notice = FailureNotice(exchange.ranks, number, exchange.timeout_s)
        context.channel.begin()
        fields = ("on_oom", "guard_above", "limit", "shrink")
        own = {name: getattr(context, name) for name in fields}
        context.channel.agree({type(self).__name__: own})


def _check_shrink(shrink: Any, budget: TokenBudget | None, aligner: RankAligner | None) -> None:
    if not isinstance(shrink, float) or not 0 < shrink < 1:
        raise ValueError(f"`shrink` must be above 0 and below 1, but is {shrink!r} instead.")
    if budget is None or aligner is None or budget.shapes is not None:
        raise ValueError(
            "`shrink` needs a `RankAligner` over a `WindowBucketer`, whose budget has no `shapes`: "
            "batches of a fixed shape have no smaller one. Leave it out."
        )
