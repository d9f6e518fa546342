"""The envelope that a state travels in: version, node, configuration, fields; and its digest.

A state is plain data: dicts, lists, tuples, numbers, strings, bytes and tensors, so it loads with
`torch.load(weights_only=True)`. The configuration in it is what decides the node's output; a state
that is loaded into a node of another configuration is refused, field by field. What a field may
hold is declared (see `fields`); that a whole state is the one that was saved, its digest says.
"""

from __future__ import annotations

import copy
import json
import sys
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, TypeVar, cast

import numpy as np
import torch

from odb_nodes._core.codec import tensor_bytes
from odb_nodes.contract.config import check_config, equal
from odb_nodes.contract.fields import check_fields, sparse_defaults
from odb_nodes.errors import StateError

__all__ = [
    "ENVELOPE",
    "STATE_VERSION",
    "NodeState",
    "Snapshot",
    "add_digest",
    "bounded_depth",
    "copy_state",
    "frozen",
    "seal",
    "seal_whole",
    "unseal",
    "unseal_whole",
]

STATE_VERSION = 6

_VERSION_KEY = "version"
_NODE_KEY = "node"
_CONFIG_KEY = "config"
_DIGEST_KEY = "digest"
ENVELOPE = frozenset({_VERSION_KEY, _NODE_KEY, _CONFIG_KEY})
_ADDED_BY = {"VirtualRanks": "`virtual_ranks`"}
"""Last nodes of some graphs only, and what adds them: those alone a user has never named."""
_PLAIN = frozenset({int, str, bytes, float, bool, type(None)})


class Snapshot(dict[str, Any]):
    """The state of a node as others keep it: it never changes. `copy_state` makes plain data of it.

    Its values may be snapshots of sources, and objects with a method `to_state()`.
    """

    __slots__ = ()


def copy_state(state: Any) -> Any:
    """Return a copy of a state that shares nothing mutable with it, as plain data.

    A value with a method `to_state()` is replaced by what that returns.
    """
    kind = type(state)
    if kind in _PLAIN:
        return state
    if kind is dict or kind is Snapshot:
        return {
            key: value if type(value) in _PLAIN else copy_state(value)
            for key, value in state.items()
        }
    if kind is list:
        return [copy_state(value) for value in state]
    if kind is tuple:
        return state if _PLAIN.issuperset(map(type, state)) else tuple(map(copy_state, state))
    if isinstance(state, torch.Tensor):
        return state.detach().clone()
    if (to_state := getattr(state, "to_state", None)) is not None:
        return copy_state(to_state())
    return copy.deepcopy(state)


def frozen(state: Any) -> Any:
    """Return a copy of a state that shares with it only what never changes."""
    kind = type(state)
    if kind in _PLAIN or kind is Snapshot:
        return state
    if kind is dict:
        return {key: frozen(value) for key, value in state.items()}
    if kind is list:
        return [frozen(value) for value in state]
    if kind is tuple:
        return state if _PLAIN.issuperset(map(type, state)) else tuple(map(frozen, state))
    return state if hasattr(state, "to_state") else copy_state(state)


@dataclass(kw_only=True)
class NodeState:
    """What the state of a node holds: a subclass declares a field for each part.

    Annotations may be plain types, `X | None`, `list[X]`, tuples, `dict[K, V]` and `Any`;
    `SourceState` for what a source's `state_dict()` returned; `Count` for a number of items, and
    `Annotated` with another limit, `InRange` or `RowsOf`; or with `Sparse`, for a field that a
    state leaves out where it holds its default. They are checked when a state is loaded.
    """

    def validate(self) -> None:
        """Check, when a state is loaded, that the values of the fields go together.

        Raises:
            ValueError: they do not.
        """


S = TypeVar("S", bound=NodeState)


def seal(node: str, config: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a node: its envelope, and the values of its fields beside it."""
    return {_VERSION_KEY: STATE_VERSION, _NODE_KEY: node, _CONFIG_KEY: dict(config), **values}


def unseal(
    state: object,
    node: str,
    declared: type[S],
    config: Mapping[str, Any],
    fixed: Callable[[S], Collection[str]] | None = None,
) -> S:
    """Return a copy of what a sealed state holds, once it is known to fit.

    Args:
        state: what `seal` returned.
        node: the name that it was sealed under.
        declared: the dataclass that declares its fields.
        config: the present configuration of the node.
        fixed: what it holds -> the fields of `config` that must be the same also within
            `allow_mismatch`.

    Raises:
        StateError: `state` is no state of this node and version, lacks a field, holds what was not
            declared, is nested too deeply, or was saved with another configuration (this last only
            warns within `allow_mismatch`, unless the field is one of `fixed`).
    """
    with bounded_depth(node):
        return _unsealed(state, node, declared, config, fixed)


def _unsealed(
    state: object,
    node: str,
    declared: type[S],
    config: Mapping[str, Any],
    fixed: Callable[[S], Collection[str]] | None,
) -> S:
    if not isinstance(state, Mapping) or not isinstance(state.get(_NODE_KEY), str):
        raise StateError(
            f"the state for {node} must be a state saved by a {node}, but is "
            f"{_summary(state)} instead. Load it into the graph that saved it."
        )
    version, saved_node = state.get(_VERSION_KEY), state[_NODE_KEY]
    if saved_node != node:
        added = [_ADDED_BY[name] for name in (saved_node, node) if name in _ADDED_BY]
        has = " and ".join(added)
        remedy = (
            f" Make the `ODBDataLoader` with the {has} that it had when it saved." if added else ""
        )
        raise StateError(
            f"the state was saved by `{saved_node}`, but is loaded into `{node}`. "
            f"Build the graph with the same nodes in the same order as when it was saved.{remedy}"
        )
    if type(version) is not int or version != STATE_VERSION:
        raise StateError(
            f"the state of {node} has `version` {version!r}, but this odb_nodes reads "
            f"{STATE_VERSION}. Load it with the odb_nodes that saved it."
        )
    values = _declared_values(state, node, declared)
    saved_config = state[_CONFIG_KEY]
    if not isinstance(saved_config, Mapping):
        raise _damaged(node, {_CONFIG_KEY: "be a dict"}, state)
    try:
        found = declared(**copy_state(values))
        found.validate()
    except ValueError as error:
        raise StateError(f"the state of {node} is damaged: {error} {_EARLIER}") from error
    check_config(node, saved_config, config, fixed(found) if fixed is not None else ())
    return found


def _declared_values(state: Mapping[str, Any], node: str, declared: type[Any]) -> dict[str, Any]:
    """Return the values of the declared fields, which are all there and hold what they may."""
    names = [one.name for one in fields(declared)]
    expected, kind = [*sorted(ENVELOPE), *names], cast(Any, declared)
    sparse = sparse_defaults(kind)
    if missing := [name for name in expected if name not in state and name not in sparse]:
        raise StateError(
            f"the state of {node} lacks `{'`, `'.join(missing)}`: it is incomplete. {_EARLIER}"
        )
    if unknown := sorted(map(str, {*state} - {*expected})):
        raise StateError(
            f"the state of {node} has `{'`, `'.join(unknown)}`, which no {node} saves. {_EARLIER}"
        )
    values = {name: state[name] if name in state else sparse[name] for name in names}
    if broken := check_fields(declared, values):
        raise _damaged(node, broken, state)
    return values


def _damaged(node: str, broken: Mapping[str, str], state: Mapping[str, Any]) -> StateError:
    named = (f"`{name}` must {rule}, but is {state[name]!r:.80}" for name, rule in broken.items())
    return StateError(f"the state of {node} is damaged: {'; '.join(named)}. {_EARLIER}")


_EARLIER = "Use an earlier checkpoint."


@contextmanager
def bounded_depth(node: str) -> Iterator[None]:
    """Raise a `StateError` where a state is nested deeper than Python can follow."""
    try:
        yield
    except RecursionError:  # not `from` it: that holds a frame for each level
        raise StateError(
            f"the state of {node} is nested too deeply to be read (the recursion limit of Python "
            f"is {sys.getrecursionlimit()}): no node saves such a state. {_EARLIER}"
        ) from None


def _summary(value: object) -> str:
    if isinstance(value, Mapping):
        return f"a dict with keys {sorted(map(str, value))}"
    return f"{type(value).__name__} {str(value)[:40]!r}"


def seal_whole(holder: str, values: NodeState) -> dict[str, Any]:
    """Return the state of what holds a whole graph, or a run over one, with a digest of all of it.

    Args:
        holder: the name that it is sealed under.
        values: what it holds; it is copied.
    """
    return add_digest(seal(holder, {}, copy_state(vars(values))))


def unseal_whole(state: object, holder: str, declared: type[S]) -> S:
    """Return a copy of what `seal_whole` has sealed, once it is known to be whole.

    Args:
        state: what `seal_whole` returned.
        holder: the name that it was sealed under.
        declared: the dataclass of the values.

    Raises:
        StateError: see `unseal`; or bits have flipped, or parts were changed or swapped.
    """
    if not isinstance(state, Mapping):
        return unseal(state, holder, declared, {})
    sealed = {key: value for key, value in state.items() if key != _DIGEST_KEY}
    found = unseal(sealed, holder, declared, {})
    with bounded_depth(holder):
        digest = _digest(sealed)
    if not equal(state.get(_DIGEST_KEY), digest):
        raise StateError(
            f"the state of {holder} is damaged: its digest is not that of what was saved. "
            f"{_EARLIER}"
        )
    return found


def add_digest(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state with a digest of all that it holds."""
    return {**state, _DIGEST_KEY: _digest(state)}


def _digest(state: Any) -> int:
    """Return a CRC-32 of a state, which depends on its values alone, not on the order of keys."""
    try:
        text = _CANONICAL.encode(state)
    except TypeError:  # keys that JSON does not have, or that cannot be sorted
        text = _CANONICAL.encode(_with_text_keys(state))
    return zlib.crc32(text.encode())


def _describe(value: Any) -> Any:
    """Return what tells a value that JSON does not have from any other of its type."""
    kind = type(value)
    if kind is bytes:
        return ["bytes", len(value), zlib.crc32(value)]
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), [*value.shape], zlib.crc32(tensor_bytes(value).data)]
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return [str(value.dtype), [*value.shape], zlib.crc32(value.tobytes())]
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (set, frozenset)):
        return sorted(map(repr, value))
    return kind.__qualname__  # no plain data, which no file would hold; its text may vary


_CANONICAL = json.JSONEncoder(sort_keys=True, default=_describe)


def _with_text_keys(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {repr(key): _with_text_keys(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_with_text_keys(item) for item in value]
    return value
