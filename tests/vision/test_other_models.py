"""Models like Qwen2-VL: groups, shapes and dummies change no loss of theirs either."""

import pytest
import torch
import transformers
from pictures import loss_and_gradient, processor, samples, step

from odb_nodes.vision import VisionLanguageCollate

TOLERANCE = 1e-5
VISION = {"depth": 2, "hidden_size": 64, "num_heads": 4, "intermediate_size": 96, "patch_size": 14}


def model(kind):
    """A fresh tiny model with random weights."""
    token = processor().tokenizer.convert_tokens_to_ids
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3]}
    if kind == "Qwen2_5_VL":
        own = {"fullatt_block_indexes": [1]}
    else:
        own = {"deepstack_visual_indexes": [0], "num_position_embeddings": 64}
        rope["mrope_interleaved"] = True
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        text_config={
            "vocab_size": 512,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "rope_parameters": rope,
            "use_cache": False,
        },
        vision_config={**VISION, "out_hidden_size": 64, **own},
        image_token_id=token("<|image_pad|>"),
        video_token_id=511,
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
    )
    return getattr(transformers, f"{kind}ForConditionalGeneration")(config)


def targets(batch):
    return int((batch["labels"][:, 1:] != -100).sum())


@pytest.mark.parametrize("kind", ["Qwen2_5_VL", "Qwen3VL"])
def test_the_loss_of_a_group_is_that_of_its_samples(kind):
    network = model(kind)
    collate = VisionLanguageCollate(dummy=processor().dummy_image())
    group = samples([2, 0, 1])
    alone = [collate([sample]) for sample in group]
    weighed = sum(loss_and_gradient(network, batch)[0] * targets(batch) for batch in alone)
    expected = weighed / sum(map(targets, alone))
    for options in ({}, {"side": "left"}, {"shapes": ((8, 256),)}):
        batch = VisionLanguageCollate(dummy=None, **options)(group)
        assert abs(loss_and_gradient(network, batch)[0] - expected) < TOLERANCE


@pytest.mark.parametrize("kind", ["Qwen2_5_VL", "Qwen3VL"])
def test_a_dummy_reaches_the_vision_tower_and_changes_nothing(kind):
    network = model(kind)
    collate = VisionLanguageCollate(dummy=processor().dummy_image())
    loss, gradient = loss_and_gradient(network, collate(samples([0, 3])))
    found, with_dummy = loss_and_gradient(
        network, collate.collate_step(samples([0, 3]), step("image"))
    )
    assert abs(found - loss) < TOLERANCE
    for name, value in with_dummy.items():
        if ".visual." in name:
            assert value is not None and not value.any(), name
        elif gradient[name] is not None:
            assert (value - gradient[name]).abs().max() < TOLERANCE, name
