"""Train a tiny language model in a loop of Accelerate, in dynamic batches.

    python examples/train_accelerate.py                   # one epoch, a few minutes on 2 cores
    python examples/train_accelerate.py --accumulate 4    # 4 batches an optimizer step
    python examples/train_accelerate.py --resume          # go on from the last checkpoint

The loop is that of any other loader: what is added is `configure_accelerator` and the factor
`info.loss_scale`. The metrics of the batches, `odb/*`, go to TensorBoard.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from accelerate import Accelerator

from odb_nodes import ODBDataLoader, pop_step_info
from odb_nodes.integrations.accelerate import configure_accelerator
from tiny_lm import build_model, load_corpus


def main() -> None:
    """Train, and save a checkpoint every few steps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--accumulate", type=int, default=1, help="batches a step (%(default)s)")
    parser.add_argument("--steps", type=int, help="most steps of the run (default: one epoch)")
    parser.add_argument("--save-every", type=int, default=20, help="steps (%(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--output", type=Path, default=Path("runs/train_accelerate"))
    options = parser.parse_args()

    accelerator = Accelerator(
        gradient_accumulation_steps=options.accumulate,
        log_with="tensorboard",
        project_dir=options.output,
    )
    accelerator.init_trackers("logs")
    corpus = load_corpus()
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
    accelerator.register_for_checkpointing(warmup)
    batches = ODBDataLoader(
        corpus.train,
        token_budget=2048,
        window=256,
        process_fn=corpus.encode,
        num_workers=1,
        accumulate=options.accumulate,
        seed=0,
    )
    loader = configure_accelerator(accelerator, batches)
    model, optimizer = accelerator.prepare(model, optimizer)
    if options.resume:
        folders = options.output.glob("step-*")
        accelerator.load_state(str(max(folders, key=os.path.getmtime)))
    with loader:
        for batch in loader:
            info = pop_step_info(batch)
            with accelerator.accumulate(model):
                loss = model(**batch).loss * info.loss_scale
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if not info.ends_optimizer_step:
                continue
            warmup.step()
            step = warmup.last_epoch
            accelerator.print(f"step {step}: loss {loss:.6f}, {info.optimizer_samples} samples")
            if step % 10 == 0:
                accelerator.log(loader.take_metrics(), step=step)
            if step % options.save_every == 0:
                accelerator.save_state(str(options.output / f"step-{step}"))
            if step == options.steps:
                break
    accelerator.end_training()


if __name__ == "__main__":
    main()
