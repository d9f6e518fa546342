"""States: plain data in an envelope of version, node and configuration, with a digest.

A state loads with `torch.load(weights_only=True)`. Its configuration is compared, field by field,
with the configuration of the node that loads the state. The digest proves that a state is
unchanged, so the values need no checks. Only the outermost state has a digest, which also covers
the states of sources.
"""

from __future__ import annotations

import copy
import marshal
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from types import NoneType
from typing import Annotated, Any, TypeVar, get_type_hints

import torch
from zlib_ng.zlib_ng import crc32

from odb_nodes._support.arrays import IntArray, int64_array
from odb_nodes._support.content import explain_unreadable, is_readable, tensor_bytes
from odb_nodes.core.contract.config import check_config
from odb_nodes.errors import StateError

STATE_VERSION = 12
ENVELOPE = frozenset({"version", "node", "config"})
DIGEST = "digest"
_ADDED_BY = {"VirtualRanks": "`virtual_ranks`", "PlannedGroups": "`lengths`"}
"""Nodes that `ODBDataLoader` adds to some graphs only, and the option that adds them."""
_EARLIER = "Use an earlier checkpoint."

SourceState = Annotated[dict[str, Any], "of a source"]
"""The result of `snapshot(source)`, or of `state_dict()` of another node."""

SourceStates = dict[str, SourceState]  # by name of the source


@dataclass(kw_only=True)
class NodeState:
    """The state of a node. A subclass declares the fields.

    Values are plain data and tensors. A field for the state of a source must be annotated as
    `SourceState`, or as `SourceStates` for a dict of sources.
    """


S = TypeVar("S", bound=NodeState)


# --- copies ---------------------------------------------------------------------------------------


class Snapshot(dict[str, Any]):
    """An immutable state of a node, as other nodes keep it. `copy_state` converts it to plain data.

    Its values may be snapshots of sources, and objects with a method `to_state()`.
    """

    __slots__ = ()


_PLAIN: frozenset[type] = frozenset({int, str, bytes, float, bool, NoneType})
_CONSTANT = _PLAIN | {Snapshot}


def copy_state(state: Any) -> Any:
    """Return a copy of a state that shares nothing mutable with it, as plain data.

    A value with a method `to_state()` is replaced by the result of that method.
    """
    return _copied(state, _PLAIN)


def to_snapshot(values: Mapping[str, Any], envelope: Mapping[str, Any]) -> Snapshot:
    """Return a `Snapshot` of an envelope and values, which shares only immutable data with them."""
    state = Snapshot(envelope)
    state.update(values)
    _copy_values(state, _CONSTANT)
    return state


def _copy_values(copied: dict[Any, Any], shared: frozenset[type]) -> None:
    """Replace the values of a new dict by copies, except values of the types in `shared`."""
    if not shared.issuperset(map(type, copied.values())):
        for key, value in copied.items():
            if type(value) not in shared:
                copied[key] = _copied(value, shared)


def _copied(state: Any, shared: frozenset[type]) -> Any:
    """Return a copy, which shares values of the types in `shared`: `_PLAIN` or `_CONSTANT`."""
    kind = type(state)
    if kind in shared:
        return state
    if kind is dict or kind is Snapshot:
        copied = dict(state)
        _copy_values(copied, shared)
        return copied
    if kind is list:
        return [_copied(value, shared) for value in state]
    if kind is tuple:
        if _PLAIN.issuperset(map(type, state)):
            return state
        return tuple([_copied(value, shared) for value in state])
    if isinstance(state, torch.Tensor):
        return state.detach().clone()
    if hasattr(state, "to_state"):
        return state if shared is _CONSTANT else _copied(state.to_state(), shared)
    return copy.deepcopy(state)


# --- declared fields ------------------------------------------------------------------------------


def check_declaration(node: str, declared: Any, base: Any) -> None:
    """Raise a `TypeError` unless the `STATE` of a node is a dataclass whose fields can be saved."""
    is_derived = isinstance(declared, type) and issubclass(declared, base)
    attributes = vars(declared) if is_derived else {}
    if "__dataclass_fields__" not in attributes or "__slots__" in attributes:
        raise TypeError(
            f"`STATE` of `{node}` must be a dataclass derived from `{base.__name__}`, without "
            f"`slots`, but is {declared!r} instead: put `@dataclass(kw_only=True)` over it."
        )
    if reserved := (ENVELOPE | {DIGEST}).intersection(attributes["__dataclass_fields__"]):
        raise TypeError(
            f"`STATE` of `{node}` must not have a field {sorted(reserved)}, which the envelope of "
            "a state has. Give it another name."
        )


def source_fields(declared: Any) -> dict[str, bool]:
    """Return the fields for states of sources, and whether each holds a dict of states."""
    try:
        hints = get_type_hints(declared, include_extras=True)
    except NameError as error:
        raise TypeError(
            f"the annotations of `{declared.__name__}`, the `STATE` of a node, are read when the "
            f"node is defined, but {error}. Import or define it at the top of the module, not "
            "below `if TYPE_CHECKING:` or in a function."
        ) from None
    states = (SourceState, SourceStates)
    return {name: hint == SourceStates for name, hint in hints.items() if hint in states}


def check_saved(node: str, config: object, declared: Any, saved: Any) -> None:
    """Raise a `TypeError` unless a node saves what it declares, as plain data."""
    if not isinstance(config, dict):
        raise TypeError(f"`fingerprint` of `{node}` must return a dict, but returned {config!r}.")
    if type(saved) is not declared:
        raise TypeError(
            f"`save` of `{node}` must return its `STATE`, which is `{declared.__name__}`, but "
            f"returned {saved!r:.80}. Declare what it returns: `STATE = ...`."
        )
    if undeclared := vars(saved).keys() - {field.name for field in fields(declared)}:
        raise TypeError(
            f"the result of `save` of `{node}` has {sorted(undeclared)}, which are no fields of "
            f"`{declared.__name__}`. Declare these fields there."
        )
    names = vars(saved).keys() - source_fields(declared)
    copied = copy_state({name: getattr(saved, name) for name in names})
    if not is_readable(copied):
        raise TypeError(explain_unreadable(copied, f"save() of {node}"))


# --- the envelope ---------------------------------------------------------------------------------


def seal(node: str, config: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a node: the envelope and the values of its fields in one dict."""
    return {"version": STATE_VERSION, "node": node, "config": config, **values}


def unseal(
    state: object,
    node: str,
    declared: type[S],
    config: Mapping[str, Any],
    fixed: Callable[[S], Collection[str]] | None = None,
) -> S:
    """Return a copy of the content of a sealed state, after all checks."""
    with bounded_depth(node):
        if not isinstance(state, Mapping) or not isinstance(state.get("node"), str):
            seen = f"{type(state).__name__} {str(state)[:40]!r}"
            if isinstance(state, Mapping):
                seen = f"a dict with keys {sorted(map(str, state))}"
            raise StateError(
                f"the state for {node} must be a state saved by a {node}, but is {seen} instead. "
                "Load it into the graph that saved it."
            )
        names = [field.name for field in fields(declared)]
        _check_envelope(state, node, [*sorted(ENVELOPE), *names])
        if DIGEST in state:
            check_digest(state, node)
        content = declared(**copy_state({name: state[name] for name in names}))
        check_config(node, state["config"], config, () if fixed is None else fixed(content))
        return content


def _check_envelope(state: Mapping[str, Any], node: str, expected: list[str]) -> None:
    version = state.get("version")
    saved_node = state["node"]
    if saved_node != node:
        options = [_ADDED_BY[name] for name in (saved_node, node) if name in _ADDED_BY]
        remedy = ""
        if options:
            remedy = f" Make it with the {' and '.join(options)} that it had when saved."
        raise StateError(
            f"the state was saved by `{saved_node}`, but is loaded into `{node}`. Build the graph "
            f"with the same nodes in the same order as when it was saved.{remedy}"
        )
    if type(version) is not int or version != STATE_VERSION:
        raise StateError(
            f"the state of {node} has `version` {version!r}, but this odb_nodes reads "
            f"{STATE_VERSION}. Load it with the odb_nodes that saved it."
        )
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
    except RecursionError:  # Not raised from this error, which holds a frame for each level.
        raise StateError(
            f"the state of {node} is nested too deeply to be read (the recursion limit of Python "
            f"is {sys.getrecursionlimit()}): no node saves such a state. {_EARLIER}"
        ) from None


def seal_whole(holder: str, values: NodeState) -> dict[str, Any]:
    """Return the state of a `Loader`, or of a run over it: a copy, with a digest."""
    return add_digest(seal(holder, {}, copy_state(vars(values))))


def unseal_whole(state: object, holder: str, declared: type[S]) -> S:
    """Return a copy of the values that `seal_whole` has sealed."""
    content = unseal(state, holder, declared, {})
    assert isinstance(state, Mapping)
    if DIGEST not in state:
        check_digest(state, holder)
    return content


def integers_of(data: bytes | None, field: str) -> IntArray:
    """Return the integers that a field of a state holds as 8 bytes each."""
    try:
        return int64_array(data)
    except (ValueError, TypeError) as error:
        raise StateError(f"`{field}` of a state is damaged: {error}. {_EARLIER}") from error


# --- the digest -----------------------------------------------------------------------------------


def add_digest(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state with the digest of its content."""
    return {**state, DIGEST: _digest(state)}


def check_digest(state: Mapping[str, Any], node: str) -> None:
    """Raise a `StateError` unless the digest of a state fits its content."""
    saved = state.get(DIGEST)
    if type(saved) is not int or saved != _digest(state):
        raise StateError(
            f"the state of {node} is damaged: its digest is not the digest of its content. "
            f"{_EARLIER}"
        )


def _digest(state: Mapping[str, Any]) -> int:
    """Return a CRC-32 of the values of a state and their types, for any order of keys."""
    canonical = _canonical({key: value for key, value in state.items() if key != DIGEST})
    return crc32(marshal.dumps(canonical, 2))  # Version 2 writes equal values alike.


_MARSHALLED = _PLAIN - {bytes}


def _sorted(keys: Iterable[Any]) -> list[Any]:
    try:
        return sorted(keys)
    except TypeError:  # The keys have several types.
        return sorted(keys, key=repr)


def _canonical(value: Any) -> Any:
    """Return the canonical form of a value for hashing: equal values have equal forms.

    A leading `...`, which no state holds, marks a form that stands for a value of another type.
    """
    kind = type(value)
    if kind in _MARSHALLED:
        return value
    if kind is bytes:
        return ..., len(value), crc32(value)
    if kind is dict or isinstance(value, Mapping):
        keys = _sorted(value)
        are_plain = _MARSHALLED.issuperset(map(type, keys))
        form: list[Any] = [..., keys if are_plain else [*map(_canonical, keys)]]
        for key in keys:
            item = value[key]
            form.append(item if type(item) in _MARSHALLED else _canonical(item))
        return form
    if kind is list:
        return [item if type(item) in _MARSHALLED else _canonical(item) for item in value]
    if kind is tuple:
        return tuple([item if type(item) in _MARSHALLED else _canonical(item) for item in value])
    if isinstance(value, torch.Tensor):
        dense = value.to_dense() if value.layout is not torch.strided else value
        return ..., str(value.dtype), [*value.shape], crc32(tensor_bytes(dense).data)
    if isinstance(value, (set, frozenset)):
        return ..., kind.__name__, *_sorted(map(_canonical, value))
    # The `repr` of other types may show an address, and `load_state` would refuse them.
    return ..., kind.__qualname__, repr(value) if kind.__module__ in ("builtins", "torch") else ""
