"""Pre-train a language model on text in Parquet files, on one rank or several with DDP.

    python examples/recipes/pretrain_parquet/train.py
    torchrun --nproc-per-node 2 examples/recipes/pretrain_parquet/train.py

Run it again after a stop: it goes on from its last checkpoint, also on another number of ranks.
"""

from __future__ import annotations

import argparse
import os
import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from odb_nodes import Checkpoints, ODBDataLoader, ParquetDataset, pop_step_info

# 1. Options. `--token-budget` is what to raise first on a real card.
parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--token-budget", type=int, default=4096, help="padded tokens of a batch")
parser.add_argument("--accumulate", type=int, default=2, help="batches of an optimizer step")
parser.add_argument("--steps", type=int, help="most optimizer steps (default: one epoch)")
parser.add_argument("--save-every", type=int, default=10, help="steps between checkpoints")
parser.add_argument("--output", type=Path, default=Path("runs/pretrain_parquet"))

END, PAD, VOCABULARY = 256, 257, 258  # the tokens are bytes, and these two
MAX_TOKENS = 1024


def make_data(folder: Path) -> None:
    """Write four Parquet files of text, of a few words to some hundred. Yours replace them."""
    rng = random.Random(0)
    words = ["".join(rng.choices("etaoinshrdlu", k=rng.randint(1, 8))) for _ in range(200)]
    written = folder.with_suffix(".part")  # a kill leaves no folder that looks complete
    written.mkdir(parents=True, exist_ok=True)
    for number in range(4):
        sizes = [int(min(150, rng.lognormvariate(3, 1))) + 1 for _ in range(500)]
        texts = [" ".join(rng.choices(words, k=size)) for size in sizes]
        # Row groups are read as a whole and mixed four at a time: some 10 MB each for real text.
        pq.write_table(pa.table({"text": texts}), written / f"{number}.parquet", row_group_size=100)
    written.rename(folder)


def encode(row: dict[str, Any]) -> dict[str, Any]:
    """Turn a row into a sample; runs in the workers. Here your tokenizer goes."""
    ids = np.array([*row["text"].encode()[: MAX_TOKENS - 1], END])
    return {"input_ids": ids, "labels": ids}


def make_model() -> torch.nn.Module:
    """Return a tiny model with random weights. Yours: `LlamaConfig.from_pretrained(...)`."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        pad_token_id=PAD,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    return LlamaForCausalLM(config)


def main() -> None:
    """Train as one rank of those that torchrun starts, or alone."""
    options = parser.parse_args()

    # 2. Ranks. On GPUs each rank has one of its own; on CPUs they talk over gloo.
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    on_gpu = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if on_gpu else "cpu"
    if on_gpu:
        torch.cuda.set_device(device)
    if ranks > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    data = options.output / "data"
    if rank == 0 and not data.exists():
        make_data(data)
    if ranks > 1:
        dist.barrier()

    # 3. Model, optimizer, batches, checkpoints.
    raw_model = make_model().to(device)
    model: torch.nn.Module = raw_model
    if ranks > 1:
        model = DistributedDataParallel(raw_model)
        # DDP arranges its buckets anew after its first backward, which may change the order of
        # additions. Done here, a resumed run adds as an uninterrupted one does.
        tokens = torch.zeros(1, 2, dtype=torch.int64, device=device)
        model(input_ids=tokens, labels=tokens).loss.backward()
        model.zero_grad()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    loader = ODBDataLoader(
        ParquetDataset(data, columns=["text"]),
        token_budget=options.token_budget,
        window=256,
        process_fn=encode,
        num_workers=1,
        accumulate=options.accumulate,
        seed=0,
    )
    parts = {"model": raw_model, "optimizer": optimizer, "loader": loader}
    checkpoints = Checkpoints(
        options.output / "checkpoints", parts, replicated=["model", "optimizer"]
    )
    step = checkpoints.load()  # 0 where there is none

    # 4. The loop. `loss_scale` makes the gradient that of the mean over all tokens of the step.
    real_tokens = padded_tokens = 0
    with loader:
        for batch in loader:
            info = pop_step_info(batch)
            real_tokens += info.local_tokens
            padded_tokens += info.local_padded_tokens
            waits = ranks > 1 and not info.ends_optimizer_step
            with model.no_sync() if waits else nullcontext():  # type: ignore[operator]
                loss = model(**{name: values.to(device) for name, values in batch.items()}).loss
                (loss * info.loss_scale).backward()
            if not info.ends_optimizer_step:
                continue
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if rank == 0:
                padding = 1 - real_tokens / padded_tokens
                fill = padded_tokens / (info.micro_steps * options.token_budget)
                counts = f"{info.optimizer_samples} samples, padding {padding:.1%}, fill {fill:.1%}"
                print(f"step {step}: loss {loss:.6f}, {counts}")
            real_tokens = padded_tokens = 0
            if step % options.save_every == 0:
                checkpoints.save(step)
            if step == options.steps:
                break
    if rank == 0:
        torch.save(raw_model.state_dict(), options.output / "model.pt")
    if ranks > 1:
        del model  # before its group, whose threads it would wait for
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
