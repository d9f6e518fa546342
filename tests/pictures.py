"""Pictures, conversations and the tiny Qwen2-VL of the examples, for the tests of `vision`."""

import functools
import io
import random
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from PIL import Image

sys.path.append(str(Path(__file__).parents[1] / "examples"))

from images import asked, noise

from odb_nodes import ODBDataLoader, pop_step_info
from odb_nodes.training.vision import VisionLanguageCollate
from tiny_vlm import Pictures, Qwen2VLImageProcessorPil, build_model, build_processor

__all__ = ["Pictures", "Qwen2VLImageProcessorPil", "build_model"]


@functools.cache
def processor():
    """A processor that skips what it cannot use."""
    return build_processor(max_pixels=28 * 28 * 16)


def model():
    """A fresh model, the same each time, in fp32."""
    return build_model(processor(), seed=0, device="cpu")


@functools.cache
def network_of(kind):
    """A tiny model with random weights."""
    if kind == "Qwen2VL":
        return model()
    if kind in ("Llava", "InternVL", "PaliGemma"):
        return model_of_whole_images(kind)
    token = processor().tokenizer.convert_tokens_to_ids
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3]}
    if kind == "Qwen2_5_VL":
        options = {"fullatt_block_indexes": [1]}
    else:
        options = {"deepstack_visual_indexes": [0], "num_position_embeddings": 64}
        rope["mrope_interleaved"] = True
    sizes = {"hidden_size": 64, "intermediate_size": 96}
    text = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    text |= {"vocab_size": 512, "head_dim": 16, "rope_scaling": rope, "use_cache": False}
    if kind == "Qwen3VLMoe":
        text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    vision = {"depth": 2, "num_heads": 4, "patch_size": 14, "out_hidden_size": 64, **options}
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        text_config={**sizes, **text},
        vision_config={**sizes, **vision},
        image_token_id=token("<|image_pad|>"),
        video_token_id=511,
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
    )
    return getattr(transformers, f"{kind}ForConditionalGeneration")(config)


IMAGE_TOKEN = 60  # of models that take whole images, 4 for each


def model_of_whole_images(kind):
    """A tiny model with random weights that takes images of 8 x 8, and numbers its tokens."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes["num_attention_heads"] = 4
    text = {**sizes, "vocab_size": 64, "model_type": "llama", "initializer_range": 0.3}
    text["num_key_value_heads"] = 2
    vision, options = {**sizes, "image_size": 8, "patch_size": 4}, {"image_token_id": IMAGE_TOKEN}
    if kind == "Llava":
        vision["model_type"] = "clip_vision_model"
    elif kind == "InternVL":
        vision |= {"image_size": [8, 8], "patch_size": [2, 2]}
    else:
        text["model_type"] = "gemma"
        options = {"image_token_index": IMAGE_TOKEN, "projection_dim": 32}
        vision |= {"projection_dim": 32, "vocab_size": 64}
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        text_config=text, vision_config=vision, **options
    )
    return getattr(transformers, f"{kind}ForConditionalGeneration")(config)


def record(index):
    """A record with 0 to 2 images."""
    rng = random.Random(index)
    images = [noise(rng.randrange(20, 150), rng.randrange(20, 150)) for _ in range(index % 3)]
    return asked(*images, answer="a red circle " * rng.randrange(1, 9), id=index)


def samples(indices):
    return [processor()(record(index)) for index in indices]


def loss_and_gradient(network, batch):
    """The mean loss over supervised tokens, and all gradients by name, `None` included."""
    network.zero_grad()
    loss = network(**{key: value for key, value in batch.items() if key != "id"}).loss
    loss.backward()
    gradients = {
        name: None if parameter.grad is None else parameter.grad.clone()
        for name, parameter in network.named_parameters()
    }
    return loss.detach(), gradients


def make_loader(size=60, *, damaged_every=10, **options):
    collate = VisionLanguageCollate(dummy=None, image_processor=processor().image_processor)
    arguments = {"token_budget": 512, "window": 12, "process_fn": processor(), **options}
    return ODBDataLoader(
        Pictures(size, damaged_every=damaged_every), collate_fn=collate, **arguments
    )


def ids_of(loader):
    return [batch["id"].tolist() for batch in loader]


def content_of(loader):
    """All that an epoch's batches hold, comparable."""
    batches = []
    for batch in loader:
        pop_step_info(batch)
        batches.append({key: torch.as_tensor(value).tolist() for key, value in batch.items()})
    return batches


def augmented(item):
    """A record with random crops and a random question, processed; draws from all generators."""
    cropped = [_crop(Image.open(io.BytesIO(image)).convert("RGB")) for image in item["images"]]
    question = random.choice(("What is it?", "Describe the picture.", "Which shapes?"))
    content = [*({"type": "image"} for _ in cropped), {"type": "text", "text": question}]
    messages = [{"role": "user", "content": content}, item["messages"][1]]
    if torch.rand(()) < 0.5:
        messages.insert(0, {"role": "system", "content": "Be brief."})
    return processor()({"id": item["id"], "messages": messages, "images": cropped})


def _crop(image):
    width, height = (max(8, int(side * np.random.uniform(0.3, 1))) for side in image.size)
    left = random.randrange(image.width - width + 1)
    top = int(torch.randint(image.height - height + 1, ()))
    return image.crop((left, top, left + width, top + height))
