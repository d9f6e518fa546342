"""One call of `Trainer.train`: its batches, its position, its steps, and what records them."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Iterator, Mapping, Sized
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from accelerate.utils import broadcast_object_list
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torchdata.nodes import BaseNode
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from odb_nodes._core.user_warning import warn_user
from odb_nodes.checkpoints.rank_states import PREFIX, names_in, rank_files, save_rank_state
from odb_nodes.contract import NodeState, SourceState
from odb_nodes.contract.state import seal_whole, unseal_whole
from odb_nodes.contract.state_file import load_state
from odb_nodes.errors import StateError, TornStateError
from odb_nodes.integrations.huggingface.auto_budget import find_for, saved_budget
from odb_nodes.integrations.huggingface.guard import RunGuard
from odb_nodes.integrations.huggingface.loss import LossWeigher
from odb_nodes.integrations.huggingface.samples import given_dataset, loader_options, model_batch
from odb_nodes.integrations.learning_rate import at_positions
from odb_nodes.integrations.recording import StepRecorder
from odb_nodes.integrations.resuming import (
    CHANGED_ARGUMENTS,
    begin_or_resume,
    load_saved_states,
    resharded_run,
)
from odb_nodes.loader.dataloader import ODBDataLoader
from odb_nodes.monitor import Monitor
from odb_nodes.sources import JsonlSource
from odb_nodes.step_info import STEP_INFO_KEY, StepInfo, pop_step_info
from odb_nodes.tools.estimate import check_can_estimate, estimate_loader_steps

NO_BOUND = 2**40  # optimizer steps, where nothing bounds them
MOST_OF_AN_EPOCH = 0.999  # share of an epoch shown, at most, before its end is seen
ESTIMATE_SLACK = 0.05  # share of the steps by which estimates are usually off
HOLDER = "ODBTrainer"
FIXED_ARGUMENTS = ("num_train_epochs", "gradient_accumulation_steps", "seed", "data_seed")
CHANGED = CHANGED_ARGUMENTS.format(
    names="`accumulate` is `gradient_accumulation_steps`, `seed` is `data_seed` or else `seed`, "
    "the others are those of the `ODBConfig`",
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

    Steps are counted as rank-steps, a step of M ranks as M of them: half as many ranks take twice
    as many steps for an epoch, and move the learning-rate schedule half as far by each.
    """

    step: int = 0  # optimizer steps of the run that are done
    epoch: int = 0  # epochs that have ended
    samples: int = 0  # of all ranks, done in the present epoch
    rank_steps: int = 0
    steps_per_epoch: int | None = None  # estimated; None where `max_steps` ends the run
    planned_ranks: int  # of that estimate
    loader: SourceState  # empty at the beginning
    monitor: dict[str, Any] | None = None
    tasks: dict[str, Any] | None = None
    files: dict[str, int] | None = None  # bytes of each that the `Trainer` has saved; on rank 0

    def rank_steps_at(self, step: int, ranks: int) -> int:
        """Return the rank-steps of so many optimizer steps, if so many ranks go on from here."""
        return self.rank_steps + (step - self.step) * ranks

    def schedule_step(self, step: int, ranks: int) -> float:
        """Return where the schedule stands after `step` optimizer steps, in steps of its own."""
        return max(0, self.rank_steps_at(step, ranks)) / self.planned_ranks

    def schedule_steps(self, epochs: float) -> int:
        """Return the steps that the schedule is made for."""
        return math.ceil((self.steps_per_epoch or 0) * epochs)

    def total_steps(self, epochs: float, ranks: int) -> int:
        """Return the optimizer steps of the whole run, those that are done included."""
        left = self.schedule_steps(epochs) * self.planned_ranks - self.rank_steps
        return self.step + max(0, math.ceil(left / ranks))


class TrainBatches:
    """Yields the batches of an epoch, or the rest of one, per `iter()`; knows how far the run is.

    It has neither `set_epoch` nor `len()`, by which the `Trainer` counts epochs of equal lengths.
    """

    def __init__(self, trainer: Any) -> None:
        args, dataset = trainer.args, given_dataset(trainer)
        if trainer.odb_budget is None:
            raise ValueError(
                '`token_budget` is "auto", and no budget is found yet: `train` finds it. Call this '
                "during `train`, or give a number of tokens."
            )
        self.loader = ODBDataLoader(dataset, **vars(loader_options(trainer)))
        self.loader.trust_labels()
        self.dataset = self.loader.dataset
        self.samples_per_epoch: int | None = None
        # The length of a dict is its number of datasets; that of a node is of one rank.
        if isinstance(dataset, JsonlSource):
            self.samples_per_epoch = dataset.num_records
        elif isinstance(dataset, Sized) and not isinstance(dataset, (Mapping, BaseNode)):
            self.samples_per_epoch = len(dataset)
        self._epochs = args.num_train_epochs if args.max_steps <= 0 else None
        self.samples_seen = 0  # of all ranks, in all epochs of this process
        self.begin_epoch(0)

    def begin_epoch(self, epoch: int, samples: int = 0) -> None:
        """Stand in an epoch, after so many samples of all ranks."""
        self.epoch, self.samples = epoch, samples
        self.steps = 0  # micro-steps that this process has yielded of this epoch
        self._it: Iterator[Any] | None = None

    @property
    def progress(self) -> float:
        """Epochs done, with the share of this one; whole epochs only where it has no length."""
        if self.samples_per_epoch is None:
            return float(self.epoch)
        return self.epoch + self.samples / self.samples_per_epoch

    @property
    def is_done(self) -> bool:
        """Whether the run has had all its epochs."""
        return self._epochs is not None and self.progress >= self._epochs

    @property
    def share_done(self) -> float:
        """Share of the run that is done, 0.0 to 1.0; always 0.0 where the run has no end."""
        return 0.0 if self._epochs is None else min(1.0, self.progress / self._epochs)

    def __iter__(self) -> Iterator[Any]:
        """Continue the epoch, or begin the next one."""
        is_empty = True
        while is_empty and not self.is_done:
            if self._it is None:
                self._it = begin_or_resume(self.loader, CHANGED)
            for batch in self._it:
                is_empty = False
                info = batch[STEP_INFO_KEY]
                self.steps = info.step + 1
                self.samples += info.all_samples_this_step
                self.samples_seen += info.all_samples_this_step
                yield batch
            # An epoch is empty where the checkpoint was written after its last step. The `Trainer`
            # would end the run at an empty epoch: go on with the next one.
            self.begin_epoch(self.epoch + 1)

    def abandon_epoch(self) -> None:
        """Begin the next epoch, where this one has not ended, so that a checkpoint is of that."""
        if self._it is not None:
            self.begin_epoch(self.epoch + 1)
            iter(self.loader)


class TakenStep(NamedTuple):
    """The batches of an optimizer step, with the seconds that each was waited for on the mean."""

    batches: list[dict[str, Any]]
    infos: list[StepInfo]
    wait_s: float


class Run:
    """Follows one call of `train`, from a checkpoint if any, and takes the batches of each step."""

    def __init__(self, trainer: Any, checkpoint: str | None) -> None:
        odb, args = trainer.odb, trainer.args
        self._trainer, self._ranks = trainer, args.world_size
        state = RunState(planned_ranks=self._ranks, loader={})
        if checkpoint is not None:
            state = _saved_run(checkpoint, args)
        self._resumes = checkpoint is not None
        if odb.finds_budget:
            trainer.odb_budget = saved_budget(state.loader) if state.loader else find_for(trainer)
        self.batches = batches = TrainBatches(trainer)
        self.by_epochs = args.max_steps <= 0  # that end the run; else `max_steps` does
        if not self.by_epochs:
            state.steps_per_epoch = None
        elif state.steps_per_epoch is None:  # A run that resumes keeps its estimate.
            state.steps_per_epoch, state.planned_ranks = _steps_per_epoch(trainer), self._ranks
            state.rank_steps = state.step * self._ranks
        if self._resumes:
            batches.loader.load_state_dict(state.loader, change_budget=odb.change_budget)
            batches.begin_epoch(state.epoch, state.samples)
            if batches.is_done:  # The loop reads nothing: it would not see that the data differ.
                begin_or_resume(batches.loader, CHANGED)
        if odb.schedule == "samples" and batches.samples_per_epoch is None:
            raise ValueError(
                '`schedule` must be "steps" where `train_dataset` does not have a number of '
                f"samples, as `{type(trainer.train_dataset).__name__}` does not."
            )
        self._begun = state
        # Optimizer steps of the run; those of the ranks of the estimate, which the learning-rate
        # schedule is made for; and an upper bound: each step has at least one sample.
        self.total_steps = self.schedule_steps = self.most_steps = int(args.max_steps)
        if self.by_epochs:
            epochs, samples = args.num_train_epochs, batches.samples_per_epoch
            self.total_steps = state.total_steps(epochs, self._ranks)
            self.schedule_steps = state.schedule_steps(epochs)
            self.most_steps = NO_BOUND
            if samples is not None:
                self.most_steps = max(self.total_steps, math.ceil(epochs) * samples) + 1
        self.losses = LossWeigher(trainer)
        self._model_batch = model_batch(trainer)
        self._arguments = {name: getattr(args, name) for name in FIXED_ARGUMENTS}
        self._follows_plan = False  # the learning-rate schedule, at the pace of these ranks
        self._is_warned = False
        self._step = TakenStep([], [], 0.0)  # that has begun
        monitor, place = odb.monitor, {"rank": args.process_index, "world_size": self._ranks}
        if not isinstance(monitor, Monitor | None):
            monitor = Monitor(monitor)
        self.recorder = StepRecorder(odb.ledger, monitor, tasks=odb.task_weights, **place)
        self.recorder.resume(batches.loader, state.monitor, state.step)
        if (tasks := odb.task_weights) is not None:
            tasks.check_model(trainer.model)
            if state.tasks is not None:
                tasks.load_state_dict(state.tasks)
        self.guard: RunGuard | None = None
        if odb.on_oom is not None:
            self.guard = RunGuard(trainer, batches.loader, self.losses, self._model_batch)
            self.recorder.guard = self.guard.guard

    # --- how far it is ----------------------------------------------------------------------------

    @property
    def epoch(self) -> float:
        """Epochs done, with the share of this one: by its samples, or else by its steps."""
        batches, begun = self.batches, self._begun
        if batches.samples_per_epoch is not None or begun.steps_per_epoch is None:
            return batches.progress
        steps = begun.steps_per_epoch * begun.planned_ranks / self._ranks
        steps *= self._trainer.args.gradient_accumulation_steps
        return float(batches.progress + min(batches.steps / steps, MOST_OF_AN_EPOCH))

    def check_estimate(self, steps: int, *, ends: bool) -> None:
        """Warn, once, where a learning-rate schedule by steps does not end with the run."""
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
        """Return the schedule, if a `LambdaLR`, at the pace of these ranks."""
        begun = self._begun
        self._follows_plan = self.by_epochs and isinstance(scheduler, LambdaLR)
        is_of_others = begun.schedule_step(begun.step + 1, self._ranks) != begun.step + 1
        if not (is_of_others and self._follows_plan and isinstance(scheduler, LambdaLR)):
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
        return seal_whole(HOLDER, state)

    def check_step(self, step: int) -> None:
        """Check that what the `Trainer` has loaded is of the checkpoint that the batches are of."""
        if self._resumes and self._begun.step != step:
            raise StateError(
                f"the `Trainer` resumes at optimizer step {step}, but the state of its batches was "
                f"saved at step {self._begun.step}: files of two checkpoints were mixed. "
                "Use a whole checkpoint."
            )

    def check_arguments(self) -> None:
        """Reject a hyperparameter search over arguments that the run was already made with."""
        for name, before in self._arguments.items():
            value = getattr(self._trainer.args, name)
            if value != before:
                raise ValueError(
                    f"`{name}` must stay as it was when `train` was called ({before}), but is "
                    f"{value} now. A hyperparameter search cannot have it in its space: make a "
                    "trainer for each value."
                )

    # --- an optimizer step ------------------------------------------------------------------------

    def take(self, batches: Iterator[Any], count: int) -> list[dict[str, Any]]:
        """Return the batches of an optimizer step, behind copies of the first for missing ones."""
        self.recorder.tell_monitor()
        start_s = time.perf_counter()
        taken = list(islice(batches, count))
        if not taken:
            return []
        wait_s = (time.perf_counter() - start_s) / len(taken)
        if not all(STEP_INFO_KEY in batch for batch in taken):
            raise ValueError(
                f"`get_train_dataloader` of `{type(self._trainer).__name__}` must return what that "
                "of `ODBTrainerMixin` does, but returned other batches. Do not override it: give "
                "`train_dataset`, `data_collator` and `ODBConfig.process_fn`."
            )
        infos = [pop_step_info(batch) for batch in taken]
        kept = [self._model_batch(batch) for batch in taken]
        self._step = TakenStep(kept, infos, wait_s)
        if self.guard is not None:
            self.guard.begin_step(kept, infos)
        fills = count - len(kept)  # The `Trainer` steps only after `count` batches.
        self.losses.weigh(kept, infos, fills)
        return [*(dict(kept[0]) for _ in range(fills)), *kept]

    def computed(self) -> TakenStep:
        """Return the optimizer step as it was computed: a guard may have left samples out."""
        if self.guard is None:
            return self._step
        return self._step._replace(batches=self.guard.batches, infos=self.guard.infos)

    def record_step(self) -> None:
        """Record the optimizer step that is done."""
        step = self.computed()
        rows = [(*pair, step.wait_s) for pair in zip(step.batches, step.infos, strict=True)]
        self.recorder.record(rows, meter=self._trainer.odb.log_metrics)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the state of this rank, the last of its files in a checkpoint."""
        for one in names_in(Path(folder)):
            # Of a torn checkpoint, saved by other ranks, which the `Trainer` has just overwritten.
            if one[1] == PREFIX and int(one[3]) != self._ranks:
                Path(folder, one[0]).unlink(missing_ok=True)
        files = None  # Rank 0 names those of the `Trainer`: without one, a checkpoint is torn.
        if self._trainer.args.process_index == 0:
            found = [path for path in Path(folder).rglob("*") if PREFIX not in path.name]
            sizes = {path: path.stat().st_size for path in found if path.is_file()}
            files = {path.relative_to(folder).as_posix(): size for path, size in sizes.items()}
        save_rank_state(self.state_dict(files), folder)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Train within this context; stops the workers, and closes ledger and monitor."""
        is_done = False
        try:
            yield
            is_done = True
        finally:
            if self.guard is not None:
                self.guard.guard.leave()
            self.batches.loader.close()
            self.recorder.close(ended=is_done)


# --- what a run begins with -----------------------------------------------------------------------


def agreed_checkpoint(args: Any, given: str | bool) -> str | None:
    """Return the checkpoint to resume from, the same on all ranks; True: the last complete one."""
    found: list[Any] = [given]
    if args.process_index == 0:
        try:
            if isinstance(given, bool):
                found = [_last_complete(Path(args.output_dir))]
            else:
                with suppress(FileNotFoundError):  # which each rank raises by itself
                    _check_complete(Path(given))
        except (OSError, StateError) as error:
            found = [error]
    (agreed,) = broadcast_object_list(found)
    if isinstance(agreed, Exception):
        raise agreed
    checkpoint: str | None = agreed
    return checkpoint


def warn_of_other_checkpoints(args: Any) -> None:
    """Warn where a new run saves beside checkpoints of another, which a resume may take."""
    if args.process_index or args.save_strategy == "no" or not os.path.isdir(args.output_dir):
        return
    if (found := get_last_checkpoint(args.output_dir)) is not None:
        warn_user(
            f"`{args.output_dir}` has checkpoints of an earlier run, up to "
            f"`{os.path.basename(found)}`, and this run begins anew: `resume_from_checkpoint=True` "
            "would take theirs while these are newer. Remove them, or use another `output_dir`."
        )


def _last_complete(folder: Path) -> str | None:
    """Return the newest complete checkpoint, and warn of those that are skipped."""
    matches = (re.fullmatch(PREFIX_CHECKPOINT_DIR + r"-(\d+)", one) for one in os.listdir(folder))
    torn: dict[Path, Exception] = {}
    for step in sorted((int(one[1]) for one in matches if one), reverse=True):
        checkpoint = folder / f"{PREFIX_CHECKPOINT_DIR}-{step}"
        try:
            _check_complete(checkpoint)
        except (FileNotFoundError, TornStateError) as error:
            torn[checkpoint] = error
            continue
        for other, why in torn.items():
            problem = f"is not complete, and is skipped: {why} Remove it."
            if not isinstance(why, TornStateError):
                problem = (
                    "has no state of the batches, and is skipped: it was saved with "
                    "`save_only_model`, without dynamic batches, or up to a kill."
                )
            warn_user(f"`{other.name}` {problem} The run resumes from `{checkpoint.name}`.")
        return str(checkpoint)
    for newest, why in torn.items():
        if isinstance(why, TornStateError):
            raise why
        return str(newest)
    return None


def _check_complete(checkpoint: Path) -> None:
    """Raise where a state of a rank, or a file of the `Trainer`, is missing or cut."""
    for file in rank_files(checkpoint, PREFIX):
        for name, size in (load_state(file).get("files") or {}).items():
            found = 0
            with suppress(FileNotFoundError):
                found = (checkpoint / name).stat().st_size
            if found < size:
                raise TornStateError(
                    f"`{name}` of `{checkpoint}` must have {size} bytes, as when it was saved, but "
                    f"has {found}. Use an earlier checkpoint."
                )


def _saved_run(checkpoint: str, args: Any) -> RunState:
    """Return the position that a checkpoint was saved at, by whatever number of ranks."""
    rank, world_size = args.process_index, args.world_size
    saved, is_own = load_saved_states(checkpoint, rank, world_size, NOT_SAVED)
    runs = [unseal_whole(one, HOLDER, RunState) for one in saved]
    if is_own:
        return runs[0]
    alike = ("step", "epoch", "samples", "rank_steps", "steps_per_epoch", "planned_ranks", "tasks")
    return resharded_run(runs, rank, world_size, alike)


def _steps_per_epoch(trainer: Any) -> int:
    """Return the optimizer steps of an epoch, given or estimated; the same on all ranks."""
    config, args = trainer.odb, trainer.args
    if config.steps_per_epoch is not None:
        return int(config.steps_per_epoch)
    check_can_estimate(trainer.train_dataset, "Give `steps_per_epoch`, or `max_steps`.")
    steps = 0
    if args.process_index == 0:
        steps = estimate_loader_steps(
            trainer.train_dataset,
            loader_options(trainer),
            world_size=args.world_size,
            looked_at=config.estimate_samples,
        )
    (agreed,) = broadcast_object_list([steps])
    return int(agreed)
