"""Training steps that lose no sample if memory runs out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from odb_nodes._support.user_warning import warn_user
from odb_nodes.core.loader.dataloader import ODBDataLoader
from odb_nodes.core.loader.loader import Loader
from odb_nodes.core.step_info import pop_step_info
from odb_nodes.errors import PeerError, StateError
from odb_nodes.training.memory.guard_context import GuardContext, OnOom
from odb_nodes.training.memory.guarded_step import GuardedStep, StepBatch
from odb_nodes.training.memory.meter import MemoryMeter

GUARD_ABOVE = 0.8
"""Default of `guard_above`."""
MILLIONTHS = 1e6  # unit in which ranks gather shares, as integers


class OomGuard:
    """Yields the optimizer steps of a loader; a step that runs out of memory is computed in parts.

        guard = OomGuard(loader)
        for step in guard:
            step.backward(model, lambda batch: model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()

    If forward or backward runs out of memory, the guard clears the gradients of the step, halves
    each batch that costs as much as the failed one, and computes the step from its first batch
    again, until it fits. The parts are collated from their samples, and weighted so that the
    gradients do not change. The plan of the ranks and the state of the loader stay the same.

    Under DDP, if the most expensive batch of a step on any rank costs more than `guard_above` of
    the limit, each rank computes the step without messages; then all ranks agree, and average their
    gradients once. In any other step, and with models whose ranks compute together (FSDP, tensor
    parallelism), the ranks cannot recover from a failure: the step is an error on all ranks.

    Args:
        loader: an `ODBDataLoader`, or a `Loader` whose graph ends with a `GroupCollator`. Only the
            guard may take batches from it.
        on_oom: what happens if memory runs out. `"split"`: as above; a sample that does not fit
            alone is an error. `"skip"`: such a sample is skipped, and all ranks take the mean over
            the other samples; skipping whole steps with 32 samples or more in a row is an error.
            `"raise"`: the model's error is raised.
        guard_above: share of `limit` above which a DDP step is guarded, see above.
        limit: cost of a batch that surely fits, in the unit of `TokenBudget.tokens`; batches that
            cost more are computed in parts from the start. Default: the loader's budget.
        shrink: new budget after memory ran out, as a share of the failed batch's cost, above 0 and
            below 1. All ranks use the smallest from the next round on, and states keep it. Not for
            a budget with `shapes`. `None`: the budget stays.
        meter: measures the parts for `peak_share`. `None`: nothing is measured.

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
    ) -> None:
        self.context = GuardContext(loader, on_oom, guard_above, limit, shrink, meter)
        self.loader, self.guard_above = loader, guard_above
        self._begun: list[StepBatch] = []  # batches of a step within which the loader has raised
        self._is_warned = False

    @property
    def ooms(self) -> int:
        """Number of out-of-memory errors on this rank."""
        return self.context.ooms

    @property
    def split_steps(self) -> int:
        """Optimizer steps that this rank has computed in parts."""
        return self.context.split_steps

    @property
    def skipped_samples(self) -> int:
        """Samples of this rank that were skipped because they do not fit alone."""
        return self.context.skipped_samples

    @property
    def peak_share(self) -> float:
        """The largest peak, as a share of the `meter`'s limit; 0.0 without a meter."""
        return self.context.peak_share

    def __iter__(self) -> Iterator[GuardedStep]:
        """Begin an epoch, or continue from a loaded state, as `iter(loader)` does.

        If the loader raises within an optimizer step, the next `iter` continues the step if the
        loader does. Warns, once, of a step whose `backward` was not called.
        """
        self.context.collator.keep_samples()
        try:
            for step in self.steps(iter(self.loader)):
                yield step
                if not (step.is_done or self._is_warned):
                    self._is_warned = True
                    warn_user(
                        f"`backward` was not called for {step.where} of the `OomGuard`, which is "
                        "not trained on. Call `step.backward(model, loss_fn)` for each step, on "
                        "all ranks."
                    )
        finally:
            self.context.stop_watching()
            self.context.collator.keep_samples(False)

    def steps(self, batches: Iterator[Any]) -> Iterator[GuardedStep]:
        """Yield the optimizer steps of an epoch; a trainer may take one before the last is done."""
        self.context.connect(type(self).__name__)
        while step_batches := self._take_step(batches):
            yield GuardedStep(self.context, step_batches)

    def _take_step(self, batches: Iterator[Any]) -> list[StepBatch]:
        """Return the batches of the next optimizer step; none at the end of the epoch."""
        begun = self._begun
        try:
            for batch in batches:
                info = pop_step_info(batch)
                last = begun[-1].info if begun else info
                if begun and (info.epoch, info.step - 1) != (last.epoch, last.step):
                    begun.clear()
                begun.append(StepBatch(batch, self.context.collator.take_samples(info), info))
                if begun[0].info.micro_step:
                    begun.clear()
                    raise StateError(
                        f"step {info.step} of epoch {info.epoch} is micro-step {info.micro_step} "
                        f"of {info.micro_steps} of an optimizer step, whose earlier batches are "
                        "gone. Load a state that was saved between two optimizer steps."
                    )
                if info.ends_optimizer_step:
                    break
        except Exception as error:
            if isinstance(error, PeerError):
                self.context.raise_published(error)
            self.context.fail(error, "taking a batch")
            raise
        self._begun = []
        return begun

    def take_metrics(
        self,
        gather: Callable[[torch.Tensor], torch.Tensor] = torch.clone,
        device: torch.device | str = "cpu",
    ) -> dict[str, float]:
        """Return `odb/ooms`, `odb/parts` and `odb/peak_memory_share` since the last call.

        All ranks call it together.

        Args:
            gather: returns the tensors of all ranks, stacked or concatenated, such as
                `accelerator.gather`. Default: this rank alone.
            device: device of the tensors for `gather`.
        """
        *counts, share = self.context.take_counts()
        row = [*counts, round(share * MILLIONTHS)]
        rows = gather(torch.tensor([row], device=device)).reshape(-1, len(row))
        ooms, parts, batches, _ = rows.sum(0).tolist()
        metrics = {"odb/ooms": float(ooms), "odb/parts": parts / max(1, batches)}
        if self.context.meter is not None:
            metrics["odb/peak_memory_share"] = int(rows[:, 3].max()) / MILLIONTHS
        return metrics
