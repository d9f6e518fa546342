"""Walk a graph of nodes: stop its threads, release its workers, find its length."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sized
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

from odb_nodes.planning.budget import TokenBudget

_POLL_S = 0.05


def walk(root: BaseNode[Any]) -> Iterator[BaseNode[Any]]:
    """Yield the nodes of a graph, each once and before its sources."""
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        sources: list[BaseNode[Any]] = []
        for value in list(vars(node).values()):
            # Plain containers only: another mapping or sequence may be a dataset, and slow.
            held = value.values() if type(value) is dict else value
            inner = held if type(value) in (dict, list, tuple) else (value,)
            sources += [item for item in inner if isinstance(item, BaseNode)]
        waiting += reversed(sources)


def stop_threads(root: BaseNode[Any], timeout_s: float) -> None:
    """Stop the threads of torchdata's own nodes and wait until each has left its source.

    Their own shutdown waits for 0.5 s and then goes on while the thread is still inside of
    `next(source)`, so a slow source loses an item at every reset.

    Raises:
        TimeoutError: a thread did not come back in time.
    """
    nodes = list(walk(root))
    for node in nodes:
        if callable(interrupt := getattr(node, "interrupt", None)):
            interrupt()  # A thread may be waiting for slow processing.
    for node in nodes:  # Outer nodes first: the inner ones still feed them.
        if isinstance(node, (Prefetcher, PinMemory, _ParallelMapperImpl)):
            # A reset of theirs that raised has deleted it, and the next one would miss it.
            it = node._it = getattr(node, "_it", None)
            if isinstance(it, _SingleThreadedMapper):
                it._stop_event.set()
                _join([it._thread], timeout_s, node)
            elif isinstance(it, _ParallelMapperIter):
                _stop_parallel_mapper(it, timeout_s, node)


def _stop_parallel_mapper(
    it: _ParallelMapperIter[Any], timeout_s: float, node: BaseNode[Any]
) -> None:
    it._stop.set()
    it._mp_stop.set()
    _join([it._read_thread, *([it._sort_thread] if it.in_order else [])], timeout_s, node)
    for worker in it._workers if it.method == "process" else ():
        worker.terminate()  # type: ignore[union-attr]
    _join(it._workers, timeout_s, node)
    for queue in (it._in_q, it._intermed_q) if it.method == "process" else ():
        # Its thread may be stuck in a pipe that nobody reads any more, and is joined at exit.
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


def close_nodes(root: BaseNode[Any], timeout_s: float) -> None:
    """Stop every thread and worker of a graph, also those that are waiting for each other.

    Raises:
        TimeoutError: a thread did not come back in time.
    """
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


def begin_epoch(root: BaseNode[Any], epoch: int | None) -> None:
    """Reset a graph to the beginning of its next epoch.

    Args:
        root: last node of the graph.
        epoch: which epoch that is, for every node that counts them; `None`: each one's next.
    """
    if epoch is not None:
        for node in walk(root):
            if isinstance(node, SamplerWrapper):
                node.epoch, node._started = epoch, False
            elif callable(set_epoch := getattr(node, "set_epoch", None)):
                set_epoch(epoch)
    root.reset(None)


def begin_cycle(root: BaseNode[Any]) -> None:
    """Reset a graph to the beginning of its epoch, in another order where it draws one."""
    for node in walk(root):
        if callable(begin := getattr(node, "begin_cycle", None)):
            begin()
    root.reset(None)


def length_of(node: BaseNode[Any]) -> int:
    """Return how many items a node yields per epoch.

    Raises:
        TypeError: it cannot be known before the epoch has ended.
    """
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


def find_budget(source: BaseNode[Any]) -> TokenBudget | None:
    """Return the budget of the `WindowBucketer` below; `None` where there is none."""
    for node in walk(source):
        if isinstance(budget := getattr(node, "budget", None), TokenBudget):
            return budget
    return None
