"""Training steps that lose no sample if memory runs out."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from odb_nodes._compat.torch import uncompiled, without_ddp_sync
from odb_nodes._support.checks import check_choice, check_count, check_number, check_type
from odb_nodes._support.user_warning import warn_user
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
from odb_nodes.core.sample import Sample, name_of
from odb_nodes.core.step_info import StepInfo, pop_step_info
from odb_nodes.errors import PeerError, StateError, StepMemoryError
from odb_nodes.training.memory.gradients import (
    Kind,
    average_gradients,
    check_has_all,
    check_no_gradients,
    give_gradients,
    kind_of,
    scale_gradients,
)
from odb_nodes.training.memory.meter import (
    MemoryMeter,
    check_meter,
    free_memory,
    is_out_of_memory,
    measuring,
)
from odb_nodes.training.memory.parts import Part, StepParts

logger = logging.getLogger("odb_nodes")

OnOom = Literal["split", "skip", "raise"]
GUARD_ABOVE = 0.8
"""Default of `guard_above`."""

LossFn = Callable[[Any], torch.Tensor]
Run = Callable[[Part, Any], torch.Tensor]
"""(part, its batch if the part is whole, else `None`) -> its share of the loss. Adds gradients."""

MILLIONTHS = 1e6  # unit in which ranks gather shares, as integers

_LEAST_FAILED_SHARE = 0.25  # of the limit: `shrink` takes a cheaper failed part for as expensive
_MOST_KEYS_SHOWN = 8  # in an error
_RECOMMENDED_SHARE = 0.9  # budget that an error recommends, as a share of the failed cost
_MOST_SKIPPED_SAMPLES = 32  # of whole steps in a row: a step may consist of outliers alone


class StepBatch(NamedTuple):
    """A batch of an optimizer step, with its samples."""

    batch: Any
    samples: list[Sample]
    info: StepInfo


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

    Attributes:
        ooms: number of out-of-memory errors on this rank.
        split_steps: optimizer steps that this rank has computed in parts.
        skipped_samples: samples of this rank that were skipped because they do not fit alone.
        peak_share: the largest peak, as a share of the `meter`'s limit; 0.0 without a meter.

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
        check_choice("on_oom", on_oom, get_args(OnOom))
        check_number("guard_above", guard_above, "[0, 1]")
        self.collator, self.aligner = _nodes_of(loader)
        budget = budget_below(self.collator)
        if shrink is not None:
            check_number("shrink", shrink, "(0, 1)")
        _check_graph(budget, self.aligner, shrink)
        budget_tokens = None if budget is None else budget.tokens
        self.loader, self.on_oom, self._shrink = loader, on_oom, shrink
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
        # Models that passed `check_has_all`. The guard must not keep them alive: freeing DDP after
        # `destroy_process_group` may hang, waiting for threads with the GIL that these need.
        self._checked_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._is_warned = False
        self._begun: list[StepBatch] = []  # batches of a step within which the loader has raised
        self._skipped_in_a_row = 0  # samples of all ranks, in the last steps, all skipped whole
        self.ooms = self.split_steps = self.skipped_samples = 0
        self.peak_share = 0.0
        self.begin_metrics()

    def __iter__(self) -> Iterator[GuardedStep]:
        """Begin an epoch, or continue from a loaded state, as `iter(loader)` does.

        If the loader raises within an optimizer step, the next `iter` continues the step if the
        loader does. Warns, once, of a step whose `backward` was not called.
        """
        self.collator.keep_samples()
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
            self.leave()
            self.collator.keep_samples(False)

    def steps(self, batches: Iterator[Any]) -> Iterator[GuardedStep]:
        """Yield the optimizer steps of an epoch; a trainer may take one before the last is done."""
        self.meet(type(self).__name__)
        while step_batches := self._take_step(batches):
            yield GuardedStep(self, step_batches)

    def _take_step(self, batches: Iterator[Any]) -> list[StepBatch]:
        """Return the batches of the next optimizer step; none at the end of the epoch."""
        begun = self._begun
        try:
            for batch in batches:
                info = pop_step_info(batch)
                last = begun[-1].info if begun else info
                if begun and (info.epoch, info.step - 1) != (last.epoch, last.step):
                    begun.clear()
                begun.append(StepBatch(batch, self.collator.take_samples(info), info))
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
                self.raise_published(error)
            self.fail(error, "taking a batch")
            raise
        self._begun = []
        return begun

    def take_metrics(
        self, gather: Callable[[torch.Tensor], torch.Tensor] = torch.clone, device: Any = "cpu"
    ) -> dict[str, float]:
        """Return `odb/ooms`, `odb/parts` and `odb/peak_memory_share` since the last call.

        All ranks call it together.

        Args:
            gather: returns the tensors of all ranks, stacked or concatenated, such as
                `accelerator.gather`. Default: this rank alone.
            device: device of the tensors for `gather`.
        """
        new_ooms = self.ooms - self._ooms_before
        share = round(self._new_share * MILLIONTHS)
        row = [new_ooms, self._new_parts, self._new_batches, share]
        rows = gather(torch.tensor([row], device=device)).reshape(-1, len(row))
        self.begin_metrics()
        ooms, parts, batches, _ = rows.sum(0).tolist()
        metrics = {"odb/ooms": float(ooms), "odb/parts": parts / max(1, batches)}
        if self.meter is not None:
            metrics["odb/peak_memory_share"] = int(rows[:, 3].max()) / MILLIONTHS
        return metrics

    def begin_metrics(self) -> None:
        """Reset the counts of `take_metrics`."""
        self._ooms_before = self.ooms
        self._new_share = 0.0  # like `peak_share`
        self._new_parts = self._new_batches = 0  # computed

    # --- the other ranks --------------------------------------------------------------------------

    def meet(self, holder: str) -> None:
        """Connect to the other ranks, and compare the options that all ranks must share."""
        if self.aligner is None:
            return
        self.rule = self.aligner.rule
        if self.rule.world_size == 1:
            return
        if self._peers is None:
            self._peers = self.aligner.peers.another(2 * self.aligner.accumulate)
        self.leave()
        self._peers.begin()
        self.channel, self.rank = self._peers.channel, self._peers.channel.rank
        options = {
            "on_oom": self.on_oom,
            "guard_above": self.guard_above,
            "limit": self.limit,
            "shrink": self._shrink,
        }
        self.channel.agree({holder: options})
        self.watch = FailureWatch(self.channel)

    def leave(self) -> None:
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
        """Raise the error that another rank has published, if any: it caused this rank's error."""
        published = None if self.watch is None else self.watch.read()
        if published is not None:
            raise published from error

    # --- used by `GuardedStep`, which changes nothing here itself ---------------------------------

    def guards(self, infos: Sequence[StepInfo]) -> bool:
        """Tell whether a step may run out of memory; all ranks decide alike."""
        most = max(info.most_cost for info in infos)
        return self.limit is None or most > self.guard_above * self.limit

    def collate(self, part: Part) -> Any:
        """Return the batch of a part."""
        batch = self.collator.collate(part.samples, part.info, part.number)
        pop_step_info(batch)
        return batch

    def has_checked(self, model: nn.Module) -> bool:
        """Tell whether a loss of the model was found to train no other parameters."""
        return model in self._checked_models

    def note_checked(self, model: nn.Module) -> None:
        """Note that no further loss of this model needs to be checked."""
        self._checked_models.add(model)

    @contextmanager
    def computing(self, part: Part) -> Iterator[None]:
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

    def note_oom(self, failed: Part, remedy: str, *, shrinks: bool = True) -> None:
        """Count and log an out-of-memory error, and request a smaller budget."""
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
        if self._shrink is not None and shrinks:
            least = _LEAST_FAILED_SHARE * (self.limit or 0)
            tokens = max(1, int(self._shrink * max(failed.cost, least)))
            self.fitting_cost = min(tokens, self.fitting_cost or tokens)
            if self.aligner is not None:
                self.aligner.request_budget(self.fitting_cost)

    def note_skipped(self, failed: Part) -> None:
        """Count a sample that does not fit alone, and is skipped."""
        self.note_oom(failed, "the sample is skipped, and the step is recomputed")
        self.skipped_samples += not failed.info.is_filler

    def note_step(self, parts: int, batches: int) -> None:
        """Count a step of `batches` batches that was computed in `parts` parts."""
        self.split_steps += parts > batches
        self._new_parts += parts
        self._new_batches += batches

    def note_skipped_step(self, info: StepInfo, *, is_skipped: bool) -> int:
        """Return the samples of all ranks in the last steps that were skipped whole."""
        samples = self._skipped_in_a_row + info.optimizer_samples
        self._skipped_in_a_row = samples if is_skipped else 0
        return self._skipped_in_a_row


class GuardedStep:
    """The batches of one optimizer step.

    Attributes:
        infos: the `StepInfo` of each batch. Record them in a `Ledger` after `backward`, which takes
            out the samples that any rank has skipped.
        is_done: whether `backward` was called.
    """

    def __init__(self, guard: OomGuard, batches: Sequence[StepBatch]) -> None:
        self._guard = guard
        self.batches: list[Any] = [batch for batch, _, _ in batches]  # `take` removes each
        self.infos = [info for _, _, info in batches]
        self.is_done = False
        self.loss: torch.Tensor | None = None  # the result of `backward`
        planned = [(samples, info) for _, samples, info in batches]
        self.parts = StepParts(planned, guard.rule, guard.cost)
        self.losses: list[torch.Tensor] = []  # this rank's share, of each computed batch
        self._retried: set[int] = set()  # ids of samples that have failed alone once
        self._has_failed = False

    def backward(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        *,
        scaler: torch.amp.GradScaler | None = None,
    ) -> torch.Tensor:
        """Compute the gradients of the step.

        Args:
            model: a plain module, DDP or FSDP, whose gradients are `None` or 0.
            loss_fn: moves a batch to the device and returns the mean loss over its supervised
                tokens, a tensor without dimensions. Called more than once if memory runs out.
            scaler: scales the loss for gradients in half precision.

        Returns:
            This rank's share of the loss, without dimensions and without a graph. Its mean over
            ranks is the mean loss over all supervised tokens of the step.

        Raises:
            StepMemoryError: a sample does not fit into memory alone; memory ran out in a step that
                is not guarded; or whole steps in a row were skipped.
            RuntimeError: `backward` was called before; the model has gradients already, which a
                guarded step would lose; or a DDP model has no `RankAligner`.
            TypeError: `loss_fn` returns no loss, or trains parameters outside of `model`; or
                `model` cannot be computed in parts.
            PeerError: another rank failed, or did not answer.
        """
        model = uncompiled(model)
        kind = kind_of(model)
        self._begin(model, kind)
        is_alone = kind == "local" or (kind == "ddp" and self._guard.guards(self.infos))
        run = partial(self._add_gradients, model, loss_fn, scaler, is_alone)
        compute = self._compute_alone if is_alone else self._compute_together
        self.loss = compute(model, run)
        return self.loss

    def _begin(self, model: nn.Module, kind: Kind) -> None:
        """Check the call of `backward`."""
        guard = self._guard
        if self.is_done:
            raise RuntimeError("`backward` was called before for this step. Take the next one.")
        self.is_done = True
        if kind == "ddp" and guard.channel is None and dist.get_world_size() > 1:
            raise RuntimeError(
                "a DDP model needs a `RankAligner` over all of its ranks below the guard, so that "
                "they agree on the parts of a step. Use `ODBDataLoader`, or add a `RankAligner`."
            )
        if kind == "local" and guard.channel is not None and not guard.has_checked(model):
            warn_user(
                "several ranks train, but the model of `step.backward` is not in DDP or FSDP: "
                "their weights differ after the first step, unless you average the gradients. "
                "Pass the wrapped model."
            )
        if kind == "sharded":  # It is never recomputed, so no gradient could count twice.
            guard.note_checked(model)

    def _add_gradients(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        scaler: torch.amp.GradScaler | None,
        is_alone: bool,
        part: Part,
        batch: Any,
    ) -> torch.Tensor:
        """Add the gradients of a part; return its share of the loss. See `Run`."""
        weight = part.info.loss_scale
        if is_alone and not (part.is_whole or weight):
            # The mean over no targets is NaN, and so would be its gradients.
            return torch.zeros((), device=_device_of(model))
        loss = loss_fn(self._guard.collate(part) if batch is None else batch)
        if not isinstance(loss, torch.Tensor) or loss.ndim or not loss.requires_grad:
            raise TypeError(
                "`loss_fn` must return the mean loss of the batch, a tensor without dimensions "
                f"that has a graph, but returned {loss!r:.80}."
            )
        if not self._guard.has_checked(model):
            check_has_all(model, loss)
        # A mean over no targets is NaN, and NaN times 0 is NaN.
        loss = loss * weight if weight else loss.nan_to_num(0.0, 0.0, 0.0) * 0.0
        (loss if scaler is None else scaler.scale(loss)).backward()
        self._guard.note_checked(model)  # Not before: memory may run out in the first part.
        return loss.detach()

    def _compute_alone(self, model: nn.Module, run: Run) -> torch.Tensor:
        """Compute the step on this rank alone; then all ranks average their gradients."""
        check_no_gradients(model)
        for number in range(len(self.infos)):
            self.compute(number, model, run)
        left_out = self.agree()
        loss = torch.stack(self.losses).sum()
        if self.settle(left_out):
            factor = self.parts.loss_factor(left_out)
            scale_gradients(model, factor)
            loss = loss * factor
        self.join(model)
        return loss

    def _compute_together(self, model: nn.Module, run: Run) -> torch.Tensor:
        """Compute the step on all ranks together."""
        limit, most = self._guard.limit, max(info.most_cost for info in self.infos)
        if limit is not None and most > limit:
            pieces = -(-most // limit)
            self.parts.cut(min(pieces, max(info.all_samples_this_step for info in self.infos)))
        losses, count = [], len(self.parts)
        for number, part in enumerate(self.parts):
            waits = isinstance(model, DistributedDataParallel) and number < count - 1
            with (
                self.together(part),
                model.no_sync() if waits else nullcontext(),  # type: ignore[operator]
            ):
                losses.append(run(part, self.take(part)))
        self.count()
        return torch.stack(losses).sum()

    # --- the stages of a step, for trainers too ---------------------------------------------------

    def compute(self, number: int, model: nn.Module, run: Run) -> None:
        """Add the gradients of batch `number`, on this rank alone; split batches until it fits."""
        guard, batches = self._guard, range(number, number + 1)
        if number == 0:
            while guard.fitting_cost is not None and self.parts.halve(guard.fitting_cost + 1):
                pass
        try:
            ddp = model if isinstance(model, DistributedDataParallel) else None
            with nullcontext() if ddp is None else without_ddp_sync(ddp):
                while (failed := self._compute_batches(batches, model, run)) is not None:
                    self._make_room(failed)
                    model.zero_grad(set_to_none=True)
                    batches = range(number + 1)
        except Exception as error:
            guard.fail(error, self.where)
            raise

    def agree(self) -> list[tuple[int, int]]:
        """Return the skipped samples and targets of each batch, summed over all ranks."""
        counts = np.array(self.parts.skipped(), np.int64)
        if (channel := self._guard.channel) is not None:
            rows = channel.gather(counts.ravel(), self.where)
            counts = rows[:, : counts.size].sum(0).reshape(counts.shape)
        return [(samples, targets) for samples, targets in counts.tolist()]

    def settle(self, left_out: Sequence[tuple[int, int]]) -> bool:
        """Count the step, remove skipped samples from `infos`, and tell whether there were any.

        Raises a `StepMemoryError` after `_MOST_SKIPPED_SAMPLES` in steps that were skipped whole.
        """
        self.count()
        info = self.infos[0]
        samples, targets = map(sum, zip(*left_out, strict=True))
        if info.optimizer_targets:  # Samples without targets train nothing.
            is_skipped = targets == info.optimizer_targets
        else:
            is_skipped = samples == info.optimizer_samples
        in_a_row = self._guard.note_skipped_step(info, is_skipped=is_skipped)
        if in_a_row >= _MOST_SKIPPED_SAMPLES:
            raise StepMemoryError(
                f"{self.where}: none of the last {in_a_row} samples of all ranks fits into memory "
                "alone: whole steps are skipped, and nothing is trained any more. Free memory, or "
                "use less for each token, such as by `enable_checkpointing`."
            )
        if samples:
            self.infos = self.parts.infos(left_out)
        return bool(samples)

    def join(self, model: nn.Module) -> None:
        """Average the gradients over the ranks of a DDP model, once all batches are computed."""
        if isinstance(model, DistributedDataParallel):
            average_gradients(model)
        give_gradients(model)  # All samples of all ranks may have been skipped.

    def count(self) -> None:
        """Count the step, once it is computed."""
        self._guard.note_step(len(self.parts), len(self.batches))

    def take(self, part: Part) -> Any:
        """Return the loader's batch of a part, once: `loss_fn` may change it. Else `None`."""
        batch = self.batches[part.batch]
        self.batches[part.batch] = None
        return batch if part.is_whole else None

    @contextmanager
    def together(self, part: Part) -> Iterator[None]:
        """Within this context, all ranks compute a part together; an error ends all of them."""
        guard, watch = self._guard, self._guard.watch
        if watch is not None:
            watch.enter()
        try:
            with guard.computing(part):
                yield
        except Exception as error:
            if watch is not None:
                watch.leave()
            if guard.on_oom != "raise" and is_out_of_memory(error):
                guard.note_oom(part, "the step cannot be computed")
                reason = self._error_of(part)
                if watch is not None:
                    watch.publish(reason)
                raise reason from error
            guard.raise_published(error)
            raise
        if watch is not None and not runs_ahead():
            watch.leave()

    def _error_of(self, part: Part) -> StepMemoryError:
        """Return the error of a part that ran out of memory while all ranks computed it."""
        samples, limit = part.samples, self._guard.limit
        keys = ", ".join(str(sample.key) for sample in samples[:_MOST_KEYS_SHOWN])
        if len(samples) > _MOST_KEYS_SHOWN:
            keys += f" and {len(samples) - _MOST_KEYS_SHOWN} more"
        most = part.cost if limit is None else min(part.cost, limit)
        return StepMemoryError(
            f"rank {self._guard.rank} ran out of memory in {self.where}, with {len(samples)} "
            f"samples of up to {max(sample.tokens for sample in samples)} tokens and "
            f"{sum(sample.patches for sample in samples)} patches (keys {keys}; cost {part.cost}). "
            "All ranks compute such a step together, so it cannot be recomputed. Resume from the "
            f"last checkpoint with a budget of {int(_RECOMMENDED_SHARE * most)} or less."
        )

    def _compute_batches(self, numbers: range, model: nn.Module, run: Run) -> Part | None:
        """Compute batches; return the part that ran out of memory, or `None`."""
        for number in numbers:
            losses: list[torch.Tensor] = []
            for part in self.parts.of(number):
                try:
                    with self._guard.computing(part):
                        losses.append(run(part, self.take(part)))
                except (RuntimeError, MemoryError) as error:
                    if self._guard.on_oom == "raise" or not is_out_of_memory(error):
                        raise
                    free_memory(error, old_garbage=self._has_failed)
                    self._has_failed = True
                    return part
            if not losses:  # all samples were skipped
                losses = [torch.zeros((), device=_device_of(model))]
            self.losses[number : number + 1] = [torch.stack(losses).sum()]
        return None

    def _make_room(self, failed: Part) -> None:
        """Split or skip what does not fit, or raise an error."""
        guard, sample = self._guard, failed.samples[0]
        if len(failed.samples) > 1:
            guard.note_oom(failed, "batches that cost as much are halved and recomputed")
            self.parts.halve(failed.cost)
        elif id(sample) not in self._retried:  # Freed memory may be in one piece now.
            guard.note_oom(failed, "the step is recomputed, once", shrinks=False)
            self._retried.add(id(sample))
        elif guard.on_oom == "skip" or failed.info.is_filler:
            guard.note_skipped(failed)
            self.parts.skip(failed)
        else:
            guard.note_oom(failed, "the step cannot be computed")
            raise StepMemoryError(
                f"{self.where}, rank {guard.rank}: a sample{name_of(sample)} with {sample.tokens} "
                f"tokens and {sample.patches} patches does not fit into memory alone. Shorten it, "
                'skip it (`exclude`, or `on_oom="skip"`), or train with less memory for each '
                "token, such as by `enable_checkpointing`."
            )

    @property
    def where(self) -> str:
        """The step, for error texts."""
        return f"step {self.infos[0].step} of epoch {self.infos[0].epoch}"


def _device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def runs_ahead() -> bool:
    """Tell whether collectives return before they are done, as on a GPU."""
    return bool(torch.cuda.is_initialized())


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
