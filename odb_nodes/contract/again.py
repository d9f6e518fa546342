"""Items of a restored state that are made again later: those first that are needed first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchdata.nodes import BaseNode

from odb_nodes.contract.node import restore_items
from odb_nodes.sample import ItemKey


class ItemsAgain:
    """Items of an epoch by rows, which a node makes again when somebody takes them.

    A node that can make items ahead has a method `make_again(items)`, which returns an object with
    these methods, or `None` where its items cannot be made later.
    """

    def __init__(self, node: BaseNode[Any], items: Sequence[ItemKey]) -> None:
        self._node, self._items = node, items

    def want(self, rows: Sequence[int]) -> None:
        """Have these made after those that were wanted before, and before all others."""

    def take(self, rows: Sequence[int]) -> list[tuple[Sequence[Any], int]]:
        """Return for each row a sequence of items, and the place of the row's item there.

        Waits for the items. A row may be taken several times, and its item is made each time.
        """
        found = [*restore_items(self._node, [self._items[row] for row in rows])]
        return [(found, place) for place in range(len(rows))]


def make_again(node: BaseNode[Any], items: Sequence[ItemKey]) -> ItemsAgain | None:
    """Return items of this epoch that a node makes again when somebody takes them."""
    own = getattr(node, "make_again", None)
    again: ItemsAgain | None = own(items) if callable(own) else ItemsAgain(node, items)
    return again
