"""Train a tiny Qwen2-VL on pictures of very different size; kill it, and resume it exactly.

    python examples/train_vlm.py             # about a minute on 2 cores
    python examples/train_vlm.py --steps 12  # a quick look

The pictures are drawn as they are read, from a thumbnail to a megapixel or two, as JPEG or PNG
files; some of the files are cut off, and their samples are skipped and counted. How many tokens a
conversation has is known once its pictures are decoded and resized, in the workers. A batch is
bounded in padded tokens and in patches.

The run is repeated in a process that kills itself in mid-epoch, and goes on from its last
checkpoint in another. Every group, every loss and the count of what was skipped must be those of
the uninterrupted run.
"""

from __future__ import annotations

import argparse
import os
import signal
import threading
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from kill_and_resume import kill_and_resume
from odb_nodes import ODBDataLoader, TokenBudget, load_state, pop_step_info, save_state
from odb_nodes.vision import VisionLanguageCollate, VisionLanguageProcessor
from options import at_least
from processes import FEWEST_STEPS, run_in_process
from run_log import MEAN_OF_STEPS, RunLog, Step, read_log, table
from tiny_vlm import Pictures, build_model, build_processor

LEARNING_RATE = 2e-3
SEED = 0
THREADS = 2  # fixed: the order in which threads add up decides the last bits of a loss
DAMAGED_EVERY = 50

tqdm.set_lock(threading.RLock())  # tqdm's own lock is a semaphore, which a kill would leak

Batch = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What all runs have in common: the processing, and the options of the command line."""

    processor: VisionLanguageProcessor
    pictures: int
    steps: int | None
    token_budget: int
    max_patches: int
    window: int
    device: str
    workers: int
    output: Path

    def loader(self, dataset: Pictures, *, workers: int = 0) -> ODBDataLoader:
        """Return a loader of conversations about pictures."""
        return ODBDataLoader(
            dataset,
            token_budget=TokenBudget(self.token_budget, max_patches=self.max_patches),
            window=self.window,
            process_fn=self.processor,
            collate_fn=VisionLanguageCollate(dummy=None),  # one rank waits for no other
            num_workers=workers,
            seed=SEED,
        )


def train(
    job: Job, name: str, *, save_every: int = 0, kill_at: int | None = None, resume: bool = False
) -> None:
    """Train for an epoch; save checkpoints, die at a step, or go on from a checkpoint."""
    torch.set_num_threads(THREADS)
    checkpoint = job.output / "checkpoint.pt"
    model = build_model(job.processor, seed=SEED, device=job.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    loader = job.loader(Pictures(job.pictures, damaged_every=DAMAGED_EVERY), workers=job.workers)
    log, done = RunLog(job.output, name), 0
    if resume:
        state = load_state(checkpoint)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        loader.load_state_dict(state["loader"])
        done = state["done"]
    left = None if job.steps is None else job.steps - done
    patches, start_s = 0, time.perf_counter()
    with loader, tqdm(desc=name, unit="sample") as bar:
        for batch in islice(loader, left):
            info = pop_step_info(batch)
            patches += len(batch.get("pixel_values", ()))
            ids = batch.pop("id").tolist()
            loss = loss_of(model, batch, job.device) * info.loss_scale
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            sizes = [(*batch["input_ids"].shape, int(batch["attention_mask"].sum()))]
            seconds = time.perf_counter() - start_s
            log.add_step(Step(ids=ids, batches=sizes, loss=loss.item(), seconds=seconds))
            bar.update(info.local_samples)
            if save_every and done % save_every == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                save_state({**state, "loader": loader.state_dict(), "done": done}, checkpoint)
            if done == kill_at:
                log.add(worker_pids=loader.worker_pids)
                os.kill(os.getpid(), signal.SIGKILL)
        skipped = loader.skipped_samples
    log.add(skipped=skipped, patches=patches, replayed_samples=loader.replayed_samples)
    log.add(held_out_loss=held_out_loss(job, model))


def loss_of(model: torch.nn.Module, batch: Batch, device: str) -> torch.Tensor:
    """Return the mean loss over the supervised tokens of a batch."""
    loss: torch.Tensor = model(**{key: value.to(device) for key, value in batch.items()}).loss
    return loss


@torch.no_grad()
def held_out_loss(job: Job, model: torch.nn.Module) -> float:
    """Return the mean loss over the supervised tokens of pictures that are not trained on."""
    total, targets = 0.0, 0
    for batch in job.loader(Pictures(48, seed=SEED + 1)):
        info = pop_step_info(batch)
        del batch["id"]
        total += loss_of(model, batch, job.device).item() * info.local_targets
        targets += info.local_targets
    return total / targets


def check_resume(job: Job) -> str:
    """Kill a repetition of the run, resume it, compare, and return what happened."""
    outcome = kill_and_resume(train, job, "whole")
    plan, skipped = outcome.plan, outcome.whole["skipped"]
    if outcome.resumed["skipped"] != skipped:
        raise SystemExit(f"resume: {outcome.resumed['skipped']} skipped, not {skipped}.")
    return (
        f"Killed after step {plan.kill_at}, {plan.lost} steps after its last checkpoint.\n"
        f"Resumed at step {plan.saved}, with {outcome.resumed['replayed_samples']} samples "
        f"processed again; {outcome.verdict} up to step {outcome.steps}.\n"
        f"Skipped in both: {skipped}."
    )


def parse_job() -> Job:
    """Return the job that the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    steps, positive, workers = map(at_least, (FEWEST_STEPS, 1, 0))
    add("--pictures", type=positive, default=1200, help="conversations (%(default)s)")
    add("--steps", type=steps, help="most steps of a run (default: one epoch)")
    add("--token-budget", type=positive, default=1024, help="padded tokens of a batch")
    add("--max-patches", type=positive, default=1024, help="patches of a batch (%(default)s)")
    add("--window", type=positive, default=64, help="samples waiting to be grouped (%(default)s)")
    add("--device", default="auto", help="of the model: auto, cpu, cuda (%(default)s)")
    add("--workers", type=workers, default=2, help="processes that decode (%(default)s)")
    add("--output", type=Path, default=Path("runs/train_vlm"), help="folder (%(default)s)")
    options = parser.parse_args()
    if options.device == "auto":
        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    options.output.mkdir(parents=True, exist_ok=True)
    return Job(processor=build_processor(), **vars(options))


if __name__ == "__main__":
    job = parse_job()
    run_in_process("whole", 0, train, job, "whole")
    verdict = check_resume(job)
    print(f"\n{verdict}\n\n{table(job.output, ['whole'], job.token_budget)}")
    steps, facts = read_log(job.output, "whole")
    few = min(MEAN_OF_STEPS, len(steps) // 2)
    first, last = (sum(step.loss for step in some) / few for some in (steps[:few], steps[-few:]))
    print(f"{'patches':30}{facts['patches']:>10,}")
    print(f"\nLoss, nats per token: {first:.3f} in the first {few} steps, {last:.3f} in the last.")
