"""Train a tiny language model in a loop of Accelerate; kill it with SIGKILL, resume it exactly.

    python examples/train_accelerate.py             # one epoch, a few minutes on 2 cores
    python examples/train_accelerate.py --steps 12  # a quick look

The loop is that of any other loader: what is added is `configure_accelerator` and the factor
`info.loss_scale`. The run is repeated in a process that kills itself in mid-epoch, and goes on from
the accelerator's own checkpoint in another. Every group and every loss must be that of the
uninterrupted run, to the last bit. The metrics of the batches, `odb/*`, go to TensorBoard.
"""

from __future__ import annotations

import os
import signal
import time

import torch
from accelerate import Accelerator

from odb_nodes import ODBDataLoader, pop_step_info
from odb_nodes.integrations.accelerate import configure_accelerator
from run_log import RunLog, Step
from tiny_lm import build_model
from trainer_runs import Job, main

SEED = 0
LOG_EVERY = 10


def train(
    job: Job,
    phase: str,
    *,
    save_every: int = 0,
    kill_at: int | None = None,
    resume: int | None = None,
) -> None:
    """Train; save checkpoints, die after a step, or go on from the checkpoint of one."""
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


if __name__ == "__main__":
    main(train, "train_accelerate", __doc__)
