"""Internals of torchdata 0.11 that we rely on: its threads, lengths, and counters of epochs.

Used are `_it` of mappers and prefetchers, which is their iterator; its events, threads, workers and
queues; `epoch` and `_started` of `SamplerWrapper`; and the key "snapshot" in the state of a
`Prefetcher`, which holds the state of its source.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sized
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
from torchdata.nodes.map import _ParallelMapperImpl, _ParallelMapperIter, _SingleThreadedMapper
from torchdata.stateful_dataloader import sampler as stateful_sampler

RANDOM_SAMPLERS = (
    RandomSampler,
    stateful_sampler.RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
"""Samplers of which no two iterations have the same order."""

_POLL_S = 0.05


def has_threads(node: BaseNode[Any]) -> bool:
    """Return whether a node has started threads or workers."""
    return isinstance(getattr(node, "_it", None), (_SingleThreadedMapper, _ParallelMapperIter))


def replays_items(node: BaseNode[Any]) -> bool:
    """Return whether a restored node takes items of its source again."""
    return isinstance(node, Unbatcher) or getattr(node, "snapshot_frequency", 1) != 1


def signal_stop(node: BaseNode[Any]) -> None:
    """Ask the threads of a node to stop, without waiting for them."""
    it = getattr(node, "_it", None)
    for event in ("_stop_event", "_stop", "_mp_stop"):
        if isinstance(it, (_SingleThreadedMapper, _ParallelMapperIter)) and hasattr(it, event):
            getattr(it, event).set()


def join_threads(node: BaseNode[Any], timeout_s: float) -> None:
    """Stop the threads and workers of a node, and wait until each has left its source."""
    # Their own shutdown gives up after 0.5 s: a slow source would lose an item at every reset.
    if not isinstance(node, (Prefetcher, PinMemory, _ParallelMapperImpl)):
        return
    # A reset that raised has deleted `_it`, and the next reset would miss it.
    it = node._it = getattr(node, "_it", None)
    signal_stop(node)
    if isinstance(it, _SingleThreadedMapper):
        _join([it._thread], timeout_s, node)
    elif isinstance(it, _ParallelMapperIter):
        _join_parallel_mapper(it, timeout_s, node)


def _join_parallel_mapper(
    it: _ParallelMapperIter[Any], timeout_s: float, node: BaseNode[Any]
) -> None:
    _join([it._read_thread, *([it._sort_thread] if it.in_order else [])], timeout_s, node)
    for worker in it._workers if it.method == "process" else ():
        worker.terminate()  # type: ignore[union-attr]
    _join(it._workers, timeout_s, node)
    for queue in (it._in_q, it._intermed_q) if it.method == "process" else ():
        # The feeder thread may block in a pipe without a reader, and would be joined at exit.
        feeder = getattr(queue, "_thread", None)
        queue.cancel_join_thread()  # type: ignore[union-attr]
        queue._reader.close()  # type: ignore[union-attr]
        queue.close()  # type: ignore[union-attr]
        _join([feeder] if feeder is not None else [], timeout_s, node)


def _join(threads: Iterable[Any], timeout_s: float, node: BaseNode[Any]) -> None:
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        while thread.is_alive():
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"a thread of `{type(node).__name__}` is still inside of `next(source)` after "
                    f"{timeout_s} s: a node below it hangs."
                )
            thread.join(_POLL_S)


def thread_of(prefetcher: Prefetcher[Any]) -> threading.Thread:
    """Return the thread of a `Prefetcher` that was reset; that thread may delete the prefetcher.

    A prefetcher joins its thread when it is deleted. If a garbage collection on that thread deletes
    it, the thread would join itself.
    """
    it = prefetcher._it
    assert it is not None
    thread = it._thread
    it._thread = _OtherThread(thread)  # type: ignore[assignment]
    return thread


class _OtherThread:
    """A thread that seems to have ended, for code that runs on it and would join it."""

    def __init__(self, thread: threading.Thread) -> None:
        self._thread = thread
        self.join = thread.join

    def is_alive(self) -> bool:
        return self._thread.is_alive() and self._thread is not threading.current_thread()


def unrepeatable_sampler(node: BaseNode[Any]) -> Any:
    """Return the sampler of a `SamplerWrapper` if it cannot repeat its order; else None."""
    sampler = getattr(node, "sampler", None) if isinstance(node, SamplerWrapper) else None
    inner = getattr(sampler, "sampler", sampler)  # of a `BatchSampler`
    restored = isinstance(sampler, Stateful) or hasattr(sampler, "set_epoch")
    return inner if isinstance(inner, RANDOM_SAMPLERS) and not restored else None


def set_epoch(node: BaseNode[Any], epoch: int) -> None:
    """Let the next reset of a `SamplerWrapper` begin `epoch`."""
    if isinstance(node, SamplerWrapper):
        node.epoch = epoch
        node._started = False


def snapshot_of(prefetcher: Prefetcher[Any]) -> dict[str, Any]:
    """Return the state of the source of a `Prefetcher` after the last item that was taken."""
    state: dict[str, Any] = prefetcher.state_dict()["snapshot"]
    return state


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
