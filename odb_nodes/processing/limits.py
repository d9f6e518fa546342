"""What the system refuses to a program that starts workers, and what to do about it."""

from __future__ import annotations

import errno
import math
import sys
import threading
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

from odb_nodes.errors import WorkerError

__all__ = ["is_picklable", "limit_behind", "open_files_limit", "start_thread"]


def start_thread(name: str, target: Callable[..., None], *args: Any) -> threading.Thread:
    """Start a daemon thread."""
    thread = threading.Thread(target=target, args=args, name=f"odb_nodes-{name}", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise WorkerError(
            f"thread `{thread.name}` could not be started: {error}.{_processes()}"
        ) from error
    return thread


def limit_behind(error: BaseException) -> str:
    """Return which limit of the system an error comes from and what to do, or nothing."""
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.EAGAIN:
        return _processes()
    if number == errno.EMFILE:
        return (
            f" The limit on open files of a process is reached (`ulimit -n`{_value('NOFILE')}): "
            "raise it, or use fewer workers."
        )
    if number == errno.ENFILE:
        return " The limit on open files of this machine is reached (`fs.file-max`): raise it."
    if number == errno.ENOMEM:
        return " The machine has no memory left for a worker: use fewer workers or smaller data."
    return ""


def is_picklable(function: Any) -> bool:
    """Tell whether a function can be sent to a process that is not forked."""
    try:
        ForkingPickler.dumps(function)
    except Exception:
        return False
    return True


def open_files_limit() -> float:
    """Return how many files this process may have open, where the system tells."""
    if sys.platform == "win32":
        return math.inf
    import resource

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return math.inf if limit == resource.RLIM_INFINITY else limit


def _processes() -> str:
    return (
        f" The limit on processes and threads is reached (`ulimit -u`{_value('NPROC')}; in a "
        "container also `pids.max` of its cgroup): raise it, or use fewer workers."
    )


def _value(name: str) -> str:
    """Return the value of a limit of this process, where the system tells."""
    if sys.platform == "win32":
        return ""
    import resource

    limit = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[0]
    return "" if limit == resource.RLIM_INFINITY else f", here {limit}"
