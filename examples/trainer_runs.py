"""What the examples of trainers have in common: their command line, and what is done with a run.

    if __name__ == "__main__":
        main(train, "train_accelerate", __doc__)

`train` is the run. `main` lets it be uninterrupted, and killed and resumed.

This is a module for the examples beside it, not a script.
"""

from __future__ import annotations

import argparse
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kill_and_resume import kill_and_resume
from options import at_least
from processes import FEWEST_STEPS, run_in_process
from tiny_lm import MAX_TOKENS, Corpus, load_corpus

PHASE_LIMIT_S = 1800.0


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
    device: str = "cpu"


class Train(Protocol):
    """Trains for an epoch, and writes the log of it, `phase.jsonl`."""

    def __call__(
        self,
        job: Job,
        phase: str,
        *,
        save_every: int = 0,
        kill_at: int | None = None,
        resume: int | None = None,
    ) -> None:
        """Save every so many steps, die after a step, or go on from the checkpoint of a step."""


def main(train: Train, name: str, description: str | None) -> None:
    """Train, be killed, resume, and compare."""
    job = parse_job(name, description)
    shutil.rmtree(job.output, ignore_errors=True)
    job.output.mkdir(parents=True)

    run_in_process("uninterrupted", 0, train, job, "uninterrupted", limit_s=PHASE_LIMIT_S)
    outcome = kill_and_resume(train, job, "uninterrupted", limit_s=PHASE_LIMIT_S)
    plan = outcome.plan
    print(
        f"\nKilled after step {plan.kill_at}, resumed after step {plan.saved}: {outcome.verdict}."
    )


def parse_job(name: str, description: str | None) -> Job:
    """Return the job that the command line asks for."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--steps", type=at_least(FEWEST_STEPS), help="most optimizer steps (default: one epoch)")
    add("--accumulate", type=at_least(1), default=1, help="batches per step (%(default)s)")
    add("--token-budget", type=at_least(MAX_TOKENS), default=2048, help="(%(default)s)")
    add("--window", type=at_least(1), default=256, help="samples in the pool (%(default)s)")
    add("--workers", type=at_least(0), default=1, help="tokenizing processes (%(default)s)")
    add("--output", type=Path, default=Path("runs", name), help="(%(default)s)")
    return Job(corpus=load_corpus(), **vars(parser.parse_args()))
