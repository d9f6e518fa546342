"""What we rely on inside of torchdata: where its nodes keep their threads, and how they count.

A node that reads on threads keeps them in an iterator, `_it`, a private name. What the iterator
holds is found by its type: threads, a pool, worker processes, their queues, and the events that
stop them. The attributes have other names in each version. All other names used here are public.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable, Sized
from concurrent.futures import Executor
from importlib.metadata import version
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event as ProcessEvent
from typing import Any

from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler
from torchdata.nodes import (
    BaseNode,
    Batcher,
    IterableWrapper,
    ParallelMapper,
    PinMemory,
    Prefetcher,
    SamplerWrapper,
    Stateful,
    Unbatcher,
)

_POLL_S = 0.05
_UNKNOWN = object()


def shuffling_samplers() -> tuple[type[Any], ...]:
    """Return the samplers that draw from all indices."""
    # Looked up, not imported: that package uses many private names of torch. A user who passes such
    # a sampler has imported it.
    module = sys.modules.get("torchdata.stateful_dataloader.sampler")
    return (RandomSampler,) if module is None else (RandomSampler, module.RandomSampler)


def is_random(sampler: Any) -> bool:
    """Return whether no two iterations of a sampler have the same order."""
    return isinstance(sampler, (*shuffling_samplers(), SubsetRandomSampler, WeightedRandomSampler))


def has_threads(node: BaseNode[Any]) -> bool:
    """Return whether a node has started threads or workers."""
    return bool(_parts_of(node, threading.Thread, Executor, BaseProcess))


def _parts_of(node: BaseNode[Any], *kinds: type[Any]) -> list[Any]:
    """Return the attributes of a node's iterator, and elements of its lists, of these types."""
    it = getattr(node, "_it", None)
    if not type(it).__module__.startswith("torchdata.nodes."):
        return []  # the user's iterator, of an `IterableWrapper`
    values = list(vars(it).values())
    lists = [value if isinstance(value, list) else [value] for value in values]
    return [part for parts in lists for part in parts if isinstance(part, kinds)]


def replays_items(node: BaseNode[Any]) -> bool:
    """Return whether a restored node takes items of its source again."""
    return isinstance(node, Unbatcher) or getattr(node, "snapshot_frequency", 1) != 1


def _check_parts(node: BaseNode[Any]) -> None:
    """Raise a `RuntimeError` if the threads of a node are not where we look for them."""
    if not hasattr(node, "snapshot_frequency"):
        return  # a node that starts none
    if not hasattr(node, "_it") and hasattr(Prefetcher(IterableWrapper(()), 1), "_it"):
        # A reset that raised has deleted it, and the next one would miss it.
        node._it = None  # type: ignore[attr-defined]
    it = getattr(node, "_it", _UNKNOWN)
    is_theirs = type(it).__module__.startswith("torchdata.") and not isinstance(it, BaseNode)
    starts_threads = getattr(node, "num_workers", 1) > 0
    if it is _UNKNOWN or (is_theirs and starts_threads and not has_threads(node)):
        raise RuntimeError(
            f"the threads of `{type(node).__name__}` cannot be found in torchdata "
            f"{version('torchdata')}, so they cannot be stopped, and a reset could lose items. "
            "Install a version that docs/versions.md names, or use `odb_nodes.ParallelProcessor` "
            "and `odb_nodes.ReadAhead` instead."
        )


def signal_stop(node: BaseNode[Any]) -> None:
    """Ask the threads of a node to stop, without waiting for them."""
    for event in _parts_of(node, threading.Event, ProcessEvent):
        event.set()


def join_threads(node: BaseNode[Any], timeout_s: float) -> None:
    """Stop the threads and workers of a node, and wait until each has left its source."""
    # In 0.11 their own shutdown gives up after 0.5 s, and a slow source would lose an item at every
    # reset; later, that of a pool waits without limit.
    _check_parts(node)
    signal_stop(node)
    pools = _parts_of(node, Executor)
    waits = [threading.Thread(target=pool.shutdown, daemon=True) for pool in pools]
    for wait in waits:
        wait.start()
    join([*_parts_of(node, threading.Thread), *waits], timeout_s, node)
    workers = _parts_of(node, BaseProcess)
    for worker in workers:
        worker.terminate()
    join(workers, timeout_s, node)
    for queue in _parts_of(node, Queue):
        # The feeder thread may block in a pipe without a reader, and would be joined at exit.
        feeder = queue._thread
        queue.cancel_join_thread()
        queue._reader.close()
        queue.close()
        join([feeder] if feeder is not None else [], timeout_s, node)


def join(parts: Iterable[Any], timeout_s: float, node: BaseNode[Any]) -> None:
    """Wait for threads or processes of a node, except for the thread that calls this."""
    deadline = time.monotonic() + timeout_s
    for part in parts:
        while part.is_alive() and part is not threading.current_thread():
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"a thread of `{type(node).__name__}` is still inside of `next(source)` after "
                    f"{timeout_s} s: a node below it hangs."
                )
            part.join(_POLL_S)


def unrepeatable_sampler(node: BaseNode[Any]) -> Any:
    """Return the sampler of a `SamplerWrapper` if it cannot repeat its order; else None."""
    sampler = getattr(node, "sampler", None) if isinstance(node, SamplerWrapper) else None
    inner = getattr(sampler, "sampler", sampler)  # of a `BatchSampler`
    restored = isinstance(sampler, Stateful) or hasattr(sampler, "set_epoch")
    return inner if is_random(inner) and not restored else None


def set_epoch(node: BaseNode[Any], epoch: int) -> None:
    """Let the next reset of a `SamplerWrapper` begin `epoch`."""
    if not isinstance(node, SamplerWrapper):
        return
    # A reset after an item begins the epoch that the updater returns; a second one repeats it.
    sampler, updater = node.sampler, node.epoch_updater
    node.epoch = epoch
    node.epoch_updater = lambda _: epoch
    node.sampler = ()  # type: ignore[assignment]
    try:
        node.reset(None)
    finally:
        node.sampler, node.epoch_updater = sampler, updater


def length_of(node: BaseNode[Any]) -> int:
    """Return the number of items of a node per epoch."""
    if hasattr(type(node), "__len__"):
        return len(node)  # type: ignore[arg-type]
    if isinstance(node, ParallelMapper) and node.prebatch is not None:
        return length_of(node.source.source)  # type: ignore[attr-defined]
    if isinstance(node, (ParallelMapper, PinMemory, Prefetcher)):
        return length_of(node.source)
    if isinstance(node, Batcher):
        items = length_of(node.source)
        return items // node.batch_size if node.drop_last else -(-items // node.batch_size)
    if isinstance(node, IterableWrapper) and isinstance(node.iterable, Sized):
        return len(node.iterable)
    if isinstance(node, SamplerWrapper) and isinstance(node.sampler, Sized):
        return len(node.sampler)
    raise TypeError(f"`{type(node).__name__}` does not know its length before the epoch has ended.")
