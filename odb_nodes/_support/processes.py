"""Ranks, threads, forks and Ctrl-C of a process, and the limits that the system sets it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from odb_nodes._support.checks import MAX_COUNT, check_count, check_integer
from odb_nodes.errors import WorkerError

_CAN_MASK = hasattr(signal, "pthread_sigmask")  # not on Windows
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # constants of `malloc.h`
_MOST_BYTES_OF_OLD_GLIBC = 32 << 20  # older versions refuse more


class Owner:
    """The process that made an object: a forked child has a copy without threads and workers."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this process is the owner."""
        return self._pid == os.getpid()

    def check(self, subject: str) -> None:
        """Raise a `WorkerError` in a forked child."""
        if not self.is_here:
            raise WorkerError(
                f"{subject} was started in process {self._pid}; process {os.getpid()}, which was "
                "forked from it, has none of its threads and workers. Make another loader in "
                "the child process."
            )


@contextlib.contextmanager
def deferred_interrupt() -> Iterator[None]:
    """Defer Ctrl-C to the end of this context; processes that start within it block the signal."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    missed: list[Any] = []
    signal.signal(signal.SIGINT, lambda number, frame: missed.append((number, frame)))
    # Children inherit the mask. It blocks the signal in this thread only, so the
    # trainer needs the handler as well.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}) if _CAN_MASK else set()
    try:
        yield
    finally:
        if _CAN_MASK:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, before)
        if missed:  # even if the block raised: the signal may have caused the error
            before(*missed[-1])


def ignore_interrupt() -> None:
    """Leave Ctrl-C to the trainer; called in a worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if _CAN_MASK:  # processes that the worker starts may want the signal
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def block_interrupt() -> None:
    """Block Ctrl-C in this thread, and in threads and processes that it starts."""
    if _CAN_MASK:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


def keep_freed_memory(size_bytes: int) -> None:
    """Make glibc reuse freed blocks of up to `size_bytes` instead of returning them to the system.

    The first write to each page of a new block costs several times the copy into it. Larger blocks
    are still returned; otherwise a process would stay at its peak memory.
    """
    if not sys.platform.startswith("linux"):
        return
    with contextlib.suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        if not mallopt(_M_MMAP_THRESHOLD, size_bytes):
            mallopt(_M_MMAP_THRESHOLD, _MOST_BYTES_OF_OLD_GLIBC)
        mallopt(_M_TRIM_THRESHOLD, size_bytes)


def start_thread(name: str, target: Callable[..., None], *args: Any) -> threading.Thread:
    """Start a daemon thread."""
    thread = threading.Thread(target=target, args=args, name=f"odb_nodes-{name}", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise WorkerError(
            f"thread `{thread.name}` could not be started: {error}.{_limit_of_processes()}"
        ) from error
    return thread


def limit_behind(error: BaseException) -> str:
    """Return the limit of the system that caused an error, and the remedy; "" if there is none."""
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, MemoryError):
        number = errno.ENOMEM
    if number == errno.EAGAIN:
        return _limit_of_processes()
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


def _limit_of_processes() -> str:
    return (
        f" The limit on processes and threads is reached (`ulimit -u`{_value('NPROC')}; in a "
        "container also `pids.max` of its cgroup): raise it, or use fewer workers."
    )


def _value(name: str) -> str:
    """Return the value of a limit of this process, if it is known."""
    if sys.platform == "win32":
        return ""
    import resource

    limit = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[0]
    return "" if limit == resource.RLIM_INFINITY else f", here {limit}"


def resolve_rank(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return (rank, world_size) of the arguments, else torch.distributed, else the environment."""
    if (rank is None) != (world_size is None):
        raise ValueError(
            "`rank` and `world_size` must be passed together, "
            f"but are {rank!r} and {world_size!r} instead."
        )
    if rank is None or world_size is None:
        if dist.is_available() and dist.is_initialized():
            return dist.get_rank(), dist.get_world_size()
        world_size = _rank_variable("WORLD_SIZE", 1, 1, MAX_COUNT)
        return _rank_variable("RANK", 0, 0, world_size - 1), world_size
    world_size = check_count("world_size", world_size)
    rank = check_integer("rank", rank)
    if not 0 <= rank < world_size:
        raise ValueError(f"`rank` must be in 0..{world_size - 1}, but is {rank} instead.")
    return rank, world_size


def may_be_empty(world_size: int) -> bool:
    """Return whether other ranks may have the data: the data belong to one rank of several."""
    return world_size == 1 and resolve_rank(None, None)[1] > 1


def _rank_variable(name: str, default: int, least: int, most: int) -> int:
    text = os.environ.get(name, str(default))
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if not least <= value <= most:
        raise ValueError(
            f"the environment variable `{name}` must be an integer in {least}..{most}, but is "
            f"{text!r} instead. Start all ranks with torchrun, which sets `RANK` and `WORLD_SIZE`, "
            "or unset both for a single process."
        )
    return value
