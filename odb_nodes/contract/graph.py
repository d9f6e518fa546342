"""Walk a graph of nodes: stop its threads, release its workers, begin its epochs."""

from __future__ import annotations

from typing import Any

from torchdata.nodes import BaseNode

from odb_nodes._compat import torchdata
from odb_nodes._compat.torchdata import length_of as length_of
from odb_nodes.contract.node import call_member
from odb_nodes.contract.node import walk as walk
from odb_nodes.planning import TokenBudget


def has_threads(root: BaseNode[Any]) -> bool:
    """Tell whether a node of a graph has started threads or workers."""
    return any(
        torchdata.has_threads(node) or getattr(node, "has_workers", False) for node in walk(root)
    )


def stop_threads(root: BaseNode[Any], timeout_s: float) -> None:
    """Interrupt the waits of all nodes, and wait until each of torchdata's threads has stopped."""
    nodes = list(walk(root))
    for node in nodes:
        call_member(node, "interrupt")  # A thread may be waiting for slow processing.
    for node in nodes:  # Outer nodes first: the inner ones still feed them.
        torchdata.join_threads(node, timeout_s)


def close_nodes(root: BaseNode[Any], timeout_s: float) -> None:
    """Stop every thread and worker of a graph, also those that are waiting for each other."""
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
    """Return the epochs that the nodes of a graph are in: a source may lag that gave no item."""
    epochs = {getattr(node, "epoch", None) for node in walk(root)}
    return {epoch for epoch in epochs if isinstance(epoch, int)}


def begin_cycle(root: BaseNode[Any]) -> None:
    """Reset a graph to the beginning of its epoch, in another order where it draws one."""
    for node in walk(root):
        call_member(node, "begin_cycle")
    root.reset(None)


def describe_empty_epoch(root: BaseNode[Any]) -> str:
    """Return what an error says of an epoch without an item: which nodes read the data, and how."""
    if excluded := sum(getattr(node, "excluded_samples", 0) for node in walk(root)):
        return f"Of what was read, `exclude` leaves out {excluded} samples: name fewer keys."
    names = [type(node).__name__ for node in walk(root) if len(list(walk(node))) == 1]
    return (
        f"What reads the data (`{'`, `'.join(names)}`) is empty, or can be read only once, such as "
        "an iterator that is made in `__init__`: make it in `reset` of the node, or `__iter__` of "
        "the dataset."
    )


def budget_below(source: BaseNode[Any]) -> TokenBudget | None:
    """Return the budget of the groups that a graph forms; `None` where it forms none."""
    for node in walk(source):
        if isinstance(budget := getattr(node, "budget", None), TokenBudget):
            return budget
    return None


def known_length_of(source: BaseNode[Any]) -> int | None:
    """Return how many items a node yields per epoch; `None` where it does not know that at once."""
    try:
        return length_of(source)
    except (TypeError, NotImplementedError):  # the latter of a dataset that cannot tell
        return None


def remaining_samples(source: BaseNode[Any]) -> int:
    """Return how many samples of the epoch a graph holds, or knows to be left."""
    return sum(getattr(node, "remaining_samples", 0) for node in walk(source))
