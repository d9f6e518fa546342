"""One call of `Trainer.train`: how far it is, and the batches of its next optimizer step."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import islice
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from odb_nodes._core.user_warning import warn_user
from odb_nodes.contract.state import seal_whole
from odb_nodes.errors import StateError
from odb_nodes.integrations.huggingface.batches import TrainBatches
from odb_nodes.integrations.huggingface.columns import ModelKeys
from odb_nodes.integrations.huggingface.guard import RunGuard
from odb_nodes.integrations.huggingface.monitoring import RunMonitor
from odb_nodes.integrations.huggingface.run_state import RunState, TakenStep, repeated
from odb_nodes.integrations.huggingface.step_plan import StepPlan
from odb_nodes.integrations.huggingface.weighing import LossWeigher
from odb_nodes.integrations.learning_rate import at_positions
from odb_nodes.ledger import Ledger
from odb_nodes.loader.rank_states import save_rank_state
from odb_nodes.monitor.metrics import StepMeter
from odb_nodes.step_info import STEP_INFO_KEY, StepInfo, pop_step_info

NO_BOUND = 2**40  # optimizer steps, where nothing bounds them
MOST_OF_AN_EPOCH = 0.999  # share of an epoch shown, at most, before its end is seen
ESTIMATE_SLACK = 0.05  # share of the steps by which estimates are usually off
HOLDER = "ODBTrainer"
FIXED_ARGUMENTS = ("num_train_epochs", "gradient_accumulation_steps", "seed", "data_seed")


class Run:
    """Follows one call of `train`, and takes the batches of each optimizer step.

    Args:
        trainer: the trainer that runs.
        batches: the batches of the run.
        plan: how many optimizer steps are expected; None where `max_steps` ends the run.
        resumed_at: optimizer steps before the checkpoint that the run resumes; None for a new run.
    """

    def __init__(
        self,
        trainer: Any,
        batches: TrainBatches,
        plan: StepPlan | None,
        resumed_at: int | None,
    ) -> None:
        self._trainer = trainer
        self.batches = batches
        self.losses = LossWeigher(trainer)
        self.meter = StepMeter()
        self._plan = plan
        self._follows_plan = False  # the learning-rate schedule, at the pace of these ranks
        self._resumed_at = resumed_at
        self._keys = ModelKeys(trainer)
        self._arguments = {name: getattr(trainer.args, name) for name in FIXED_ARGUMENTS}
        self._is_warned = False
        self._ledger = _ledger_of(trainer)
        self._step = TakenStep(batches=[], infos=[], own=0, wait_s=0.0)  # that has begun
        self.monitor: RunMonitor | None = None
        if trainer.odb.monitor is not None:
            self.monitor = RunMonitor(trainer.odb.monitor, trainer, batches.loader)
        self.guard: RunGuard | None = None
        if trainer.odb.on_oom is not None:
            self.guard = RunGuard(trainer, batches.loader, self.losses, self._keys)

    # --- how far it is ----------------------------------------------------------------------------

    @property
    def ends_by_epochs(self) -> bool:
        """Whether epochs end the run, and not `max_steps`."""
        return self._plan is not None

    @property
    def epoch(self) -> float:
        """Epochs done, with the share of this one: by its samples, or else by its steps."""
        batches, plan = self.batches, self._plan
        if batches.samples_per_epoch is not None or plan is None:
            return batches.progress
        steps = plan.steps_per_epoch_now
        share: float = batches.steps / (steps * self._trainer.args.gradient_accumulation_steps)
        return batches.progress + min(share, MOST_OF_AN_EPOCH)

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the run: exact with `max_steps`, else estimated."""
        args = self._trainer.args
        if self._plan is None:
            return int(args.max_steps)
        return self._plan.steps(float(args.num_train_epochs))

    @property
    def schedule_steps(self) -> int:
        """Steps that the learning-rate schedule is made for: those of the ranks of its estimate."""
        if self._plan is None:
            return self.total_steps
        return self._plan.schedule_steps(float(self._trainer.args.num_train_epochs))

    @property
    def most_steps(self) -> int:
        """An upper bound of the optimizer steps: each one has at least one sample."""
        if self._plan is None:
            return self.total_steps
        samples = self.batches.samples_per_epoch
        if samples is None:
            return NO_BOUND
        epochs = math.ceil(float(self._trainer.args.num_train_epochs))
        return max(self.total_steps, epochs * samples) + 1

    def check_estimate(self, steps: int, *, ends: bool) -> None:
        """Warn, once, where a learning-rate schedule by steps does not end with the run.

        Args:
            steps: optimizer steps so far, the one that begins included.
            ends: whether there are no more.
        """
        total = self.total_steps if self._follows_plan else self.schedule_steps
        slack = 1 + ESTIMATE_SLACK * total
        is_off = steps > total + slack or (ends and steps < total - slack)
        if self._trainer.odb.schedule == "samples" or not is_off or self._is_warned:
            return
        self._is_warned = True
        if self._trainer.args.process_index:
            return
        remedies = ['`schedule="samples"`'] * (self.batches.samples_per_epoch is not None)
        warn_user(
            f"the run {'ends after' if ends else 'goes on after'} {steps} optimizer steps, but its "
            f"learning-rate schedule was made for {total}, by `steps_per_epoch`, or by the "
            "estimate where that is not given. For the next run, give "
            f"{' or '.join([*remedies, 'another `steps_per_epoch`'])}."
        )

    def paced(self, scheduler: LRScheduler) -> LRScheduler:
        """Return the schedule at the pace of these ranks, where its estimate is of others.

        One that is no `LambdaLR` goes on by steps: `check_estimate` warns where that is off.
        """
        plan = self._plan
        self._follows_plan = plan is not None and isinstance(scheduler, LambdaLR)
        if plan is None or plan.is_of_these_ranks or not isinstance(scheduler, LambdaLR):
            return scheduler
        return at_positions(scheduler, plan.schedule_step)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the run on this rank. Between optimizer steps only."""
        batches, plan = self.batches, self._plan
        step, ranks = self._trainer.state.global_step, self._trainer.args.world_size
        state = RunState(
            step=step,
            epoch=batches.epoch,
            samples=batches.samples,
            rank_steps=step * ranks if plan is None else plan.rank_steps_at(step),
            steps_per_epoch=None if plan is None else plan.steps_per_epoch,
            planned_ranks=ranks if plan is None else plan.planned_ranks,
            loader=batches.loader.state_dict(),
            monitor=None if self.monitor is None else self.monitor.state_dict(),
        )
        return seal_whole(HOLDER, state)

    def check_step(self, step: int) -> None:
        """Check that what the `Trainer` has loaded is of the checkpoint that the batches are of.

        Args:
            step: optimizer steps of the run so far, by the trainer's count.

        Raises:
            StateError: it is not.
        """
        if self._resumed_at not in (None, step):
            raise StateError(
                f"the `Trainer` resumes at optimizer step {step}, but the state of its batches was "
                f"saved at step {self._resumed_at}: files of two checkpoints were mixed. "
                "Use a whole checkpoint."
            )

    def check_arguments(self) -> None:
        """Reject a hyperparameter search over arguments that the run was already made with.

        Raises:
            ValueError: names the argument.
        """
        for name, before in self._arguments.items():
            value = getattr(self._trainer.args, name)
            if value != before:
                raise ValueError(
                    f"`{name}` must stay as it was when `train` was called ({before}), but is "
                    f"{value} now. A hyperparameter search cannot have it in its space: make a "
                    "trainer for each value."
                )

    # --- an optimizer step ------------------------------------------------------------------------

    def take(
        self, batches: Iterator[Any], count: int
    ) -> tuple[list[dict[str, Any]], torch.Tensor | None]:
        """Return the batches of an optimizer step, and what their loss is to be divided by.

        Args:
            batches: the rest of the epoch.
            count: how many the `Trainer` wants. Where fewer are left, the last one is repeated with
                a weight of 0: the `Trainer` steps only after `count` batches.

        Raises:
            ValueError: the batches are not those of `TrainBatches`, or see `LossWeigher.weigh`.
        """
        start_s = time.perf_counter()
        taken = list(islice(batches, count))
        if not taken:
            return [], None
        wait_s = (time.perf_counter() - start_s) / count
        if not all(STEP_INFO_KEY in batch for batch in taken):
            raise ValueError(
                f"`get_train_dataloader` of `{type(self._trainer).__name__}` must return what that "
                "of `ODBTrainerMixin` does, but returned other batches. Do not override it: give "
                "`train_dataset`, `data_collator` and `ODBConfig.process_fn`."
            )
        infos = [pop_step_info(batch) for batch in taken]
        kept = [self._keys.of(batch) for batch in taken]
        while len(kept) < count:
            kept.append(dict(kept[-1]))
            infos.append(repeated(infos[-1]))
        self._step = TakenStep(batches=kept, infos=infos, own=len(taken), wait_s=wait_s)
        if self.guard is not None:
            self.guard.begin_step(kept, infos)
        return kept, self.losses.weigh(kept, infos)

    @property
    def optimizer_samples(self) -> int:
        """Samples of the optimizer step, on all ranks, without those that were left out."""
        _, infos = self._computed()
        return infos[0].optimizer_samples

    def record_step(self) -> None:
        """Count the optimizer step that is done, and write it into the ledger, if there is one."""
        step, (batches, infos) = self._step, self._computed()
        if self._ledger is not None:
            for info in infos[: step.own]:
                self._ledger.record(info)
        if self._trainer.odb.log_metrics:
            for batch, info in zip(batches, infos, strict=True):
                self.meter.add(batch, info, step.wait_s)
        if self.monitor is not None:
            ooms = 0 if self.guard is None else self.guard.ooms
            self.monitor.record(step, batches, infos, ooms)
        self._step = TakenStep(batches=[], infos=[], own=0, wait_s=0.0)

    def _computed(self) -> tuple[list[dict[str, Any]], list[StepInfo]]:
        """Return the batches of the optimizer step, and the `StepInfo` of each."""
        at = self._step if self.guard is None else self.guard
        return at.batches, at.infos

    def save(self, folder: str) -> None:
        """Write the state of this rank into a checkpoint, after its ledger is on the disk."""
        if self._ledger is not None:
            self._ledger.sync()
        save_rank_state(self.state_dict(), folder)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Train within this context; stops the workers, and closes ledger and monitor."""
        noting = nullcontext() if self.monitor is None else self.monitor.noting_norms()
        is_done = False
        try:
            with noting:
                yield
            is_done = True
        finally:
            if self.guard is not None:
                self.guard.close()
            if self._ledger is not None:
                self._ledger.close(ended=is_done)
            self.batches.loader.close()
            if self.monitor is not None:
                self.monitor.close(write=is_done)

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics of the steps since the last call. All ranks call it together."""
        if not len(self.meter):
            return {}
        gather = self._trainer.accelerator.gather
        metrics = self.meter.take_metrics(gather, self._trainer.args.device)
        return metrics if self.guard is None else metrics | self.guard.take_metrics(gather)


def _ledger_of(trainer: Any) -> Ledger | None:
    folder, args = trainer.odb.ledger, trainer.args
    if folder is None:
        return None
    return Ledger(folder, rank=args.process_index, world_size=args.world_size)
