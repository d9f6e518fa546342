"""Which `Loader` moves a node: two of them would take each other's items."""

from __future__ import annotations

import gc
import weakref
from typing import Any

from torchdata.nodes import BaseNode

from odb_nodes.contract.graph import walk

__all__ = ["claim", "release"]

_owners: weakref.WeakKeyDictionary[BaseNode[Any], weakref.ref[Any]] = weakref.WeakKeyDictionary()


def claim(root: BaseNode[Any], loader: object) -> None:
    """Make `loader` the one that moves the nodes of a graph, until it is released or gone.

    Raises:
        RuntimeError: another one moves a node of it.
    """
    nodes = list(walk(root))
    if any(_other_owner(node, loader) is not None for node in nodes):
        gc.collect()  # A loader and its iterator refer to each other: it may be gone already.
    for node in nodes:
        if _other_owner(node, loader) is not None:
            raise RuntimeError(
                f"a `{type(node).__name__}` of this `{type(loader).__name__}` is iterated by "
                "another one, and each would take items that the other one then lacks. Make a node "
                "for each loader, or `close()` the other one before."
            )
    for node in nodes:
        _owners[node] = weakref.ref(loader)


def release(root: BaseNode[Any], loader: object) -> None:
    """Let others move the nodes that `loader` has claimed."""
    for node in walk(root):
        if _other_owner(node, loader) is None:
            _owners.pop(node, None)


def _other_owner(node: BaseNode[Any], loader: object) -> object | None:
    owner = _owners[node]() if node in _owners else None
    return None if owner is loader else owner
