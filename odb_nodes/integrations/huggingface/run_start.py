"""What a call of `Trainer.train` begins with: its budget, its batches, its number of steps."""

from __future__ import annotations

from typing import Any

from accelerate.utils import broadcast_object_list

from odb_nodes.contract.state import unseal_whole
from odb_nodes.integrations.huggingface.auto_budget import find_for, saved_budget
from odb_nodes.integrations.huggingface.batches import loader_options, make_batches
from odb_nodes.integrations.huggingface.run import HOLDER, Run
from odb_nodes.integrations.huggingface.run_state import RunState
from odb_nodes.integrations.huggingface.step_plan import StepPlan
from odb_nodes.integrations.resuming import load_saved_states, resharded_run
from odb_nodes.integrations.step_estimate import check_can_estimate, estimate_loader_steps

NOT_SAVED = (
    "it was saved by a `Trainer` without dynamic batches, or with `save_only_model`. To begin a "
    "run with its weights, load them with `from_pretrained`, without `resume_from_checkpoint`."
)


def make_run(trainer: Any, checkpoint: str | None) -> Run:
    """Return the run of one call of `train`, at the position of a checkpoint or at its beginning.

    Args:
        trainer: the trainer that runs. It gets its `odb_budget`, where that is found by trying: of
            a checkpoint the one that it was saved under.
        checkpoint: the folder of the checkpoint; None for a new run.

    Raises:
        FileNotFoundError, StateError: the checkpoint has no state of this rank, or a damaged one.
        TypeError, ValueError: the dataset does not have what the configuration needs of it.
        ShapeTooLargeError, PeerError: no budget was found: see `find_for`.
    """
    args = trainer.args
    state = None if checkpoint is None else _saved_run(checkpoint, args)
    if trainer.odb.finds_budget and state is not None:
        trainer.odb_budget = saved_budget(state.loader)
    elif trainer.odb.finds_budget:
        trainer.odb_budget = None
        trainer.odb_budget = find_for(trainer)
    batches = make_batches(trainer)
    plan = None if args.max_steps > 0 else _step_plan(trainer, state)
    if state is not None:
        change = trainer.odb.change_budget
        batches.go_to(state.epoch, state.samples, state.loader, change_budget=change)
    if trainer.odb.schedule == "samples" and batches.samples_per_epoch is None:
        raise ValueError(
            '`schedule` must be "steps" where `train_dataset` does not have a number of samples, '
            f"as `{type(trainer.train_dataset).__name__}` does not."
        )
    run = Run(trainer, batches, plan, None if state is None else state.step)
    if run.monitor is not None:
        run.monitor.begin(*((None, 0) if state is None else (state.monitor, state.step)))
    return run


def _saved_run(checkpoint: str, args: Any) -> RunState:
    """Return the position that a checkpoint was saved at, by whatever number of ranks."""
    rank, world_size = args.process_index, args.world_size
    saved, is_own = load_saved_states(checkpoint, rank, world_size, NOT_SAVED)
    runs = [unseal_whole(one, HOLDER, RunState) for one in saved]
    if is_own:
        return runs[0]
    alike = ("step", "epoch", "samples", "rank_steps", "steps_per_epoch", "planned_ranks")
    return resharded_run(runs, rank, world_size, alike)


def _step_plan(trainer: Any, state: RunState | None) -> StepPlan:
    """Return the plan of a run of epochs, from its beginning or from a position on.

    A resumed run keeps the estimate of its checkpoint, which its schedule is made of.
    """
    ranks = trainer.args.world_size
    step = 0 if state is None else state.step
    if state is None or state.steps_per_epoch is None:
        estimate, planned_ranks, rank_steps = _steps_per_epoch(trainer), ranks, step * ranks
    else:
        estimate, planned_ranks = state.steps_per_epoch, state.planned_ranks
        rank_steps = state.rank_steps
    return StepPlan(
        steps_per_epoch=estimate,
        planned_ranks=planned_ranks,
        ranks=ranks,
        begun_at=step,
        rank_steps=rank_steps,
    )


def _steps_per_epoch(trainer: Any) -> int:
    """Return the optimizer steps of an epoch, given or estimated; the same on all ranks."""
    config, args = trainer.odb, trainer.args
    if config.steps_per_epoch is not None:
        return int(config.steps_per_epoch)
    check_can_estimate(trainer.train_dataset, "Give `steps_per_epoch`, or `max_steps`.")
    if args.process_index == 0:
        steps = estimate_loader_steps(
            trainer.train_dataset,
            loader_options(trainer),
            world_size=args.world_size,
            looked_at=config.estimate_samples,
        )
    else:
        steps = 0
    (agreed,) = broadcast_object_list([steps])
    return int(agreed)
