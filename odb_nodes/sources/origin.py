"""Where an item comes from, for errors: noted for every item, put into words for a bad one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchdata.nodes import BaseNode

Origin = tuple[Any, ...]
"""Words, as a format for `%`, and what belongs in them; origins among those are shown likewise."""


def origin_of(node: BaseNode[Any]) -> Callable[[], Origin | None]:
    """Return what says where the last item of a node comes from: its `origin`, if it has one."""
    found = getattr(node, "origin", None)
    return found if callable(found) else _unknown


def show_origin(origin: Origin | None) -> str:
    """Return the words of an origin, after a comma; nothing where it is not known."""
    if origin is None:
        return ""
    words, *values = origin
    shown = (
        show_origin(value) if value is None or isinstance(value, tuple) else value
        for value in values
    )
    return f", {words % tuple(shown)}"


def _unknown() -> None:
    return None
