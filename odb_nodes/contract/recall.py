"""Make items of a graph again from their keys, wherever it stands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torchdata.nodes import BaseNode

from odb_nodes.contract.node import StatefulNode
from odb_nodes.sample import ItemKey

__all__ = ["recall", "recalls"]


def recalls(node: BaseNode[Any]) -> bool:
    """Tell whether a node can make each of its items again from what `item_key` said of it.

    A node that reads data can if it has `read(key)`; one of another kind says so by `recalls`.
    """
    if isinstance(said := getattr(node, "recalls", None), bool):
        return said
    item_key = getattr(type(node), "item_key", None)
    tells_keys = item_key is not None and item_key is not StatefulNode.item_key
    return tells_keys and callable(getattr(node, "read", None))


def recall(node: BaseNode[Any], items: Sequence[ItemKey]) -> Iterator[Any]:
    """Yield items of a node again, which goes on afterwards where it stands.

    Args:
        node: a node that `recalls`.
        items: what `item_key` said of them, in the present epoch.
    """
    if callable(own := getattr(node, "recall", None)):
        yield from own(items)
    else:
        yield from (node.read(item.key) for item in items)  # type: ignore[attr-defined]
