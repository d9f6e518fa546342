"""States of nodes and iterables that are not of this library: each must be a position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from odb_nodes.core.contract.state import Snapshot


def check_source_state(node: object, name: str, saved: Any, is_dict: bool) -> None:
    """Raise a `TypeError` unless the saved state of a source, or of a dict, has a position."""
    holder = f"a source of `{type(node).__name__}`"
    if not is_dict:
        check_plain_state(getattr(node, name, holder), saved)
        return
    for state in saved.values():
        if type(state) is not Snapshot:
            check_plain_state(holder, state)


def check_plain_state(node: object, state: Any) -> None:
    """Raise a `TypeError` unless a plain node and the nodes below it returned their positions."""
    check_own_state(node, state, "get_state")
    if "node" in state:  # A sealed state: a `StatefulNode` has checked its own sources.
        return
    below = getattr(node, "source", f"a node below {_name(node)}")
    for key in ("source", "snapshot", "it_state"):  # keys of source states in torchdata
        if key in state and (key != "snapshot" or state[key] is not None):
            # A mapper keeps its state in the state of an iterator, one level further down.
            check_plain_state(node if key == "it_state" else below, state[key])
    for key in ("iterable", "_sampler"):  # They have no state before their first item.
        if key in state and state.get("_num_yielded"):
            name = key.strip("_")
            check_own_state(getattr(node, name, f"the {name} of {_name(node)}"), state[key])


def check_own_state(holder: object, state: Any, method: str = "state_dict") -> None:
    """Raise a `TypeError` unless the state of a node or an iterable is there and not empty.

    An empty state loses items when it is loaded.
    """
    if state is None or not state or (method == "get_state" and not isinstance(state, Mapping)):
        raise TypeError(
            f"`{method}` of {_name(holder)} must return its position, a dict that is not empty, "
            f"but returned {state!r:.80} instead: a run that resumes from it would lose or repeat "
            'items. Return at least `{"position": self.position}`, and go there when it is loaded.'
        )


def _name(holder: object) -> str:
    return holder if isinstance(holder, str) else f"`{type(holder).__name__}`"
