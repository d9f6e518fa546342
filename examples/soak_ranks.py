"""A rank of `soak.py`: a tiny model on a mixture of three sources, from the newest checkpoint on.

The driver starts it in a process for each rank, and reads what it prints into its log.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch._dynamo  # which the first step of an optimizer imports
import torch.distributed as dist
from torch.utils.data import IterableDataset

from odb_nodes import (
    Checkpoints,
    JsonlSource,
    Ledger,
    ODBDataLoader,
    ParquetDataset,
    Skipped,
    WorkerOptions,
    pop_step_info,
)

SAVE_EVERY = 10  # steps
WEIGHTS = {"lines": 0.45, "rows": 0.3, "stream": 0.25}  # also the shares of the sources' sizes
VOCABULARY, MOST_TOKENS = 256, 120


@dataclass(frozen=True, kw_only=True)
class Job:
    """What all ranks of an attempt have in common.

    Args:
        data: folder of the files of the sources.
        disk: folder of checkpoints and ledger.
        logs: folder of a log for each rank.
        stop: file; if it exists, the run ends with its epoch.
        sizes: samples of each source.
        ranks: number of ranks.
        virtual_ranks: see `ODBDataLoader`.
        port: of the store, on 127.0.0.1.
        timeout_s: seconds to wait for another rank.
        step_s: seconds that an optimizer step sleeps.
    """

    data: Path
    disk: Path
    logs: Path
    stop: Path
    sizes: dict[str, int]
    ranks: int
    virtual_ranks: int | None
    port: int
    timeout_s: float
    step_s: float


# --- data -----------------------------------------------------------------------------------------


def text_of(number: int) -> str:
    """Return a text of its own length and letters, shorter than `MOST_TOKENS`."""
    draw = random.Random(number)
    size = min(MOST_TOKENS - 1, int(draw.lognormvariate(3.2, 0.7)) + 2)
    return "".join(draw.choices("etaoin shrdlu", k=size))


def write_data(folder: Path, sizes: dict[str, int]) -> None:
    """Write the JSON Lines and Parquet files."""
    folder.mkdir(parents=True)
    for number in range(2):
        with (folder / f"{number}.jsonl").open("w") as lines:
            for key in range(number, sizes["lines"], 2):
                lines.write(json.dumps({"text": text_of(key)}) + "\n")
    texts = [text_of(-1 - key) for key in range(sizes["rows"])]
    pq.write_table(pa.table({"text": texts}), folder / "rows.parquet", row_group_size=200)


class Stream(IterableDataset[int]):
    """Numbers of records, in another order in each epoch, that resumes by a state of its own."""

    def __init__(self, size: int) -> None:
        self.size, self.epoch, self.position, self.start = size, 0, 0, 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        order = random.Random(self.epoch).sample(range(self.size), self.size)
        self.position, self.start = self.start, 0
        while self.position < self.size:
            self.position += 1
            yield order[self.position - 1]

    def state_dict(self) -> dict[str, int]:
        """Return the position."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Begin the next iteration there."""
        self.start = state["position"]


def sample_of(text: str) -> dict[str, Any]:
    """Return the bytes of a text as a sample."""
    ids = np.frombuffer(text.encode(), np.uint8).astype(np.int64)
    return {"input_ids": ids, "labels": ids}


def line_sample(record: dict[str, str]) -> dict[str, Any] | Skipped:
    """Return the sample of a line, unless it is short."""
    text = record["text"]
    return sample_of(text) if len(text) > 5 else Skipped("short")


def row_sample(row: dict[str, str]) -> dict[str, Any]:
    """Return the sample of a row, in one of two templates that is drawn at random."""
    return sample_of(random.choice(("{}", "Q{}")).format(row["text"]))


def stream_sample(number: int) -> dict[str, Any]:
    """Return the sample of a number, with some letters smudged at random."""
    sample = sample_of(text_of(10**9 + number))
    smudged = np.random.random(len(sample["input_ids"])) < 0.1
    return {**sample, "input_ids": np.where(smudged, ord("?"), sample["input_ids"])}


def make_loader(job: Job) -> ODBDataLoader:
    """Return the loader of a rank, with a worker process for each rank or virtual rank."""
    dataset = {
        "lines": JsonlSource(job.data / "*.jsonl"),
        "rows": ParquetDataset(job.data / "rows.parquet"),
        "stream": Stream(job.sizes["stream"]),
    }
    return ODBDataLoader(
        dataset,
        process_fn={"lines": line_sample, "rows": row_sample, "stream": stream_sample},
        weights=WEIGHTS,
        token_budget=512,
        window=64,
        round_size=8,
        workers=WorkerOptions(
            num_workers=1, start_method="fork", in_flight_samples=64, timeout_s=60
        ),
        virtual_ranks=job.virtual_ranks,
        timeout_s=job.timeout_s,
        seed=0,
    )


# --- training -------------------------------------------------------------------------------------


def sum_over_ranks(values: torch.Tensor, batches: Iterator[Any]) -> None:
    """Add up a tensor of all ranks, or raise the loader's error if a rank is lost."""
    try:
        dist.all_reduce(values)
    except RuntimeError:
        # The collective notices a lost rank first, and names none: the loader must, as well.
        for _ in batches:
            pass
        raise


def take_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, loss: float, batches: Iterator[Any]
) -> float:
    """Take an optimizer step with the gradients of all ranks, and return the loss of all."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    flat = torch.cat([*(gradient.flatten() for gradient in gradients), torch.tensor([loss])])
    sum_over_ranks(flat, batches)
    flat /= dist.get_world_size()  # as DDP does, which `loss_scale` expects
    sizes = [gradient.numel() for gradient in gradients]
    for gradient, values in zip(gradients, flat.split([*sizes, 1]), strict=False):
        gradient.copy_(values.view_as(gradient))
    optimizer.step()
    optimizer.zero_grad()
    return float(flat[-1])


def check_replicas(model: torch.nn.Module) -> None:
    """Raise an error unless the weights are equal on all ranks, to the last bit."""
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    largest, least = weights.clone(), weights.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    if not torch.equal(largest, least):
        raise AssertionError("the weights differ between ranks.")


def train(job: Job) -> None:
    """Train until an epoch ends and `job.stop` exists."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=job.timeout_s))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(VOCABULARY, 8), torch.nn.Linear(8, VOCABULARY))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = make_loader(job)
    checkpoints = Checkpoints(
        job.disk / "checkpoints",
        {"model": model, "optimizer": optimizer, "loader": loader},
        replicated=["model", "optimizer"],
        timeout_s=job.timeout_s,
    )
    step, loss_of_step = checkpoints.load(), 0.0
    print(f"begins at step {step}", flush=True)
    with loader, Ledger(job.disk / "ledger") as ledger:
        is_over = False
        while not is_over:
            batches = iter(loader)
            for batch in batches:
                info = pop_step_info(batch)
                logits = model(batch["input_ids"][:, :-1]).flatten(0, 1)
                labels = batch["labels"][:, 1:].flatten()
                loss = torch.nn.functional.cross_entropy(logits, labels) * info.loss_scale
                loss.backward()
                loss_of_step += loss.item()
                if info.ends_optimizer_step:
                    loss_of_step = take_step(model, optimizer, loss_of_step, batches)
                    step += 1
                ledger.record(info)
                if info.ends_optimizer_step:
                    print(f"step {step} epoch {info.epoch} loss {loss_of_step!r}", flush=True)
                    loss_of_step = 0.0
                    if step % SAVE_EVERY == 0:
                        checkpoints.save(step)
                    time.sleep(job.step_s)
            checkpoints.save(step)
            check_replicas(model)
            stop = torch.tensor(float(job.stop.exists()))
            dist.all_reduce(stop, dist.ReduceOp.MAX)
            is_over = bool(stop)
            print(f"epoch {loader.epoch - 1} ended", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def end_with_driver() -> None:
    """Wait until the driver has ended, and end this process."""
    if (driver := multiprocessing.parent_process()) is not None:
        driver.join()
        os._exit(1)


def run_rank(rank: int, job: Job) -> None:
    """Be a rank, with standard output and errors in its log."""
    log = os.open(job.logs / f"{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(job.ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(job.port)}
    torch.set_num_threads(1)
    threading.Thread(target=end_with_driver, daemon=True).start()
    try:
        train(job)
    except Exception as error:
        traceback.print_exc()
        print(f"ended by {type(error).__name__}: {' '.join(str(error).split())}", flush=True)
        sys.exit(1)
