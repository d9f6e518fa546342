"""From a `Trainer` and its arguments to a loader and a run."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from typing import Any

from accelerate.utils import broadcast_object_list
from torchdata.nodes import BaseNode
from transformers import DefaultDataCollator, Trainer, TrainingArguments, default_data_collator
from transformers.trainer_utils import RemoveColumnsCollator, has_length

from odb_nodes.integrations.huggingface.config import ODBConfig
from odb_nodes.integrations.huggingface.loss import base_model, shifts_labels
from odb_nodes.integrations.huggingface.run import Run
from odb_nodes.integrations.huggingface.train_batches import TrainBatches
from odb_nodes.integrations.resuming import load_saved_state
from odb_nodes.integrations.step_estimate import check_can_estimate, estimate_loader_steps
from odb_nodes.loader.dataloader import ODBDataLoader
from odb_nodes.loader.options import LoaderOptions

IS_SEQ2SEQ = "is_encoder_decoder"
NOT_SAVED = (
    "it was saved by a `Trainer` without dynamic batches, or with `save_only_model`. To begin a "
    "run with its weights, load them with `from_pretrained`, without `resume_from_checkpoint`."
)


@contextmanager
def allow_streams(trainer: Any, odb: Any, dataset: Any, given: Iterable[Any]) -> Iterator[None]:
    """Let a trainer be made for epochs of a dataset without a length, if it is told their steps.

    Args:
        trainer: that is made within the `with` block.
        odb: of the trainer.
        dataset: to train on, where it is known.
        given: all that the trainer is made with.

    Raises:
        ValueError: neither `max_steps` nor `steps_per_epoch` was given.
    """
    args = next((one for one in given if isinstance(one, TrainingArguments)), None)
    if dataset is None or has_length(dataset) or (args is not None and args.max_steps > 0):
        yield
        return
    if args is None or getattr(odb, "steps_per_epoch", None) is None:
        raise ValueError(
            "`max_steps`, or `steps_per_epoch` of the `ODBConfig` beside `num_train_epochs`, must "
            "be given where `train_dataset` has no length, as `"
            f"{type(dataset).__name__}` has none."
        )
    before, args.max_steps = args.max_steps, 1  # The `Trainer` wants one, when it is made.
    try:
        yield
    finally:
        # Also where a class of trainers makes its own arguments of those that it is given.
        for each in (args, getattr(trainer, "args", args)):
            each.max_steps = before


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
    plugin = trainer.accelerator.state.deepspeed_plugin
    if plugin is not None and "scheduler" in plugin.deepspeed_config and args.max_steps <= 0:
        raise ValueError(
            "`max_steps` must be given where the DeepSpeed config has a `scheduler`, which would "
            "be told a bound in place of the number of steps. Or leave the `scheduler` out: the "
            "`Trainer` makes one."
        )
    is_seq2seq = getattr(getattr(base_model(trainer.model), "config", None), IS_SEQ2SEQ, False)
    if is_seq2seq and config.collate_fn is None and not can_pad(trainer.data_collator):
        raise ValueError(
            "`data_collator` must be given for an encoder-decoder model, whose labels have lengths "
            "of their own: `DataCollatorForSeq2Seq(tokenizer, model=model)`."
        )
    if config.schedule == "samples" and args.max_steps > 0:
        raise ValueError(
            '`schedule` must be "steps" where `max_steps` is given, since the samples of the run '
            "are not known then. Give `num_train_epochs` instead."
        )


def check_overrides(kinds: Iterable[type]) -> None:
    """Refuse a class of trainers that makes its own batches, which nobody would ask it for.

    Args:
        kinds: the classes that `ODBTrainerMixin` stands before.

    Raises:
        ValueError: one of them overrides `get_train_dataloader`.
    """
    for kind in kinds:
        if "get_train_dataloader" in vars(kind) and kind is not Trainer:
            raise ValueError(
                f"`{kind.__name__}` must not override `get_train_dataloader`, which would never be "
                "called: dynamic batches are made of `train_dataset`, with `data_collator` and "
                "`ODBConfig.process_fn`. Give it the dataset, or use a class without that method."
            )


def make_batches(trainer: Any) -> TrainBatches:
    """Return the batches of a run, from its beginning."""
    args, dataset = trainer.args, trainer.train_dataset
    if dataset is None:
        raise ValueError("`train_dataset` must be given to train, but is None.")
    loader = ODBDataLoader(dataset, **vars(_loader_options(trainer)))
    # The length of a dict is that of its datasets' names; that of a node is of one rank.
    is_counted = isinstance(dataset, Sized) and not isinstance(dataset, (Mapping, BaseNode))
    samples = len(dataset) if is_counted else None
    return TrainBatches(loader, samples, args.num_train_epochs if args.max_steps <= 0 else None)


def make_run(trainer: Any, checkpoint: str | None) -> Run:
    """Return the run of one call of `train`, where a checkpoint stands or at its beginning.

    Raises:
        FileNotFoundError, StateError: the checkpoint has no state of this rank.
        TypeError, ValueError: the dataset cannot tell what the configuration needs of it.
    """
    batches, args = make_batches(trainer), trainer.args
    saved = None if checkpoint is None else load_saved_state(checkpoint, NOT_SAVED)
    # That of the checkpoint, since the schedule of the learning rate must be the same again.
    steps_per_epoch = None if saved is None else saved[Run.STEPS_KEY]
    if args.max_steps > 0:
        steps_per_epoch = None
    elif steps_per_epoch is None:
        steps_per_epoch = _steps_per_epoch(trainer)
    if saved is not None:
        batches.load_state_dict(saved[Run.BATCHES_KEY])
    if trainer.odb.schedule == "samples" and batches.samples_per_epoch is None:
        raise ValueError(
            '`schedule` must be "steps" where `train_dataset` does not tell its number of samples, '
            f"as `{type(trainer.train_dataset).__name__}` does not."
        )
    shift = trainer.odb.shift_labels
    return Run(
        trainer,
        batches,
        steps_per_epoch=steps_per_epoch,
        columns=model_columns(trainer),
        shift=shifts_labels(trainer.model) if shift is None else shift,
    )


def collator_of(trainer: Any) -> Any:
    """Return the collate function for training, or None where the trainer's own cannot pad."""
    if trainer.odb.collate_fn is not None:
        return trainer.odb.collate_fn
    collate = trainer.data_collator
    if not can_pad(collate):
        return None
    columns = model_columns(trainer)
    return collate if columns is None else RemoveColumnsCollator(collate, columns)


def can_pad(collate: Any) -> bool:
    """Tell a collator from the one that a `Trainer` has where none was given."""
    return collate is not default_data_collator and not isinstance(collate, DefaultDataCollator)


def model_columns(trainer: Any) -> set[str] | None:
    """Return the keys that the model takes, or `None` where all are to be kept."""
    if not trainer.args.remove_unused_columns:
        return None
    names = inspect.signature(base_model(trainer.model).forward).parameters
    return {*names, "label", "label_ids", *trainer.label_names}


def _steps_per_epoch(trainer: Any) -> int:
    """Return about how many optimizer steps an epoch has; the same on all ranks."""
    config, args = trainer.odb, trainer.args
    if config.steps_per_epoch is not None:
        return int(config.steps_per_epoch)
    check_can_estimate(trainer.train_dataset, "Give `steps_per_epoch`, or `max_steps`.")
    if args.process_index == 0:
        steps = estimate_loader_steps(
            trainer.train_dataset,
            _loader_options(trainer),
            world_size=args.world_size,
            looked_at=config.estimate_samples,
        )
    else:
        steps = 0
    (agreed,) = broadcast_object_list([steps])
    return int(agreed)


def _loader_options(trainer: Any) -> LoaderOptions:
    config, args = trainer.odb, trainer.args
    is_random = getattr(args, "train_sampling_strategy", "random") == "random"
    options: LoaderOptions = config.loader_options(
        collate_fn=collator_of(trainer),
        shuffle=None if is_random else False,
        seed=int(args.seed if args.data_seed is None else args.data_seed),
        num_workers=args.dataloader_num_workers if config.workers is None else 0,
        pin_memory=args.dataloader_pin_memory,
        accumulate=args.gradient_accumulation_steps,
    )
    return options
