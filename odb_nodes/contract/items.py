"""Which class of a node hands on several items at once, and what it may return."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_TAKES_ITEMS = {"next_items", "next", "item_key", "item_location"}


def hands_on_items(cls: type[Any]) -> bool:
    """Tell whether `next_items` of a class still stands for single calls of the other methods.

    Not where one of those is defined, perhaps by a mixin, before it.
    """
    first = next(one for one in cls.__mro__ if not _TAKES_ITEMS.isdisjoint(vars(one)))
    return "next_items" in vars(first)


def check_items(name: str, items: Sequence[Any], keys: Sequence[Any], count: int) -> None:
    """Raise a `TypeError` unless a node has returned 1 to `count` items, and a key for each."""
    if not 0 < len(items) == len(keys) <= count:
        raise TypeError(
            f"`next_items` of `{name}` must return 1 to {count} items, and a key for each, but "
            f"returned {len(items)} and {len(keys)} keys."
        )
