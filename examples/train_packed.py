"""Train a tiny language model in padded and in packed batches; kill the packed run, and resume it.

    python examples/train_packed.py             # one epoch each: a few minutes on 2 cores
    python examples/train_packed.py --steps 12  # a quick look

Both have the same budget, `--token-budget`: a padded batch has a row per sample, as wide as the
longest; a packed one has all samples in one row, one after the other. Text, tokenizer, model and
training loop are those of train_lm.py.

Attention in a packed row stays within each sample. On a GPU, "flash_attention_2" computes no more
than that; here, on any device, `attend_per_sample` does it. transformers' "sdpa" and "eager" give
the same losses, but compute the attention of the whole row and mask most of it.

Then the packed run is repeated in a process that kills itself in mid-epoch, and goes on from its
last checkpoint in another. Every group and every loss must be that of the uninterrupted run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from run_log import table
from train_lm import check_resume, parse_job, train_dynamic

PER_SAMPLE = "per_sample"


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
        query: (B, heads, T, size), as are `key` and `value`.
        key: see `query`.
        value: see `query`.
        scaling: of the scores.
        cu_seq_lens_q: where each sample of a packed row begins and the last one ends, (n + 1,)
            int32. `None`: a row per sample, with padding on the right, which no token looks at.
    """
    sizes = [query.shape[2]] if cu_seq_lens_q is None else cu_seq_lens_q.diff().tolist()
    parts = zip(*(states.split(sizes, dim=2) for states in (query, key, value)), strict=True)
    attended = [
        scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling) for q, k, v in parts
    ]
    return torch.cat(attended, dim=2).transpose(1, 2).contiguous(), None


# At the top level: the processes that are killed and resumed import this script, too.
AttentionInterface.register(PER_SAMPLE, attend_per_sample)


def main() -> None:
    """Train in both layouts, check the resume, and report."""
    job = parse_job("train_packed", __doc__, token_budget=2048)
    train_dynamic(job, "padded")
    packed: dict[str, Any] = {"layout": "packed", "attention": PER_SAMPLE}
    train_dynamic(job, "packed", **packed)
    verdict = check_resume(job, "packed", **packed)
    print(f"\n{verdict}\n\n{table(job.output, ['padded', 'packed'], job.token_budget)}")


if __name__ == "__main__":
    main()
