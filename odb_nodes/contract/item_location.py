"""Where an item comes from, for errors: noted for every item, put into words for a bad one."""

from __future__ import annotations

from typing import Any

ItemLocation = tuple[Any, ...]
"""A format for `%`, and its values; locations among the values are formatted likewise."""


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
