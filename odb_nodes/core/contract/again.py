"""Items of an epoch that a node makes again after a restore, in the order they are needed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from torchdata.nodes import BaseNode

from odb_nodes.core.sample import ItemKey

_ITEMS_AT_ONCE = 64


class ItemsAgain(ABC):
    """Items of an epoch, numbered by index, which a node makes again when `take` is called.

    A node that can make items before they are taken has a method `make_again(items)`, which returns
    an instance of a subclass.
    """

    are_made = False
    """Whether all items are made already."""

    def want(self, indices: Sequence[int]) -> None:  # noqa: B027
        """Queue the items of these indices: after all queued items, before the remaining ones."""

    @abstractmethod
    def take(self, indices: Sequence[int]) -> list[tuple[Sequence[Any], int]]:
        """Return for each item a sequence that contains it, and its position in the sequence.

        Waits for the items. An item may be taken several times; each time, it is made again.
        """

    @abstractmethod
    def key_of(self, index: int) -> ItemKey | None:
        """Return the key of an item; `None` if the node has no keys."""

    def name_of(self, index: int) -> str:
        """Return the name of an item in errors: its key, or else its number in the epoch."""
        return str(self.key_of(index))


class _ReadByKey(ItemsAgain):
    """Items that a node reads by their keys when they are taken."""

    def __init__(self, node: BaseNode[Any], items: Sequence[ItemKey]) -> None:
        self._node, self._items = node, items

    def take(self, indices: Sequence[int]) -> list[tuple[Sequence[Any], int]]:
        keys = [self._items[index] for index in indices]
        restore: Any = getattr(self._node, "restore_items", None)
        read: Any = getattr(self._node, "read", None)
        items = [*restore(keys)] if callable(restore) else [read(key.key) for key in keys]
        return [(items, position) for position in range(len(indices))]

    def key_of(self, index: int) -> ItemKey:
        return self._items[index]


def make_again(node: Any, items: Sequence[ItemKey]) -> ItemsAgain:
    """Return items of this epoch that a node makes again when `take` is called."""
    make = getattr(node, "make_again", None)
    items_again: ItemsAgain = make(items) if callable(make) else _ReadByKey(node, items)
    return items_again


def each_of(items_again: ItemsAgain, indices: Sequence[int]) -> Iterator[Any]:
    """Yield the items of these indices, making 64 of them at a time."""
    for start in range(0, len(indices), _ITEMS_AT_ONCE):
        for items, position in items_again.take(indices[start : start + _ITEMS_AT_ONCE]):
            yield items[position]


def restore_items(node: BaseNode[Any], items: Sequence[ItemKey]) -> Iterator[Any]:
    """Yield items of this epoch again by their keys. The node keeps its position."""
    return each_of(make_again(node, items), range(len(items)))
