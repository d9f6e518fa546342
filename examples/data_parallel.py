"""Training over several ranks in dynamic batches, the same for DDP and FSDP; stopped and resumed.

    if __name__ == "__main__":
        main(DdpTrainer, "train_ddp", __doc__)

`train` is the loop. `main` runs it three times, in new processes: uninterrupted; killed in
mid-epoch; and resumed. Every group and every loss of every rank must be that of the first run.

This is a module for the examples beside it, not a script.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import threading
import time
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm
from transformers import LlamaForCausalLM

from checkpoints import Checkpoints
from odb_nodes import ODBDataLoader, StepInfo, load_rank_state, pop_step_info, save_rank_state
from options import at_least
from processes import FEWEST_STEPS, await_end, plan_kill, run_in_process
from rank_report import check_ranks, log_name, table
from ranks import PEERS_WITHIN_S, choose_device, die_together, from_environment, meet
from run_log import RunLog, Step, read_log
from tiny_lm import MAX_TOKENS, build_model, load_corpus
from trainer_runs import Job

PEAK_LR = 3e-3
SEED = 0
PHASE_LIMIT_S = 1800.0

tqdm.set_lock(threading.RLock())  # tqdm's own lock is a semaphore, which a kill would leak

Batch = dict[str, Any]


class Trainer(ABC):
    """A causal language model over all ranks, and its optimizer."""

    def __init__(self, device: str) -> None:
        torch.set_num_threads(1)  # fixed: the order of additions decides the last bits of a loss
        self._device = device
        self.model = self.parallel(build_model(seed=SEED, device=device))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.95))
        self.steps = self.samples = 0
        self._ids: list[int] = []
        self._batches: list[tuple[int, int, int]] = []
        self._loss = 0.0

    @abstractmethod
    def parallel(self, model: LlamaForCausalLM) -> torch.nn.Module:
        """Return the model as one of several ranks, which have the same weights."""

    @abstractmethod
    def micro_step(self, *, last: bool) -> AbstractContextManager[None]:
        """Return a context for forward and backward; the ranks share gradients in the last one."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write model and optimizer into a checkpoint. All ranks call it."""

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Read what `save` wrote."""

    def step(self, batch: Batch, info: StepInfo, progress: float) -> None:
        """Take one micro-step, and with the last one of them the optimizer step.

        Args:
            batch: of this rank.
            info: of this step.
            progress: share of the epoch that is done, for the learning rate.
        """
        self._ids += batch.pop("id").tolist()
        inputs = {key: value.to(self._device) for key, value in batch.items()}
        with self.micro_step(last=info.ends_optimizer_step):
            # The ranks' gradients are averaged; with this scale that gives the mean over all
            # supervised tokens of all ranks and micro-steps.
            loss = self.model(**inputs).loss * info.loss_scale
            loss.backward()
        self._loss += loss.item()
        tokens = 0 if info.is_filler else int(batch["attention_mask"].sum())
        self._batches.append((*batch["input_ids"].shape, tokens))
        if info.ends_optimizer_step:
            self.optimizer.param_groups[0]["lr"] = PEAK_LR * min(0.05 + 5 * progress, 1 - progress)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.steps += 1
            self.samples += info.optimizer_samples

    def take_log(self, seconds: float) -> Step:
        """Return what this rank did in the optimizer step that has ended, and forget it."""
        step = Step(ids=self._ids, batches=self._batches, loss=self._loss, seconds=seconds)
        self._ids, self._batches, self._loss = [], [], 0.0
        return step


def write_checkpoint(folder: Path, trainer: Trainer, loader: ODBDataLoader) -> None:
    """Write all that the next step depends on. Between optimizer steps only."""
    trainer.save(folder)
    gpu_rng = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    rank_state = {
        "loader": loader.state_dict(),
        "rngs": (torch.get_rng_state(), gpu_rng),
        "done": (trainer.steps, trainer.samples),
    }
    save_rank_state(rank_state, folder)


def read_checkpoint(folder: Path, trainer: Trainer, loader: ODBDataLoader) -> None:
    """Go back to where `write_checkpoint` was called."""
    trainer.load(folder)
    rank_state = load_rank_state(folder)
    loader.load_state_dict(rank_state["loader"])
    rng, gpu_rng = rank_state["rngs"]
    torch.set_rng_state(rng)
    if gpu_rng is not None:
        torch.cuda.set_rng_state(gpu_rng)
    trainer.steps, trainer.samples = rank_state["done"]


def train(
    job: Job,
    trainer_type: type[Trainer],
    phase: str,
    *,
    save_every: int = 0,
    kill_at: int | None = None,
    resume: bool = False,
) -> None:
    """Train as one rank; save checkpoints, die at a step, or go on from a checkpoint."""
    with meet(phase, job.device) as store:
        rank = dist.get_rank()
        checkpoints = Checkpoints(job.output / "checkpoints")
        log = RunLog(job.output, log_name(phase, rank))
        trainer = trainer_type(job.device)
        loader = ODBDataLoader(
            job.corpus.train,
            token_budget=job.token_budget,
            window=job.window,
            process_fn=job.corpus.encode,
            num_workers=job.workers,
            accumulate=job.accumulate,
            seed=SEED,
            timeout_s=PEERS_WITHIN_S,
        )
        if resume:
            read_checkpoint(checkpoints.latest(), trainer, loader)
        total = len(job.corpus.train)
        bar = tqdm(
            desc=phase, unit="sample", total=total, initial=trainer.samples, disable=rank > 0
        )
        start_s = time.perf_counter()
        with loader, bar:
            for batch in loader:
                info = pop_step_info(batch)
                trainer.step(batch, info, progress=trainer.samples / total)
                bar.update(info.all_samples_this_step)
                if not info.ends_optimizer_step:
                    continue
                log.add_step(trainer.take_log(time.perf_counter() - start_s))
                if save_every and trainer.steps % save_every == 0:
                    checkpoints.save(
                        trainer.steps, lambda folder: write_checkpoint(folder, trainer, loader)
                    )
                if trainer.steps == kill_at:
                    log.add(worker_pids=loader.worker_pids)
                    die_together(store)
                if trainer.steps == job.steps:
                    break
            log.add(wait_s=loader.exchange_wait_s, replayed_samples=loader.replayed_samples)


def main(trainer_type: type[Trainer], name: str, description: str | None) -> None:
    """Train, be killed, resume and check, as the rank that torchrun has started; then report."""
    job = parse_job(name, description)
    rank, world_size = from_environment("RANK"), from_environment("WORLD_SIZE")

    def run(phase: str, exit_code: int, **options: Any) -> None:
        run_in_process(
            f"{phase} (rank {rank})",
            exit_code,
            train,
            job,
            trainer_type,
            phase,
            limit_s=PHASE_LIMIT_S,
            **options,
        )

    if rank == 0:
        shutil.rmtree(job.output / "checkpoints", ignore_errors=True)
    run("uninterrupted", 0)
    steps, _ = read_log(job.output, log_name("uninterrupted", rank))
    plan = plan_kill(len(steps))
    run("killed", -signal.SIGKILL, save_every=plan.save_every, kill_at=plan.kill_at)
    _, facts = read_log(job.output, log_name("killed", rank))
    await_end(facts["worker_pids"])
    run("resumed", 0, resume=True)
    if rank == 0:
        verdict = check_ranks(job.output, world_size, plan, exact=job.device == "cpu")
        print(f"\n{verdict}\n\n{table(job.output, world_size)}")


def parse_job(name: str, description: str | None) -> Job:
    """Return the job that the command line asks for."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    steps, tokens, positive, workers = map(at_least, (FEWEST_STEPS, MAX_TOKENS, 1, 0))
    add("--steps", type=steps, help="most optimizer steps (default: one epoch)")
    add("--accumulate", type=positive, default=1, help="batches per step, each rank (%(default)s)")
    add("--token-budget", type=tokens, default=2048, help="padded tokens of a batch (%(default)s)")
    add("--window", type=positive, default=256, help="samples waiting to be grouped (%(default)s)")
    add("--device", default="auto", help="of the model: auto, cpu, cuda (%(default)s)")
    add("--workers", type=workers, default=1, help="tokenizing processes per rank (%(default)s)")
    add("--output", type=Path, default=Path("runs", name), help="shared folder (%(default)s)")
    options = parser.parse_args()
    options.device = choose_device(options.device)
    options.output.mkdir(parents=True, exist_ok=True)
    return Job(corpus=load_corpus(), **vars(options))
