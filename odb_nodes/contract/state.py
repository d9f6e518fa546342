"""States: plain data in an envelope of version, node and configuration; whole ones with a digest.

A state loads with `torch.load(weights_only=True)`. The configuration in it decides the node's
output: a state of another one is refused, field by field. A digest says that a state is the one
that was saved, so values are not checked one by one. Each state that is handed out has one; the
states of sources within it are covered by it.
"""

from __future__ import annotations

import copy
import json
import sys
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cache
from types import NoneType
from typing import Annotated, Any, TypeVar, get_type_hints

import torch

from odb_nodes._core.codec import explain_unreadable, is_readable, tensor_bytes
from odb_nodes.contract.config import check_config, equal
from odb_nodes.errors import StateError

STATE_VERSION = 7
ENVELOPE = frozenset({"version", "node", "config"})
DIGEST = "digest"
_ADDED_BY = {"VirtualRanks": "`virtual_ranks`"}
"""Last nodes of some graphs only, and what adds them: those alone a user has never named."""
_EARLIER = "Use an earlier checkpoint."
_PLAIN = frozenset({int, str, bytes, float, bool, NoneType})
_WRITTEN = _PLAIN - {bytes}  # by JSON

SourceState = Annotated[dict[str, Any], "of a source"]
"""What `snapshot` or `state_dict()` of another node returned."""

SourceStates = dict[str, SourceState]
"""The states of several nodes, by name."""


@dataclass(kw_only=True)
class NodeState:
    """What the state of a node holds: a subclass declares a field for each part.

    Values are plain data and tensors, see `check_saved`. A field with the state of a source is
    annotated as `SourceState` or `SourceStates`; other annotations are for the reader.
    """


S = TypeVar("S", bound=NodeState)


# --- copies ---------------------------------------------------------------------------------------


class Snapshot(dict[str, Any]):
    """The state of a node as others keep it: it never changes. `copy_state` makes plain data of it.

    Its values may be snapshots of sources, and objects with a method `to_state()`.
    """

    __slots__ = ()


_SHARED = _PLAIN | {Snapshot}


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


def frozen_state(values: dict[str, Any]) -> Snapshot:
    """Return a state that shares with some values only what never changes."""
    state = Snapshot(values)
    for name, value in values.items():
        if type(value) not in _SHARED:
            state[name] = frozen(value)
    return state


def frozen(state: Any) -> Any:
    """Return a copy of a part of a state that shares with it only what never changes."""
    kind = type(state)
    if kind in _SHARED:
        return state
    if kind is dict:
        return {
            key: value if type(value) in _PLAIN else frozen(value) for key, value in state.items()
        }
    if kind is list:
        return [frozen(value) for value in state]
    if kind is tuple:
        return state if _PLAIN.issuperset(map(type, state)) else tuple(map(frozen, state))
    return state if hasattr(state, "to_state") else copy_state(state)


# --- declared fields ------------------------------------------------------------------------------


def check_declaration(node: str, declared: Any, base: type[Any]) -> None:
    """Raise a `TypeError` unless `STATE` of a node is a dataclass whose fields can be checked."""
    if not (isinstance(declared, type) and issubclass(declared, base)):
        raise TypeError(
            f"`STATE` of `{node}` must be a dataclass derived from `{base.__name__}`, but is "
            f"{declared!r} instead."
        )
    if "__dataclass_fields__" not in vars(declared):
        raise TypeError(
            f"`{declared.__name__}` must be a dataclass: put `@dataclass(kw_only=True)` over it."
        )
    if "__slots__" in vars(declared):
        raise TypeError(f"`{declared.__name__}` must be a dataclass without `slots`.")
    try:
        names = {*_hints(declared)}
    except NameError as error:
        raise TypeError(f"an annotation of `{declared.__name__}` is not known: {error}.") from error
    if reserved := (ENVELOPE | {DIGEST}) & names:
        raise TypeError(
            f"`STATE` of `{node}` must not have a field {sorted(reserved)}: the envelope of a "
            "state has one. Give it another name."
        )


@cache
def _hints(declared: Any) -> dict[str, Any]:
    hints = get_type_hints(declared, include_extras=True)
    return {one.name: hints[one.name] for one in fields(declared)}


@cache
def source_fields(declared: Any) -> dict[str, bool]:
    """Return the fields that hold the states of sources, and whether each holds several."""
    states = (SourceState, SourceStates)
    return {name: hint == SourceStates for name, hint in _hints(declared).items() if hint in states}


def check_saved(node: str, config: object, declared: Any, saved: Any) -> None:
    """Raise a `TypeError` unless a node saves what it declares, as plain data."""
    if not isinstance(config, dict):
        raise TypeError(f"`fingerprint` of `{node}` must return a dict, but returned {config!r}.")
    expected: Any = declared  # `type(saved) is declared` would narrow it
    if type(saved) is not expected:
        raise TypeError(
            f"`save` of `{node}` must return its `STATE`, which is `{expected.__name__}`, but "
            f"returned {saved!r:.80}. Declare what it returns: `STATE = ...`."
        )
    if others := vars(saved).keys() - {one.name for one in fields(declared)}:
        raise TypeError(
            f"what `save` of `{node}` returned has {sorted(others)}, which are no fields of "
            f"`{declared.__name__}`. Declare them there."
        )
    for name in vars(saved).keys() - source_fields(declared).keys():
        value = copy_state(getattr(saved, name))
        if not _is_plain(value):
            raise TypeError(explain_unreadable(value, f"save().{name} of {node}"))


def _is_plain(value: Any) -> bool:
    kind = type(value)
    if kind is dict:
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    if kind in (list, tuple):
        return all(map(_is_plain, value))
    return (kind in _PLAIN and value != b"") or is_readable(value)


# --- the envelope ---------------------------------------------------------------------------------


def seal(node: str, config: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a node: its envelope, and the values of its fields beside it."""
    return {"version": STATE_VERSION, "node": node, "config": config, **values}


def unseal(
    state: object,
    node: str,
    declared: type[S],
    config: Mapping[str, Any],
    fixed: Callable[[S], Collection[str]] | None = None,
) -> S:
    """Return a copy of what a sealed state holds, once it is known to fit.

    A state within another has no digest of its own: that of the outer one covers it.
    """
    with bounded_depth(node):
        if not isinstance(state, Mapping) or not isinstance(state.get("node"), str):
            raise StateError(
                f"the state for {node} must be a state saved by a {node}, but is "
                f"{_summary(state)} instead. Load it into the graph that saved it."
            )
        _check_envelope(state, node)
        names = [one.name for one in fields(declared)]
        _check_names(state, node, names)
        if DIGEST in state:
            check_digest(state, node)
        found = declared(**copy_state({name: state[name] for name in names}))
        check_config(node, state["config"], config, fixed(found) if fixed is not None else ())
        return found


def _check_envelope(state: Mapping[str, Any], node: str) -> None:
    version, saved_node = state.get("version"), state["node"]
    if saved_node != node:
        added = [_ADDED_BY[name] for name in (saved_node, node) if name in _ADDED_BY]
        remedy = f" Make the `ODBDataLoader` with the {' and '.join(added)} that it had when saved."
        raise StateError(
            f"the state was saved by `{saved_node}`, but is loaded into `{node}`. Build the graph "
            f"with the same nodes in the same order as when it was saved.{remedy if added else ''}"
        )
    if type(version) is not int or version != STATE_VERSION:
        raise StateError(
            f"the state of {node} has `version` {version!r}, but this odb_nodes reads "
            f"{STATE_VERSION}. Load it with the odb_nodes that saved it."
        )


def _check_names(state: Mapping[str, Any], node: str, names: Collection[str]) -> None:
    expected = [*sorted(ENVELOPE), *names]
    if missing := [name for name in expected if name not in state]:
        raise StateError(
            f"the state of {node} lacks `{'`, `'.join(missing)}`: it is incomplete. {_EARLIER}"
        )
    if unknown := sorted(map(str, {*state} - {*expected, DIGEST})):
        raise StateError(
            f"the state of {node} has `{'`, `'.join(unknown)}`, which no {node} saves. {_EARLIER}"
        )
    if not isinstance(state["config"], Mapping):
        raise StateError(
            f"the state of {node} is damaged: `config` must be a dict, but is "
            f"{state['config']!r:.80}. {_EARLIER}"
        )


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


# --- the digest -----------------------------------------------------------------------------------


def seal_whole(holder: str, values: NodeState) -> dict[str, Any]:
    """Return the state of what holds a whole graph, or a run over one: a copy, with a digest."""
    return add_digest(seal(holder, {}, copy_state(vars(values))))


def unseal_whole(state: object, holder: str, declared: type[S]) -> S:
    """Return a copy of what `seal_whole` has sealed."""
    found = unseal(state, holder, declared, {})
    assert isinstance(state, Mapping)
    if DIGEST not in state:
        check_digest(state, holder)
    return found


def add_digest(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state with a digest of all that it holds."""
    return {**state, DIGEST: _digest(state)}


def check_digest(state: Mapping[str, Any], node: str) -> None:
    """Raise a `StateError` unless a state is what was saved."""
    found = _digest({key: value for key, value in state.items() if key != DIGEST})
    if not equal(state.get(DIGEST), found):
        raise StateError(
            f"the state of {node} is damaged: its digest is not that of what was saved. {_EARLIER}"
        )


def _digest(state: Any) -> int:
    """Return a CRC-32 of the values of a state and their types, whatever the order of keys."""
    return zlib.crc32(_encode(_canonical(state)).encode())


_encode = json.JSONEncoder(sort_keys=True).encode
_SHOWN_WHOLE = (complex, bytearray, torch.Size, torch.dtype, torch.device)


def _canonical(value: Any) -> Any:
    """Return what JSON writes differently for each value: it has no tuples, and no other keys."""
    kind = type(value)
    if kind is bytes:
        return ["bytes", len(value), zlib.crc32(value)]
    if kind in _PLAIN:
        return value
    if kind is dict or isinstance(value, Mapping):
        return {
            key if type(key) is str else f"not text: {key!r}": (
                one if type(one) in _WRITTEN else _canonical(one)
            )
            for key, one in value.items()
        }
    if kind in (list, tuple):
        return [
            kind.__name__,
            *(one if type(one) in _WRITTEN else _canonical(one) for one in value),
        ]
    if isinstance(value, torch.Tensor):
        dense = value.to_dense() if value.layout is not torch.strided else value
        return [str(value.dtype), [*value.shape], zlib.crc32(tensor_bytes(dense).data)]
    if isinstance(value, (set, frozenset)):
        return [kind.__name__, *sorted(_encode(_canonical(one)) for one in value)]
    if isinstance(value, _SHOWN_WHOLE):
        return [kind.__name__, repr(value)]
    return kind.__qualname__  # no plain data, which `load_state` would refuse
