"""What we rely on inside of transformers: the loop of its `Trainer`, and its models' losses.

Read in transformers 5.23.0, 5.6.0 and 4.57.6; the extra `hf` allows 4.57 and later. Each function
has a canary in `tests/_compat/test_transformers.py`.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial, reduce
from typing import Any

import torch

from odb_nodes._compat.accelerate import unwrap_model
from odb_nodes.errors import StateError

# --- the loop -------------------------------------------------------------------------------------


@contextmanager
def constructed_without_length(trainer: Any, args: Any) -> Iterator[None]:
    """Let a `Trainer` without `max_steps` be made for a dataset without a length.

    Relies on `Trainer._validate_args` alone reading `args.max_steps` in the constructor.
    """
    before, args.max_steps = args.max_steps, 1
    try:
        yield
    finally:
        # A subclass may have given its base class a copy of `args`.
        for arguments in (args, getattr(trainer, "args", args)):
            arguments.max_steps = before


@contextmanager
def bounded_loop(args: Any, most_steps: int) -> Iterator[None]:
    """Let `Trainer.train` loop until it is stopped, or until `most_steps` optimizer steps.

    Relies on `Trainer.set_initial_training_values`: for a loader without a length it takes
    `args.max_steps` for the steps of the run and of each epoch, and sets no limit to the epochs;
    and on `args.ignore_data_skip` to keep `_run_epoch` from reading batches only to skip them.
    """
    before = args.max_steps, args.ignore_data_skip
    args.max_steps, args.ignore_data_skip = most_steps, True
    try:
        yield
    finally:
        args.max_steps, args.ignore_data_skip = before


def plan_steps(trainer: Any, steps: int) -> None:
    """Make a run that begins expect `steps` optimizer steps.

    Relies on `TrainerState.max_steps`, and on `compute_steps` to turn `logging_steps` and the like
    from shares into steps. A resumed run keeps the steps of its checkpoint.
    """
    trainer.state.max_steps = steps
    if not trainer.state.global_step:
        trainer.state.compute_steps(trainer.args, steps)


def begin_alone(trainer: Any) -> None:
    """Do to a trainer and its model what `train` does before a first `training_step`.

    Doing it again is harmless. Relies on the names of these arguments, methods and attributes;
    older versions have `gradient_checkpointing` alone.
    """
    args, model = trainer.args, trainer.model
    if args.fp16_full_eval or args.bf16_full_eval:
        model.to(args.device)
    trainer.current_gradient_accumulation_steps = args.gradient_accumulation_steps
    name = "activation_checkpointing"
    if not hasattr(args, name):
        name = "gradient_checkpointing"
    if not getattr(args, name):
        return
    options = dict(getattr(args, f"{name}_kwargs") or {})
    further = {key: options.pop(key) for key in ("every_n_layers", "offload") if key in options}
    if not hasattr(model, f"{name}_enable"):
        name = "gradient_checkpointing"
    getattr(model, f"{name}_enable")(**{f"{name}_kwargs": options or None}, **further)


def stop_epoch(trainer: Any, *, ends_training: bool) -> None:
    """End the epoch, called from a `get_batch_samples` that returns no batches.

    Relies on `_run_epoch` to look at `control` also after no batches.
    """
    trainer.control.should_epoch_stop = True
    if ends_training:
        trainer.control.should_training_stop = True


def finish_at_this_step(args: Any, state: Any, control: Any) -> None:
    """Do at the end of an epoch what the `Trainer` does after the last step of a run.

    Relies on `DefaultFlowCallback.on_step_end` to do that at `state.max_steps`, and on
    `Trainer._maybe_log_save_evaluate` being called after `on_epoch_end`.
    """
    from transformers.trainer_callback import DefaultFlowCallback, TrainerControl

    def flow(max_steps: int) -> Any:
        seen, wanted = copy.copy(state), TrainerControl()
        seen.max_steps = max_steps
        DefaultFlowCallback().on_step_end(args, seen, wanted)
        return wanted

    step = state.global_step
    done, last = flow(step + 1), flow(step)
    state.max_steps = step
    control.should_evaluate |= last.should_evaluate and not done.should_evaluate
    control.should_save |= last.should_save and not done.should_save


# --- checkpoints ----------------------------------------------------------------------------------


def load_skipped_weights(model: Any, checkpoint: str, loaded: Any) -> None:
    """Load a model as `from_pretrained` does, where `load_state_dict` has left out some of it.

    A `Trainer` loads by `load_state_dict`, not strictly, and only logs the keys that differ. They
    do where `save_pretrained` writes weights by other names, or in other parts, than the model has
    them, as for mixtures of experts, ViT and Qwen2-VL. Relies on the `Trainer` passing the result
    to `Trainer._issue_warnings_after_load`. With FSDP, DeepSpeed and adapters of peft it does not:
    they save the model's own keys.
    """
    from transformers import PreTrainedModel

    model = unwrap_model(model)
    missing = _not_loaded(model, loaded.missing_keys)
    if not missing and not loaded.unexpected_keys:
        return
    refused = partial(_other_weights, checkpoint, type(model).__name__)
    is_stock = isinstance(model, PreTrainedModel) and getattr(model, "hf_quantizer", None) is None
    # These may be missing without a word of `from_pretrained`: new, they would be random.
    optional = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    optional = [key for key in missing if any(re.search(pattern, key) for pattern in optional)]
    if not is_stock or optional:
        raise refused(optional or missing, loaded.unexpected_keys)
    try:
        # In the widest type of all, so that each weight is copied into its own without rounding.
        types = (
            parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()
        )
        dtype = reduce(torch.promote_types, types)
        whole, info = type(model).from_pretrained(
            checkpoint,
            config=model.config,
            dtype=dtype,
            output_loading_info=True,
            local_files_only=True,
        )
        new = [*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])]
        left_over = info["unexpected_keys"]
        if not new and not left_over:
            model.load_state_dict(whole.state_dict())
    except Exception as error:  # a class of models may raise any error for a config or for weights
        raise refused(missing, loaded.unexpected_keys) from error
    if new or left_over:
        raise refused(new, left_over)


def _not_loaded(model: Any, missing: Iterable[str]) -> list[str]:
    """Return the missing keys whose weights were not loaded by another name either.

    Relies on `_keys_to_ignore_on_save`: weights that do not change, such as of positions.
    """
    missing = {*missing} - {*(getattr(model, "_keys_to_ignore_on_save", None) or ())}
    weights = model.state_dict(keep_vars=True)
    loaded = {id(value) for key, value in weights.items() if key not in missing}
    return sorted(key for key in missing if id(weights.get(key)) not in loaded)


def _other_weights(
    checkpoint: str, model: str, missing: Iterable[str], left_over: Iterable[str]
) -> StateError:
    keys = {"missing from it": sorted(missing), "in it alone": sorted(left_over)}
    parts = [
        f"{len(names)} are {where}, such as `{names[0]}`" for where, names in keys.items() if names
    ]
    return StateError(
        f"the weights of `{checkpoint}` must fit the model, a `{model}`, but "
        f"{', and '.join(parts)}: these would not be resumed. Resume with the model that was "
        f"saved. Or begin a new run with its weights: `{model}.from_pretrained(checkpoint)`, "
        "without `resume_from_checkpoint`."
    )


# --- arguments ------------------------------------------------------------------------------------


def sampling_strategy(args: Any) -> str:
    """Return `train_sampling_strategy`; versions before 5 have `group_by_length` in its place."""
    default = "group_by_length" if getattr(args, "group_by_length", False) else "random"
    return getattr(args, "train_sampling_strategy", default)


def parallel_sizes(trainer: Any) -> dict[str, int]:
    """Return how many ranks share samples, by the methods that say so in some versions."""
    names = ("get_tp_size", "get_cp_size", "get_sp_size")
    return {name: getattr(trainer, name)() for name in names if hasattr(trainer, name)}


def deepspeed_has_scheduler(trainer: Any) -> bool:
    """Return whether DeepSpeed makes the schedule, which the loop tells its `max_steps`."""
    plugin = trainer.accelerator.state.deepspeed_plugin  # None without DeepSpeed
    return plugin is not None and "scheduler" in plugin.deepspeed_config


def steps_within_backward(args: Any) -> bool:
    """Return whether the optimizer steps within the backward, by its `OptimizerNames`."""
    name = str(args.optim.value)
    return name in ("lomo", "adalomo") or name.endswith("layerwise")


# --- columns --------------------------------------------------------------------------------------


def is_default_collator(collate: Any) -> bool:
    """Return whether a `Trainer` chose this collator itself; it stacks, and cannot pad."""
    from transformers import DefaultDataCollator, default_data_collator

    return collate is default_data_collator or isinstance(collate, DefaultDataCollator)


def pads_by_default(trainer: Any) -> bool:
    """Return whether a `Trainer` has a collator that it chose itself, for rows of tokens.

    Relies on `PreTrainedModel.main_input_name`, where the trainer keeps all columns.
    """
    if not is_default_collator(trainer.data_collator):
        return False
    if trainer.args.remove_unused_columns or trainer.model is None:
        return "input_ids" in collator_columns(trainer)
    return getattr(base_model(trainer.model), "main_input_name", "input_ids") == "input_ids"


def collator_columns(trainer: Any) -> set[str]:
    """Return the keys of samples that the trainer's collator takes.

    Relies on `Trainer._set_signature_columns_if_needed`, which other libraries override, and which
    sets `_signature_columns` once: also where a search has taken the model away since. Where it is
    the `Trainer`'s own, the parameters of the model inside its wrappers count, too.
    """
    from transformers import Trainer

    name = "_set_signature_columns_if_needed"
    getattr(trainer, name)()
    columns = {*trainer._signature_columns}
    is_stock = getattr(type(trainer), name) is getattr(Trainer, name)
    if is_stock and trainer.model is not None:
        columns |= model_inputs(trainer.model)
    return columns


def sample_columns(trainer: Any) -> set[str] | None:
    """Return the keys of samples that the trainer's collator gets, or None where it gets all."""
    return collator_columns(trainer) if trainer.args.remove_unused_columns else None


def model_inputs(model: Any) -> set[str]:
    """Return the names of the arguments that a model takes, inside its wrappers."""
    return {*inspect.signature(base_model(model).forward).parameters}


def needs_labels(trainer: Any) -> bool:
    """Tell whether the model cannot be called without `labels`."""
    if trainer.model is None:
        return False
    parameters = inspect.signature(base_model(trainer.model).forward).parameters
    return "labels" in parameters and parameters["labels"].default is inspect.Parameter.empty


# --- models and losses ----------------------------------------------------------------------------


def base_model(model: Any) -> Any:
    """Return the model inside the wrappers of sharding, of compilation and of adapters (peft)."""
    model = unwrap_model(model)
    get_base_model = getattr(model, "get_base_model", None)
    return model if get_base_model is None else get_base_model()


def is_encoder_decoder(model: Any) -> bool:
    """Return whether labels differ in length from the inputs; relies on `is_encoder_decoder`."""
    return bool(getattr(getattr(base_model(model), "config", None), "is_encoder_decoder", False))


def shifts_labels(model: Any) -> bool:
    """Return whether position i of a model predicts label i + 1, so that the first is no target.

    Relies on `PreTrainedModel.loss_type` and the table `LOSS_MAPPING`, as `Trainer` itself does. A
    name that is not in the table, as of GPT-2, has the causal loss if it calls `loss_function`: the
    `Trainer` takes such models for others. Models that compute their own cross entropy, as the
    decoders of BART and TrOCR, name `shift_labels` where they shift. A model of another library
    is taken for a causal one.
    """
    from transformers import PreTrainedModel
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    base = base_model(model)
    if is_encoder_decoder(model):
        return False
    if not isinstance(base, PreTrainedModel):
        return True
    forward = inspect.unwrap(type(base).forward)
    names = {*forward.__code__.co_names, *forward.__code__.co_varnames}
    has_own_loss = not names.isdisjoint(("CrossEntropyLoss", "_compute_loss"))
    if has_own_loss and forward.__module__.startswith("transformers."):
        return "shift_labels" in names
    loss = LOSS_MAPPING.get(getattr(base, "loss_type", None) or "")
    return "loss_function" in names if loss is None else loss is ForCausalLMLoss


def smoother_shifts(trainer: Any) -> bool | None:
    """Tell whether the `Trainer` shifts labels for its `label_smoother`; `None` without one.

    Relies on `compute_loss` to ask `MODEL_FOR_CAUSAL_LM_MAPPING_NAMES` for the name of the model.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if trainer.label_smoother is None or trainer.compute_loss_func is not None:
        return None
    return type(base_model(trainer.model)).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def ctc_reduction(trainer: Any) -> str | None:
    """Return how a model for CTC reduces its loss over a batch, or None where the loss is another.

    "mean" is one over samples. Relies on the names of these classes, which end with "ForCTC".
    """
    model = base_model(trainer.model)
    is_ctc = any(kind.__name__.endswith("ForCTC") for kind in type(model).__mro__)
    if not is_ctc or trainer.compute_loss_func is not None:
        return None
    return getattr(getattr(model, "config", None), "ctc_loss_reduction", None)


def takes_num_items(trainer: Any) -> bool:
    """Return whether the loss takes `num_items_in_batch`, by the model or `compute_loss_func`."""
    return bool(trainer.model_accepts_loss_kwargs) or trainer.compute_loss_func is not None


def loss_scale(trainer: Any, *, has_items: bool) -> float:
    """Return what a `Trainer` multiplies a loss by, before its backward.

    Relies on `compute_loss` to multiply a loss that takes `num_items_in_batch` by the ranks, with
    `average_tokens_across_devices`; and on `training_step` to divide others by the micro-steps,
    unless there is a `compute_loss_func`, or `loss_is_scaled_for_ga` (of later versions) differs.
    """
    is_divided = not has_items and trainer.compute_loss_func is None
    if (is_scaled := getattr(trainer, "loss_is_scaled_for_ga", None)) is not None:
        is_divided = not is_scaled
    is_averaged = has_items and getattr(trainer.args, "average_tokens_across_devices", False)
    scale = trainer.accelerator.num_processes if is_averaged else 1
    return float(scale / (trainer.args.gradient_accumulation_steps if is_divided else 1))


# --- its samplers ---------------------------------------------------------------------------------


def sampler_class(name: str) -> Any:
    """Return a sampler of the `Trainer` by its name; `None` where transformers lacks it."""
    try:
        from transformers import trainer_pt_utils
    except ImportError:
        return None
    return getattr(trainer_pt_utils, name, None)


def length_grouped_order(lengths: list[int], batch_size: int, seed: int) -> list[int]:
    """Return the order of the samples in the first epoch of a `LengthGroupedSampler`."""
    generator = torch.Generator().manual_seed(seed)
    sampler = sampler_class("LengthGroupedSampler")
    return [*sampler(batch_size, lengths=lengths, generator=generator)]


def rebalanced_batches(
    lengths: list[int], batch_size: int, *, world_size: int, accumulate: int, seed: int
) -> list[tuple[list[int], ...]]:
    """Return the batches of a `BatchRebalanceSampler` in its first epoch, for all ranks.

    Relies on `_assign` computing the batches of an optimizer step for all ranks, and on
    `_yield_global_batch` choosing the part of one rank; calling it for each rank would compute
    all batches again for each.
    """
    sampler = sampler_class("BatchRebalanceSampler")(
        lengths, batch_size * world_size * accumulate, world_size, accumulate, seed=seed,
        drop_last=False,
    )  # fmt: skip
    sampler._yield_global_batch = lambda indices: zip(
        *sampler._assign(indices, [lengths[index] for index in indices]), strict=True
    )
    return [*sampler]
