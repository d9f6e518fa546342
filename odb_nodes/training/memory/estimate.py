"""Training memory, estimated from a model's parameters and configuration before any step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from odb_nodes._support.checks import check_choice, check_count, check_type
from odb_nodes.core.planning import TokenBudget
from odb_nodes.core.planning.model_flops import field_of, missing_fields

OPTIMIZER_TENSORS: Mapping[str, int] = {
    "adamw": 2, "adam": 2, "lion": 1, "rmsprop": 1, "sgd_momentum": 1, "sgd": 0
}  # fmt: skip
"""Tensors of a parameter's size and dtype that an optimizer keeps per parameter."""

NEEDED_SIZES = ("hidden", "layers", "heads", "vocabulary")
OPTIONAL_SIZES = ("kv_heads", "head_size", "intermediate", "activation", "experts", "longest")
SAVED_BY_ACTIVATION = {"relu": 1, "gelu_new": 5}
"""Tensors that backward needs for an activation function; 2 for functions not listed."""


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Memory of a training step on one device, in bytes.

    Attributes:
        rows, width: the estimated batch: `rows` rows of `width` tokens.
        parameter_bytes: the parameters.
        gradient_bytes: their gradients.
        optimizer_bytes: the optimizer's state.
        activation_bytes: tensors that autograd saves for backward, except the logits.
        logits_bytes: the logits, and their log-probabilities and gradient in fp32.
    """

    rows: int
    width: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    logits_bytes: int

    @property
    def total_bytes(self) -> int:
        """The sum of all parts."""
        fixed = self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes
        return fixed + self.activation_bytes + self.logits_bytes


def estimate_training_memory(
    model: nn.Module,
    batch: int | TokenBudget | tuple[int, int],
    *,
    optimizer: str = "adamw",
    dtype: torch.dtype | None = None,
    checkpointing: bool = False,
) -> MemoryEstimate:
    """Estimate the memory of a training step without running it.

    Activations are counted as in Korthikanti et al. 2022, "Reducing Activation Recomputation in
    Large Transformer Models", section 4.1; also gated feed-forwards, grouped keys and RMSNorm.

    Args:
        model: a decoder or encoder with a configuration of transformers; it may be on the meta
            device, where it takes no memory. Images are not counted.
        batch: (rows, width in tokens); or a budget: then the batch with the widest rows that the
            model takes.
        optimizer: `"adamw"`, `"adam"`, `"lion"`, `"rmsprop"`, `"sgd_momentum"` or `"sgd"`.
        dtype: the dtype of autocast. `None`: the dtype of the parameters.
        checkpointing: whether each layer keeps only its input and is recomputed in backward.

    Raises:
        TypeError, ValueError: an argument is not valid, or the model has no such configuration.
    """
    check_type("model", model, nn.Module)
    check_choice("optimizer", optimizer, tuple(OPTIMIZER_TENSORS))
    config = _config_of(model)
    rows, width = _shape_of(batch, config["longest"])
    weights = list(model.parameters())
    weight_dtype = weights[0].dtype
    compute_dtype = weight_dtype if dtype is None else dtype
    trained_bytes = sum(_bytes_of(weight) for weight in weights if weight.requires_grad)
    is_rms = any("RMSNorm" in type(module).__name__ for module in model.modules())
    layer_bytes, input_bytes = _layer_bytes(
        model, config, width, weight_dtype, compute_dtype, is_rms
    )
    # the last norm, and the head
    end_bytes = config["hidden"] * (weight_dtype.itemsize * (1 + is_rms) + compute_dtype.itemsize)
    kept_bytes = layer_bytes * config["layers"]
    if checkpointing:
        kept_bytes = input_bytes * config["layers"] + layer_bytes
    activation_bytes = rows * width * (kept_bytes + end_bytes)
    if compute_dtype != weight_dtype:  # autocast keeps the weights that it casts
        linears = {layer.weight for layer in model.modules() if isinstance(layer, nn.Linear)}
        activation_bytes += sum(weight.numel() for weight in linears) * compute_dtype.itemsize
    return MemoryEstimate(
        rows=rows,
        width=width,
        parameter_bytes=sum(map(_bytes_of, weights)),
        gradient_bytes=trained_bytes,
        optimizer_bytes=OPTIMIZER_TENSORS[optimizer] * trained_bytes,
        activation_bytes=activation_bytes,
        logits_bytes=rows * width * config["vocabulary"] * (compute_dtype.itemsize + 4 + 4),
    )


def _bytes_of(weight: torch.Tensor) -> int:
    return weight.numel() * weight.element_size()


def _layer_bytes(
    model: nn.Module,
    config: Mapping[str, Any],
    width: int,
    weight_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    is_rms: bool,
) -> tuple[int, int]:
    """Return the bytes that a layer saves per token, and the bytes of its input per token."""
    hidden = config["hidden"]
    heads = config["heads"]
    value_bytes = compute_dtype.itemsize
    head_size = config["head_size"] or hidden // heads
    queries, keys = heads * head_size, (config["kv_heads"] or heads) * head_size
    is_gated = any("gate" in name and "proj" in name for name, _ in model.named_parameters())
    # Inputs of linear layers: projections share an input, unless autocast copies it for each.
    inputs = 2 if compute_dtype == weight_dtype else 4 + is_gated
    # RMSNorm also keeps its normalized input.
    norms = 2 * hidden * weight_dtype.itemsize * (1 + is_rms)
    implementation = getattr(model.config, "_attn_implementation", None) or "sdpa"
    # Queries, keys, values, output. Without flash attention, keys are repeated per query head.
    attention = 2 * (queries + (keys if "flash" in implementation else queries)) * value_bytes
    if any(name.endswith("q_norm") for name, _ in model.named_modules()):
        attention += (queries + keys) * weight_dtype.itemsize * (1 + is_rms)
    if implementation == "eager":
        copy_bytes = value_bytes if value_bytes < 4 else 0
        attention += heads * width * (4 + copy_bytes)  # The softmax is in fp32.
    elif implementation == "sdpa":
        attention += width * value_bytes  # Each layer makes a mask.
    saved_tensors = SAVED_BY_ACTIVATION.get(config["activation"], 2) + 2 * is_gated
    intermediate = (config["intermediate"] or 4 * hidden) * (config["experts"] or 1)
    layer_bytes = norms + attention + (inputs * hidden + saved_tensors * intermediate) * value_bytes
    return layer_bytes, hidden * weight_dtype.itemsize


def _shape_of(batch: Any, longest: int | None) -> tuple[int, int]:
    if isinstance(batch, tuple) and len(batch) == 2:
        return check_count("batch", batch[0]), check_count("batch", batch[1])
    budget = TokenBudget.of(batch, "batch")
    width = budget.width(budget.capacity if longest is None else min(budget.capacity, longest))
    if budget.layout == "packed":
        return budget.shape([budget.capacity])
    rows = max(budget.tokens // budget.row_cost(width), 1)
    return min(rows, budget.max_samples or rows), width


def _config_of(model: Any) -> dict[str, Any]:
    """Return the sizes in the configuration of a model, by name."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    sizes = {name: field_of(config, name) for name in NEEDED_SIZES + OPTIONAL_SIZES}
    missing = missing_fields(config, *NEEDED_SIZES)
    if missing or getattr(config, "is_encoder_decoder", False):
        fault = f"has no {missing}" if missing else "describes an encoder with a decoder"
        raise ValueError(
            "`model.config` must be the config of a decoder or an encoder of transformers, but "
            f"{fault}. Call `find_budget`, which measures steps."
        )
    return sizes
