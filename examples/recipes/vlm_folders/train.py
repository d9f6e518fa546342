"""Train a vision-language model on folders of images, each with its caption beside it.

    python examples/recipes/vlm_folders/train.py

Run it again after a stop: it goes on from its last checkpoint.
"""

from __future__ import annotations

import argparse
import os
import random
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast, Qwen2VLConfig, Qwen2VLImageProcessorPil
from transformers import Qwen2VLForConditionalGeneration as Qwen2VL

from odb_nodes import Checkpoints, ODBDataLoader, TokenBudget, pop_step_info
from odb_nodes.vision import BadImages, VisionLanguageCollate, VisionLanguageProcessor

# 1. Options. `--token-budget` is what to raise first on a real card.
parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--token-budget", type=int, default=1024, help="padded tokens of a batch")
parser.add_argument("--steps", type=int, help="most steps (default: one epoch)")
parser.add_argument("--save-every", type=int, default=10, help="steps between checkpoints")
parser.add_argument("--output", type=Path, default=Path("runs/vlm_folders"))

COLORS = ("red", "green", "blue", "yellow", "orange", "purple")
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"]
VOCABULARY, QUESTION = 400, "What do you see?"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_data(folder: Path) -> None:
    """Draw 600 images, some of them cut off, each with its caption. Yours replace the folder."""
    rng = random.Random(0)
    written = folder.with_suffix(".part")  # a kill leaves no folder that looks complete
    for number in range(600):
        width, height = (int(2 ** rng.uniform(5, 9)) for _ in range(2))
        image = Image.new("RGB", (width, height))
        colors = rng.choices(COLORS, k=rng.randint(1, 5))
        for color in colors:
            left, top = rng.randint(0, width // 2), rng.randint(0, height // 2)
            ImageDraw.Draw(image).ellipse((left, top, left + 40, top + 40), fill=color)
        path = written / f"circles-{len(colors)}" / f"{number:04}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path)
        path.with_suffix(".txt").write_text(f"I see a {' and a '.join(colors)} circle.")
        if number % 50 == 7:
            path.write_bytes(path.read_bytes()[:200])
    written.rename(folder)


class CaptionedImages:
    """All images below a folder, as records of conversations."""

    def __init__(self, folder: Path) -> None:
        self.paths = sorted(folder.glob("**/*.jpg"))  # in the same order in each run
        self.captions = [path.with_suffix(".txt").read_text() for path in self.paths]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a question about an image and its caption; the image is decoded in the workers."""
        path = str(self.paths[index])
        question = [{"type": "image"}, {"type": "text", "text": QUESTION}]
        answer = {"role": "assistant", "content": self.captions[index]}
        messages = [{"role": "user", "content": question}, answer]
        return {"id": path, "images": [path], "messages": messages}


def make_processor(captions: list[str]) -> VisionLanguageProcessor:
    """Return what makes samples of records. Yours: an `AutoTokenizer`, an `AutoImageProcessor`."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads would not survive a fork
    bpe = ByteLevelBPETokenizer()
    size = VOCABULARY - len(SPECIAL)
    bpe.train_from_iterator(captions, size, special_tokens=["<pad>"], show_progress=False)
    names = {"pad_token": "<pad>", "additional_special_tokens": SPECIAL}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, **names)
    images = Qwen2VLImageProcessorPil(min_pixels=56 * 56, max_pixels=28 * 28 * 64)
    return VisionLanguageProcessor(tokenizer, images, bad_images=BadImages.skipped())


def make_model(processor: VisionLanguageProcessor) -> torch.nn.Module:
    """Return a tiny model. Yours: `Qwen2VL.from_pretrained(...)`."""
    torch.manual_seed(0)
    token = processor.tokenizer.convert_tokens_to_ids
    text: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 192}
    text |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    text |= {"rope_scaling": {"rope_type": "default", "mrope_section": [2, 3, 3]}}
    text |= {"bos_token_id": None, "eos_token_id": token("<|im_end|>")}
    vision = {"depth": 2, "embed_dim": 64, "hidden_size": 64, "num_heads": 4, "mlp_ratio": 2}
    image_token = token("<|image_pad|>")
    config = Qwen2VLConfig(text_config=text, vision_config=vision, image_token_id=image_token)
    return Qwen2VL(config)


def main() -> None:
    """Train, from the last checkpoint where there is one."""
    options = parser.parse_args()

    # 2. Data, model, batches, checkpoints.
    if not (data := options.output / "data").exists():
        make_data(data)
    dataset = CaptionedImages(data)
    processor = make_processor([QUESTION, *dataset.captions])
    model = make_model(processor).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = ODBDataLoader(
        dataset,
        token_budget=TokenBudget(options.token_budget, max_patches=2 * options.token_budget),
        window=64,
        process_fn=processor,
        collate_fn=VisionLanguageCollate(dummy=None),  # on several ranks: processor.dummy_image()
        num_workers=2,
        seed=0,
    )
    parts = {"model": model, "optimizer": optimizer, "loader": loader}
    checkpoints = Checkpoints(options.output / "checkpoints", parts)
    step = checkpoints.load()  # 0 where there is none

    # 3. The loop.
    with loader:
        for batch in loader:
            info = pop_step_info(batch)
            del batch["id"]  # which image it was; the model does not take it
            loss = model(**{name: values.to(DEVICE) for name, values in batch.items()}).loss
            (loss * info.loss_scale).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            padding = 1 - info.local_tokens / info.local_padded_tokens
            fill = info.local_padded_tokens / options.token_budget
            counts = f"{info.local_samples} samples, {len(batch.get('pixel_values', ()))} patches"
            print(f"step {step}: loss {loss:.6f}, {counts}, padding {padding:.1%}, fill {fill:.1%}")
            if step % options.save_every == 0:
                checkpoints.save(step)
            if step == options.steps:
                break
        torch.save(model.state_dict(), options.output / "model.pt")
        print(f"skipped so far: {dict(loader.skipped_samples)}")


if __name__ == "__main__":
    main()
