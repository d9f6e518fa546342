"""Make items of a graph again from their keys, wherever it stands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torchdata.nodes import BaseNode

from odb_nodes._core.checks import MAX_KEY, check_count
from odb_nodes.contract.node import StatefulNode
from odb_nodes.errors import SampleError
from odb_nodes.sample import ItemKey

__all__ = ["checked_key", "recall", "recalls"]


def recalls(node: BaseNode[Any]) -> bool:
    """Tell whether a node can make each of its items again from what `item_key` said of it.

    A node that reads data can if it has `read(key)`; one of another kind says so by `recalls`.
    """
    if isinstance(said := getattr(node, "recalls", None), bool):
        return said
    item_key = getattr(type(node), "item_key", None)
    tells_keys = item_key is not None and item_key is not StatefulNode.item_key
    return tells_keys and callable(getattr(node, "read", None))


def checked_key(node: BaseNode[Any], key: Any) -> ItemKey | None:
    """Return what `item_key` of a node has returned, once it is known to be valid.

    Raises:
        SampleError: it is neither `None` nor an `ItemKey` of valid numbers.
    """
    if key is None:
        return None
    try:
        source, number, world_size, repeat = key
        if not isinstance(source, str):
            raise TypeError(f"`source` must be a string, but is {source!r} instead.")
        plain = type(number) is type(repeat) is type(world_size) is int
        if plain and 0 <= number <= MAX_KEY and 0 <= repeat <= MAX_KEY and world_size > 0:
            return key if type(key) is ItemKey else ItemKey(*key)
        return ItemKey(
            source,
            check_count("key", number, 0, MAX_KEY),
            check_count("world_size", world_size),
            check_count("repeat", repeat, 0, MAX_KEY),
        )
    except (TypeError, ValueError) as error:
        raise SampleError(
            f"`item_key()` of `{type(node).__name__}` must return an `ItemKey` or None, but "
            f"returned {key!r:.200}: {error}"
        ) from error


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
