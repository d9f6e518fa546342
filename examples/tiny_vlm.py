"""A tiny Qwen2-VL and pictures to learn from, made on the spot: nothing is downloaded.

    from tiny_vlm import Pictures, build_model, build_processor

A picture shows coloured shapes, and is asked how many, or what it shows: from a thumbnail to
several megapixels, so patches and tokens have a long tail. Some conversations have no picture, some
have two.

This is a module for the examples beside it, not a script.
"""

from __future__ import annotations

import io
import os
import random
from typing import Any

import torch
from PIL import Image, ImageDraw
from tokenizers import ByteLevelBPETokenizer
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)

from odb_nodes.vision import BadImages, VisionLanguageProcessor

try:
    from transformers import Qwen2VLImageProcessorPil
except ImportError:  # before version 5
    from transformers import (  # type: ignore[assignment]
        Qwen2VLImageProcessor as Qwen2VLImageProcessorPil,
    )

COLORS = ("red", "green", "blue", "yellow", "white", "orange", "purple", "pink")
SHAPES = ("circle", "square", "triangle", "bar")
NUMBERS = ("no", "one", "two", "three", "four", "five", "six")
MIN_PIXELS, MAX_PIXELS = 56 * 56, 28 * 28 * 32  # of a picture that the model sees
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
VOCABULARY_SIZE = 512

Record = dict[str, Any]


class Pictures:
    """A map-style dataset of conversations about pictures, each drawn when it is read.

    Args:
        size: number of conversations.
        seed: of what they show and say.
        damaged_every: one picture in so many is cut off in the middle of its file; 0 for none.
    """

    def __init__(self, size: int, *, seed: int = 0, damaged_every: int = 0) -> None:
        self._size, self._seed, self._damaged_every = size, seed, damaged_every

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Record:
        """Return a record for a `VisionLanguageProcessor`, its images as the bytes of files."""
        rng = random.Random(f"{self._seed}-{index}")
        pictures = [draw(rng) for _ in range(rng.choice((0, 1, 1, 1, 1, 2)))]
        images = [encode(picture, rng) for picture, _ in pictures]
        if self._damaged_every and index % self._damaged_every == 1 and images:
            images[0] = images[0][: len(images[0]) // 2]
        shapes = [found for _, found in pictures]
        content: list[Record] = [{"type": "image"} for _ in images]
        content.append({"type": "text", "text": question(rng, len(images))})
        return {
            "id": index,
            "images": images,
            "messages": [
                {"role": "user", "content": content},
                {"role": "assistant", "content": answer(rng, shapes)},
            ],
        }


def draw(rng: random.Random) -> tuple[Image.Image, list[str]]:
    """Return a picture of any size, and the names of what it shows."""
    width, height = (int(2 ** rng.uniform(6, 10.5)) for _ in range(2))
    picture = Image.new("RGB", (width, height), "black")
    pen, found = ImageDraw.Draw(picture), []
    for _ in range(rng.randrange(1, len(NUMBERS))):
        color, shape = rng.choice(COLORS), rng.choice(SHAPES)
        found.append(f"a {color} {shape}")
        side = rng.uniform(0.1, 0.4) * min(width, height)
        left, top = rng.uniform(0, width - side), rng.uniform(0, height - side)
        box = (left, top, left + side, top + side)
        if shape == "circle":
            pen.ellipse(box, fill=color)
        elif shape == "triangle":
            pen.polygon([(left, box[3]), (box[2], box[3]), (left + side / 2, top)], fill=color)
        else:
            pen.rectangle(box if shape == "square" else (*box[:3], top + side / 4), fill=color)
    return picture, found


def encode(picture: Image.Image, rng: random.Random) -> bytes:
    """Return a picture as the bytes of a JPEG or PNG file."""
    file = io.BytesIO()
    picture.save(file, rng.choice(("JPEG", "PNG")))
    return file.getvalue()


def question(rng: random.Random, images: int) -> str:
    """Return what is asked."""
    if not images:
        return rng.choice(("Name a color.", "Which shapes do you know?"))
    return rng.choice(("What do you see?", "Describe the picture, and count what it shows."))


def answer(rng: random.Random, pictures: list[list[str]]) -> str:
    """Return what the model is to say."""
    if not pictures:
        return f"I know {', '.join(rng.sample(COLORS + SHAPES, rng.randrange(1, 12)))}."
    told = [f"{NUMBERS[len(found)]}: {', '.join(found)}" for found in pictures]
    return "I see " + "; then ".join(told) + "."


def build_processor(*, max_pixels: int = MAX_PIXELS) -> VisionLanguageProcessor:
    """Return the `process_fn` of a loader, with a tokenizer trained on what is said.

    Args:
        max_pixels: most pixels of a picture that the model sees; 28 x 28 make a token.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads would not survive a fork
    rng = random.Random(0)
    words = [[f"a {rng.choice(COLORS)} {rng.choice(SHAPES)}"] * (n % 6 + 1) for n in range(300)]
    texts = [question(rng, n % 2) + answer(rng, [words[n]] * (n % 3)) for n in range(300)]
    trained = ByteLevelBPETokenizer()
    size = VOCABULARY_SIZE - len(SPECIAL)
    trained.train_from_iterator(texts, size, special_tokens=["<pad>"], show_progress=False)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=trained._tokenizer,
        pad_token="<pad>",
        additional_special_tokens=list(SPECIAL),
    )
    image_processor = Qwen2VLImageProcessorPil(min_pixels=MIN_PIXELS, max_pixels=max_pixels)
    return VisionLanguageProcessor(tokenizer, image_processor, bad_images=BadImages.skipped())


def build_model(
    processor: VisionLanguageProcessor,
    *,
    seed: int = 0,
    device: str = "cpu",
    width: int = 64,
    layers: int = 2,
) -> Qwen2VLForConditionalGeneration:
    """Return the model with random weights: by default two layers of text, two of vision.

    Args:
        processor: the processor, which knows the tokens of the model.
        seed: the seed for torch's global generators, which this sets.
        device: the device of the weights; with one seed they differ between kinds of devices.
        width: the width of the model, a multiple of 64.
        layers: layers of text, and of vision.
    """
    torch.manual_seed(seed)
    token = processor.tokenizer.convert_tokens_to_ids
    unit = width // 64
    config = Qwen2VLConfig(
        text_config={
            "vocab_size": VOCABULARY_SIZE,
            "hidden_size": width,
            "intermediate_size": 3 * width,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rope_scaling": {
                "rope_type": "default",
                "mrope_section": [2 * unit, 3 * unit, 3 * unit],
            },
            "bos_token_id": None,
            "eos_token_id": token("<|im_end|>"),
            "use_cache": False,
        },
        vision_config={
            "depth": layers,
            "embed_dim": width,
            "hidden_size": width,
            "num_heads": 4,
            "mlp_ratio": 2,
        },
        image_token_id=token("<|image_pad|>"),
        video_token_id=VOCABULARY_SIZE - 1,
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
    )
    with torch.device(device):
        return Qwen2VLForConditionalGeneration(config)
