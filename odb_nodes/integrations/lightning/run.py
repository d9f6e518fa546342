"""The batches of a run, and its position after the last optimizer step."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from odb_nodes._compat import lightning as compat
from odb_nodes._support.seeds import load_rngs, save_rngs
from odb_nodes.core.contract import NodeState, SourceState
from odb_nodes.core.loader.dataloader import ODBDataLoader
from odb_nodes.core.loader.reshard_states import Ranks
from odb_nodes.core.step_info import StepInfo, pop_step_info
from odb_nodes.errors import StateError
from odb_nodes.integrations.resuming import CHANGED_ARGUMENTS, begin_or_resume, resharded_run
from odb_nodes.training.checkpoints.resharding import batches_per_step
from odb_nodes.training.memory.guard import OomGuard
from odb_nodes.training.memory.guarded_step import GuardedStep
from odb_nodes.training.monitor.counts import timed
from odb_nodes.training.tasks.trainer_options import AnyWeights

CHANGED = CHANGED_ARGUMENTS.format(
    names="`accumulate` is `accumulate_grad_batches`, the other arguments belong to the "
    "`ODBDataModule` or to your `ODBDataLoader`",
    load="load_from_checkpoint",
    leave_out="ckpt_path",
    smaller="no `change_budget`",
)


class FetchedBatch(NamedTuple):
    """A batch, or a guard's step, that Lightning has read and may not have trained on yet."""

    batch_idx: int  # number of the batch in the epoch, from 0
    batches: list[Any]  # still on the CPU
    # Not in the batches: Lightning cannot move a frozen dataclass to a device.
    planned_infos: list[StepInfo]
    state: dict[str, Any]  # the loader's state after this batch
    wait_s: float  # mean waiting time of `batches`
    step: GuardedStep | None

    @property
    def infos(self) -> list[StepInfo]:
        """The `StepInfo` of each batch; after a guarded step, without skipped samples."""
        return self.planned_infos if self.step is None else self.step.infos

    @property
    def last_info(self) -> StepInfo:
        """The `StepInfo` of the last batch."""
        return self.infos[-1]


class TrainBatches:
    """Each `iter()` yields the batches of an epoch; keeps the `StepInfo` and state of each batch.

    Without `len()`, Lightning does not assume an exact length; without `state_dict`, it does not
    save a state after the batch that it reads ahead.
    """

    def __init__(self, loader: ODBDataLoader, guard: OomGuard | None = None) -> None:
        self.loader, self.guard = loader, guard
        if guard is not None:
            guard.context.collator.keep_samples()
        self.start_state: dict[str, Any] | None = None  # before the most recent `iter()`
        self.end_state: dict[str, Any] | None = None  # after the last epoch that ended
        self.last: FetchedBatch | None = None  # batch of that epoch; `None` if it yielded none
        self._waiting: deque[FetchedBatch] = deque()
        self._has_taken = False  # whether a batch of the last `iter()` was taken

    def __iter__(self) -> Iterator[Any]:
        """Begin the next epoch, or continue from a loaded state, at the first `next`."""
        # In a second `fit`, Lightning iterates twice before it trains.
        if self.start_state is not None and self._waiting and not self._has_taken:
            self.loader.load_state_dict(self.start_state)
        self._waiting.clear()
        self._has_taken = False
        batches = begin_or_resume(self.loader, CHANGED)
        self.start_state = self.loader.state_dict()
        last = None
        items = batches if self.guard is None else self.guard.steps(batches)
        for item, wait_s in timed(items):
            last = self._fetched(item, wait_s)
            self._waiting.append(last)
            yield item
        self.last = last
        self.end_state = self.loader.state_dict()

    def _fetched(self, item: Any, wait_s: float) -> FetchedBatch:
        step = item if isinstance(item, GuardedStep) else None
        infos = [pop_step_info(item)] if step is None else step.infos
        batch_idx = infos[-1].step if step is None else infos[-1].step // self.loader.accumulate
        batches = [item] if step is None else [*step.batches]
        state = self.loader.state_dict()
        return FetchedBatch(batch_idx, batches, infos, state, wait_s / len(batches), step)

    def close(self) -> None:
        """Stop the workers and the guard's watch."""
        if self.guard is not None:
            self.guard.context.stop_watching()
        self.loader.close()

    def take(self) -> FetchedBatch:
        """Return the oldest batch that was not taken."""
        if not self._waiting:
            raise RuntimeError(
                "Lightning trains on a batch that was not read from `ODBCallback.batches`. Return "
                "that object from `train_dataloader`, not inside another loader, and let "
                "`training_step` take a batch, not a `dataloader_iter`."
            )
        self._has_taken = True
        return self._waiting.popleft()


@dataclass(kw_only=True)
class RunState(NodeState):
    """The position of a run on one rank, between two optimizer steps. Treat it as immutable."""

    epoch: int = 0  # epochs that have ended
    steps: int = 0  # micro-steps of the current epoch that are done
    total_steps: int = 0  # micro-steps of the run that are done
    samples: int = 0  # this rank's samples of the current epoch that are done
    loader: SourceState | None = None  # None before the first batch of a run
    rngs: dict[str, Any] | None = None  # see `save_rngs`; None before the first optimizer step
    monitor: dict[str, Any] | None = None
    tasks: dict[str, Any] | None = (
        None  # weights of the tasks; None before the first optimizer step
    )


def position_of_rank(runs: Sequence[RunState], rank: int, world_size: int) -> RunState:
    """Return the position of a rank from the saved positions, resharded if necessary."""
    if len(runs) == world_size:
        return runs[rank]
    old = runs[rank % len(runs)]
    samples = Ranks(len(runs), world_size).split(sum(run.samples for run in runs))[rank]
    shared = ("epoch", "steps", "total_steps", "tasks")
    new = resharded_run(runs, rank, world_size, shared, samples=samples, rngs=old.rngs)
    if old.loader is None or new.loader is None:
        return new
    # A rank that hosts twice as many virtual ranks has twice as many batches.
    old_batches, new_batches = batches_per_step(old.loader), batches_per_step(new.loader)
    return replace(
        new,
        steps=new.steps * new_batches // old_batches,
        total_steps=new.total_steps * new_batches // old_batches,
    )


class FitRun:
    """Follows a run from its start, or from the position of a checkpoint."""

    def __init__(self, trainer: Any, start: RunState, tasks: AnyWeights | None = None) -> None:
        self._trainer, self._tasks = trainer, tasks
        self.start = self._settled = self.after = start
        """`after`: the position after the current batch, once the optimizer has stepped."""
        self.current: FetchedBatch | None = None
        """The batch that is trained on, or the last one."""
        self.backwards = 0
        """Number of weighed losses of this optimizer step."""
        self._optimizer_steps = 0  # done before the current batch

    def begin(self, batches: TrainBatches, batch_idx: int) -> FetchedBatch:
        """Make the next batch the current one, and return it."""
        if self.current is None and self.start.rngs is not None:
            load_rngs(self.start.rngs)
        settled = self.settle()
        fetched = batches.take()
        info = fetched.infos[0]
        epoch = self._trainer.current_epoch
        if fetched.batch_idx != batch_idx:
            raise StateError(
                f"Lightning is at batch {batch_idx} of the epoch, the loader at "
                f"{fetched.batch_idx}: the checkpoint was changed, or an epoch was left before "
                "its end."
            )
        total = compat.batches_begun(self._trainer)
        samples = self.after.samples
        if info.step == 0:
            samples = 0
            settled = replace(
                settled,
                epoch=epoch,
                total_steps=total - 1,
                steps=0,
                samples=0,
                loader=batches.start_state,
            )
        if info.micro_step == 0:
            self.backwards = 0
        self._settled = settled
        self.current = fetched
        self._optimizer_steps = self._trainer.global_step
        self.after = RunState(
            epoch=epoch,
            steps=fetched.batch_idx + 1,
            total_steps=total,
            samples=samples + sum(info.local_samples for info in fetched.infos),
            loader=fetched.state,
        )
        return fetched

    @property
    def has_stepped(self) -> bool:
        """Whether the optimizer has stepped since the current batch began."""
        return bool(self._trainer.global_step > self._optimizer_steps)

    def settle(self) -> RunState:
        """Return the position after the last optimizer step."""
        # Another callback may save before our hooks are called, or after an exception.
        current = self.current
        if current is None or not (current.last_info.ends_optimizer_step and self.has_stepped):
            return self._settled
        tasks = None if self._tasks is None else self._tasks.state_dict()
        return replace(self.after, rngs=save_rngs(), tasks=tasks)

    def state_after(self, batches: TrainBatches) -> dict[str, Any] | None:
        """Return the loader's state after the epoch, if the current batch was its last."""
        return batches.end_state if batches.last is self.current else None
