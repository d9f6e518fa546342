"""Checks of arguments, whose errors name the argument, the rule and the value."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any

MAX_COUNT = 2**31 - 1
"""Largest count: state stores counts as 32-bit integers."""


def check_integer(name: str, value: object) -> int:
    """Return `value` as an int.

    Raises:
        TypeError: it is not an integer, or a bool.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(
            f"`{name}` must be an integer, but is {value!r} (`{type(value).__name__}`) instead."
        ) from None


def check_count(name: str, value: object, minimum: int = 1) -> int:
    """Return `value` as an int of at least `minimum`.

    Raises:
        TypeError: it is not an integer, or a bool.
        ValueError: it is below `minimum` or above 2**31 - 1.
    """
    count = check_integer(name, value)
    if not minimum <= count <= MAX_COUNT:
        raise ValueError(f"`{name}` must be in {minimum}..{MAX_COUNT}, but is {count} instead.")
    return count


def check_bool(name: str, value: object) -> bool:
    """Return `value`, or raise a `TypeError` where it is no bool."""
    if not isinstance(value, bool):
        raise TypeError(f"`{name}` must be True or False, but is {value!r} instead.")
    return value


def check_iterable(name: str, value: object) -> None:
    """Raise a `TypeError` unless `value` can be iterated again and again."""
    if isinstance(value, Iterator) or not isinstance(value, Iterable):
        raise TypeError(
            f"`{name}` must be an iterable that can be iterated once per epoch, but is "
            f"`{type(value).__name__}` instead. Wrap a generator in an `IterableDataset`."
        )


def check_callable(name: str, value: Any) -> None:
    """Raise a `TypeError` unless `value` is a function or None."""
    if value is not None and not callable(value):
        raise TypeError(f"`{name}` must be a function or None, but is {value!r} instead.")


def check_node(name: str, value: Any) -> None:
    """Raise a `TypeError` unless `value` is a node."""
    from torchdata.nodes import BaseNode  # Late: planning imports this module, but not torch.

    if not isinstance(value, BaseNode):
        raise TypeError(
            f"`{name}` must be a `torchdata.nodes.BaseNode`, but is `{type(value).__name__}` "
            "instead. Wrap an iterable in `IterableSource`."
        )
