"""Methods of the contract, of nodes that may not have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchdata.nodes import BaseNode

from odb_nodes._core.checks import check_type
from odb_nodes.contract.source_states import check_state_of
from odb_nodes.contract.state import Snapshot, copy_state

__all__ = ["call_member", "check_node", "member", "snapshot"]


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


def snapshot(node: BaseNode[Any]) -> dict[str, Any]:
    """Return where any node stands, to be kept: it never changes, and is cheap to take.

    Raises:
        TypeError: a plain node does not say where it stands.
    """
    own = getattr(node, "_snapshot_of_own", None)
    state: dict[str, Any] | None = own() if own is not None else None
    if state is None:
        state = node.state_dict()
        check_state_of(node, state)
        state = Snapshot(copy_state(state))
    return state
