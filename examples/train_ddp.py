"""Train a tiny language model on several ranks with DDP, in dynamic batches.

    torchrun --nproc-per-node 4 examples/train_ddp.py                   # a few minutes on 2 cores
    torchrun --nproc-per-node 4 examples/train_ddp.py --accumulate 4    # 4 batches of each rank
    torchrun --nproc-per-node 4 examples/train_ddp.py --resume          # also with 2 ranks, or 8

Each rank forms batches of its share of the text under `--token-budget`; all take the same steps,
and the gradient is that of the mean loss over all supervised tokens, whichever rank has them.
"""

from __future__ import annotations

import argparse
import os
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from odb_nodes import Checkpoints, ODBDataLoader, pop_step_info
from tiny_lm import build_model, load_corpus


def main() -> None:
    """Train as one rank, and save a checkpoint with the others every few steps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--accumulate", type=int, default=1, help="batches a step (%(default)s)")
    parser.add_argument("--token-budget", type=int, default=2048, help="of a batch (%(default)s)")
    parser.add_argument("--steps", type=int, help="most steps of the run (default: one epoch)")
    parser.add_argument("--save-every", type=int, default=20, help="steps (%(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--output", type=Path, default=Path("runs/train_ddp"), help="folder")
    options = parser.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])  # set by torchrun
    on_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = f"cuda:{local_rank}" if on_gpus else "cpu"
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpus else "gloo")
    corpus = load_corpus()
    raw_model = build_model(device=device)
    model = DistributedDataParallel(raw_model)
    # DDP arranges its buckets anew after its first backward, and with more than two ranks that
    # changes the order of additions. Done before any step, a resumed run adds as the whole one.
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=device)
    model(input_ids=tokens, labels=tokens).loss.backward()
    model.zero_grad()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    loader = ODBDataLoader(
        corpus.train,
        token_budget=options.token_budget,
        window=256,
        process_fn=corpus.encode,
        num_workers=1,
        accumulate=options.accumulate,
        seed=0,
    )

    parts = {"model": raw_model, "optimizer": optimizer, "loader": loader}
    checkpoints = Checkpoints(
        options.output / "checkpoints", parts, replicated=["model", "optimizer"]
    )
    step = checkpoints.load() if options.resume else 0
    with loader:
        for batch in loader:
            info = pop_step_info(batch)
            inputs = {key: value.to(device) for key, value in batch.items()}
            with nullcontext() if info.ends_optimizer_step else model.no_sync():
                # DDP averages the ranks' gradients; with this scale that gives the mean over all
                # supervised tokens of all ranks and micro-steps.
                loss = model(**inputs).loss * info.loss_scale
                loss.backward()
            if not info.ends_optimizer_step:
                continue
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if dist.get_rank() == 0:
                print(f"step {step}: loss {loss:.6f}, {info.optimizer_samples} samples")
            if step % options.save_every == 0:
                checkpoints.save(step)
            if step == options.steps:
                break
    del model  # before its group, whose threads it would wait for
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
