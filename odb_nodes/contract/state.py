"""States: plain data in an envelope of version, node and configuration; whole ones with a digest.

A state loads with `torch.load(weights_only=True)`. The configuration in it decides the node's
output: a state of another one is refused, field by field. A digest says that a state is the one
that was saved, so values are not checked one by one. Each state that is handed out has one; the
states of sources within it are covered by it.
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

from odb_nodes._core.content import explain_unreadable, is_readable, tensor_bytes
from odb_nodes.contract.config import check_config
from odb_nodes.errors import StateError

STATE_VERSION = 12
ENVELOPE = frozenset({"version", "node", "config"})
DIGEST = "digest"
_ADDED_BY = {"VirtualRanks": "`virtual_ranks`"}
"""Last nodes of some graphs only, and what adds them: those alone a user has never named."""
_EARLIER = "Use an earlier checkpoint."

SourceState = Annotated[dict[str, Any], "of a source"]
"""What `snapshot` or `state_dict()` of another node returned."""

SourceStates = dict[str, SourceState]  # the states of several nodes, by name


@dataclass(kw_only=True)
class NodeState:
    """The state of a node: a subclass declares a field for each part.

    Values are plain data and tensors. A field that holds the state of a source is annotated as
    `SourceState` or `SourceStates`; other annotations are for the reader.
    """


S = TypeVar("S", bound=NodeState)


# --- copies ---------------------------------------------------------------------------------------


class Snapshot(dict[str, Any]):
    """The state of a node as others keep it: it never changes. `copy_state` makes plain data of it.

    Its values may be snapshots of sources, and objects with a method `to_state()`.
    """

    __slots__ = ()


_PLAIN: frozenset[type] = frozenset({int, str, bytes, float, bool, NoneType})
_CONSTANT = _PLAIN | {Snapshot}


def copy_state(state: Any) -> Any:
    """Return a copy of a state that shares nothing mutable with it, as plain data.

    A value with a method `to_state()` is replaced by what that returns.
    """
    return _copied(state, _PLAIN)


def kept(values: Mapping[str, Any], envelope: Mapping[str, Any]) -> Snapshot:
    """Return a state in an envelope that shares with some values only what never changes."""
    state = Snapshot(envelope)
    state.update(values)
    _copy_values(state, _CONSTANT)
    return state


def _copy_values(copied: dict[Any, Any], shared: frozenset[type]) -> None:
    """Replace the values of a new dict by copies, but those of the types in `shared`."""
    if not shared.issuperset(map(type, copied.values())):
        for key, value in copied.items():
            if type(value) not in shared:
                copied[key] = _copied(value, shared)


def _copied(state: Any, shared: frozenset[type]) -> Any:
    """Return a copy but of values of the types in `shared`: `_PLAIN`, or all that is constant."""
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
    if (to_state := getattr(state, "to_state", None)) is not None:
        return state if shared is _CONSTANT else _copied(to_state(), shared)
    return copy.deepcopy(state)


# --- declared fields ------------------------------------------------------------------------------


def check_declaration(node: str, declared: Any, base: Any) -> None:
    """Raise a `TypeError` unless `STATE` of a node is a dataclass whose fields can be saved."""
    own = vars(declared) if isinstance(declared, type) and issubclass(declared, base) else {}
    if "__dataclass_fields__" not in own or "__slots__" in own:
        raise TypeError(
            f"`STATE` of `{node}` must be a dataclass derived from `{base.__name__}`, without "
            f"`slots`, but is {declared!r} instead: put `@dataclass(kw_only=True)` over it."
        )
    if reserved := (ENVELOPE | {DIGEST}).intersection(own["__dataclass_fields__"]):
        raise TypeError(
            f"`STATE` of `{node}` must not have a field {sorted(reserved)}: the envelope of a "
            "state has one. Give it another name."
        )


def source_fields(declared: Any) -> dict[str, bool]:
    """Return the fields that hold the states of sources, and whether each holds several."""
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
    if others := vars(saved).keys() - {one.name for one in fields(declared)}:
        raise TypeError(
            f"what `save` of `{node}` returned has {sorted(others)}, which are no fields of "
            f"`{declared.__name__}`. Declare them there."
        )
    own = {name: getattr(saved, name) for name in vars(saved).keys() - source_fields(declared)}
    if not is_readable(copied := copy_state(own)):
        raise TypeError(explain_unreadable(copied, f"save() of {node}"))


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
            seen = f"{type(state).__name__} {str(state)[:40]!r}"
            if isinstance(state, Mapping):
                seen = f"a dict with keys {sorted(map(str, state))}"
            raise StateError(
                f"the state for {node} must be a state saved by a {node}, but is {seen} instead. "
                "Load it into the graph that saved it."
            )
        names = [one.name for one in fields(declared)]
        _check_envelope(state, node, [*sorted(ENVELOPE), *names])
        if DIGEST in state:
            check_digest(state, node)
        found = declared(**copy_state({name: state[name] for name in names}))
        check_config(node, state["config"], config, fixed(found) if fixed is not None else ())
        return found


def _check_envelope(state: Mapping[str, Any], node: str, expected: list[str]) -> None:
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


# --- the digest -----------------------------------------------------------------------------------


def add_digest(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state with a digest of all that it holds."""
    return {**state, DIGEST: _digest(state)}


def check_digest(state: Mapping[str, Any], node: str) -> None:
    """Raise a `StateError` unless a state is what was saved."""
    found, saved = _digest(state), state.get(DIGEST)
    if type(saved) is not int or saved != found:
        raise StateError(
            f"the state of {node} is damaged: its digest is not that of what was saved. {_EARLIER}"
        )


def _digest(state: Mapping[str, Any]) -> int:
    """Return a CRC-32 of the values of a state and their types, whatever the order of keys."""
    values = _ordered({key: value for key, value in state.items() if key != DIGEST})
    return crc32(marshal.dumps(values, 2))  # in version 2, equal values are written alike


_WRITTEN = _PLAIN - {bytes}


def _sorted(keys: Iterable[Any]) -> list[Any]:
    try:
        return sorted(keys)
    except TypeError:  # of several types
        return sorted(keys, key=repr)


def _ordered(value: Any) -> Any:
    """Return what `marshal` writes differently for each value, and equally for equal ones.

    No state has an ellipsis: it begins what stands for a value.
    """
    kind = type(value)
    if kind in _WRITTEN:
        return value
    if kind is bytes:
        return ..., len(value), crc32(value)
    if kind is dict or isinstance(value, Mapping):
        keys = _sorted(value)
        written = [..., keys if _WRITTEN.issuperset(map(type, keys)) else [*map(_ordered, keys)]]
        for key in keys:
            one = value[key]
            written.append(one if type(one) in _WRITTEN else _ordered(one))
        return written
    if kind is list:
        return [one if type(one) in _WRITTEN else _ordered(one) for one in value]
    if kind is tuple:
        return tuple([one if type(one) in _WRITTEN else _ordered(one) for one in value])
    if isinstance(value, torch.Tensor):
        dense = value.to_dense() if value.layout is not torch.strided else value
        return ..., str(value.dtype), [*value.shape], crc32(tensor_bytes(dense).data)
    if isinstance(value, (set, frozenset)):
        return ..., kind.__name__, *_sorted(map(_ordered, value))
    # What is no plain data may show its address, and `load_state` would refuse it.
    return ..., kind.__qualname__, repr(value) if kind.__module__ in ("builtins", "torch") else ""
