"""Methods of the contract, of nodes that may not have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchdata.nodes import BaseNode

from odb_nodes._core.checks import check_type

__all__ = ["call_member", "check_node", "member"]


def call_member(node: BaseNode[Any], name: str, *arguments: Any) -> Any:
    """Call a method of the contract; return `None` where a plain node does not have it."""
    return member(node, name)(*arguments)


def member(node: BaseNode[Any], name: str) -> Callable[..., Any]:
    """Return a method of the contract; one that returns `None` where a plain node lacks it."""
    method = getattr(node, name, None)
    return method if callable(method) else _none


def _none(*_: Any) -> None:
    return None


def check_node(name: str, value: Any) -> None:
    """Raise a `TypeError` unless `value` is a node."""
    check_type(name, value, BaseNode, "Wrap an iterable in `IterableSource`.")
