"""Train a tiny language model in fixed and in dynamic batches; kill it, and resume it exactly.

    python examples/train_lm.py             # about a minute and a half on 2 cores
    python examples/train_lm.py --steps 12  # a quick look

The text is a third of the functions and classes at the top level of Python's standard library: a
few tokens to many thousands, tokenized in the workers, so no length is known beforehand. Both
methods get the same memory: a fixed batch has room for `--token-budget` padded tokens should all
its samples be of the greatest length, a dynamic one fills that room. Both train on the same samples
in about the same number of optimizer steps: fixed batches hold less, so a step takes several.

The run has four parts: "dynamic" and "fixed"; "killed", which repeats the dynamic one in a process
that dies of SIGKILL in mid-epoch; and "resumed", which goes on from its last checkpoint in another
process. Every batch, every loss and the weights must be those of the dynamic part, to the last bit.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, RandomSampler
from tqdm import tqdm

from lm_report import Log, plot, read_log, table
from odb_nodes import Checkpoints, ODBDataLoader, PaddingCollate, pop_step_info
from tiny_lm import MAX_TOKENS, Corpus, build_model, load_corpus

PARTS = ("dynamic", "fixed", "killed", "resumed")
PEAK_LR = 3e-3
SAVE_EVERY = 5  # steps
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

tqdm.set_lock(threading.RLock())  # tqdm's own lock is a semaphore, which a kill would leak

Batch = dict[str, Any]


class Trainer:
    """A model and its optimizer, for one epoch of `epoch_samples` samples."""

    def __init__(self, epoch_samples: int) -> None:
        torch.set_num_threads(2)  # the order in which threads add up decides the last bits
        self.model = build_model(device=DEVICE, hidden_size=64)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.95))
        self.epoch_samples = epoch_samples
        self.steps = self.samples = 0

    def step(self, batches: list[Batch], loss_scales: list[float]) -> float:
        """Take one optimizer step, and return the sum of the mean losses times `loss_scales`."""
        # By samples: the number of dynamic batches is known only when the epoch has ended.
        progress = self.samples / self.epoch_samples
        self.optimizer.param_groups[0]["lr"] = PEAK_LR * min(0.1 + 5 * progress, 1 - progress)
        total = 0.0
        for batch, loss_scale in zip(batches, loss_scales, strict=True):
            loss = self.mean_loss(batch) * loss_scale
            loss.backward()
            total += loss.item()
            self.samples += len(batch["input_ids"])
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        return total

    def mean_loss(self, batch: Batch) -> torch.Tensor:
        """Return the mean over the supervised tokens of a batch."""
        loss: torch.Tensor = self.model(**{k: v.to(DEVICE) for k, v in batch.items()}).loss
        return loss

    @torch.no_grad()
    def summary(self, corpus: Corpus) -> dict[str, Any]:
        """Return the mean loss over the held-out tokens, and a digest of the weights."""
        total, targets = 0.0, 0
        for batch in ODBDataLoader(corpus.held_out, token_budget=4096, process_fn=corpus.encode):
            info = pop_step_info(batch)
            total += self.mean_loss(batch).item() * info.local_targets
            targets += info.local_targets
        digest = hashlib.sha256()
        for weights in self.model.state_dict().values():
            digest.update(weights.cpu().numpy().tobytes())
        return {"held_out_loss": total / targets, "weights": digest.hexdigest()}

    def state_dict(self) -> dict[str, Any]:
        """Return all that the next step depends on; with dropout, random states as well."""
        model, optimizer = self.model.state_dict(), self.optimizer.state_dict()
        return {"model": model, "optimizer": optimizer, "done": (self.steps, self.samples)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to where `state_dict` was called."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps, self.samples = state["done"]


def train_dynamic(options: argparse.Namespace, corpus: Corpus, part: str) -> None:
    """Train in dynamic batches: the whole run, the part before a kill, or the one after it."""
    trainer = Trainer(len(corpus.train))
    loader = ODBDataLoader(
        corpus.train,
        token_budget=options.token_budget,
        window=options.window,
        process_fn=corpus.encode,
        num_workers=options.workers,
        seed=0,
    )
    parts = {"trainer": trainer, "loader": loader}
    checkpoints = Checkpoints(options.output / "checkpoints", parts)
    if part == "resumed":
        checkpoints.load()
    log = Log(options.output, part)
    bar = tqdm(desc=part, unit="sample", total=trainer.epoch_samples, initial=trainer.samples)
    with loader, bar:
        for batch in loader:
            info = pop_step_info(batch)
            log.add_step([batch], trainer.step([batch], [info.loss_scale]))
            bar.update(info.local_samples)
            if part == "killed" and trainer.steps % SAVE_EVERY == 0:
                checkpoints.save(trainer.steps)
            if trainer.steps == options.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            if trainer.steps == options.steps:
                break
    log.add(replayed_samples=loader.replayed_samples, **trainer.summary(corpus))


def train_fixed(options: argparse.Namespace, corpus: Corpus, samples: int, steps: int) -> None:
    """Train in fixed batches on as many samples, in about as many optimizer steps."""
    trainer = Trainer(len(corpus.train))
    batch_size = options.token_budget // MAX_TOKENS  # one more sample could exceed the budget
    generator = torch.Generator().manual_seed(0)
    loader: DataLoader[str] = DataLoader(
        corpus.train,  # type: ignore[arg-type]
        batch_size=batch_size,
        sampler=RandomSampler(corpus.train, num_samples=samples, generator=generator),
        collate_fn=partial(encode_and_collate, corpus),
        num_workers=options.workers,
    )
    batches = iter(loader)
    batches_per_step = max(1, round(samples / steps / batch_size))
    log = Log(options.output, "fixed")
    with tqdm(desc="fixed", unit="sample", total=samples) as bar:
        while group := list(islice(batches, batches_per_step)):
            targets = [int((batch["labels"][:, 1:] != -100).sum()) for batch in group]
            log.add_step(group, trainer.step(group, [count / sum(targets) for count in targets]))
            bar.update(trainer.samples - bar.n)
    log.add(**trainer.summary(corpus))


def encode_and_collate(corpus: Corpus, texts: list[str]) -> Batch:
    """Return a fixed batch. Runs in the workers."""
    return PaddingCollate()(list(map(corpus.encode, texts)))


@contextmanager
def announced(part: str) -> Iterator[None]:
    """Say which part of the run begins, and how long it took."""
    print(f"Part {PARTS.index(part) + 1} of {len(PARTS)}: {part}", flush=True)
    start_s = time.perf_counter()
    yield
    print(f"\nThe {part} part took {time.perf_counter() - start_s:.0f} s.\n", flush=True)


def kill_and_resume(options: argparse.Namespace) -> str:
    """Repeat the dynamic part in two processes, the first of them killed, and compare.

    Raises:
        SystemExit: a process ended otherwise, or the resumed run differs from the whole one.
    """
    whole, facts = read_log(options.output, "dynamic")
    kill_at = len(whole) // 2 + 1
    for part, exit_code in (("killed", -signal.SIGKILL), ("resumed", 0)):
        again = [sys.executable, __file__, *sys.argv[1:], "--part", part]
        extra = ["--kill-at", str(kill_at)] if part == "killed" else []
        with announced(part):
            ended = subprocess.run([*again, *extra]).returncode
        if ended != exit_code:
            raise SystemExit(f"The {part} part ended with exit code {ended}, not {exit_code}.")
    killed, _ = read_log(options.output, "killed")
    resumed, resumed_facts = read_log(options.output, "resumed")
    saved = len(whole) - len(resumed)
    same_steps = [step.result for step in whole[:kill_at] + whole[saved:]] == [
        step.result for step in killed + resumed
    ]
    if not same_steps or resumed_facts["weights"] != facts["weights"]:
        raise SystemExit("The resumed run differs from the uninterrupted one.")
    return (
        f"Killed after step {kill_at}, resumed from the checkpoint of step {saved}, with "
        f"{resumed_facts['replayed_samples']} samples processed again.\n"
        f"Batches, losses and weights equal those of the uninterrupted run to the last bit."
    )


def main() -> None:
    """Run all four parts and report, or one of the last two."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--steps", type=int, help="most steps of a dynamic run, at least 12 (default: one epoch)")
    add("--token-budget", type=int, default=4096, help="padded tokens of a batch (%(default)s)")
    add("--window", type=int, default=256, help="samples waiting to be grouped (%(default)s)")
    add("--workers", type=int, default=2, help="processes that tokenize (%(default)s)")
    add("--output", type=Path, default=Path("runs/train_lm"), help="folder (%(default)s)")
    add("--part", choices=PARTS[2:], help=argparse.SUPPRESS)
    add("--kill-at", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    corpus = load_corpus(every=3)
    if options.part:
        train_dynamic(options, corpus, options.part)
        return
    with announced("dynamic"):
        train_dynamic(options, corpus, "dynamic")
    steps, _ = read_log(options.output, "dynamic")
    with announced("fixed"):
        train_fixed(options, corpus, sum(step.samples for step in steps), len(steps))
    shutil.rmtree(options.output / "checkpoints", ignore_errors=True)  # of an earlier call
    print(f"\n{kill_and_resume(options)}\n\n{table(options.output, options.token_budget)}")
    plot(options.output / "train_lm.png", options.token_budget, MAX_TOKENS)
    print(f"\nPicture: {options.output / 'train_lm.png'}")


if __name__ == "__main__":
    main()
