"""Train a tiny Qwen2-VL on pictures of very different size.

    python examples/train_vlm.py             # about a minute on 2 cores
    python examples/train_vlm.py --resume    # go on from the last checkpoint

The pictures are drawn as they are read, from a thumbnail to a megapixel or two, as JPEG or PNG
files; some of the files are cut off, and their samples are skipped and counted. How many tokens a
conversation has is known once its pictures are decoded and resized, in the workers. A batch is
bounded in padded tokens and in patches.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from odb_nodes import Checkpoints, ODBDataLoader, TokenBudget, pop_step_info
from odb_nodes.vision import VisionLanguageCollate
from tiny_vlm import Pictures, build_model, build_processor


def main() -> None:
    """Train, and save a checkpoint every few steps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pictures", type=int, default=1200, help="conversations (%(default)s)")
    parser.add_argument("--steps", type=int, help="most steps of the run (default: one epoch)")
    parser.add_argument("--save-every", type=int, default=20, help="steps (%(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--output", type=Path, default=Path("runs/train_vlm"), help="folder")
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    processor = build_processor()
    model = build_model(processor, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = ODBDataLoader(
        Pictures(options.pictures, damaged_every=50),
        token_budget=TokenBudget(1024, max_patches=1024),
        window=64,
        process_fn=processor,
        collate_fn=VisionLanguageCollate(dummy=None),  # one rank waits for no other
        num_workers=2,
        seed=0,
    )
    parts = {"model": model, "optimizer": optimizer, "loader": loader}
    checkpoints = Checkpoints(options.output / "checkpoints", parts)
    step = checkpoints.load() if options.resume else 0
    with loader:
        for batch in loader:
            info = pop_step_info(batch)
            del batch["id"]  # of the samples, for you to trace them; the model does not take it
            inputs = {key: value.to(device) for key, value in batch.items()}
            loss = model(**inputs).loss * info.loss_scale
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            rows, width = batch["input_ids"].shape
            patches = len(batch.get("pixel_values", ()))
            print(f"step {step}: loss {loss:.6f}, {rows} x {width} tokens, {patches} patches")
            if step % options.save_every == 0:
                checkpoints.save(step)
            if step == options.steps:
                break
        print(f"Skipped so far: {dict(loader.skipped_samples)}")


if __name__ == "__main__":
    main()
