"""A run that is killed and resumed, and must be what it is uninterrupted: for any framework.

    if __name__ == "__main__":
        main(train, "train_accelerate", __doc__)

`train` is the loop. `main` runs it three times, in new processes: uninterrupted; killed with
SIGKILL in mid-epoch; and resumed. Every group and every loss must be that of the first run.

This is a module for the examples beside it, not a script.
"""

from __future__ import annotations

import argparse
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from options import at_least
from processes import FEWEST_STEPS, plan_kill, run_in_process
from run_log import Step, compare, read_log
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

    def run(phase: str, exit_code: int = 0, **options: Any) -> list[Step]:
        run_in_process(phase, exit_code, train, job, phase, limit_s=PHASE_LIMIT_S, **options)
        return read_log(job.output, phase)[0]

    whole = run("uninterrupted")
    plan = plan_kill(len(whole))
    killed = run("killed", -signal.SIGKILL, save_every=plan.save_every, kill_at=plan.kill_at)
    resumed = run("resumed", resume=plan.saved)
    verdict = compare(whole[: plan.kill_at] + whole[plan.saved :], killed + resumed, exact=True)
    print(f"\nkilled after step {plan.kill_at}, resumed after step {plan.saved}: {verdict}")


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
