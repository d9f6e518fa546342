"""Functions over a graph of nodes: stop threads, release workers, begin epochs."""

from __future__ import annotations

from typing import Any

from torchdata.nodes import BaseNode

from odb_nodes._compat import torchdata
from odb_nodes._compat.torchdata import length_of as length_of
from odb_nodes.core.contract.node import call_member
from odb_nodes.core.contract.node import walk as walk
from odb_nodes.core.planning import TokenBudget


def has_threads(root: BaseNode[Any]) -> bool:
    """Return whether a node of a graph has started threads or workers."""
    return any(
        torchdata.has_threads(node) or getattr(node, "has_workers", False) for node in walk(root)
    )


def stop_threads(root: BaseNode[Any], timeout_s: float) -> None:
    """Interrupt the waits of all nodes, and wait until each thread has left its source."""
    nodes = list(walk(root))
    for node in nodes:
        call_member(node, "interrupt")  # A thread may be waiting for slow processing.
    for node in nodes:  # Outer nodes first: their sources still feed them.
        torchdata.join_threads(node, timeout_s)
        call_member(node, "join_threads", timeout_s)


def close_nodes(root: BaseNode[Any], timeout_s: float) -> None:
    """Stop every thread and worker of a graph, even if they wait for each other."""
    nodes = list(walk(root))
    for node in nodes:
        torchdata.signal_stop(node)
    for node in nodes:
        call_member(node, "close")
    stop_threads(root, timeout_s)


def begin_epoch(root: BaseNode[Any], epoch: int | None) -> None:
    """Reset a graph to the beginning of its next epoch."""
    if epoch is not None:
        for node in walk(root):
            torchdata.set_epoch(node, epoch)
            call_member(node, "set_epoch", epoch)
    root.reset(None)


def epochs_of(root: BaseNode[Any]) -> set[int]:
    """Return the epochs of the nodes of a graph. A source that gave no item may lag behind."""
    epochs = {getattr(node, "epoch", None) for node in walk(root)}
    return {epoch for epoch in epochs if isinstance(epoch, int)}


def begin_cycle(root: BaseNode[Any]) -> None:
    """Reset a graph to the beginning of its epoch, with another shuffled order."""
    for node in walk(root):
        call_member(node, "begin_cycle")
    root.reset(None)


def describe_empty_epoch(root: BaseNode[Any]) -> str:
    """Return the cause of an epoch without an item, for errors: exclusions, or the sources."""
    if excluded := sum(getattr(node, "excluded_samples", 0) for node in walk(root)):
        return f"`exclude` leaves out {excluded} samples, all that were read: name fewer keys."
    names = [type(node).__name__ for node in walk(root) if len(list(walk(node))) == 1]
    return (
        f"The source of the data (`{'`, `'.join(names)}`) is empty, or can be read only once, such "
        "as an iterator that is made in `__init__`: make it in `reset` of the node, or `__iter__` "
        "of the dataset."
    )


def budget_below(source: BaseNode[Any]) -> TokenBudget | None:
    """Return the budget of the node in a graph that forms groups; `None` without such a node."""
    for node in walk(source):
        budget = getattr(node, "budget", None)
        if isinstance(budget, TokenBudget):
            return budget
    return None


def known_length_of(source: BaseNode[Any]) -> int | None:
    """Return how many items a node yields per epoch; `None` if its length is unknown."""
    try:
        return length_of(source)
    except (TypeError, NotImplementedError):  # The second comes from a dataset without a length.
        return None
