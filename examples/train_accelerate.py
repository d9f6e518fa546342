"""Train a tiny language model in a loop of Accelerate; kill it with SIGKILL, resume it exactly.

    python examples/train_accelerate.py             # one epoch, a few minutes on 2 cores
    python examples/train_accelerate.py --steps 12  # a quick look

The loop is that of any other loader: what is added is `configure_accelerator` and the factor
`info.loss_scale`. The run is repeated in a process that kills itself in mid-epoch, and goes on from
the accelerator's own checkpoint in another. Every group and every loss must be that of the
uninterrupted run, to the last bit. The metrics of the batches, `odb/*`, go to TensorBoard.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator

from odb_nodes import ODBDataLoader, pop_step_info
from odb_nodes.integrations.accelerate import configure_accelerator
from options import at_least
from processes import FEWEST_STEPS, plan_kill, run_in_process
from run_log import RunLog, Step, compare, read_log
from tiny_lm import MAX_TOKENS, Corpus, build_model, load_corpus

SEED = 0
LOG_EVERY = 10


@dataclass(frozen=True, kw_only=True)
class Job:
    """What all phases have in common: the data, and the options of the command line."""

    corpus: Corpus
    steps: int | None
    accumulate: int
    token_budget: int
    window: int
    workers: int
    output: Path


def train(
    job: Job, phase: str, save_every: int = 0, kill_at: int | None = None, resume: int | None = None
) -> None:
    """Train an epoch; save checkpoints, die at a step, or go on from the checkpoint of one."""
    torch.set_num_threads(1)
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=job.accumulate,
        log_with="tensorboard",
        project_dir=job.output,
    )
    accelerator.init_trackers(phase)
    raw_model = build_model(seed=SEED, device="cpu")
    raw_optimizer = torch.optim.AdamW(raw_model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    batches = ODBDataLoader(
        job.corpus.train,
        token_budget=job.token_budget,
        window=job.window,
        process_fn=job.corpus.encode,
        num_workers=job.workers,
        accumulate=accelerator.gradient_accumulation_steps,
        seed=SEED,
    )
    loader = configure_accelerator(accelerator, batches)
    model, optimizer = accelerator.prepare(raw_model, raw_optimizer)
    if resume is not None:
        accelerator.load_state(str(job.output / f"step-{resume}"))
    log, start_s, step = RunLog(job.output, phase), time.perf_counter(), resume or 0
    ids: list[int] = []
    shapes: list[tuple[int, int, int]] = []
    losses: list[float] = []
    with loader:
        for batch in loader:
            info = pop_step_info(batch)
            ids += batch.pop("id").tolist()
            shapes.append((*batch["input_ids"].shape, int(batch["attention_mask"].sum())))
            with accelerator.accumulate(model):
                loss = model(**batch).loss * info.loss_scale
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item() / job.accumulate)
            if not info.ends_optimizer_step:
                continue
            step += 1
            seconds = time.perf_counter() - start_s
            log.add_step(Step(ids=ids, batches=shapes, loss=sum(losses), seconds=seconds))
            ids, shapes, losses = [], [], []
            if step % LOG_EVERY == 0:
                accelerator.log(loader.take_metrics(), step=step)
            if save_every and step % save_every == 0:
                accelerator.save_state(str(job.output / f"step-{step}"))
            if step == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            if step == job.steps:
                break
    accelerator.end_training()


def main() -> None:
    """Run all phases and compare them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--steps", type=at_least(FEWEST_STEPS), help="optimizer steps (default: one epoch)")
    add("--accumulate", type=at_least(1), default=1, help="batches per step (%(default)s)")
    add("--token-budget", type=at_least(MAX_TOKENS), default=2048, help="(%(default)s)")
    add("--window", type=at_least(1), default=256, help="samples in the pool (%(default)s)")
    add("--workers", type=at_least(0), default=1, help="tokenizing processes (%(default)s)")
    add("--output", type=Path, default=Path("runs/train_accelerate"), help="(%(default)s)")
    options = parser.parse_args()
    shutil.rmtree(options.output, ignore_errors=True)
    options.output.mkdir(parents=True)
    job = Job(corpus=load_corpus(), **vars(options))
    run_in_process("uninterrupted", 0, train, job, "uninterrupted")
    whole, _ = read_log(job.output, "uninterrupted")
    plan = plan_kill(len(whole))
    killed = {"save_every": plan.save_every, "kill_at": plan.kill_at}
    run_in_process("killed", -signal.SIGKILL, train, job, "killed", **killed)
    run_in_process("resumed", 0, train, job, "resumed", resume=plan.saved)
    rest, _ = read_log(job.output, "resumed")
    verdict = compare(whole[plan.saved :], rest, exact=True)
    print(f"\nkilled at step {plan.kill_at}, {plan.lost} steps lost; {verdict}")


if __name__ == "__main__":
    main()
