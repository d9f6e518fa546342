"""Processes that are to end in a known way, and the wait for those that a kill leaves behind.

    plan = plan_kill(steps)
    run_in_process("killed", -signal.SIGKILL, train, job, kill_at=plan.kill_at)
    seconds = await_end(pids_of_its_workers)

This is a module for the examples beside it, not a script.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

FEWEST_STEPS = 6  # enough for a checkpoint, steps that are lost with the process, and a rest
GONE_WITHIN_S = 30.0


class KillPlan(NamedTuple):
    """Where a repetition of a run is killed, in steps."""

    save_every: int
    saved: int  # the last checkpoint before the kill
    kill_at: int

    @property
    def lost(self) -> int:
        """Steps that the kill loses."""
        return self.kill_at - self.saved


def plan_kill(steps: int) -> KillPlan:
    """Return where to kill a run of so many steps: about half way, with some steps not saved.

    Raises:
        SystemExit: if it has too few.
    """
    if steps < FEWEST_STEPS:
        raise SystemExit(f"resume: the run must have {FEWEST_STEPS} steps, but has {steps}.")
    save_every = max(3, steps // 8)
    saved = steps // 2 // save_every * save_every
    return KillPlan(save_every, saved, saved + 2)


def run_in_process(
    name: str,
    exit_code: int,
    target: Callable[..., None],
    *args: Any,
    limit_s: float | None = None,
    **options: Any,
) -> None:
    """Call `target(*args, **options)` in a new process, and wait for its end.

    It does not outlive this process, however this one ends.

    Args:
        name: of the run, for errors.
        exit_code: what the process must end with; minus the signal's number if killed.
        target: a function at the top level of a module, or of the script.
        *args: what it is called with; travels pickled.
        limit_s: seconds until the process is killed. Default: no limit.
        **options: the same, by name.

    Raises:
        SystemExit: if the process ends with another exit code, or not in time.
    """
    start_method = multiprocessing.get_start_method()
    process = multiprocessing.get_context("spawn").Process(
        target=_call, args=(start_method, target, args, options)
    )
    process.start()
    process.join(limit_s)
    if process.exitcode is None:
        process.kill()
        raise SystemExit(f"The {name} run did not end within {limit_s:.0f} s.")
    if process.exitcode != exit_code:
        raise SystemExit(
            f"The {name} run ended with exit code {process.exitcode}, not {exit_code}."
        )


def _call(
    start_method: str, target: Callable[..., None], args: tuple[Any, ...], options: dict[str, Any]
) -> None:
    """Call `target` in this new process, whose workers start as those of its parent do."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    multiprocessing.set_start_method(start_method, force=True)  # "spawn" in a spawned process
    target(*args, **options)


def _end_with_parent() -> None:
    """End this process at once when the one that started it has ended."""
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)


def await_end(pids: Sequence[int]) -> float:
    """Wait until none of these processes runs any more, and return the seconds it took.

    Raises:
        SystemExit: if one still runs after `GONE_WITHIN_S`.
    """
    start_s = time.perf_counter()
    while running := list(filter(is_running, pids)):
        if time.perf_counter() - start_s > GONE_WITHIN_S:
            raise SystemExit(f"Processes {running} outlived the one that was killed.")
        time.sleep(0.05)
    return time.perf_counter() - start_s


def is_running(pid: int) -> bool:
    """Tell whether there is such a process; one that is dead but not reaped does not count."""
    try:
        os.kill(pid, 0)
        status = Path(f"/proc/{pid}/status")
        return not status.exists() or "State:\tZ" not in status.read_text()
    except (ProcessLookupError, FileNotFoundError):
        return False
