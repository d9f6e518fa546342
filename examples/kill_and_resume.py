"""A run that is repeated, killed and resumed, and must come to what the uninterrupted one did.

    outcome = kill_and_resume(train, job, "whole")

This is a module for the examples beside it, not a script.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from processes import KillPlan, await_end, plan_kill, run_in_process
from run_log import compare, read_log


class Job(Protocol):
    """What is needed of a job."""

    @property
    def output(self) -> Path:
        """Folder of the logs and of the checkpoint."""

    @property
    def device(self) -> str:
        """Of the model."""


class Outcome(NamedTuple):
    """What happened."""

    plan: KillPlan
    gone_s: float  # from the kill until the last worker was gone
    steps: int  # of the uninterrupted run
    whole: dict[str, Any]  # what the logs say beside the steps
    resumed: dict[str, Any]
    verdict: str


def kill_and_resume(train: Callable[..., None], job: Job, name: str, **options: Any) -> Outcome:
    """Kill a repetition of a run in mid-epoch, resume it from its last checkpoint, and compare.

    Args:
        train: `train(job, name, *, save_every, kill_at, resume, **options)`, at the top level of a
            script; `resume` is the step that was saved. It logs `worker_pids` before it kills
            itself, if it knows them.
        job: of the run.
        name: of the run.
        options: what else it was called with.

    Raises:
        SystemExit: if a process ends otherwise, or the groups or losses differ.
    """
    whole, facts = read_log(job.output, name)
    plan = plan_kill(len(whole))
    killing = {"save_every": plan.save_every, "kill_at": plan.kill_at, **options}
    run_in_process("killed", -signal.SIGKILL, train, job, "killed", **killing)
    killed, killed_facts = read_log(job.output, "killed")
    gone_s = await_end(killed_facts.get("worker_pids", []))
    run_in_process("resumed", 0, train, job, "resumed", resume=plan.saved, **options)
    resumed, resumed_facts = read_log(job.output, "resumed")
    expected = whole[: plan.kill_at] + whole[plan.saved :]
    verdict = compare(expected, killed + resumed, exact=job.device == "cpu")
    return Outcome(plan, gone_s, len(whole), facts, resumed_facts, verdict)
