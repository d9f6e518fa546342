"""Mix three sources by weight, each with its own processing; kill the run, and resume it exactly.

    python examples/mix_sources.py             # a few minutes on 2 cores
    python examples/mix_sources.py --steps 12  # a quick look
    python examples/mix_sources.py --by tokens

The sources are chats in a JSON Lines file, a list of captions, and pages that are smudged at random
whenever they are processed. A tiny language model trains on the mixture.

Then the run is repeated in a process that kills itself in mid-epoch, and goes on from its last
checkpoint in another. Every group, every loss and every count must be that of the first run.
"""

from __future__ import annotations

import argparse
import os
import signal
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch

from kill_and_resume import kill_and_resume
from odb_nodes import Mixing, ODBDataLoader, load_state, pop_step_info, save_state
from odb_nodes.tools.source_report import SourceReport
from options import at_least
from processes import FEWEST_STEPS
from run_log import RunLog, Step, read_log
from three_sources import Sources, make_sources
from tiny_lm import MAX_TOKENS, build_model

WEIGHTS = {"chats": 0.5, "captions": 0.3, "pages": 0.2}
LR, SEED = 1e-3, 0
Unit = Literal["samples", "tokens"]
THREADS = 2  # fixed: the order in which threads add up decides the last bits of a loss


@dataclass(frozen=True, kw_only=True)
class Job:
    """What all runs have in common: the sources, and the options of the command line."""

    sources: Sources
    by: Unit
    steps: int
    token_budget: int
    window: int
    device: str
    workers: int
    output: Path


def train(
    job: Job, name: str, *, save_every: int = 0, kill_at: int | None = None, resume: bool = False
) -> None:
    """Train on the mixture; save checkpoints, die at a step, or go on from a checkpoint."""
    torch.set_num_threads(THREADS)
    model = build_model(seed=SEED, device=job.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    log, report, done = RunLog(job.output, name), SourceReport(), 0
    loader = ODBDataLoader(
        job.sources.datasets(),
        process_fn=job.sources.functions(),
        weights=Mixing(weights=WEIGHTS, by=job.by, stop="first_exhausted"),
        token_budget=job.token_budget,
        window=job.window,
        num_workers=job.workers,
        seed=SEED,
    )
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer}
    parts |= {"loader": loader, "report": report}
    if resume:
        state = load_state(job.output / "checkpoint.pt")
        done = state["done"]
        for key, part in parts.items():
            part.load_state_dict(state[key])
    with loader:
        for batch in islice(loader, job.steps - done):
            info = pop_step_info(batch)
            report.add(info)
            ids = batch.pop("id").tolist()
            inputs = {key: value.to(job.device) for key, value in batch.items()}
            loss = model(**inputs).loss * info.loss_scale
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            log.add_step(Step(ids=ids, batches=[], loss=loss.item(), seconds=0.0))
            if save_every and done % save_every == 0:
                state = {key: part.state_dict() for key, part in parts.items()}
                save_state({"done": done, **state}, job.output / "checkpoint.pt")
            if done == kill_at:
                log.add(worker_pids=loader.worker_pids)
                os.kill(os.getpid(), signal.SIGKILL)
    log.add(counts=report.state_dict())


def check_resume(job: Job) -> str:
    """Kill a repetition of the run, resume it, compare, and return what happened."""
    outcome = kill_and_resume(train, job, "whole")
    if outcome.resumed["counts"] != outcome.whole["counts"]:
        raise SystemExit("resume: the counts by source are not those of the uninterrupted run.")
    plan = outcome.plan
    return (
        f"Killed after step {plan.kill_at}, resumed at step {plan.saved}: {outcome.verdict}; "
        "counts too."
    )


def main() -> None:
    """Train on the mixture, check the resume, and report the shares."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    steps, tokens, samples, workers = map(at_least, (FEWEST_STEPS, MAX_TOKENS, 1, 0))
    add("--by", choices=("samples", "tokens"), default="samples", help="of weights (%(default)s)")
    add("--steps", type=steps, default=60, help="most steps of a run (%(default)s)")
    add("--token-budget", type=tokens, default=2048, help="padded tokens of a batch (%(default)s)")
    add("--window", type=samples, default=32, help="samples waiting to be grouped (%(default)s)")
    add("--device", default="auto", help="of the model: auto, cpu, cuda (%(default)s)")
    add("--workers", type=workers, default=2, help="processes that tokenize (%(default)s)")
    add("--output", type=Path, default=Path("runs/mix_sources"), help="folder (%(default)s)")
    options = parser.parse_args()
    if options.device == "auto":
        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    options.output.mkdir(parents=True, exist_ok=True)
    job = Job(sources=make_sources(options.output), **vars(options))
    train(job, "whole")
    report = SourceReport()
    report.load_state_dict(read_log(job.output, "whole")[1]["counts"])
    print(
        f"{report.table(WEIGHTS)}\n\nWeights are shares of {job.by} read, and {job.window} samples "
        f"wait to be grouped.\n{check_resume(job)}"
    )


if __name__ == "__main__":
    main()
