"""Walk a graph of nodes: stop its threads, release its workers, find its length."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any

from torchdata.nodes import (
    BaseNode,
    Batcher,
    IterableWrapper,
    ParallelMapper,
    PinMemory,
    Prefetcher,
    SamplerWrapper,
)
from torchdata.nodes.map import _ParallelMapperImpl, _ParallelMapperIter, _SingleThreadedMapper

_POLL_S = 0.05


def walk(root: BaseNode[Any]) -> Iterator[BaseNode[Any]]:
    """Yield the nodes of a graph, each before its sources."""
    yield root
    for value in list(vars(root).values()):
        if isinstance(value, BaseNode):
            yield from walk(value)
        elif isinstance(value, Mapping):
            yield from (n for v in value.values() if isinstance(v, BaseNode) for n in walk(v))
        elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
            yield from (n for v in value if isinstance(v, BaseNode) for n in walk(v))


def stop_threads(root: BaseNode[Any], timeout_s: float) -> None:
    """Stop the threads of torchdata's own nodes and wait until each has left its source.

    Their own shutdown waits for 0.5 s and then goes on while the thread is still inside of
    `next(source)`, so a slow source loses an item at every reset.

    Raises:
        TimeoutError: a thread did not come back in time.
    """
    for node in walk(root):  # Outer nodes first: the inner ones still feed them.
        it = getattr(node, "_it", None)
        if isinstance(it, _SingleThreadedMapper):
            it._stop_event.set()
            _join([it._thread], timeout_s, node)
        elif isinstance(it, _ParallelMapperIter):
            it._stop.set()
            it._mp_stop.set()
            threads = [it._read_thread, *([it._sort_thread] if it.in_order else [])]
            _join(threads, timeout_s, node)
            processes = [worker for worker in it._workers if hasattr(worker, "terminate")]
            for process in processes:
                process.terminate()
            _join(it._workers, timeout_s, node)


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


def close_nodes(root: BaseNode[Any], timeout_s: float) -> None:
    """Stop every thread and worker of a graph, also those that are waiting for each other."""
    nodes = list(walk(root))
    for node in nodes:
        it = getattr(node, "_it", None)
        for event in ("_stop_event", "_stop", "_mp_stop"):
            if isinstance(it, (_SingleThreadedMapper, _ParallelMapperIter)) and hasattr(it, event):
                getattr(it, event).set()
    for node in nodes:
        if callable(close := getattr(node, "close", None)):
            close()
    stop_threads(root, timeout_s)


def length_of(node: BaseNode[Any]) -> int:
    """Return how many items a node yields per epoch.

    Raises:
        TypeError: it cannot be known before the epoch has ended.
    """
    if hasattr(type(node), "__len__"):
        return len(node)  # type: ignore[arg-type]
    if isinstance(node, Batcher):
        items = length_of(node.source)
        return items // node.batch_size if node.drop_last else -(-items // node.batch_size)
    if isinstance(node, (ParallelMapper, _ParallelMapperImpl, PinMemory, Prefetcher)):
        inner = node._it if getattr(node, "prebatch", None) is None else None
        return length_of(node.source if not isinstance(inner, BaseNode) else inner)
    if isinstance(node, IterableWrapper) and isinstance(node.iterable, Sized):
        return len(node.iterable)
    if isinstance(node, SamplerWrapper) and isinstance(node.sampler, Sized):
        return len(node.sampler)
    raise TypeError(f"`{type(node).__name__}` does not know its length before the epoch has ended.")
