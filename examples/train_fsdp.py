"""Train a tiny language model on several ranks with FSDP2, in dynamic batches.

    torchrun --nproc-per-node 4 examples/train_fsdp.py                   # a few minutes on 2 cores
    torchrun --nproc-per-node 4 examples/train_fsdp.py --accumulate 4    # 4 batches of each rank
    torchrun --nproc-per-node 4 examples/train_fsdp.py --resume          # from the last checkpoint

Each rank has a share of the weights and of the optimizer. All ranks save into one checkpoint with
torch.distributed.checkpoint, the states of their loaders too.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from odb_nodes import DistributedState, ODBDataLoader, pop_step_info
from tiny_lm import build_model, load_corpus


def main() -> None:
    """Train as one rank, and save a checkpoint with the others every few steps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--accumulate", type=int, default=1, help="batches a step (%(default)s)")
    parser.add_argument("--token-budget", type=int, default=2048, help="of a batch (%(default)s)")
    parser.add_argument("--steps", type=int, help="most steps of the run (default: one epoch)")
    parser.add_argument("--save-every", type=int, default=20, help="steps (%(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--output", type=Path, default=Path("runs/train_fsdp"), help="folder")
    options = parser.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])  # set by torchrun
    on_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = f"cuda:{local_rank}" if on_gpus else "cpu"
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpus else "gloo")
    mesh = init_device_mesh("cuda" if on_gpus else "cpu", (dist.get_world_size(),))
    corpus = load_corpus()
    model = build_model(device=device)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert isinstance(model, FSDPModule)  # fully_shard has changed its class
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

    def states(step: int) -> dict[str, Any]:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        loader_state = DistributedState(loader)
        parts = {"model": model_state, "optimizer": optimizer_state, "loader": loader_state}
        return {"step": step, **parts}

    step = 0
    if options.resume:
        # torch.distributed.checkpoint writes `.metadata` last: with it, a checkpoint is complete.
        complete = options.output.glob("step-*/.metadata")
        state = states(step)
        dcp.load(state, checkpoint_id=max(complete, key=os.path.getmtime).parent)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        step = state["step"]
    with loader:
        for batch in loader:
            info = pop_step_info(batch)
            inputs = {key: value.to(device) for key, value in batch.items()}
            model.set_requires_gradient_sync(info.ends_optimizer_step)
            # FSDP averages the ranks' gradients; with this scale that gives the mean over all
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
                dcp.save(states(step), checkpoint_id=options.output / f"step-{step}")
            if step == options.steps:
                break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
