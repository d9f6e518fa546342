"""FLOPs of a model's forward pass, from the fields of its configuration alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

NAMES: Mapping[str, tuple[str, ...]] = {
    "text": ("text_config", "llm_config", "language_config"),
    "vision": ("vision_config",),
    # sizes
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "layers": ("num_hidden_layers", "n_layer", "n_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "vocabulary": ("vocab_size",),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "head_size": ("head_dim",),
    "intermediate": ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner"),
    "activation": ("hidden_act", "hidden_activation", "activation_function"),
    "gated": ("hidden_activation",),
    "longest": ("max_position_embeddings", "n_positions"),
    # latent attention
    "kv_rank": ("kv_lora_rank",),
    "query_rank": ("q_lora_rank",),
    "plain_size": ("qk_nope_head_dim",),
    "rotary_size": ("qk_rope_head_dim",),
    "value_size": ("v_head_dim",),
    # kinds of layers
    "kinds": ("layer_types",),
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
    "mixed_kinds": ("mlp_layer_types",),
    "dense_first": ("first_k_dense_replace",),
    "dense_layers": ("mlp_only_layers",),
    "mixed_every": ("decoder_sparse_step", "expert_layer_period"),
    "mixed_offset": ("expert_layer_offset",),
    # image encoders
    "depth": ("depth", "num_hidden_layers"),
    "encoder_hidden": ("embed_dim", "hidden_size"),
    "ratio": ("mlp_ratio",),
    "patch": ("patch_size",),
    "image": ("image_size",),
    "window_pixels": ("window_size",),
    "full_blocks": ("fullatt_block_indexes",),
}
"""What a field means -> its names in the configurations of transformers, the first that is set."""

OTHERWISE = frozenset(
    (
        "doge", "ernie4_5_vl_moe_text", "glm4v_moe_vision", "glm4v_vision", "glm46v_vision",
        "llama4_text", "longcat_flash", "recurrent_gemma"
    )
)  # fmt: skip
"""Models that mean something else by these fields."""
UNKNOWN = ("cross_attention_layers", "index_topk", "is_encoder_decoder")
"""Fields of models that have other layers beside, or choose which tokens attend."""
GATED = frozenset(("bitnet", "gemma", "pixtral"))
"""Models whose feed-forward has a gate, which their activation does not tell."""

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
LINEAR, CONV = "linear_attention", "conv"
ALIASES = {"attention": FULL, "mamba": LINEAR}  # of earlier versions
KINDS = (FULL, SLIDING, CHUNKED, LINEAR, CONV)
ASK = "Pass `StepTime(squares=...)`, fitted to steps"


class Flops(NamedTuple):
    """FLOPs of a forward pass: of each token, each pair of tokens and each image patch."""

    token: float
    square: float
    patch: float


def field_of(config: Any, meaning: str) -> Any:
    """Return a field of a configuration, under any of its names; None if it is not set or 0."""
    return next((value for name in NAMES[meaning] if (value := _get(config, name))), None)


def missing_fields(config: Any, *meanings: str) -> list[str]:
    """Return the names of the fields that are not set."""
    return [" or ".join(NAMES[each]) for each in meanings if field_of(config, each) is None]


def flops_of_config(config: Any, *, causal: bool, image_patches: int) -> Flops:
    """Return the FLOPs of a model, see `StepTime.of_config`."""
    whole, encoder = field_of(config, "text") or config, field_of(config, "vision")
    place, text = "config" if whole is config else "config.text_config", _of_layer(whole, 0)
    _check_known(config, "config")
    _check_known(text, place, "hidden", "layers", "heads", "vocabulary")
    if field_of(text, "linear_heads") or field_of(text, "expansion"):
        _check_known(text, place, "kinds")
    token_macs = field_of(text, "hidden") * field_of(text, "vocabulary")
    square_macs = 0.0
    for layer, (kind, attended) in enumerate(_layers(text)):
        of_layer = _of_layer(whole, layer)
        token_macs += _feed_forward(of_layer, layer)
        if kind in (LINEAR, CONV):
            token_macs += _without_pairs(of_layer, kind)
            continue
        projections, pair_macs = _attention(of_layer)
        token_macs += projections
        if attended is None:
            square_macs += pair_macs / (1 + causal)
        else:
            token_macs += pair_macs * attended
    patch_macs = 0.0 if encoder is None else _encoder(encoder, image_patches)
    return Flops(2 * token_macs, 2 * square_macs, 2 * patch_macs)


def _get(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def _of_layer(config: Any, layer: int) -> Any:
    """Return the configuration of a layer, where layers differ in their sizes."""
    if isinstance(config, Mapping):
        overrides = {
            int(key): sizes for key, sizes in (_get(config, "per_layer_config") or {}).items()
        }
        return {**config, **overrides.get(layer, {})}
    return config.per_layer_config[layer] if _get(config, "is_heterogeneous") else config


def _check_known(config: Any, name: str, *needed: str) -> None:
    """Raise an error where a configuration lacks a field, or is of a model that is not known."""
    reasons = [f"has no {each}" for each in missing_fields(config, *needed)]
    reasons += [f"has {each}, which is not counted" for each in UNKNOWN if _get(config, each)]
    if (model := _get(config, "model_type")) in OTHERWISE:
        reasons.append(f"is of {model}, which means something else by its fields")
    if reasons:
        raise ValueError(
            f"`{name}` must have the fields of a decoder or an encoder of transformers, but "
            f"{' and '.join(reasons)}. {ASK}."
        )


def _layers(config: Any) -> list[tuple[str, float | None]]:
    """Return the kind of each layer, and how many tokens a token attends to, if not to all."""
    number, window = field_of(config, "layers"), field_of(config, "window")
    if _get(config, "use_sliding_window") is False:
        window = None
    full_layers, full_every = field_of(config, "full_layers"), field_of(config, "full_every")
    kinds = field_of(config, "kinds")
    if kinds is None:
        kinds = [
            SLIDING
            if layer >= (full_layers or 0) and (layer + 1) % (full_every or number + 1)
            else FULL
            for layer in range(number)
        ]
    kinds = [ALIASES.get(kind, kind) for kind in kinds]
    if unknown := {*kinds} - {*KINDS}:
        raise ValueError(
            f"`layer_types` must be of {', '.join(KINDS)}, but has {min(unknown)}, which is not "
            f"counted. {ASK}."
        )
    longest = field_of(config, "longest") or math.inf
    attended = {SLIDING: window or 0, CHUNKED: (field_of(config, "chunk") or 0) / 2}
    attended = {kind: tokens for kind, tokens in attended.items() if 0 < tokens < longest}
    return [(kind, attended.get(kind)) for kind in kinds]


def _attention(config: Any) -> tuple[float, float]:
    """Return the multiplications of a layer's projections for a token, and for a pair of tokens."""
    hidden, heads = field_of(config, "hidden"), field_of(config, "heads")
    if rank := field_of(config, "kv_rank"):
        plain, rotary = field_of(config, "plain_size") or 0, field_of(config, "rotary_size") or 0
        size, value_size = plain + rotary, field_of(config, "value_size")
        query_rank = field_of(config, "query_rank")
        queries = heads * size * (query_rank or hidden) + hidden * (query_rank or 0)
        keys = hidden * (rank + rotary) + rank * heads * (plain + value_size)
        return queries + keys + heads * value_size * hidden, heads * (size + value_size)
    size = field_of(config, "head_size") or hidden // heads
    is_shared = _get(config, "multi_query") and not _get(config, "new_decoder_architecture")
    kv_heads = 1 if is_shared else field_of(config, "kv_heads") or heads  # the former of Falcon
    is_gated = field_of(config, "linear_heads") is not None  # queries have a gate of their size
    projections = hidden * size * ((2 + is_gated) * heads + 2 * kv_heads)
    return projections, 2 * heads * size


def _without_pairs(config: Any, kind: str) -> float:
    """Return the multiplications of the linear layers around a recurrence or a convolution."""
    hidden = field_of(config, "hidden")
    if kind == CONV:
        return float(4 * hidden**2)
    if heads := field_of(config, "linear_heads"):  # of a gated delta rule
        values = heads * field_of(config, "linear_size")
        keys = field_of(config, "linear_key_heads") * field_of(config, "linear_key_size")
        return float(hidden * (2 * keys + 3 * values + 2 * heads))
    if expansion := field_of(config, "expansion"):  # of Mamba
        return float(3 * expansion * hidden**2)
    size = field_of(config, "head_size") or hidden // field_of(config, "heads")
    return float(5 * hidden * size * field_of(config, "heads"))  # with a gate of the output


def _feed_forward(config: Any, layer: int) -> float:
    """Return the multiplications of a layer's feed-forward for a token: of its active experts."""
    hidden = field_of(config, "hidden")
    size = field_of(config, "intermediate") or 4 * hidden
    size = size[layer] if isinstance(size, list | tuple) else size
    matrices = 2 + _is_gated(config)
    experts, shared_size = field_of(config, "all_experts") or 0, field_of(config, "shared_size")
    if experts < 2 or not _is_mixed(config, layer):
        return float(matrices * hidden * (size if experts or not shared_size else shared_size))
    expert_size = field_of(config, "expert_size") or size
    shared_size = shared_size or (field_of(config, "shared") or 0) * expert_size
    active = (field_of(config, "experts") or 1) * expert_size + shared_size
    return float(hidden * (matrices * active + experts))


def _is_mixed(config: Any, layer: int) -> bool:
    """Tell whether a layer of a model that has experts has some."""
    kinds, every = field_of(config, "mixed_kinds"), field_of(config, "mixed_every") or 1
    if kinds:
        return bool(kinds[layer] == "sparse")
    offset = field_of(config, "mixed_offset")
    if offset is None:
        offset = every - 1
    is_dense = layer in (field_of(config, "dense_layers") or ())
    is_first = layer < (field_of(config, "dense_first") or 0)
    return layer % every == offset and not is_dense and not is_first


def _is_gated(config: Any) -> bool:
    """Tell whether a feed-forward has a gate: by its activation, since no field says so."""
    is_named = field_of(config, "gated") is not None or _get(config, "model_type") in GATED
    return is_named or str(field_of(config, "activation")).lower().startswith(("silu", "swi"))


def _encoder(config: Any, image_patches: int) -> float:
    """Return the multiplications of an image encoder for a patch, on average."""
    _check_known(config, "config.vision_config", "encoder_hidden", "depth", "patch")
    hidden, depth = field_of(config, "encoder_hidden"), field_of(config, "depth")
    size = field_of(config, "intermediate") or int(hidden * (field_of(config, "ratio") or 4))
    side = _side(field_of(config, "patch"))
    if pixels := field_of(config, "image"):
        image_patches = (_side(pixels) // side) ** 2
    attended = float(image_patches * depth)
    full_blocks = field_of(config, "full_blocks")
    if full_blocks and (window := field_of(config, "window_pixels")):
        in_window = min((window // side) ** 2, image_patches)
        attended = len(full_blocks) * image_patches + (depth - len(full_blocks)) * in_window
    linear = hidden * (4 * hidden + (2 + _is_gated(config)) * size)
    return float(depth * linear + 2 * hidden * attended)


def _side(size: Any) -> int:
    return int(size[0] if isinstance(size, list | tuple) else size)
