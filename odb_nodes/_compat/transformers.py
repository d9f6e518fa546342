"""Internals of transformers that we rely on: the `Trainer`, losses and positions of models.

Read in transformers 5.23.0, 5.6.0 and 4.57.6; the extra `hf` allows 4.57.1 and later. Most
functions have a canary in `tests/_compat/test_transformers.py`.
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
    """Within the block, a `Trainer` without `max_steps` accepts a dataset without a length.

    Relies on `Trainer._validate_args` alone reading `args.max_steps` in the constructor.
    """
    before = args.max_steps
    args.max_steps = 1
    try:
        yield
    finally:
        # A subclass may have given its base class a copy of `args`.
        for arguments in (args, getattr(trainer, "args", args)):
            arguments.max_steps = before


@contextmanager
def bounded_loop(args: Any, most_steps: int) -> Iterator[None]:
    """Within the block, `Trainer.train` loops until stopped, at most `most_steps` optimizer steps.

    Relies on `Trainer.set_initial_training_values`: without a length of the loader,
    `args.max_steps` is the number of steps of the run and of each epoch, and epochs have no limit.
    With `args.ignore_data_skip`, `_run_epoch` reads no batches only to skip them.
    """
    before = args.max_steps, args.ignore_data_skip
    args.max_steps = most_steps
    args.ignore_data_skip = True
    try:
        yield
    finally:
        args.max_steps, args.ignore_data_skip = before


def plan_steps(trainer: Any, steps: int) -> None:
    """Set the number of optimizer steps that a new run expects.

    Relies on `TrainerState.max_steps`, and on `compute_steps` to convert `logging_steps` and
    similar arguments from shares to steps. A resumed run keeps the steps of its checkpoint.
    """
    trainer.state.max_steps = steps
    if not trainer.state.global_step:
        trainer.state.compute_steps(trainer.args, steps)


def begin_alone(trainer: Any) -> None:
    """Prepare a trainer and its model for a `training_step`, as `train` does. Idempotent.

    Relies on the names of these arguments, methods and attributes;
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
    """End the epoch. To be called in `get_batch_samples`, which then returns no batches.

    Relies on `_run_epoch` to read `control` even after no batches.
    """
    trainer.control.should_epoch_stop = True
    if ends_training:
        trainer.control.should_training_stop = True


def finish_at_this_step(args: Any, state: Any, control: Any) -> None:
    """End the run at the end of an epoch: evaluate and save as after the last step of a run.

    Relies on `DefaultFlowCallback.on_step_end` to request both at `state.max_steps`, and on
    `Trainer._maybe_log_save_evaluate` being called after `on_epoch_end`.
    """
    from transformers.trainer_callback import DefaultFlowCallback, TrainerControl

    def flow(max_steps: int) -> Any:
        seen = copy.copy(state)
        wanted = TrainerControl()
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
    """Load with `from_pretrained` if `load_state_dict` has skipped weights.

    A `Trainer` calls `load_state_dict(strict=False)`, and only logs keys that differ. They differ
    if `save_pretrained` renames, splits or joins weights, as for mixtures of experts, ViT and
    Qwen2-VL. Relies on the `Trainer` passing the result
    to `Trainer._issue_warnings_after_load`. It does not with FSDP, DeepSpeed and adapters of
    peft, which save the model's own keys.
    """
    from transformers import PreTrainedModel

    model = unwrap_model(model)
    missing = _not_loaded(model, loaded.missing_keys)
    if not missing and not loaded.unexpected_keys:
        return
    error_of = partial(_weights_error, checkpoint, type(model).__name__)
    is_stock = isinstance(model, PreTrainedModel) and getattr(model, "hf_quantizer", None) is None
    # `from_pretrained` does not report these if they are missing: they would be random.
    optional = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    optional = [key for key in missing if any(re.search(pattern, key) for pattern in optional)]
    if not is_stock or optional:
        raise error_of(optional or missing, loaded.unexpected_keys)
    try:
        # In the widest dtype of all weights, so that copying rounds none of them.
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
        unexpected = info["unexpected_keys"]
        if not new and not unexpected:
            model.load_state_dict(whole.state_dict())
    except Exception as error:  # Model classes raise any error for a config or weights.
        raise error_of(missing, loaded.unexpected_keys) from error
    if new or unexpected:
        raise error_of(new, unexpected)


def _not_loaded(model: Any, missing: Iterable[str]) -> list[str]:
    """Return the missing keys whose weights no tied key has loaded.

    Relies on `_keys_to_ignore_on_save`: constant weights, such as positions.
    """
    missing = {*missing} - {*(getattr(model, "_keys_to_ignore_on_save", None) or ())}
    weights = model.state_dict(keep_vars=True)
    loaded = {id(value) for key, value in weights.items() if key not in missing}
    return sorted(key for key in missing if id(weights.get(key)) not in loaded)


def _weights_error(
    checkpoint: str, model: str, missing: Iterable[str], unexpected: Iterable[str]
) -> StateError:
    keys = {"missing from it": sorted(missing), "in it alone": sorted(unexpected)}
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
    """Return the sizes of tensor, context and sequence parallelism, by their methods."""
    names = ("get_tp_size", "get_cp_size", "get_sp_size")
    return {name: getattr(trainer, name)() for name in names if hasattr(trainer, name)}


def deepspeed_has_scheduler(trainer: Any) -> bool:
    """Return whether the DeepSpeed config has a scheduler, which is made for `max_steps`."""
    plugin = trainer.accelerator.state.deepspeed_plugin  # None without DeepSpeed
    return plugin is not None and "scheduler" in plugin.deepspeed_config


def steps_within_backward(args: Any) -> bool:
    """Return whether the optimizer steps within the backward, by its `OptimizerNames`."""
    name = str(args.optim.value)
    return name in ("lomo", "adalomo") or name.endswith("layerwise")


# --- columns --------------------------------------------------------------------------------------


def is_default_collator(collate: Any) -> bool:
    """Return whether this is the default collator of a `Trainer`, which stacks and cannot pad."""
    from transformers import DefaultDataCollator, default_data_collator

    return collate is default_data_collator or isinstance(collate, DefaultDataCollator)


def pads_by_default(trainer: Any) -> bool:
    """Return whether a `Trainer` has the default collator, but needs padding of token rows.

    If the trainer keeps all columns, relies on `PreTrainedModel.main_input_name`.
    """
    if not is_default_collator(trainer.data_collator):
        return False
    if trainer.args.remove_unused_columns or trainer.model is None:
        return "input_ids" in collator_columns(trainer)
    return getattr(base_model(trainer.model), "main_input_name", "input_ids") == "input_ids"


def collator_columns(trainer: Any) -> set[str]:
    """Return the keys of samples that the trainer's collator takes.

    Relies on `Trainer._set_signature_columns_if_needed`, which other libraries override. It sets
    `_signature_columns` once, even if a search later removes the model. If it is not overridden,
    the parameters of the model inside its wrappers are added.
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
    """Return the keys of samples that the trainer's collator gets, or None if it gets all."""
    return collator_columns(trainer) if trainer.args.remove_unused_columns else None


def model_inputs(model: Any) -> set[str]:
    """Return the names of the arguments that a model takes, inside its wrappers."""
    return {*inspect.signature(base_model(model).forward).parameters}


def needs_labels(trainer: Any) -> bool:
    """Return whether the model cannot be called without `labels`."""
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
    model that is not in the table, such as GPT-2, has the causal loss if it calls `loss_function`;
    the `Trainer` misses those. Models that compute their own cross entropy, such as the decoders of
    BART and TrOCR, use the name `shift_labels` if they shift. Models of other libraries count as
    causal.
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


def rope_index_module(model: Any) -> Any:
    """Return a module without weights that has the model's `get_rope_index`; `None` without it.

    Relies on `get_rope_index` to use the module's `config` alone. The result is picklable.
    """
    for module in model.modules():
        if hasattr(type(module), "get_rope_index"):
            weightless = object.__new__(type(module))
            weightless.__dict__["config"] = module.config
            return weightless
    return None


def smoother_shifts(trainer: Any) -> bool | None:
    """Return whether the `Trainer` shifts labels for its `label_smoother`; `None` without one.

    Relies on `compute_loss` to look up the model's class in `MODEL_FOR_CAUSAL_LM_MAPPING_NAMES`.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if trainer.label_smoother is None or trainer.compute_loss_func is not None:
        return None
    return type(base_model(trainer.model)).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def ctc_reduction(trainer: Any) -> str | None:
    """Return how a CTC model reduces its loss over a batch; `None` for other losses.

    "mean" is a mean over samples. Relies on the names of these classes, which end with "ForCTC".
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
    """Return the factor by which a `Trainer` multiplies a loss before backward.

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


# --- samplers -------------------------------------------------------------------------------------


def sampler_class(name: str) -> Any:
    """Return a sampler of the `Trainer` by its name; `None` if transformers lacks it."""
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

    Relies on `_assign` to compute the batches of an optimizer step for all ranks, and on
    `_yield_global_batch` to choose the batches of a rank. A sampler for each rank would compute all
    batches for each rank.
    """
    sampler = sampler_class("BatchRebalanceSampler")(
        lengths, batch_size * world_size * accumulate, world_size, accumulate, seed=seed,
        drop_last=False,
    )  # fmt: skip
    sampler._yield_global_batch = lambda indices: zip(
        *sampler._assign(indices, [lengths[index] for index in indices]), strict=True
    )
    return [*sampler]
