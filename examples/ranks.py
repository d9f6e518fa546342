"""The processes of a torchrun job: who they are, where they meet, and how they end together.

    with meet("training", device="cpu") as store:
        ...  # torch.distributed is initialised
        die_together(store)

torchrun starts the script once per rank. The script starts a process for each phase of its story;
those of one phase form a job of their own, which may be killed and leaves the next one untouched:
the store in which they meet is torchrun's, and each phase has its own keys there.

This is a module for the examples beside it, not a script.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

PEERS_WITHIN_S = 120.0  # ranks that share cores start at different times


def from_environment(name: str) -> int:
    """Return what torchrun says of this process: `RANK`, `WORLD_SIZE`, `LOCAL_RANK` and others.

    Raises:
        SystemExit: if it was not started by torchrun.
    """
    if name not in os.environ:
        raise SystemExit(
            f"`{name}` is not set. Start the example with torchrun, for example: "
            "torchrun --nproc-per-node 2 examples/train_ddp.py"
        )
    return int(os.environ[name])


def choose_device(device: str) -> str:
    """Return `device`, or for "auto": cuda where each rank has a GPU, else cpu."""
    if device != "auto":
        return device
    return "cuda" if torch.cuda.device_count() >= from_environment("LOCAL_WORLD_SIZE") else "cpu"


@contextmanager
def meet(phase: str, device: str) -> Iterator[dist.Store]:
    """Initialise torch.distributed with the other ranks of a phase, and leave it with them.

    Args:
        phase: its name, the same on all ranks, and used once.
        device: "cuda", for NCCL with one GPU per rank, or "cpu", for gloo.

    Yields:
        A store of this phase, which outlives its processes.
    """
    limit = timedelta(seconds=PEERS_WITHIN_S)
    store, rank, world_size = next(dist.rendezvous("env://", timeout=limit))
    store = dist.PrefixStore(phase, store)
    gpu = None
    if device == "cuda":
        gpu = torch.device("cuda", from_environment("LOCAL_RANK"))
        torch.cuda.set_device(gpu)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if gpu else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=limit,
        device_id=gpu,
    )
    yield store
    dist.barrier()  # once one rank has ended, the files of all are written
    dist.destroy_process_group()


def die_together(store: dist.Store) -> None:
    """Kill this process with SIGKILL, once all ranks are about to do so."""
    keys = [f"dying-{rank}" for rank in range(dist.get_world_size())]
    store.set(keys[dist.get_rank()], "")
    store.wait(keys, timedelta(seconds=PEERS_WITHIN_S))
    os.kill(os.getpid(), signal.SIGKILL)
