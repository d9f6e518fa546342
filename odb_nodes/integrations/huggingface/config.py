"""The options of dynamic batches for a `Trainer`, and checks of the trainer's own arguments."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import has_length

from odb_nodes._compat import transformers as compat
from odb_nodes._support.checks import (
    check_bool,
    check_choice,
    check_number,
    check_type,
    explains_arguments,
    keep_count,
    refuse,
)
from odb_nodes.core.loader.options import BatchOptions
from odb_nodes.core.planning import TokenBudget
from odb_nodes.core.sources import JsonlSource
from odb_nodes.integrations.learning_rate import LrScaling
from odb_nodes.training.memory.guard import GUARD_ABOVE
from odb_nodes.training.memory.meter import MemoryMeter, check_meter
from odb_nodes.training.monitor import Monitor
from odb_nodes.training.tasks.trainer_options import AnyWeights, check_task_weights, task_names

AUTO = "auto"
"""The `token_budget` that trial steps find."""

Schedule = Literal["steps", "samples"]
LossKind = Literal["divided", "token_mean", "sample_mean"]


_TRAINER_ARGUMENTS = {
    "accumulate": "set `gradient_accumulation_steps` of the `TrainingArguments`",
    "batch_size": "`token_budget` bounds a batch, and `TokenBudget(max_samples=)` its samples",
    "num_workers": "set `dataloader_num_workers` of the `TrainingArguments`",
    "seed": "set `data_seed` of the `TrainingArguments`",
}
"""Arguments of `ODBDataLoader` that the `Trainer` has under another name -> what to pass."""


@explains_arguments("`ODBDataLoader`", _TRAINER_ARGUMENTS)
@dataclass(frozen=True, kw_only=True)
class ODBConfig(BatchOptions):
    """Dynamic batches of a `Trainer`. Dataset, collator, seed and workers come from the `Trainer`.

    Args:
        token_budget: padded tokens of a batch on one rank, in place of
            `per_device_train_batch_size`; or a `TokenBudget`; or `"auto"`: the largest budget whose
            steps fit into memory on all ranks. Trial steps find it before training, and checkpoints
            keep it.
        collate_fn: the collate function for training. Default: the trainer's `data_collator`.
        window, process_fn, observe, state, workers, prefetch: as in `ODBDataLoader`.
        round_size, timeout_s, exclude, largest_first, diversity, window_start: as in
            `ODBDataLoader`.
        step_time: the time of a step, by which ranks are levelled; see `RankAligner`. Default for
            packed groups: `StepTime.of_config` of the model.
        uneven: `"fill"` or `"stop"`; see `RankAligner`.
        shift_labels: whether the model predicts `labels[..., 1:]`, so that the first label is no
            target. Default: as the model's loss does, or True if that is unknown.
        loss_is: the reduction of a batch's loss. `"divided"`: a sum divided by
            `num_items_in_batch`. `"token_mean"`: a mean over the supervised tokens of the batch;
            without labels, over `Observation.targets`. `"sample_mean"`: a mean over samples, such
            as pairs. Default: derived from the labels, the first step and, for CTC, the model's
            config.
        task_weights: weighs the loss of each task: `TaskWeights`, or a `GradNorm` or `PCGrad` of
            parameters of the model. It names `tasks`, and needs a loss for each token: the cross
            entropy of the model's `logits`, or the result of the trainer's `compute_loss_func`, see
            `TaskWeights.loss`. Default: all supervised tokens weigh the same.
        steps_per_epoch: approximate optimizer steps of an epoch. With `num_train_epochs`, the
            learning rate, the progress bar and arguments that are shares of the run depend on it.
            Default: estimated from the lengths of 512 samples.
        schedule: what the learning-rate schedule follows: `"steps"`, or `"samples"`, so that it
            ends with the last sample even if the estimate was wrong.
        lr_scaling: scales the learning rate by the samples of a step. Default: no scaling.
        log_metrics: whether to log `odb/*` beside the loss.
        ledger: the folder of a `Ledger` of the trained samples, shared by all restarts of this run
            only. Default: no ledger.
        monitor: a `Monitor` of the run, which its checkpoints resume; or a folder for a `Monitor`
            with a record every 10 optimizer steps. Default: no monitor.
        on_oom: what happens if forward or backward runs out of memory. `"split"`: the optimizer
            step is recomputed in parts; a sample that does not fit alone is an error. `"skip"`:
            such a sample is skipped, and the mean is over the other samples. `None`: the error is
            raised. See `odb_nodes.memory.OomGuard`.
        guard_above: under DDP, share of the budget above which the largest batch of a step makes
            `on_oom` guard the step.
        shrink: with `on_oom`, the new budget of all ranks after memory ran out, as a share of the
            failed batch's cost, above 0 and below 1. `None`: the budget stays.
        change_budget: whether a run may resume with a smaller `token_budget` than its checkpoint
            has; see `Loader.load_state_dict`.
        memory_share: share of the GPU memory available to this process that steps may take, above 0
            and at most 1: the limit for `"auto"` and for measured peaks. See
            `odb_nodes.memory.CudaMeter`.
        memory_meter: measures memory, with its own limit, in place of a `CudaMeter`.

    Raises:
        TypeError, ValueError: a field is not valid.
    """

    token_budget: int | TokenBudget | Literal["auto"]  # type: ignore[assignment]
    shift_labels: bool | None = None
    loss_is: LossKind | None = None
    task_weights: AnyWeights | None = None
    steps_per_epoch: int | None = None
    schedule: Schedule = "steps"
    lr_scaling: LrScaling | None = None
    log_metrics: bool = True
    ledger: str | os.PathLike[str] | None = None
    monitor: Monitor | str | os.PathLike[str] | None = None
    on_oom: Literal["split", "skip"] | None = None
    guard_above: float = GUARD_ABOVE
    shrink: float | None = None
    change_budget: bool = False
    memory_share: float = 0.9
    memory_meter: MemoryMeter | None = None

    def __post_init__(self) -> None:
        check_task_weights(self.task_weights)
        if self.task_weights is not None:
            object.__setattr__(self, "tasks", task_names(self.task_weights, self.tasks))
        super().__post_init__()
        for name, choices in (
            ("loss_is", get_args(LossKind)),
            ("schedule", get_args(Schedule)),
            ("on_oom", ("split", "skip")),
        ):
            if (value := getattr(self, name)) is not None:
                check_choice(name, value, choices)
        for name in ("shift_labels", "log_metrics", "change_budget"):
            if (value := getattr(self, name)) is not None:
                check_bool(name, value)
        if self.steps_per_epoch is not None:
            keep_count(self, "steps_per_epoch")
        check_type("ledger", self.ledger, str | os.PathLike | None)
        check_type("monitor", self.monitor, Monitor | str | os.PathLike | None)
        check_type("lr_scaling", self.lr_scaling, LrScaling | None)
        check_number("guard_above", self.guard_above, "[0, 1]")
        if self.shrink is not None:
            check_number("shrink", self.shrink, "(0, 1)")
            if self.on_oom is None:
                raise ValueError("`shrink` must be None if `on_oom` is None. Give both.")
        check_number("memory_share", self.memory_share, "(0, 1]")
        if self.memory_meter is not None:
            check_meter(self.memory_meter, "memory_meter")

    def _check_budget(self) -> None:
        if isinstance(self.token_budget, str):
            remedy = "Or give a number of tokens, or a `TokenBudget`."
            check_choice("token_budget", self.token_budget, (AUTO,), remedy)
        else:
            super()._check_budget()

    @property
    def finds_budget(self) -> bool:
        """Whether trial steps find the budget."""
        return self.token_budget == AUTO


def check_trainer(trainer: Any, config: ODBConfig) -> None:
    """Reject arguments of a trainer that dynamic batching would ignore or break."""
    check_type("odb", config, ODBConfig)
    args = trainer.args
    by_epochs = args.max_steps <= 0
    check_choice(
        "train_sampling_strategy",
        compat.sampling_strategy(args),
        ("random", "sequential"),
        "Dynamic batches already group samples of similar length.",
    )
    for name, size in compat.parallel_sizes(trainer).items():
        if size > 1:
            raise ValueError(
                f"`{name}()` must be 1, but is {size}: ranks that share samples need a training "
                "loop with `ODBDataLoader(process_group=...)`: see docs/distributed.md."
            )
    cannot_pad = config.collate_fn is None and compat.is_default_collator(trainer.data_collator)
    # Between the trials of a hyperparameter search there is no model; it was checked before.
    has_decoder = trainer.model is not None and compat.is_encoder_decoder(trainer.model)
    recomputes = config.on_oom is not None or config.finds_budget
    weighs_tasks = config.task_weights is not None
    refused = {
        f"`args.n_gpu` must be at most 1, but is {args.n_gpu}: `DataParallel` would split each "
        "batch again. Start one process per GPU with torchrun.": args.n_gpu > 1,
        "`auto_find_batch_size` must be False, but is True: dynamic batches have no fixed size to "
        "search for. Lower `token_budget` instead.": args.auto_find_batch_size,
        "`max_steps` must be given if the DeepSpeed config has a `scheduler`, since DeepSpeed "
        "would plan it for an upper bound of the steps. Or remove the `scheduler`: the `Trainer` "
        "makes one.": by_epochs and compat.deepspeed_has_scheduler(trainer),
        f'`optim` must not be "{args.optim.value}" with `on_oom` or a `token_budget` of "auto": '
        "it steps within backward, which cannot be recomputed if memory runs out. Leave one "
        "out.": recomputes and compat.steps_within_backward(args),
        "`data_collator` must be given for an encoder-decoder model, whose labels differ in length "
        "from the inputs: `DataCollatorForSeq2Seq(tokenizer, model=model)`, or for speech and "
        "images a function that pads the labels with -100.": cannot_pad and has_decoder,
        '`loss_is` must not be "divided" if the `forward` of the model has no `**kwargs` for '
        "`num_items_in_batch`, and there is no `compute_loss_func`.": (
            config.loss_is == "divided" and not compat.takes_num_items(trainer)
        ),
        "`compute_loss_func` must be given with `task_weights` if `forward` of the model needs "
        "`labels`: it is called without them, to return `logits`.": (
            weighs_tasks and trainer.compute_loss_func is None and compat.needs_labels(trainer)
        ),
        '`loss_is` and `on_oom="skip"` must not be given together with `task_weights`.': (
            weighs_tasks and (config.loss_is is not None or config.on_oom == "skip")
        ),
        '`schedule` must be "steps" if `max_steps` is given: the number of samples of such a run '
        "is unknown. Give `num_train_epochs` instead.": (
            config.schedule == "samples" and not by_epochs
        ),
    }
    refuse(refused)
    if config.task_weights is not None and config.task_weights.needs_gradients:
        _check_gradients_of_tasks(trainer, config.task_weights, recomputes=recomputes)


def _check_gradients_of_tasks(trainer: Any, tasks: AnyWeights, *, recomputes: bool) -> None:
    """Reject a trainer under which `GradNorm` or `PCGrad` cannot compute gradients."""
    conflicts = {
        "FSDP, which shards parameters": trainer.is_fsdp_enabled,
        "DeepSpeed, which computes gradients itself": trainer.is_deepspeed_enabled,
        "`fp16`, which scales losses; use `bf16`": trainer.args.fp16,
        '`on_oom` or a `token_budget` of "auto", which compute steps again': recomputes,
        "`model_init`, which makes the model only later": trainer.model_init is not None,
    }
    rule = f"`{type(tasks).__name__}` must not be given with"
    refuse({f"{rule} {conflict}.": applies for conflict, applies in conflicts.items()})


def check_overrides(kinds: Iterable[type]) -> None:
    """Reject a class of trainers that makes its own batches, which would not be used."""
    for kind in kinds:
        if "get_train_dataloader" in vars(kind) and kind is not Trainer:
            raise ValueError(
                f"`{kind.__name__}` must not override `get_train_dataloader`: it would never be "
                "called, since dynamic batches are made of `train_dataset`, with `data_collator` "
                "and `ODBConfig.process_fn`. If the class is yours, leave out the method. Else "
                "write a loop with `ODBDataLoader`: see docs/pytorch.md."
            )


@contextmanager
def allow_streams(trainer: Any, odb: Any, dataset: Any, arguments: Iterable[Any]) -> Iterator[None]:
    """Let a trainer be made for epochs without a length; a `JsonlSource` counts its records."""
    args = next((value for value in arguments if isinstance(value, TrainingArguments)), None)
    has_steps = args is not None and args.max_steps > 0
    if dataset is None or has_steps or has_length(dataset):
        yield
        return
    is_counted = isinstance(dataset, JsonlSource) or getattr(odb, "steps_per_epoch", None)
    if args is None or not is_counted:
        raise ValueError(
            "`max_steps`, or `steps_per_epoch` of the `ODBConfig` together with "
            "`num_train_epochs`, must be given if `train_dataset` has no length, as "
            f"`{type(dataset).__name__}` has none."
        )
    with compat.constructed_without_length(trainer, args):
        yield
