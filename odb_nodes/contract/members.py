"""Methods of the contract, of nodes that may not have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchdata.nodes import BaseNode

from odb_nodes._core.checks import check_type
from odb_nodes.contract.state import copy_state

__all__ = ["call_member", "check_node", "member", "state_to_keep"]


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


def state_to_keep(node: BaseNode[Any]) -> dict[str, Any]:
    """Return where any node stands, to be kept: see `StatefulNode.state_to_keep`."""
    own = getattr(node, "state_to_keep", None)
    state: dict[str, Any] = own() if callable(own) else copy_state(node.state_dict())
    return state
