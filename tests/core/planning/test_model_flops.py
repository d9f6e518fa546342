"""`StepTime.of_config`: near the FLOPs that torch counts in real models."""

from argparse import Namespace

import numpy as np
import pytest
import torch
import transformers
from refusals import refuses
from torch.utils.flop_counter import FlopCounterMode

from odb_nodes.core.planning import StepTime
from odb_nodes.core.planning.model_flops import flops_of_config

LENGTHS = (32, 64, 96)
SMALL = {
    "vocab_size": 96,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 80,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**SMALL, "num_key_value_heads": 2}
SIZED = {**GROUPED, "head_dim": 16}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
OF_GPT2 = {"n_embd": 48, "n_layer": 3, "n_head": 4, "vocab_size": 96}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
FAMILIES = {
    "Llama": GROUPED,
    "Qwen2": GROUPED,
    "Qwen3": SIZED,
    "Mistral": {**GROUPED, "sliding_window": None},
    "Gemma": SIZED,
    "Gemma2": {**SIZED, "layer_types": ["full_attention"] * 3},
    "GPTNeoX": SMALL,
    "Arcee": {**GROUPED, "head_dim": 12},
    "GPT2": {**OF_GPT2, "bos_token_id": 1, "eos_token_id": 2},
    "Starcoder2": {**GROUPED, "sliding_window": None},
    "Mixtral": {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": {**SIZED, **EXPERTS, "mlp_only_layers": [1]},
    "Qwen2Moe": {**GROUPED, **EXPERTS, "shared_expert_intermediate_size": 40},
    "DeepseekV3": {**SMALL, **EXPERTS, **LATENT},
}
HEADS = {"GPT2": "LMHeadModel"}


def flops(model, **inputs):
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(**inputs)
    return counter


def of_blocks(counter, folder):
    """FLOPs of the modules that are right in a list of modules."""
    counts = counter.get_flop_counts().items()
    return sum(sum(of.values()) for name, of in counts if name.split(".")[-2:-1] == [folder])


def model_of(config, head="ForCausalLM"):
    """The model of a configuration, whose attention and experts are products that are counted."""
    config._attn_implementation = config._experts_implementation = "eager"
    name = type(config).__name__.removesuffix("Config")
    return getattr(transformers, name + HEADS.get(name, head))(config).eval()


def counted(model):
    """FLOPs of a token and of a pair of tokens, fitted to three lengths; the fit is exact."""
    totals = [
        flops(model, input_ids=torch.randint(5, 90, (2, length))).get_total_flops()
        for length in LENGTHS
    ]
    design = 2.0 * np.array([[1, length, length**2] for length in LENGTHS])
    _, token, square = np.linalg.solve(design, totals)
    return token, square


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_and_squares_are_those_that_are_counted(family):
    config = getattr(transformers, f"{family}Config")(**FAMILIES[family])
    token, square = counted(model_of(config))  # eager attention computes all pairs
    whole = flops_of_config(config, causal=False, image_patches=1)
    assert (whole.token, whole.square) == pytest.approx((token, square), rel=0.005)
    causal = StepTime.of_config(config)
    assert causal.squares == pytest.approx(square / token / 2, rel=0.005)
    assert StepTime.of_config(config.to_dict()) == causal
    assert StepTime.of_config(Namespace(**config.to_dict())) == causal


def test_an_encoder_attends_to_all():
    config = transformers.BertConfig(**SMALL)
    token, square = counted(model_of(config, "ForMaskedLM"))
    time = StepTime.of_config(config, causal=False)
    assert 1 / time.squares == pytest.approx(token / square, rel=0.06)  # the head has another layer


WINDOWS = {
    "Mistral": ({**GROUPED, "sliding_window": 16}, 3),
    "Qwen3": (
        {**SIZED, "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
        2,
    ),
    "Gemma3Text": ({**SIZED, "sliding_window": 16, "layer_types": None}, 3),
    "GptOss": ({**SIZED, "sliding_window": 16, "num_local_experts": 4}, 2),
}


@pytest.mark.parametrize("family", WINDOWS)
def test_layers_with_a_window_count_in_tokens(family):
    options, windows = WINDOWS[family]
    config = getattr(transformers, f"{family}Config")(**options)
    flat = getattr(transformers, f"{family}Config")(**options)
    flat.layer_types, flat.sliding_window = ["full_attention"] * 3, None
    windowed, full = (
        flops_of_config(layers, causal=True, image_patches=1) for layers in (config, flat)
    )
    pair = full.square / 3
    assert windowed.square == pytest.approx(pair * (3 - windows))
    assert windowed.token == pytest.approx(full.token + windows * 2 * pair * 16)
    # Far beyond the window that is what a causal window lets through, pair by pair.
    length = 4_000
    position = torch.arange(length)
    distance = position[:, None] - position
    seen = int(((distance >= 0) & (distance < 16)).sum())
    assert 2 * pair * seen == pytest.approx(2 * pair * 16 * length, rel=0.01)


def test_a_window_that_holds_every_sample_is_none():
    config = transformers.MistralConfig(**GROUPED | {"sliding_window": 4096})
    plain = transformers.MistralConfig(**GROUPED | {"sliding_window": None})
    assert StepTime.of_config(config) == StepTime.of_config(plain)
    fields = {**GROUPED, "hidden_act": "silu", "sliding_window": 64}  # as Qwen2 has it in a file
    off = StepTime.of_config({**fields, "use_sliding_window": False})
    assert off.squares == StepTime.of_config(plain).squares
    of_two = StepTime.of_config({**fields, "max_window_layers": 1})
    assert 0 < of_two.squares < off.squares / 2


def test_chunks_and_layers_that_differ_in_size_count_by_layer():
    config = {**GROUPED, "hidden_act": "silu", "attention_chunk_size": 32}
    kinds = ["chunked_attention", "full_attention", "full_attention"]
    flops_now = flops_of_config({**config, "layer_types": kinds}, causal=True, image_patches=1)
    full = flops_of_config(config, causal=True, image_patches=1)
    assert flops_now.square == pytest.approx(full.square * 2 / 3)
    assert flops_now.token == pytest.approx(full.token + full.square / 3 * 32)
    wider = {**config, "per_layer_config": {"01": {"head_dim": 24}}}
    assert flops_of_config(wider, causal=True, image_patches=1).square == full.square * 4 / 3


def test_linear_attention_has_no_squares():
    config = transformers.Qwen3NextConfig(
        **SIZED,
        **EXPERTS,
        shared_expert_intermediate_size=24,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        layer_types=["linear_attention", "linear_attention", "full_attention"],
    )
    model = model_of(config)
    counted_flops = flops_of_config(config, causal=False, image_patches=1)
    assert counted_flops.square == 2 * 2 * 4 * 16  # of one layer
    linears = sum(
        2 * module.weight.numel()
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and "expert" not in name
    )
    routed = 3 * 2 * 48 * ((2 + 1) * 3 * 24 + 8)
    assert counted_flops.token == pytest.approx(linears + routed, rel=0.02)
    hybrid = transformers.JambaConfig(**GROUPED, attn_layer_period=3, attn_layer_offset=2)
    assert flops_of_config(hybrid, causal=False, image_patches=1).square == 2 * 2 * 48


# --- image encoders -------------------------------------------------------------------------------

PATCHES = {"patch_size": 4, "hidden_act": "silu"}
ENCODERS = {
    "Qwen2VL": {"embed_dim": 48, "hidden_size": 48, "depth": 2, "num_heads": 4, "patch_size": 4},
    "Qwen2_5_VL": {
        **PATCHES,
        "hidden_size": 48,
        "out_hidden_size": 48,
        "depth": 3,
        "num_heads": 4,
        "intermediate_size": 80,
        "window_size": 16,
        "fullatt_block_indexes": [1],
    },
    "Qwen3VL": {
        "hidden_size": 48,
        "out_hidden_size": 48,
        "depth": 2,
        "num_heads": 4,
        "intermediate_size": 80,
        "patch_size": 4,
        "deepstack_visual_indexes": [],
    },
}


@pytest.mark.parametrize("family", ENCODERS)
def test_patches_of_images_of_any_size_are_those_that_are_counted(family):
    config = getattr(transformers, f"{family}Config")(
        text_config=GROUPED, vision_config=ENCODERS[family]
    )
    model = model_of(config, "ForConditionalGeneration")
    encoder = model.model.visual.eval()
    side = 16  # patches: 16 windows of 4 x 4
    values = torch.randn(side * side, 3 * 2 * 4 * 4)
    counter = flops(encoder, hidden_states=values, grid_thw=torch.tensor([[1, side, side]]))
    counted_flops = flops_of_config(config, causal=True, image_patches=side * side)
    assert counted_flops.patch == pytest.approx(of_blocks(counter, "blocks") / side**2, rel=0.02)
    text = flops_of_config(config.text_config, causal=True, image_patches=1)
    assert counted_flops[:2] == text[:2]
    time = StepTime.of_config(config, image_patches=side * side)
    assert time.patches == pytest.approx(counted_flops.patch / counted_flops.token)


TOWERS = {
    "Llava": (transformers.CLIPVisionModel, "clip_vision_model", "llama"),
    "Gemma3": (transformers.SiglipVisionModel, "siglip_vision_model", "gemma3_text"),
}


@pytest.mark.parametrize("family", TOWERS)
def test_patches_of_images_of_one_size_are_those_that_are_counted(family):
    tower, vision_type, text_type = TOWERS[family]
    sizes = {key: value for key, value in SMALL.items() if not key.endswith("_id")}
    del sizes["vocab_size"], sizes["max_position_embeddings"]
    config = getattr(transformers, f"{family}Config")(
        text_config={**SIZED, "model_type": text_type},
        vision_config={**sizes, "image_size": 32, "patch_size": 4, "model_type": vision_type},
    )
    config.vision_config._attn_implementation = "eager"
    counter = flops(tower(config.vision_config).eval(), pixel_values=torch.randn(1, 3, 32, 32))
    patch = flops_of_config(config, causal=True, image_patches=1).patch
    assert patch == pytest.approx(of_blocks(counter, "layers") / 64, rel=0.04)  # and a class token
    assert StepTime.of_config(config) == StepTime.of_config(config.to_dict())


MISSING = {key: value for key, value in GROUPED.items() if key not in ("hidden_size", "vocab_size")}
test_what_cannot_be_counted_is_refused = refuses(
    [
        (
            (MISSING,),
            ValueError,
            "`config` must .* has no hidden_size or n_embd or d_model and has",
        ),
        ((None,), ValueError, "has no vocab_size"),
        ((transformers.T5Config(),), ValueError, "has is_encoder_decoder, which is not counted"),
        ((transformers.Llama4TextConfig(),), ValueError, "is of llama4_text, in which"),
        (
            ({**GROUPED, "layer_types": ["conv", "ssm"]},),
            ValueError,
            "`layer_types` .* but has ssm",
        ),
        (({**GROUPED, "mamba_expand": 2},), ValueError, "`config` .* has no layer_types"),
        (({**GROUPED, "vision_config": {"depth": 3}},), ValueError, "`config.vision_config` .* no"),
        (({"text_config": MISSING},), ValueError, "`config.text_config` must"),
        *(
            (({**GROUPED, name: "x"},), TypeError, f"`{name}` must be .* but is 'x'")
            for name in ("hidden_size", "num_hidden_layers", "num_key_value_heads", "head_dim")
        ),
        (({**GROUPED, "num_attention_heads": [4]},), TypeError, "`num_attention_heads` must be"),
        (({**GROUPED, "hidden_size": -48},), ValueError, "`hidden_size` must be in"),
        (({**GROUPED, "num_hidden_layers": 2.5},), TypeError, "`num_hidden_layers` must be"),
        (({**GROUPED, "intermediate_size": "x"},), TypeError, "`intermediate_size` must be"),
        (({**GROUPED, "intermediate_size": [80]},), ValueError, "`intermediate_size` .* 3 layers"),
        (({**GROUPED, "layer_types": 3},), TypeError, "`layer_types` must be"),
        (({**GROUPED, "kv_lora_rank": 4},), ValueError, "has no v_head_dim"),
        (
            ({**GROUPED, "linear_num_value_heads": 4, "layer_types": ["linear_attention"] * 3},),
            ValueError,
            "has no linear_value_head_dim",
        ),
        (
            ({**GROUPED, "vision_config": {"hidden_size": 8, "depth": 2, "patch_size": "x"}},),
            TypeError,
            "`patch_size` must be",
        ),
    ],
    lambda arguments: StepTime.of_config(*arguments),
)


@pytest.mark.parametrize("patches", [0, 1.5])
def test_a_number_of_patches_is_checked(patches):
    with pytest.raises((TypeError, ValueError), match="`image_patches`"):
        StepTime.of_config(GROUPED, image_patches=patches)
