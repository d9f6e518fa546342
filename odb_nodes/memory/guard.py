"""Steps of training that lose nothing where memory runs out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from odb_nodes._core.checks import check_choice
from odb_nodes._core.user_warning import warn_user
from odb_nodes.errors import PeerError, StateError
from odb_nodes.loader.dataloader import ODBDataLoader
from odb_nodes.loader.loader import Loader
from odb_nodes.memory.context import GUARD_ABOVE, GuardContext, OnOom
from odb_nodes.memory.guarded_step import GuardedStep
from odb_nodes.memory.meter import MemoryMeter
from odb_nodes.memory.model import MemoryModel
from odb_nodes.memory.partwise_step import StepBatch
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
            all ranks; where 32 samples or more in a row are whole steps that are left out, it is an
            error. `"raise"`: the error of the model is raised.
        guard_above: share of `limit`, see above.
        limit: cost of a batch that is known to fit, in the unit of `TokenBudget.tokens`; one above
            it is computed in parts from the beginning. Default: that of the loader's budget.
        shrink: share of the cost that ran out of memory, above 0 and below 1, that all ranks form
            their groups under from the next round on; the smallest wins, and states keep it. Not
            for a budget with `shapes`. `None`: the budget stays.
        meter: measures each part that is computed, see `peak_share`. `None` measures nothing.
        memory: learns from each measurement, with the sample's source where all of a part have one,
            and is fitted now and then; its `accuracy` says how far off it was. Left out are the
            first optimizer step, in which the optimizer may not have its state yet, and packed rows
            under a budget with `attention_tokens`, whose width does not say what attention takes.

    Raises:
        TypeError, ValueError: an argument is not valid.
    """

    def __init__(
        self,
        loader: ODBDataLoader | Loader[Any],
        on_oom: OnOom = "split",
        *,
        guard_above: float = GUARD_ABOVE,
        limit: int | None = None,
        shrink: float | None = None,
        meter: MemoryMeter | None = None,
        memory: MemoryModel | None = None,
    ) -> None:
        check_choice("on_oom", on_oom, get_args(OnOom))
        self._loader = loader
        self._is_warned = False
        self._begun: list[StepBatch] = []  # of an optimizer step in which the loader has raised
        self._options: dict[str, Any] = {
            "on_oom": on_oom,
            "guard_above": guard_above,
            "limit": limit,
            "shrink": shrink,
            "meter": meter,
            "memory": memory,
        }
        self._context = GuardContext.of(loader, **self._options)

    def __repr__(self) -> str:
        options = (f"{name}={value!r}" for name, value in self._options.items())
        return f"{type(self).__name__}({self._loader!r}, {', '.join(options)})"

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

    @property
    def peak_share(self) -> float:
        """The largest peak so far, as a share of the `meter`'s limit; 0.0 without one."""
        run_meter = self._context.run_meter
        return 0.0 if run_meter is None else run_meter.peak_share

    def __iter__(self) -> Iterator[GuardedStep]:
        """Begin an epoch, or continue from a loaded state, as `iter(loader)` does.

        Where the loader raises between the batches of an optimizer step, those that came before
        are kept for the next `iter`, which goes on with the step if the loader does. Warns, once,
        of a step that is left without its `backward`.
        """
        self._context.collator.keep_samples()
        batches = iter(self._loader)
        self._context.meet(type(self).__name__)
        try:
            while taken := self._taken(batches):
                yield (step := GuardedStep(self._context, taken))
                if not (step.is_done or self._is_warned):
                    self._is_warned = True
                    warn_user(_without_backward(step.infos[0]))
        finally:
            self._context.leave()
            self._context.collator.keep_samples(False)

    def _taken(self, batches: Iterator[Any]) -> list[StepBatch]:
        """Return the batches of the next optimizer step; none at the end of the epoch."""
        context, begun = self._context, self._begun
        try:
            for batch in batches:
                info = pop_step_info(batch)
                if begun and not _follows(info, begun[-1].info):
                    begun.clear()
                begun.append(StepBatch(batch, context.collator.take_samples(info), info))
                if begun[0].info.micro_step:
                    raise StateError(_within_step(begun.pop().info))
                if info.ends_optimizer_step:
                    break
        except Exception as error:
            if isinstance(error, PeerError):
                context.raise_told(error)
            context.fail(error, "taking a batch")
            raise
        self._begun = []
        return begun


def _follows(info: StepInfo, before: StepInfo) -> bool:
    return (info.epoch, info.step) == (before.epoch, before.step + 1)


def _without_backward(info: StepInfo) -> str:
    return (
        f"`backward` was not called for step {info.step} of epoch {info.epoch} of the `OomGuard`: "
        "it is not trained on. Call `step.backward(model, loss_fn)` for each step, on all ranks."
    )


def _within_step(info: StepInfo) -> str:
    return (
        f"step {info.step} of epoch {info.epoch} is micro-step {info.micro_step} of "
        f"{info.micro_steps} of an optimizer step, whose batches before are gone. Load a state "
        "that was saved between two optimizer steps."
    )
