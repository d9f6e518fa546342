"""What training takes, estimated before any step, from a model's parameters and configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from odb_nodes._core.checks import check_choice, check_count, check_type
from odb_nodes.planning import TokenBudget
from odb_nodes.planning.model_flops import field_of, missing_fields

STATES: Mapping[str, int] = {
    "adamw": 2, "adam": 2, "lion": 1, "rmsprop": 1, "sgd_momentum": 1, "sgd": 0
}  # fmt: skip
"""Tensors of a parameter's size and dtype that an optimizer keeps for it."""

NEEDED = ("hidden", "layers", "heads", "vocabulary")
USED = ("kv_heads", "head_size", "intermediate", "activation", "experts", "longest")
SAVED_BY = {"relu": 1, "gelu_new": 5}
"""Tensors that backward needs of an activation function and its output; 2 for any other."""


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """What a step of training takes on one device, in bytes.

    Attributes:
        rows, width: the batch that it is estimated for: rows of so many tokens.
        parameter_bytes: the parameters.
        gradient_bytes: their gradients.
        optimizer_bytes: the optimizer's state.
        activation_bytes: what autograd saves for backward, the logits' part left out.
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
    """Estimate what a step of training takes, without making one.

    Activations are counted as in Korthikanti et al. 2022, "Reducing Activation Recomputation in
    Large Transformer Models", section 4.1, for gated feed-forwards, grouped keys and RMSNorm, too.

    Args:
        model: a decoder or encoder with the configuration of transformers; it may be on the meta
            device, where it takes no memory. Images are not counted.
        batch: rows and their width in tokens; or a budget, of whose batches one of the widest rows
            that the model takes is meant.
        optimizer: `"adamw"`, `"adam"`, `"lion"`, `"rmsprop"`, `"sgd_momentum"` or `"sgd"`.
        dtype: what autocast computes in. `None`: in the dtype of the parameters.
        checkpointing: whether each layer keeps its input alone, and is computed again in backward.

    Raises:
        TypeError, ValueError: an argument is not valid, or the model has no such configuration.
    """
    check_type("model", model, nn.Module)
    check_choice("optimizer", optimizer, tuple(STATES))
    config = _config_of(model)
    rows, width = _shape_of(batch, config["longest"])
    weights = list(model.parameters())
    stored = weights[0].dtype
    computed = stored if dtype is None else dtype
    trained_bytes = sum(one.numel() * one.element_size() for one in weights if one.requires_grad)
    is_rms = any("RMSNorm" in type(one).__name__ for one in model.modules())
    layer, layer_input = _layer_bytes(model, config, width, stored, computed, is_rms)
    end = config["hidden"] * (stored.itemsize * (1 + is_rms) + computed.itemsize)  # last norm, head
    kept = layer_input * config["layers"] + layer if checkpointing else layer * config["layers"]
    activation_bytes = rows * width * (kept + end)
    if computed != stored:  # autocast keeps the weights that it casts
        linears = {one.weight: one for one in model.modules() if isinstance(one, nn.Linear)}
        activation_bytes += sum(one.numel() for one in linears) * computed.itemsize
    return MemoryEstimate(
        rows=rows,
        width=width,
        parameter_bytes=sum(one.numel() * one.element_size() for one in weights),
        gradient_bytes=trained_bytes,
        optimizer_bytes=STATES[optimizer] * trained_bytes,
        activation_bytes=activation_bytes,
        logits_bytes=rows * width * config["vocabulary"] * (computed.itemsize + 4 + 4),
    )


def _layer_bytes(
    model: nn.Module,
    config: Mapping[str, Any],
    width: int,
    stored: torch.dtype,
    computed: torch.dtype,
    is_rms: bool,
) -> tuple[int, int]:
    """Return what a layer saves for each token, and what its input takes of that."""
    hidden, heads, one = config["hidden"], config["heads"], computed.itemsize
    head_size = config["head_size"] or hidden // heads
    queries, keys = heads * head_size, (config["kv_heads"] or heads) * head_size
    is_gated = any("gate" in name and "proj" in name for name, _ in model.named_parameters())
    # The input of each linear layer: shared, unless autocast makes a copy for each.
    inputs = 2 if computed == stored else 4 + is_gated
    norms = 2 * hidden * stored.itemsize * (1 + is_rms)  # RMSNorm keeps its normalized input, too
    kind = getattr(model.config, "_attn_implementation", None) or "sdpa"
    # Queries, keys, values, and what comes of them; but for flash attention, keys are repeated.
    attention = 2 * (queries + (keys if "flash" in kind else queries)) * one
    if any(name.endswith("q_norm") for name, _ in model.named_modules()):
        attention += (queries + keys) * stored.itemsize * (1 + is_rms)
    if kind == "eager":
        attention += heads * width * (4 + (one if one < 4 else 0))  # the softmax is in fp32
    elif kind == "sdpa":
        attention += width * one  # the mask, which is made anew for each layer
    saved = SAVED_BY.get(config["activation"], 2) + 2 * is_gated
    feed_forward = saved * (config["intermediate"] or 4 * hidden) * (config["experts"] or 1) * one
    return norms + inputs * hidden * one + attention + feed_forward, hidden * stored.itemsize


def _shape_of(batch: Any, longest: int | None) -> tuple[int, int]:
    if isinstance(batch, tuple) and len(batch) == 2:
        return check_count("batch", batch[0]), check_count("batch", batch[1])
    budget = TokenBudget.of(batch, "batch")
    width = budget.capacity if longest is None else min(budget.capacity, longest)
    if budget.layout == "packed":
        return budget.shape([budget.capacity])
    rows = max(budget.tokens // budget.row_cost(width), 1)
    return min(rows, budget.max_samples or rows), width


def _config_of(model: Any) -> dict[str, Any]:
    """Return the numbers of a model's configuration, under names of ours."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    found = {name: field_of(config, name) for name in NEEDED + USED}
    missing = missing_fields(config, *NEEDED)
    if missing or getattr(config, "is_encoder_decoder", False):
        what = f"has no {missing}" if missing else "is of an encoder with a decoder"
        raise ValueError(
            f"`model.config` must be that of a decoder or an encoder of transformers, but {what}. "
            "Call `find_budget`, which measures steps."
        )
    return found
