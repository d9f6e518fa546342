"""Train a tiny language model in fixed and in dynamic batches; kill it, and resume it exactly.

    python examples/train_lm.py            # about 3 minutes on 2 cores
    python examples/train_lm.py --steps 8  # a quick look

The text is every top-level function and class of Python's standard library: a few tokens to many
thousands, tokenized in the workers, so no length is known beforehand. Both methods get the same
memory: a fixed batch has room for `--token-budget` padded tokens should all its samples be of the
greatest length, a dynamic one fills that room. Both train on the same number of samples in about
the same number of optimizer steps: fixed batches hold less, so a step takes several of them.

Then the dynamic run is repeated in a process that kills itself in mid-epoch, and goes on from its
last checkpoint in another. Every group and every loss must be that of the uninterrupted run.
"""

from __future__ import annotations

import argparse
import os
import signal
import threading
import time
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader, RandomSampler
from tqdm import tqdm

from kill_and_resume import kill_and_resume
from odb_nodes import (
    ODBDataLoader,
    PaddingCollate,
    TokenBudget,
    load_state,
    pop_step_info,
    save_state,
)
from options import at_least
from processes import FEWEST_STEPS
from run_log import RunLog, Step, plot, read_log, table
from tiny_lm import MAX_TOKENS, Corpus, Document, Encode, build_model, load_corpus

PEAK_LR = 3e-3
SEED = 0
THREADS = 2  # fixed: the order in which threads add up decides the last bits of a loss
COLORS = {"fixed": "#d1603d", "dynamic": "#1f6f8b"}

tqdm.set_lock(threading.RLock())  # tqdm's own lock is a semaphore, which a kill would leak

Batch = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What all runs have in common: the data, and the options of the command line."""

    corpus: Corpus
    steps: int | None
    token_budget: int
    window: int
    device: str
    workers: int
    output: Path


def encode_and_collate(encode: Encode, documents: list[Document]) -> Batch:
    """Return a fixed batch. Runs in the workers too."""
    return PaddingCollate()(list(map(encode, documents)))


def real_tokens(batch: Batch) -> int:
    """Return the tokens of a batch without its padding; a packed one has none here."""
    mask: torch.Tensor = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
    return int(mask.sum())


class Trainer:
    """A causal language model, its optimizer, and a log of what they do."""

    def __init__(self, job: Job, name: str, attention: str = "sdpa") -> None:
        torch.set_num_threads(THREADS)
        self.model = build_model(seed=SEED, device=job.device, attention=attention)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.95))
        self.steps = self.samples = 0
        self.log = RunLog(job.output, name)
        self._job = job
        self._start_s = time.perf_counter()

    def step(self, batches: list[Batch], loss_scales: list[float]) -> None:
        """Take one optimizer step over the mean losses of `batches` times `loss_scales`."""
        # By samples: the number of dynamic batches is known only when the epoch has ended.
        progress = self.samples / len(self._job.corpus.train)
        self.optimizer.param_groups[0]["lr"] = PEAK_LR * min(0.05 + 5 * progress, 1 - progress)
        ids = [i for batch in batches for i in batch.pop("id").tolist()]
        total = 0.0
        for batch, loss_scale in zip(batches, loss_scales, strict=True):
            loss = self._loss(batch) * loss_scale
            loss.backward()
            total += loss.item()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        self.samples += len(ids)
        sizes = [(*batch["input_ids"].shape, real_tokens(batch)) for batch in batches]
        seconds = time.perf_counter() - self._start_s
        self.log.add_step(Step(ids=ids, batches=sizes, loss=total, seconds=seconds))

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Return the mean loss over the supervised tokens of the documents held out."""
        job, total, targets = self._job, 0.0, 0
        for batch in ODBDataLoader(
            job.corpus.held_out,
            token_budget=job.token_budget,
            process_fn=job.corpus.encode,
            shuffle=False,
        ):
            info = pop_step_info(batch)
            del batch["id"]
            total += self._loss(batch).item() * info.local_targets
            targets += info.local_targets
        return total / targets

    def state_dict(self) -> dict[str, Any]:
        """Return all that the next step depends on, beside its batch."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "rngs": (torch.get_rng_state(), torch.cuda.get_rng_state_all()),
            "done": (self.steps, self.samples),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to where `state_dict` was called."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rngs"][0])
        torch.cuda.set_rng_state_all(state["rngs"][1])
        self.steps, self.samples = state["done"]

    def _loss(self, batch: Batch) -> torch.Tensor:
        inputs = {
            key: value.to(self._job.device) if isinstance(value, torch.Tensor) else value
            for key, value in batch.items()
        }
        loss: torch.Tensor = self.model(**inputs).loss
        return loss


def train_dynamic(
    job: Job,
    name: str,
    *,
    layout: Literal["padded", "packed"] = "padded",
    attention: str = "sdpa",
    save_every: int = 0,
    kill_at: int | None = None,
    resume: bool = False,
) -> None:
    """Train in dynamic batches; save checkpoints, die at a step, or go on from a checkpoint."""
    checkpoint = job.output / "checkpoint.pt"
    trainer = Trainer(job, name, attention)
    loader = ODBDataLoader(
        job.corpus.train,
        token_budget=TokenBudget(job.token_budget, layout=layout),
        window=job.window,
        process_fn=job.corpus.encode,
        num_workers=job.workers,
        seed=SEED,
    )
    if resume:
        state = load_state(checkpoint)
        trainer.load_state_dict(state["trainer"])
        loader.load_state_dict(state["loader"])
    left = None if job.steps is None else job.steps - trainer.steps
    total = expected_samples(job, trainer)
    with loader, tqdm(desc=name, unit="sample", total=total, initial=trainer.samples) as bar:
        for batch in islice(loader, left):
            info = pop_step_info(batch)
            trainer.step([batch], [info.loss_scale])
            bar.total = expected_samples(job, trainer)
            bar.update(info.local_samples)
            if save_every and trainer.steps % save_every == 0:
                state = {"trainer": trainer.state_dict(), "loader": loader.state_dict()}
                save_state(state, checkpoint)
            if trainer.steps == kill_at:
                trainer.log.add(worker_pids=loader.worker_pids)
                os.kill(os.getpid(), signal.SIGKILL)
    trainer.log.add(replayed_samples=loader.replayed_samples, held_out_loss=trainer.held_out_loss())


def expected_samples(job: Job, trainer: Trainer) -> int | None:
    """Return the samples of an epoch, or of so many steps as they have been; `None`: not known."""
    epoch = len(job.corpus.train)
    if job.steps is None:
        return epoch
    if not trainer.steps:
        return None
    return min(epoch, trainer.samples * job.steps // trainer.steps)


def train_fixed(job: Job, samples: int, steps: int) -> None:
    """Train in fixed batches on as many samples, in about as many optimizer steps."""
    trainer = Trainer(job, "fixed")
    batch_size = job.token_budget // MAX_TOKENS  # one more sample could exceed the budget
    generator = torch.Generator().manual_seed(SEED)
    loader: DataLoader[Document] = DataLoader(
        job.corpus.train,  # type: ignore[arg-type]
        batch_size=batch_size,
        sampler=RandomSampler(job.corpus.train, num_samples=samples, generator=generator),
        collate_fn=partial(encode_and_collate, job.corpus.encode),
        num_workers=job.workers,
    )
    batches = iter(loader)
    batches_per_step = max(1, round(samples / steps / batch_size))
    with tqdm(desc="fixed", unit="sample", total=samples) as bar:
        while group := list(islice(batches, batches_per_step)):
            targets = [int((batch["labels"][:, 1:] != -100).sum()) for batch in group]
            trainer.step(group, [count / sum(targets) for count in targets])
            bar.update(trainer.samples - bar.n)
    trainer.log.add(held_out_loss=trainer.held_out_loss())


def check_resume(job: Job, name: str, **options: Any) -> str:
    """Kill a repetition of a dynamic run, resume it, compare, and return what happened.

    Args:
        job: of the run.
        name: of the run.
        options: the arguments of `train_dynamic` that the run had.
    """
    outcome = kill_and_resume(train_dynamic, job, name, **options)
    plan = outcome.plan
    return (
        f"Killed after step {plan.kill_at}, {plan.lost} steps after its last checkpoint; its "
        f"{job.workers} workers were gone {outcome.gone_s:.1f} s later.\n"
        f"Resumed at step {plan.saved}, with {outcome.resumed['replayed_samples']} samples "
        f"processed again; {outcome.verdict} up to step {outcome.steps}."
    )


def parse_job(name: str, description: str | None, token_budget: int = 4096) -> Job:
    """Return the job that the command line asks for.

    Args:
        name: of the script.
        description: for its help.
        token_budget: the default one.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    steps, tokens, samples, workers = map(at_least, (FEWEST_STEPS, MAX_TOKENS, 1, 0))
    add("--steps", type=steps, help="most steps of a dynamic run (default: one epoch)")
    add("--token-budget", type=tokens, default=token_budget, help="of a batch (%(default)s)")
    add("--window", type=samples, default=256, help="samples waiting to be grouped (%(default)s)")
    add("--device", default="auto", help="of the model: auto, cpu, cuda (%(default)s)")
    add("--workers", type=workers, default=2, help="processes that tokenize (%(default)s)")
    add("--output", type=Path, default=Path("runs", name), help="folder (%(default)s)")
    options = parser.parse_args()
    if options.device == "auto":
        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    options.output.mkdir(parents=True, exist_ok=True)
    return Job(corpus=load_corpus(), **vars(options))


def main() -> None:
    """Train with both methods, check the resume, and report."""
    job = parse_job("train_lm", __doc__)
    train_dynamic(job, "dynamic")
    steps, _ = read_log(job.output, "dynamic")
    train_fixed(job, samples=sum(len(step.ids) for step in steps), steps=len(steps))
    verdict = check_resume(job, "dynamic")
    print(f"\n{verdict}\n\n{table(job.output, COLORS, job.token_budget)}")
    picture = job.output / "train_lm.png"
    plot(picture, COLORS, token_budget=job.token_budget, max_tokens=MAX_TOKENS)
    print(f"\nPicture: {picture}")


if __name__ == "__main__":
    main()
