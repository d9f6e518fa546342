"""Train a tiny language model in packed batches: all samples of a batch in one row.

    python examples/train_packed.py                    # one epoch, a few minutes on 2 cores
    python examples/train_packed.py --layout padded    # the same budget, one row per sample
    python examples/train_packed.py --resume           # go on from the last checkpoint

Attention in a packed row must stay within each sample. On a GPU, "flash_attention_2" computes no
more than that; here `attend_per_sample` does it on any device. transformers' "sdpa" and "eager"
give the same losses, but compute the attention of the whole row and mask most of it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from odb_nodes import Checkpoints, ODBDataLoader, TokenBudget, pop_step_info
from tiny_lm import build_model, load_corpus


def attend_per_sample(
    _module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    cu_seq_lens_q: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Return causal attention within each sample, (B, T, heads, size).

    Args:
        query: the queries, (B, heads, T, size); `key` and `value` have the same shape.
        key: the keys.
        value: the values.
        scaling: the factor on the scores.
        cu_seq_lens_q: where each sample of a packed row begins and the last one ends, (n + 1,)
            int32. `None`: a row per sample, padded on the right, where no real token looks.
    """
    sizes = [query.shape[2]] if cu_seq_lens_q is None else cu_seq_lens_q.diff().tolist()
    parts = zip(*(states.split(sizes, dim=2) for states in (query, key, value)), strict=True)
    attended = [
        scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling) for q, k, v in parts
    ]
    return torch.cat(attended, dim=2).transpose(1, 2).contiguous(), None


def main() -> None:
    """Train, and save a checkpoint every few steps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layout", choices=("packed", "padded"), default="packed")
    parser.add_argument("--token-budget", type=int, default=2048, help="of a batch (%(default)s)")
    parser.add_argument("--steps", type=int, help="most steps of the run (default: one epoch)")
    parser.add_argument("--save-every", type=int, default=20, help="steps (%(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--output", type=Path, default=Path("runs/train_packed"), help="folder")
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    corpus = load_corpus()
    AttentionInterface.register("per_sample", attend_per_sample)
    model = build_model(device=device, attention="per_sample")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    loader = ODBDataLoader(
        corpus.train,
        token_budget=TokenBudget(options.token_budget, layout=options.layout),
        window=256,
        process_fn=corpus.encode,
        num_workers=2,
        seed=0,
    )
    parts = {"model": model, "optimizer": optimizer, "loader": loader}
    checkpoints = Checkpoints(options.output / "checkpoints", parts)
    step = checkpoints.load() if options.resume else 0
    with loader:
        for batch in loader:
            info = pop_step_info(batch)
            inputs = {k: v.to(device) if torch.is_tensor(v) else v for k, v in batch.items()}
            loss = model(**inputs).loss * info.loss_scale
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            rows, width = batch["input_ids"].shape
            print(f"step {step}: loss {loss:.6f}, {info.local_samples} samples as {rows} x {width}")
            if step % options.save_every == 0:
                checkpoints.save(step)
            if step == options.steps:
                break


if __name__ == "__main__":
    main()
