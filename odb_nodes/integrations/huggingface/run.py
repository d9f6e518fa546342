"""One call of `Trainer.train`: its batches, its position, its steps, its checkpoints."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping, Sized
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from accelerate.utils import broadcast_object_list
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torchdata.nodes import BaseNode

from odb_nodes._support.user_warning import warn_user
from odb_nodes.core.contract import NodeState, SourceState
from odb_nodes.core.contract.state import seal_whole, unseal_whole
from odb_nodes.core.loader.dataloader import ODBDataLoader
from odb_nodes.core.sources import JsonlSource
from odb_nodes.core.step_info import STEP_INFO_KEY, StepInfo, pop_step_info
from odb_nodes.errors import StateError
from odb_nodes.integrations.huggingface.auto_budget import find_for, saved_budget
from odb_nodes.integrations.huggingface.guard import RunGuard
from odb_nodes.integrations.huggingface.loss import LossWeigher
from odb_nodes.integrations.huggingface.samples import loader_options, model_batch, train_dataset
from odb_nodes.integrations.learning_rate import at_positions
from odb_nodes.integrations.recording import StepRecorder
from odb_nodes.integrations.resuming import (
    CHANGED_ARGUMENTS,
    begin_or_resume,
    load_saved_states,
    resharded_run,
)
from odb_nodes.tools.estimate import (
    ESTIMATE_SAMPLES,
    check_samples_can_be_drawn,
    estimate_loader_steps,
)
from odb_nodes.training.checkpoints.rank_states import PREFIX, rank_file_names, save_rank_state
from odb_nodes.training.monitor import Monitor

NO_BOUND = 2**40  # optimizer steps of a run of unknown length
MAX_EPOCH_SHARE = 0.999  # reported share of an epoch, at most, until it ends
ESTIMATE_SLACK = 0.05  # usual relative error of an estimate of the steps
STATE_NAME = "ODBTrainer"  # in saved states
FIXED_ARGUMENTS = ("num_train_epochs", "gradient_accumulation_steps", "seed", "data_seed")
CHANGED = CHANGED_ARGUMENTS.format(
    names="`accumulate` is `gradient_accumulation_steps`, `seed` is `data_seed` or else `seed`, "
    "the other arguments are fields of the `ODBConfig`",
    load="from_pretrained",
    leave_out="resume_from_checkpoint",
    smaller="`change_budget` is a field of the `ODBConfig`",
)
NOT_SAVED = (
    "it was saved by a `Trainer` without dynamic batches, or with `save_only_model`. To begin a "
    "run with its weights, load them with `from_pretrained`, without `resume_from_checkpoint`."
)


@dataclass(kw_only=True)
class RunState(NodeState):
    """The position of a run on one rank, between two optimizer steps.

    A step of M ranks counts as M rank-steps: half as many ranks take twice as many steps for an
    epoch, and each step moves the learning-rate schedule half as far.
    """

    step: int = 0  # optimizer steps of the run that are done
    epoch: int = 0  # epochs that have ended
    samples: int = 0  # samples of the current epoch that all ranks have done
    rank_steps: int = 0
    steps_per_epoch: int | None = None  # estimated; None if `max_steps` ends the run
    planned_ranks: int  # number of ranks of the estimate
    loader: SourceState  # empty at the start of a run
    monitor: dict[str, Any] | None = None
    tasks: dict[str, Any] | None = None
    files: dict[str, int] | None = None  # sizes of the `Trainer`'s files; on rank 0

    def rank_steps_at(self, step: int, ranks: int) -> int:
        """Return the rank-steps at optimizer step `step`, if `ranks` ranks continue from here."""
        return self.rank_steps + (step - self.step) * ranks

    def schedule_step(self, step: int, ranks: int) -> float:
        """Return the position of the schedule after `step` optimizer steps, in planned steps."""
        return max(0, self.rank_steps_at(step, ranks)) / self.planned_ranks

    def schedule_steps(self, epochs: float) -> int:
        """Return the length of the schedule, in planned steps."""
        return math.ceil((self.steps_per_epoch or 0) * epochs)

    def total_steps(self, epochs: float, ranks: int) -> int:
        """Return the optimizer steps of the whole run, done steps included."""
        to_come = self.schedule_steps(epochs) * self.planned_ranks - self.rank_steps
        return self.step + max(0, math.ceil(to_come / ranks))


class TrainBatches:
    """Each `iter()` yields the batches of an epoch, or its remaining batches; counts the progress.

    Without `set_epoch` and `len()`, the `Trainer` does not assume epochs of equal lengths.
    """

    def __init__(self, trainer: Any) -> None:
        dataset = train_dataset(trainer)
        if trainer.odb_budget is None:
            raise ValueError(
                '`token_budget` is "auto", and only `train` finds the budget. Call this during '
                "`train`, or give a number of tokens."
            )
        self.loader = ODBDataLoader(dataset, **vars(loader_options(trainer)))
        self.loader.trust_labels()
        self.dataset = self.loader.dataset
        self.samples_per_epoch: int | None = None
        # `len` counts the datasets of a dict, and the samples of one rank of a node.
        if isinstance(dataset, JsonlSource):
            self.samples_per_epoch = dataset.num_records
        elif isinstance(dataset, Sized) and not isinstance(dataset, (Mapping, BaseNode)):
            self.samples_per_epoch = len(dataset)
        self._epochs = None if trainer.args.max_steps > 0 else trainer.args.num_train_epochs
        self.samples_seen = 0  # by all ranks, in all epochs of this process
        self.begin_epoch(0)

    def begin_epoch(self, epoch: int, samples: int = 0) -> None:
        """Set the position: `samples` samples of all ranks after the start of an epoch."""
        self.epoch, self.samples = epoch, samples
        self.steps = 0  # micro-steps of this epoch that this process has yielded
        self._batches: Iterator[Any] | None = None

    @property
    def progress(self) -> float:
        """Epochs done, with the fraction of the current epoch if its length is known."""
        if self.samples_per_epoch is None:
            return float(self.epoch)
        return self.epoch + self.samples / self.samples_per_epoch

    @property
    def is_done(self) -> bool:
        """Whether all epochs are done."""
        return self._epochs is not None and self.progress >= self._epochs

    @property
    def share_done(self) -> float:
        """Fraction of the run that is done, 0.0 to 1.0; 0.0 if epochs do not end the run."""
        return 0.0 if self._epochs is None else min(1.0, self.progress / self._epochs)

    def __iter__(self) -> Iterator[Any]:
        """Continue the epoch, or begin the next one."""
        is_empty = True
        while is_empty and not self.is_done:
            if self._batches is None:
                self._batches = begin_or_resume(self.loader, CHANGED)
            for batch in self._batches:
                is_empty = False
                info = batch[STEP_INFO_KEY]
                self.steps = info.step + 1
                self.samples += info.all_samples_this_step
                self.samples_seen += info.all_samples_this_step
                yield batch
            # A checkpoint after the last step of an epoch leaves an empty epoch, at which the
            # `Trainer` would end the run: continue with the next one.
            self.begin_epoch(self.epoch + 1)

    def abandon_epoch(self) -> None:
        """Begin the next epoch if this one has not ended, so that a checkpoint is of the next."""
        if self._batches is not None:
            self.begin_epoch(self.epoch + 1)
            iter(self.loader)


class TakenStep(NamedTuple):
    """The batches of an optimizer step, and the mean seconds that the step waited for each."""

    batches: list[dict[str, Any]]
    infos: list[StepInfo]
    wait_s: float


class TrainRun:
    """Follows one call of `train`, from a checkpoint if any, and takes the batches of each step."""

    def __init__(self, trainer: Any, checkpoint: str | None) -> None:
        odb, args = trainer.odb, trainer.args
        self._trainer = trainer
        self._ranks = args.world_size
        self._resumes = checkpoint is not None
        self.by_epochs = args.max_steps <= 0  # whether `num_train_epochs` ends the run
        state = RunState(planned_ranks=self._ranks, loader={})
        if checkpoint is not None:
            state = _saved_run(checkpoint, args)
        if odb.finds_budget:
            trainer.odb_budget = saved_budget(state.loader) if state.loader else find_for(trainer)
        self.batches = TrainBatches(trainer)
        if not self.by_epochs:
            state.steps_per_epoch = None
        elif state.steps_per_epoch is None:  # A resumed run keeps its estimate.
            state.steps_per_epoch = _steps_per_epoch(trainer)
            state.planned_ranks = self._ranks
            state.rank_steps = state.step * self._ranks
        self._begun = state
        self._resume_batches()
        self._plan_steps()
        self.losses = LossWeigher(trainer)
        self._model_batch = model_batch(trainer)
        self._arguments = {name: getattr(args, name) for name in FIXED_ARGUMENTS}
        self._follows_plan = False  # whether the learning-rate schedule is paced, see `paced`
        self._is_warned = False
        self._step = TakenStep([], [], 0.0)  # the current optimizer step
        monitor = odb.monitor
        if not isinstance(monitor, Monitor | None):
            monitor = Monitor(monitor)
        place = {"rank": args.process_index, "world_size": self._ranks}
        self.recorder = StepRecorder(odb.ledger, monitor, tasks=odb.task_weights, **place)
        self.recorder.resume(self.batches.loader, state.monitor, state.step)
        if odb.task_weights is not None:
            odb.task_weights.check_model(trainer.model)
            if state.tasks is not None:
                odb.task_weights.load_state_dict(state.tasks)
        self.guard: RunGuard | None = None
        if odb.on_oom is not None:
            self.guard = RunGuard(trainer, self.batches.loader, self.losses, self._model_batch)
            self.recorder.guard = self.guard.guard

    def _resume_batches(self) -> None:
        batches, state, odb = self.batches, self._begun, self._trainer.odb
        if self._resumes:
            batches.loader.load_state_dict(state.loader, change_budget=odb.change_budget)
            batches.begin_epoch(state.epoch, state.samples)
            if batches.is_done:  # The loop reads nothing, so data that differ are reported here.
                begin_or_resume(batches.loader, CHANGED)
        if odb.schedule == "samples" and batches.samples_per_epoch is None:
            raise ValueError(
                '`schedule` must be "steps" if the number of samples of `train_dataset` is '
                f"unknown, as of a `{type(self._trainer.train_dataset).__name__}`."
            )

    def _plan_steps(self) -> None:
        """Set the steps of the run and of its schedule, and the upper bound of the loop."""
        args = self._trainer.args
        samples = self.batches.samples_per_epoch
        self.total_steps = self.schedule_steps = self.most_steps = int(args.max_steps)
        if not self.by_epochs:
            return
        epochs = args.num_train_epochs
        self.total_steps = self._begun.total_steps(epochs, self._ranks)
        self.schedule_steps = self._begun.schedule_steps(epochs)  # at the pace of `planned_ranks`
        self.most_steps = NO_BOUND
        if samples is not None:  # Each step has at least one sample.
            self.most_steps = max(self.total_steps, math.ceil(epochs) * samples) + 1

    # --- progress ---------------------------------------------------------------------------------

    @property
    def epoch(self) -> float:
        """Epochs done, with the fraction of the current one: by samples if known, else by steps."""
        batches, begun = self.batches, self._begun
        if batches.samples_per_epoch is not None or begun.steps_per_epoch is None:
            return batches.progress
        steps = begun.steps_per_epoch * begun.planned_ranks / self._ranks
        steps *= self._trainer.args.gradient_accumulation_steps
        return float(batches.progress + min(batches.steps / steps, MAX_EPOCH_SHARE))

    def check_estimate(self, steps: int, *, ends: bool) -> None:
        """Warn, once, if a learning-rate schedule by steps does not end with the run."""
        total = self.total_steps if self._follows_plan else self.schedule_steps
        slack = 1 + ESTIMATE_SLACK * total
        is_off = steps > total + slack or (ends and steps < total - slack)
        if self._trainer.odb.schedule == "samples" or not is_off or self._is_warned:
            return
        self._is_warned = True
        if self._trainer.args.process_index:
            return
        remedy = "another `steps_per_epoch`"
        if self.batches.samples_per_epoch is not None:
            remedy = f'`schedule="samples"` or {remedy}'
        warn_user(
            f"the run {'ends after' if ends else 'continues after'} {steps} optimizer steps, but "
            f"its learning-rate schedule was made for {total}, by `steps_per_epoch` or its "
            f"estimate. For the next run, give {remedy}."
        )

    def paced(self, scheduler: LRScheduler) -> LRScheduler:
        """Return the schedule at the pace of this number of ranks, if it is a `LambdaLR`."""
        begun = self._begun
        self._follows_plan = self.by_epochs and isinstance(scheduler, LambdaLR)
        differs = begun.schedule_step(begun.step + 1, self._ranks) != begun.step + 1
        if not (differs and self._follows_plan and isinstance(scheduler, LambdaLR)):
            return scheduler
        return at_positions(scheduler, lambda step: begun.schedule_step(step, self._ranks))

    def state_dict(self, files: dict[str, int] | None = None) -> dict[str, Any]:
        """Return the position of the run on this rank. Between optimizer steps only."""
        batches, step = self.batches, self._trainer.state.global_step
        tasks = self.losses.tasks
        state = replace(
            self._begun,
            step=step,
            epoch=batches.epoch,
            samples=batches.samples,
            rank_steps=self._begun.rank_steps_at(step, self._ranks),
            loader=batches.loader.state_dict(),
            monitor=self.recorder.save(),
            tasks=None if tasks is None else tasks.state_dict(),
            files=files,
        )
        return seal_whole(STATE_NAME, state)

    def check_step(self, step: int) -> None:
        """Raise a `StateError` if trainer and batches were resumed from different checkpoints."""
        if self._resumes and self._begun.step != step:
            raise StateError(
                f"the `Trainer` resumes at optimizer step {step}, but the state of its batches was "
                f"saved at step {self._begun.step}: files of two checkpoints were mixed. "
                "Use a whole checkpoint."
            )

    def check_arguments(self) -> None:
        """Reject a hyperparameter search over arguments that batches depend on."""
        for name, initial in self._arguments.items():
            value = getattr(self._trainer.args, name)
            if value != initial:
                raise ValueError(
                    f"`{name}` must not change after `train` was called ({initial}), but is "
                    f"{value} now. A hyperparameter search cannot vary it: make a trainer for each "
                    "value."
                )

    # --- an optimizer step ------------------------------------------------------------------------

    def take(self, batches: Iterator[Any], count: int) -> list[dict[str, Any]]:
        """Return `count` batches of an optimizer step; copies of the first replace missing ones."""
        self.recorder.report_to_monitor()
        start_s = time.perf_counter()
        loaded = list(islice(batches, count))
        if not loaded:
            return []
        wait_s = (time.perf_counter() - start_s) / len(loaded)
        if not all(STEP_INFO_KEY in batch for batch in loaded):
            raise ValueError(
                f"`get_train_dataloader` of `{type(self._trainer).__name__}` must return the "
                "batches of `ODBTrainerMixin`, but returned other batches. Do not override it: "
                "give `train_dataset`, `data_collator` and `ODBConfig.process_fn`."
            )
        infos = [pop_step_info(batch) for batch in loaded]
        step_batches = [self._model_batch(batch) for batch in loaded]
        self._step = TakenStep(step_batches, infos, wait_s)
        if self.guard is not None:
            self.guard.begin_step(step_batches, infos)
        fills = count - len(step_batches)  # The `Trainer` steps only after `count` batches.
        self.losses.weigh(step_batches, infos, fills)
        return [dict(step_batches[0]) for _ in range(fills)] + step_batches

    def computed(self) -> TakenStep:
        """Return the current optimizer step, without samples that the guard has skipped."""
        if self.guard is None:
            return self._step
        return self._step._replace(batches=self.guard.batches, infos=self.guard.infos)

    def record_step(self) -> None:
        """Record the current optimizer step, which is done."""
        step = self.computed()
        rows = [(*pair, step.wait_s) for pair in zip(step.batches, step.infos, strict=True)]
        self.recorder.record(rows, meter=self._trainer.odb.log_metrics)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the state of this rank, the last of its files in a checkpoint."""
        for match in rank_file_names(Path(folder)):
            # The `Trainer` overwrites a torn checkpoint, perhaps of another number of ranks.
            if match[1] == PREFIX and int(match[3]) != self._ranks:
                Path(folder, match[0]).unlink(missing_ok=True)
        files = None
        if self._trainer.args.process_index == 0:  # Without one of its files, a checkpoint is torn.
            paths = [path for path in Path(folder).rglob("*") if PREFIX not in path.name]
            files = {
                path.relative_to(folder).as_posix(): path.stat().st_size
                for path in paths
                if path.is_file()
            }
        save_rank_state(self.state_dict(files), folder)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Train within this context, which ends the workers, the ledger and the monitor."""
        is_done = False
        try:
            yield
            is_done = True
        finally:
            if self.guard is not None:
                self.guard.guard.context.stop_watching()
            self.batches.loader.close()
            self.recorder.close(ended=is_done)


def _saved_run(checkpoint: str, args: Any) -> RunState:
    """Return the position of a checkpoint, resharded if another number of ranks saved it."""
    rank, world_size = args.process_index, args.world_size
    saved, is_own = load_saved_states(checkpoint, rank, world_size, NOT_SAVED)
    runs = [unseal_whole(state, STATE_NAME, RunState) for state in saved]
    if is_own:
        return runs[0]
    shared = ("step", "epoch", "samples", "rank_steps", "steps_per_epoch", "planned_ranks", "tasks")
    return resharded_run(runs, rank, world_size, shared)


def _steps_per_epoch(trainer: Any) -> int:
    """Return the optimizer steps of an epoch, configured or estimated; the same on all ranks."""
    config, args = trainer.odb, trainer.args
    if config.steps_per_epoch is not None:
        return int(config.steps_per_epoch)
    check_samples_can_be_drawn(trainer.train_dataset, "Give `steps_per_epoch`, or `max_steps`.")
    steps = 0
    if args.process_index == 0:
        steps = estimate_loader_steps(
            trainer.train_dataset,
            loader_options(trainer),
            world_size=args.world_size,
            samples=ESTIMATE_SAMPLES,
        )
    (agreed,) = broadcast_object_list([steps])
    return int(agreed)
