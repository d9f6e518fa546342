"""Which graphs a `Loader` can iterate: nodes that keep each item, and belong to no other loader."""

from __future__ import annotations

import weakref
from typing import Any

from torchdata.nodes import BaseNode

from odb_nodes._compat.torchdata import replays_items, unrepeatable_sampler
from odb_nodes.core.contract.graph import walk
from odb_nodes.core.contract.node import check_node
from odb_nodes.core.nodes.exclusions import ExcludedKeys


def check_root(root: BaseNode[Any]) -> None:
    """Raise an error if a node of a graph would lose or repeat items."""
    check_node("root", root)
    for node in walk(root):
        name = type(node).__name__
        if getattr(node, "in_order", True) is False:
            raise ValueError(
                f"`in_order` of `{name}` must be True: without an order, no state can say which "
                "items came out, and a resumed run loses and repeats some."
            )
        if (sampler := unrepeatable_sampler(node)) is not None:
            raise ValueError(
                f"`sampler` of `{name}` is a `{type(sampler).__name__}`, whose order cannot be "
                "drawn again: a resumed run loses and repeats samples. Use `ShardedSampler`, or a "
                "sampler that is seeded by `set_epoch`."
            )
        exclusions = [getattr(below, "exclude", None) for below in walk(node)]
        has_keys = any(isinstance(keys, ExcludedKeys) and keys for keys in exclusions)
        if has_keys and replays_items(node):
            raise ValueError(
                f"`exclude` must be empty below a `{name}` that reads items of its source again "
                "when it is restored, since it would then read other items. Leave "
                "`snapshot_frequency` at 1, and `prebatch` at None."
            )


_owners: weakref.WeakKeyDictionary[BaseNode[Any], weakref.ref[Any]] = weakref.WeakKeyDictionary()
"""The `Loader` that last iterated a node. Two loaders would take each other's items."""


def claim(root: BaseNode[Any], loader: object) -> None:
    """Note that `loader` iterates the nodes of a graph; raise if another loader iterates a node."""
    if (node := iterated_elsewhere(root, loader)) is not None:
        raise RuntimeError(
            f"a `{type(node).__name__}` of this `{type(loader).__name__}` is iterated by "
            "another loader, and each would take items from the other. Make a node for each "
            "loader, or `close()` the other loader before."
        )
    for node in walk(root):
        _owners[node] = weakref.ref(loader)


def iterated_elsewhere(root: BaseNode[Any], loader: object) -> BaseNode[Any] | None:
    """Return a node of a graph that another `Loader` iterates; `None` if there is no such node."""
    for node in walk(root):
        owner = _owners[node]() if node in _owners else None
        if owner is not None and owner is not loader and owner._is_iterating:
            return node
    return None
