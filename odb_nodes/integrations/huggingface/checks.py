"""What a `Trainer` must not be or do to train with dynamic batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import Trainer, TrainingArguments

from odb_nodes._compat import transformers as compat
from odb_nodes._core.checks import check_choice, check_type
from odb_nodes.integrations.huggingface.auto_budget import check_auto
from odb_nodes.integrations.huggingface.config import ODBConfig


def check_trainer(trainer: Any, config: ODBConfig) -> None:
    """Reject arguments of a trainer that dynamic batching would ignore or break."""
    check_type("odb", config, ODBConfig)
    args = trainer.args
    if args.n_gpu > 1:
        raise ValueError(
            f"`args.n_gpu` must be at most 1, but is {args.n_gpu}: `DataParallel` would split each "
            "batch again. Start one process per GPU with torchrun."
        )
    if args.auto_find_batch_size:
        raise ValueError(
            "`auto_find_batch_size` must be False, but is True: dynamic batches have no fixed size "
            "to search for. Lower `token_budget` instead."
        )
    check_choice(
        "train_sampling_strategy",
        compat.sampling_strategy(args),
        ("random", "sequential"),
        "Dynamic batches already group samples of like length.",
    )
    for name, size in compat.parallel_sizes(trainer).items():
        if size > 1:
            raise ValueError(
                f"`{name}()` must be 1, but is {size}: ranks that work on the same samples need a "
                "training loop of your own, with `ODBDataLoader(process_group=...)`: see "
                "docs/distributed.md."
            )
    if args.max_steps <= 0 and compat.deepspeed_has_scheduler(trainer):
        raise ValueError(
            "`max_steps` must be given where the DeepSpeed config has a `scheduler`, since "
            "DeepSpeed would plan it for an upper bound of the steps. Or remove the `scheduler`: "
            "then the `Trainer` makes one."
        )
    takes_back = config.on_oom is not None or config.finds_budget
    if takes_back and compat.steps_within_backward(args):
        raise ValueError(
            f'`optim` must not be "{args.optim.value}" where `on_oom` is given, or `token_budget` '
            'is "auto": its steps are within the backward, and cannot be taken back where memory '
            "runs out. Leave one out."
        )
    check_auto(trainer, config)
    is_padded = config.collate_fn is not None or not compat.is_default_collator(
        trainer.data_collator
    )
    # Between the trials of a hyperparameter search there is no model; it was checked before.
    has_model = trainer.model is not None
    if not is_padded and has_model and compat.is_encoder_decoder(trainer.model):
        raise ValueError(
            "`data_collator` must be given for an encoder-decoder model, whose labels have lengths "
            "of their own: `DataCollatorForSeq2Seq(tokenizer, model=model)`, or for speech and "
            "images a function that pads the labels with -100."
        )
    if config.loss_is == "divided" and not compat.takes_num_items(trainer):
        raise ValueError(
            '`loss_is` must not be "divided" where the model takes no `num_items_in_batch`, which '
            "its `forward` shows by `**kwargs`, and there is no `compute_loss_func`."
        )
    if config.schedule == "samples" and args.max_steps > 0:
        raise ValueError(
            '`schedule` must be "steps" where `max_steps` is given, since the number of samples of '
            "such a run is not known. Give `num_train_epochs` instead."
        )


def check_overrides(kinds: Iterable[type]) -> None:
    """Reject a class of trainers that makes its own batches, since they would not be used."""
    kinds = [*kinds]
    for kind in kinds:
        if "get_train_dataloader" in vars(kind) and kind is not Trainer:
            where = "" if kind is kinds[0] else f", as its base class `{kind.__name__}` does"
            raise ValueError(
                f"`{kinds[0].__name__}` must not override `get_train_dataloader`{where}: it would "
                "never be called, since dynamic batches are made of `train_dataset`, with "
                "`data_collator` and `ODBConfig.process_fn`. If the class is yours, leave out the "
                "method. Otherwise write a loop with `ODBDataLoader`: see docs/pytorch.md."
            )


@contextmanager
def allow_streams(trainer: Any, odb: Any, dataset: Any, given: Iterable[Any]) -> Iterator[None]:
    """Let a trainer be made for epochs of a dataset without a length, given `steps_per_epoch`."""
    args = next((one for one in given if isinstance(one, TrainingArguments)), None)
    has_steps = args is not None and args.max_steps > 0
    if dataset is None or has_steps or compat.has_length(dataset):
        yield
        return
    if args is None or getattr(odb, "steps_per_epoch", None) is None:
        raise ValueError(
            "`max_steps`, or `steps_per_epoch` of the `ODBConfig` together with "
            "`num_train_epochs`, must be given where `train_dataset` has no length, as "
            f"`{type(dataset).__name__}` has none."
        )
    with compat.constructed_without_length(trainer, args):
        yield
