"""FLOPs of a model's forward pass, from the fields of its configuration alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from odb_nodes._support.checks import check_count, check_number, check_type

NUMBERS: Mapping[str, tuple[str, ...]] = {
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "layers": ("num_hidden_layers", "n_layer", "n_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "vocabulary": ("vocab_size",),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "head_size": ("head_dim",),
    "longest": ("max_position_embeddings", "n_positions"),
    # latent attention
    "kv_rank": ("kv_lora_rank",),
    "query_rank": ("q_lora_rank",),
    "plain_size": ("qk_nope_head_dim",),
    "rotary_size": ("qk_rope_head_dim",),
    "value_size": ("v_head_dim",),
    # kinds of layers
    "window": ("sliding_window",),
    "full_layers": ("max_window_layers",),
    "full_every": ("sliding_window_pattern",),
    "chunk": ("attention_chunk_size",),
    "linear_heads": ("linear_num_value_heads",),
    "linear_size": ("linear_value_head_dim",),
    "linear_key_heads": ("linear_num_key_heads",),
    "linear_key_size": ("linear_key_head_dim",),
    "expansion": ("mamba_expand",),
    # mixtures of experts
    "experts": ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"),
    "all_experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "expert_size": ("moe_intermediate_size", "expert_ffn_hidden_size"),
    "shared_size": ("shared_expert_intermediate_size", "shared_intermediate_size"),
    "shared": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
    "dense_first": ("first_k_dense_replace",),
    "mixed_every": ("decoder_sparse_step", "expert_layer_period"),
    "mixed_offset": ("expert_layer_offset",),
    # image encoders
    "depth": ("depth", "num_hidden_layers"),
    "encoder_hidden": ("embed_dim", "hidden_size"),
    "ratio": ("mlp_ratio",),
    "window_pixels": ("window_size",),
}
NAMES: Mapping[str, tuple[str, ...]] = {
    **NUMBERS,
    "text": ("text_config", "llm_config", "language_config"),
    "vision": ("vision_config",),
    # names of functions
    "activation": ("hidden_act", "hidden_activation", "activation_function"),
    "gated": ("hidden_activation",),
    # lists with a value for each layer, or of layers
    "kinds": ("layer_types",),
    "mixed_kinds": ("mlp_layer_types",),
    "dense_layers": ("mlp_only_layers",),
    "full_blocks": ("fullatt_block_indexes",),
    # a number, or a list: a number for each layer, or for each side
    "intermediate": ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner"),
    "patch": ("patch_size",),
    "image": ("image_size",),
}
"""Meaning of a field -> its names in transformers' configurations; the first that is set counts."""

OTHER_MEANINGS = frozenset(
    (
        "doge", "ernie4_5_vl_moe_text", "glm4v_moe_vision", "glm4v_vision", "glm46v_vision",
        "llama4_text", "longcat_flash", "recurrent_gemma"
    )
)  # fmt: skip
"""Models in which fields with these names have another meaning."""
UNKNOWN = ("cross_attention_layers", "index_topk", "is_encoder_decoder")
"""Fields of models with layers that are not counted, or that choose the tokens which attend."""
GATED = frozenset(("bitnet", "gemma", "pixtral"))
"""Models whose feed-forward has a gate that the name of their activation does not show."""

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
LINEAR, CONV = "linear_attention", "conv"
ALIASES = {"attention": FULL, "mamba": LINEAR}  # names of earlier versions
KINDS = (FULL, SLIDING, CHUNKED, LINEAR, CONV)
ASK = "Pass `StepTime(squares=...)`, fitted to steps"


class Flops(NamedTuple):
    """FLOPs of a forward pass for each token, each pair of tokens, and each image patch."""

    token: float
    square: float
    patch: float


def field_of(config: Any, meaning: str) -> Any:
    """Return a field of a configuration by its meaning; `None` if the field is not set, or 0.

    Raises:
        TypeError, ValueError: the field must be a number of at least 0, and is not.
    """
    for name in NAMES[meaning]:
        if value := _get(config, name):
            if meaning in NUMBERS:
                check_number(name, value, "[0, inf)")
            return value
    return None


def missing_fields(config: Any, *meanings: str) -> list[str]:
    """Return the names of the fields that are not set."""
    return [" or ".join(NAMES[name]) for name in meanings if field_of(config, name) is None]


def flops_of_config(config: Any, *, causal: bool, image_patches: int) -> Flops:
    """Return the FLOPs of a model, see `StepTime.of_config`."""
    whole = field_of(config, "text") or config
    encoder = field_of(config, "vision")
    place = "config" if whole is config else "config.text_config"
    text = _fields_of_layer(whole, 0)
    _check_known(_Fields(config), "config")
    _check_known(text, place, "hidden", "layers", "heads", "vocabulary")
    if text.linear_heads or text.expansion:
        _check_known(text, place, "kinds")
    if text.linear_heads:
        _check_known(text, place, "linear_size", "linear_key_heads", "linear_key_size")
    if text.kv_rank:
        _check_known(text, place, "value_size")
    token_macs = text.hidden * text.vocabulary
    square_macs = 0.0
    for layer, (kind, attended) in enumerate(_layers(text)):
        fields = _fields_of_layer(whole, layer)
        token_macs += _feed_forward(fields, layer)
        if kind in (LINEAR, CONV):
            token_macs += _without_pairs(fields, kind)
            continue
        projections, pair_macs = _attention(fields)
        token_macs += projections
        if attended is None:
            square_macs += pair_macs / (1 + causal)
        else:
            token_macs += pair_macs * attended
    patch_macs = 0.0 if encoder is None else _encoder(_Fields(encoder), image_patches)
    return Flops(2 * token_macs, 2 * square_macs, 2 * patch_macs)


class _Fields:
    """The fields of a configuration by their meaning, see `field_of`."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def __getattr__(self, meaning: str) -> Any:
        return field_of(self.config, meaning)

    def named(self, name: str) -> Any:
        """Return the field with this name; `None` if the field is not set."""
        return _get(self.config, name)

    def value_of_layer(self, meaning: str, layer: int) -> Any:
        """Return a layer's value of a field that is a list with a value for each layer."""
        name = next(name for name in NAMES[meaning] if self.named(name))
        values = self.named(name)
        if layer >= len(values):
            raise ValueError(
                f"`{name}` must have a value for each layer, but has {len(values)} values for "
                f"{self.layers} layers."
            )
        return values[layer]


def _get(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def _fields_of_layer(config: Any, layer: int) -> _Fields:
    """Return the fields of a layer, whose sizes may differ from other layers."""
    if isinstance(config, Mapping):
        overrides = config.get("per_layer_config") or {}
        check_type("per_layer_config", overrides, Mapping)
        by_layer = {int(key): sizes for key, sizes in overrides.items()}  # keys such as "01"
        return _Fields({**config, **by_layer.get(layer, {})})
    return _Fields(config.per_layer_config[layer] if _get(config, "is_heterogeneous") else config)


def _check_known(config: _Fields, name: str, *needed: str) -> None:
    """Raise a `ValueError` if a configuration lacks a field, or is of an unknown model."""
    reasons = [f"has no {field}" for field in missing_fields(config.config, *needed)]
    reasons += [f"has {field}, which is not counted" for field in UNKNOWN if config.named(field)]
    if (model := config.named("model_type")) in OTHER_MEANINGS:
        reasons.append(f"is of {model}, in which these fields have other meanings")
    if reasons:
        raise ValueError(
            f"`{name}` must have the fields of a decoder or an encoder of transformers, but "
            f"{' and '.join(reasons)}. {ASK}."
        )


def _layers(config: _Fields) -> list[tuple[str, float | None]]:
    """Return the kind of each layer, and how many tokens a token attends to; `None`: all."""
    number, window = config.layers, config.window
    check_count("num_hidden_layers", number)
    if config.named("use_sliding_window") is False:
        window = None
    kinds = config.kinds
    if kinds is None:
        first, every = config.full_layers or 0, config.full_every or number + 1
        kinds = [
            SLIDING if layer >= first and (layer + 1) % every else FULL for layer in range(number)
        ]
    check_type("layer_types", kinds, list | tuple)
    kinds = [ALIASES.get(kind, kind) for kind in kinds]
    if unknown := {*kinds} - {*KINDS}:
        raise ValueError(
            f"`layer_types` must be of {', '.join(KINDS)}, but has {min(unknown)}, which is not "
            f"counted. {ASK}."
        )
    longest = config.longest or math.inf
    attended = {SLIDING: window or 0, CHUNKED: (config.chunk or 0) / 2}
    attended = {kind: tokens for kind, tokens in attended.items() if 0 < tokens < longest}
    return [(kind, attended.get(kind)) for kind in kinds]


def _attention(config: _Fields) -> tuple[float, float]:
    """Return the multiplications of a layer's projections for a token, and for a pair of tokens."""
    hidden, heads = config.hidden, config.heads
    if rank := config.kv_rank:
        plain, rotary = config.plain_size or 0, config.rotary_size or 0
        size = plain + rotary
        value_size = config.value_size
        query_rank = config.query_rank
        queries = heads * size * (query_rank or hidden) + hidden * (query_rank or 0)
        keys = hidden * (rank + rotary) + rank * heads * (plain + value_size)
        return queries + keys + heads * value_size * hidden, heads * (size + value_size)
    size = config.head_size or hidden // heads
    is_shared = config.named("multi_query") and not config.named("new_decoder_architecture")
    kv_heads = 1 if is_shared else config.kv_heads or heads  # first: Falcon
    is_gated = config.linear_heads is not None  # queries have a gate of their size
    projections = hidden * size * ((2 + is_gated) * heads + 2 * kv_heads)
    return projections, 2 * heads * size


def _without_pairs(config: _Fields, kind: str) -> float:
    """Return the multiplications of the linear layers around a recurrence or a convolution."""
    hidden = config.hidden
    if kind == CONV:
        return float(4 * hidden**2)
    if heads := config.linear_heads:  # a gated delta rule
        values = heads * config.linear_size
        keys = config.linear_key_heads * config.linear_key_size
        return float(hidden * (2 * keys + 3 * values + 2 * heads))
    if expansion := config.expansion:  # Mamba
        return float(3 * expansion * hidden**2)
    size = config.head_size or hidden // config.heads
    return float(5 * hidden * size * config.heads)  # with a gate of the output


def _feed_forward(config: _Fields, layer: int) -> float:
    """Return the multiplications of a layer's feed-forward, its active experts, for a token."""
    hidden = config.hidden
    size = config.intermediate or 4 * hidden
    if isinstance(size, list | tuple):
        size = config.value_of_layer("intermediate", layer)
    check_number("intermediate_size", size, "[0, inf)")
    matrices = 2 + _is_gated(config)
    experts = config.all_experts or 0
    shared_size = config.shared_size
    if experts < 2 or not _is_mixed(config, layer):
        return float(matrices * hidden * (size if experts or not shared_size else shared_size))
    expert_size = config.expert_size or size
    shared_size = shared_size or (config.shared or 0) * expert_size
    active = (config.experts or 1) * expert_size + shared_size
    return float(hidden * (matrices * active + experts))


def _is_mixed(config: _Fields, layer: int) -> bool:
    """Return whether a layer has experts, in a model with experts."""
    kinds = config.mixed_kinds
    every = config.mixed_every or 1
    if kinds:
        return bool(config.value_of_layer("mixed_kinds", layer) == "sparse")
    offset = config.mixed_offset
    if offset is None:
        offset = every - 1
    is_dense = layer in (config.dense_layers or ())
    is_first = layer < (config.dense_first or 0)
    return layer % every == offset and not is_dense and not is_first


def _is_gated(config: _Fields) -> bool:
    """Return whether a feed-forward has a gate, by its activation: no field says so."""
    is_named = config.gated is not None or config.named("model_type") in GATED
    return is_named or str(config.activation).lower().startswith(("silu", "swi"))


def _encoder(config: _Fields, image_patches: int) -> float:
    """Return the multiplications of an image encoder for a patch, on average."""
    _check_known(config, "config.vision_config", "encoder_hidden", "depth", "patch")
    hidden, depth = config.encoder_hidden, config.depth
    size = config.intermediate or int(hidden * (config.ratio or 4))
    check_number("intermediate_size", size, "[0, inf)")
    side = _side("patch_size", config.patch)
    if pixels := config.image:
        image_patches = (_side("image_size", pixels) // side) ** 2
    attended = float(image_patches * depth)
    full_blocks = config.full_blocks or ()
    check_type("fullatt_block_indexes", full_blocks, list | tuple)
    if full_blocks and (window := config.window_pixels):
        in_window = min((window // side) ** 2, image_patches)
        attended = len(full_blocks) * image_patches + (depth - len(full_blocks)) * in_window
    linear = hidden * (4 * hidden + (2 + _is_gated(config)) * size)
    return float(depth * linear + 2 * hidden * attended)


def _side(name: str, size: Any) -> int:
    """Return the side of a square, or the first of two sides, in pixels."""
    return int(check_number(name, size[0] if isinstance(size, list | tuple) else size, "[1, inf)"))
