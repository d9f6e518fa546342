"""Check what `get_state` of a plain node returned: an empty state loses items when it is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torchdata.nodes import BaseNode

__all__ = ["check_own_state", "check_sources", "check_state_of"]

_INNER_KEYS = ("source", "snapshot", "it_state")
"""Where torchdata's nodes keep the state of their source."""
_OWN_KEYS = ("iterable", "_sampler")
"""Where they keep that of an iterable or a sampler, which has none before its first item."""


def check_state_of(node: object, state: Any) -> None:
    """Make sure that a node, and what torchdata's nodes have below, said where it stands.

    Args:
        node: the node; or its name, where it is not at hand.
        state: what its `state_dict()` returned.

    Raises:
        TypeError: it is no dict, or is empty.
    """
    if not isinstance(state, Mapping) or not state:
        _refuse("get_state", node, state)
    if "node" in state:  # It is sealed: one of ours has checked its own sources.
        return
    for key in _INNER_KEYS:
        if key in state and (key != "snapshot" or state[key] is not None):
            # A mapper keeps its state in that of an iterator, one level further down.
            below = node if key == "it_state" else getattr(node, "source", None)
            known = isinstance(below, BaseNode)
            check_state_of(below if known else f"a node below {_name(node)}", state[key])
    for key in _OWN_KEYS:
        if key in state and state.get("_num_yielded"):
            name = key.strip("_")
            check_own_state(getattr(node, name, f"the {name} of {_name(node)}"), state[key])


def check_sources(node: object, names: Iterable[str], values: Mapping[str, Any]) -> None:
    """Make sure that the sources of a node said where they stand; see `check_state_of`.

    Args:
        node: the node, whose sources are attributes.
        names: the fields of its state that hold those of sources.
        values: the values of its fields.
    """
    for name in names:
        source, state = getattr(node, name, None), values[name]
        if isinstance(source, dict) and isinstance(state, dict):
            for key, one in state.items():
                check_state_of(source.get(key, f"source {key!r}"), one)
        else:
            known = isinstance(source, BaseNode)
            check_state_of(source if known else f"a source of `{type(node).__name__}`", state)


def check_own_state(iterable: object, state: Any) -> None:
    """Make sure that an iterable that has yielded said where it stands.

    Args:
        iterable: the iterable; or its name, where it is not at hand.
        state: what its `state_dict()` returned.

    Raises:
        TypeError: it is None, or empty.
    """
    if state is None or (isinstance(state, Mapping) and not state):
        _refuse("state_dict", iterable, state)


def _refuse(method: str, holder: object, state: Any) -> None:
    raise TypeError(
        f"`{method}` of {_name(holder)} must return where it stands, a dict that is not empty, but "
        f"returned {state!r:.80} instead: a run that resumes from it would lose or repeat items. "
        'Return a position at least, as in `{"position": self.position}`, and go there when it is '
        "loaded."
    )


def _name(holder: object) -> str:
    return holder if isinstance(holder, str) else f"`{type(holder).__name__}`"
