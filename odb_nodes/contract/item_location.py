"""Where an item comes from, for errors: noted for every item, put into words for a bad one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchdata.nodes import BaseNode

ItemLocation = tuple[Any, ...]
"""A format for `%`, and its values; locations among the values are formatted likewise."""


def locator_of(node: BaseNode[Any]) -> Callable[[], ItemLocation | None]:
    """Return a function that returns where the last item of a node comes from."""
    found = getattr(node, "item_location", None)
    return found if callable(found) else _unknown


def format_location(location: ItemLocation | None) -> str:
    """Return the words of a location, after a comma; nothing where it is not known."""
    if location is None:
        return ""
    words, *values = location
    shown = (
        format_location(value) if value is None or isinstance(value, tuple) else value
        for value in values
    )
    return f", {words % tuple(shown)}"


def _unknown() -> None:
    return None
