"""Items of an epoch that are made again, in any order: those first that are needed first."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from torchdata.nodes import BaseNode

from odb_nodes.sample import ItemKey

_TAKEN = 64


class ItemsAgain(ABC):
    """Items of an epoch by rows, which a node makes again when somebody takes them.

    A node that can make items ahead has a method `make_again(items)`, which returns an object of
    a class that derives from this one.
    """

    are_made = False
    """Whether all of them are made already, so that nothing is won by taking them later."""

    def want(self, rows: Sequence[int]) -> None:  # noqa: B027
        """Have these made after those that were wanted before, and before all others."""

    @abstractmethod
    def take(self, rows: Sequence[int]) -> list[tuple[Sequence[Any], int]]:
        """Return for each row a sequence of items, and the place of the row's item there.

        Waits for the items. A row may be taken several times, and its item is made each time.
        """

    @abstractmethod
    def key_of(self, row: int) -> ItemKey | None:
        """Return the key that the node tells of an item; `None` where it has none."""

    def name_of(self, row: int) -> str:
        """Return what an error calls an item: its key, or else its number in the epoch."""
        return str(self.key_of(row))


class _ReadByKey(ItemsAgain):
    """Items that a node reads by their keys when they are taken."""

    def __init__(self, node: BaseNode[Any], items: Sequence[ItemKey]) -> None:
        self._node, self._items = node, items

    def take(self, rows: Sequence[int]) -> list[tuple[Sequence[Any], int]]:
        """Return for each row all items, and the place of the row's item there."""
        node, items = self._node, [self._items[row] for row in rows]
        restore = getattr(node, "restore_items", None)
        made = [*restore(items)] if callable(restore) else [node.read(item.key) for item in items]  # type: ignore[attr-defined]
        return [(made, place) for place in range(len(rows))]

    def key_of(self, row: int) -> ItemKey:
        """Return the key that an item is read by."""
        return self._items[row]


def make_again(node: Any, items: Sequence[ItemKey]) -> ItemsAgain:
    """Return items of this epoch that a node makes again when somebody takes them."""
    make = getattr(node, "make_again", None)
    again: ItemsAgain = make(items) if callable(make) else _ReadByKey(node, items)
    return again


def each_of(again: ItemsAgain, rows: Sequence[int]) -> Iterator[Any]:
    """Yield some of the items, a few of which are made at a time."""
    for start in range(0, len(rows), _TAKEN):
        yield from (run[place] for run, place in again.take(rows[start : start + _TAKEN]))


def restore_items(node: BaseNode[Any], items: Sequence[ItemKey]) -> Iterator[Any]:
    """Yield items of this epoch again by their keys. The node keeps its position."""
    return each_of(make_again(node, items), range(len(items)))
