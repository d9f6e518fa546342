"""Internals of torch.distributed that we rely on: gloo groups that are built by hand.

`torch.distributed.new_group` would need every rank of the job to take part, and would register the
group with the job. A `ProcessGroupGloo` needs only its own ranks, and closes when it is deleted.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

_FOREVER = timedelta(days=365)


def job_store() -> dist.Store:
    """Return a new connection to the store of the job.

    A store serves one call at a time, and gloo waits for other ranks within a call. Threads that
    share a store would deadlock if their order differs between ranks.
    """
    store: Any = dist.distributed_c10d._get_default_store()
    try:
        connection: dist.Store = store.clone()
    except (AttributeError, RuntimeError, NotImplementedError):  # of this process, or of old torch
        connection = store
    return connection


class RefusingCollectives(TorchDispatchMode):
    """Within this context, a collective of this thread raises an error instead of waiting.

    Relies on collectives being operations of the namespace `c10d`, which a `TorchDispatchMode`
    intercepts, as `torch.distributed.tensor.debug.CommDebugMode` does.
    """

    def __init__(self, reason: str) -> None:
        super().__init__()
        self._reason = reason

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operation of torch, unless it is a collective."""
        if func.namespace in ("c10d", "_c10d_functional"):
            raise RuntimeError(self._reason)
        return func(*args, **(kwargs or {}))


def store_host() -> str:
    """Return the process that hosts the store of the job, for errors.

    It is the agent of torchrun, or else rank 0, unless the program made the store itself.
    """
    return "torchrun" if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else "rank 0"


def abort_groups() -> None:
    """Abort all groups of this process: collectives over NCCL then fail, those over gloo do not."""
    for group in [*dist.distributed_c10d._world.pg_names]:
        with suppress(RuntimeError):
            group.abort()


def gloo_group(
    store: dist.Store, rank: int, world_size: int, timeout_s: float
) -> dist.ProcessGroupGloo:
    """Return a gloo group of the ranks that meet at `store`, not registered with the job."""
    return dist.ProcessGroupGloo(store, rank, world_size, timedelta(seconds=timeout_s))


def begin_all_gather(group: Any, parts: Sequence[torch.Tensor], tensor: torch.Tensor) -> dist.Work:
    """Start an all-gather without waiting for it, and return its work.

    It has no timeout within gloo, which would close the connection after the caller gave up.
    """
    options = dist.distributed_c10d.AllgatherOptions()
    options.timeout = _FOREVER
    work: dist.Work = group.allgather([list(parts)], [tensor], options)
    return work


def is_wait_timeout(error: RuntimeError) -> bool:
    """Return whether `work.wait(timeout)` raised because the work is not done yet.

    gloo raises a `RuntimeError` both for a timeout and for failed work.
    """
    return "Operation timed out!" in str(error)


def keep_alive(value: Any) -> None:
    """Keep an object alive until `stop_keeping_alive`, even at the end of the interpreter."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


def stop_keeping_alive(value: Any) -> None:
    """Undo `keep_alive`."""
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(value))
