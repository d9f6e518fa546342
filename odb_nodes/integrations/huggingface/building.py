"""From a `Trainer` and its arguments to a loader and a run."""

from __future__ import annotations

import inspect
from collections.abc import Sized
from typing import Any

from accelerate.utils import broadcast_object_list
from transformers import DefaultDataCollator, default_data_collator
from transformers.trainer_utils import RemoveColumnsCollator

from odb_nodes.checkpoint import load_rank_state
from odb_nodes.dataloader import ODBDataLoader
from odb_nodes.integrations.huggingface.config import ODBConfig
from odb_nodes.integrations.huggingface.loss import shifts_labels
from odb_nodes.integrations.huggingface.run import Run
from odb_nodes.integrations.huggingface.train_batches import TrainBatches
from odb_nodes.integrations.step_estimate import estimate_steps
from odb_nodes.planning import TokenBudget


def check_trainer(trainer: Any, config: ODBConfig) -> None:
    """Refuse what would silently not be what it says.

    Raises:
        TypeError, ValueError: names the argument and what to do.
    """
    if not isinstance(config, ODBConfig):
        raise TypeError(f"`odb` must be an `ODBConfig`, but is {config!r} instead.")
    args = trainer.args
    if args.n_gpu > 1:
        raise ValueError(
            f"`args.n_gpu` must be at most 1, but is {args.n_gpu}: `DataParallel` would split each "
            "batch again. Start one process per GPU with torchrun."
        )
    if args.auto_find_batch_size:
        raise ValueError(
            "`auto_find_batch_size` must be False: batches have no size to find. Lower "
            "`token_budget` instead."
        )
    strategy = getattr(args, "train_sampling_strategy", "random")
    if strategy not in ("random", "sequential"):
        raise ValueError(
            '`train_sampling_strategy` must be "random" or "sequential", but is '
            f"{strategy!r} instead: samples of like length are grouped here already."
        )
    for name in ("get_tp_size", "get_cp_size", "get_sp_size"):
        size = getattr(trainer, name, lambda: 1)()
        if size > 1:
            raise ValueError(
                f"`{name}()` must be 1, but is {size}: ranks that work on the same samples need a "
                "loop of your own, with `ODBDataLoader(process_group=...)`."
            )
    if config.schedule == "samples" and args.max_steps > 0:
        raise ValueError(
            '`schedule` must be "steps" where `max_steps` is given, since the samples of the run '
            "are not known then. Give `num_train_epochs` instead."
        )


def make_batches(trainer: Any) -> TrainBatches:
    """Return the batches of a run, from its beginning."""
    config, args, dataset = trainer.odb, trainer.args, trainer.train_dataset
    if dataset is None:
        raise ValueError("`train_dataset` must be given to train, but is None.")
    is_random = getattr(args, "train_sampling_strategy", "random") == "random"
    workers: dict[str, Any] = {"num_workers": args.dataloader_num_workers}
    loader = ODBDataLoader(
        dataset,
        token_budget=config.token_budget,
        collate_fn=collator_of(trainer),
        shuffle=None if is_random else False,
        seed=_seed(args),
        window=config.window,
        process_fn=config.process_fn,
        observe=config.observe,
        prefetch=config.prefetch,
        state=config.state,
        pin_memory=args.dataloader_pin_memory,
        uneven=config.uneven,
        accumulate=args.gradient_accumulation_steps,
        round_size=config.round_size,
        timeout_s=config.timeout_s,
        **(workers if config.workers is None else {"workers": config.workers}),
    )
    samples = len(dataset) if isinstance(dataset, Sized) else None
    return TrainBatches(loader, samples, args.num_train_epochs if args.max_steps <= 0 else None)


def make_run(trainer: Any, checkpoint: str | None) -> Run:
    """Return the run of one call of `train`, where a checkpoint stands or at its beginning.

    Raises:
        FileNotFoundError, StateError: the checkpoint has no state of this rank.
    """
    batches, args = make_batches(trainer), trainer.args
    saved = None if checkpoint is None else load_rank_state(checkpoint)
    if args.max_steps > 0:
        steps_per_epoch = None
    elif saved is not None:  # The schedule of the learning rate must be the same again.
        steps_per_epoch = saved[Run.STEPS_KEY]
    else:
        steps_per_epoch = _steps_per_epoch(trainer)
    if saved is not None:
        batches.load_state_dict(saved[Run.BATCHES_KEY])
    shift = trainer.odb.shift_labels
    return Run(
        trainer,
        batches,
        steps_per_epoch=steps_per_epoch,
        columns=model_columns(trainer),
        shift=shifts_labels(trainer.model) if shift is None else shift,
    )


def collator_of(trainer: Any) -> Any:
    """Return the trainer's collate function, or None where it has only one that cannot pad."""
    collate = trainer.data_collator
    if collate is default_data_collator or isinstance(collate, DefaultDataCollator):
        return None
    columns = model_columns(trainer)
    return collate if columns is None else RemoveColumnsCollator(collate, columns)


def model_columns(trainer: Any) -> set[str] | None:
    """Return the keys that the model takes, or `None` where all are to be kept."""
    if not trainer.args.remove_unused_columns:
        return None
    get_base_model = getattr(trainer.model, "get_base_model", None)  # of adapters
    model = trainer.model if get_base_model is None else get_base_model()
    names = inspect.signature(model.forward).parameters
    return {*names, "label", "label_ids", *trainer.label_names}


def _steps_per_epoch(trainer: Any) -> int:
    """Return about how many optimizer steps an epoch has; the same on all ranks."""
    config, args = trainer.odb, trainer.args
    if config.steps_per_epoch is not None:
        return int(config.steps_per_epoch)
    if args.process_index == 0:
        steps = estimate_steps(
            trainer.train_dataset,
            budget=TokenBudget.of(config.token_budget),
            window=config.window,
            accumulate=args.gradient_accumulation_steps,
            world_size=args.world_size,
            process_fn=config.process_fn,
            observe=config.observe,
            looked_at=config.estimate_samples,
            seed=_seed(args),
        )
    else:
        steps = 0
    (agreed,) = broadcast_object_list([steps])
    return int(agreed)


def _seed(args: Any) -> int:
    return int(args.seed if args.data_seed is None else args.data_seed)
