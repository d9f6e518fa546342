"""The envelope that every node's state travels in: version, node, configuration, fields.

A state is plain data: dicts, lists, tuples, numbers, strings, bytes and tensors, so it loads with
`torch.load(weights_only=True)`. The configuration in it is what decides the node's output; a state
that is loaded into a node of another configuration is refused, field by field.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import os
import pickle
import re
import tempfile
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

from odb_nodes.errors import StateError

__all__ = [
    "STATE_VERSION",
    "allow_mismatch",
    "copy_state",
    "load_state",
    "save_state",
    "seal",
    "unseal",
]

STATE_VERSION = 1

_VERSION_KEY = "version"
_NODE_KEY = "node"
_CONFIG_KEY = "config"
_PLAIN = (int, str, bytes, float, bool, type(None))

_strict: contextvars.ContextVar[bool] = contextvars.ContextVar("odb_nodes_strict", default=True)


@contextlib.contextmanager
def allow_mismatch(allow: bool = True) -> Iterator[None]:
    """Within this context a changed configuration field warns instead of raising."""
    token = _strict.set(not allow)
    try:
        yield
    finally:
        _strict.reset(token)


def copy_state(state: Any) -> Any:
    """Return a copy of a state that shares nothing mutable with it."""
    kind = type(state)
    if kind in _PLAIN:
        return state
    if kind is dict:
        return {key: copy_state(value) for key, value in state.items()}
    if kind is list:
        return [copy_state(value) for value in state]
    if kind is tuple:
        return tuple([copy_state(value) for value in state])
    if isinstance(state, torch.Tensor):
        return state.detach().clone()
    return copy.deepcopy(state)


def seal(node: str, config: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    """Return the state of a node: its envelope, and `fields` beside it."""
    return {_VERSION_KEY: STATE_VERSION, _NODE_KEY: node, _CONFIG_KEY: dict(config), **fields}


def unseal(
    state: object, node: str, config: Mapping[str, Any], fields: tuple[str, ...]
) -> dict[str, Any]:
    """Return a copy of the `fields` of a sealed state, once it is known to fit.

    Raises:
        StateError: `state` is no state of this node and version, lacks a field, or was saved with
            another configuration (this last only warns within `allow_mismatch`).
    """
    if not isinstance(state, Mapping) or _NODE_KEY not in state:
        raise StateError(
            f"the state for {node} must be a state saved by a {node}, but is "
            f"{_summary(state)} instead. Load it into the graph that saved it."
        )
    version, saved_node = state.get(_VERSION_KEY), state[_NODE_KEY]
    if saved_node != node:
        raise StateError(
            f"the state was saved by `{saved_node}`, but is loaded into `{node}`. "
            "Build the graph with the same nodes in the same order as when it was saved."
        )
    if version != STATE_VERSION:
        raise StateError(
            f"the state of {node} has `version` {version!r}, but this odb_nodes reads "
            f"{STATE_VERSION}. Load it with the odb_nodes that saved it."
        )
    missing = [name for name in (_CONFIG_KEY, *fields) if name not in state]
    if missing:
        raise StateError(
            f"the state of {node} lacks `{'`, `'.join(missing)}`: it is incomplete. "
            "Use an earlier checkpoint."
        )
    _check_config(node, state[_CONFIG_KEY], config)
    return {name: copy_state(state[name]) for name in fields}


def _check_config(node: str, saved: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    changed = []
    for name in sorted({*saved, *present}):
        if saved.get(name, _ABSENT) != present.get(name, _ABSENT):
            values = repr(saved.get(name, "absent")), repr(present.get(name, "absent"))
            before, now = _where_they_differ(*values)
            changed.append(f"`{name}` was {before} when saved, but is {now} now")
    if not changed:
        return
    message = (
        f"the state does not fit {node}: {'; '.join(changed)}. Build the node as it was, or load "
        "with `strict=False` if the change is meant: the rest of the epoch then differs, and after "
        "a change of the order of samples it may repeat or miss some."
    )
    if _strict.get():
        raise StateError(message)
    warnings.warn(message, stacklevel=2)


def _where_they_differ(*texts: str) -> tuple[str, ...]:
    """Return texts; of long ones the part from a little before they differ."""
    if max(map(len, texts)) <= _LONG_CHARACTERS:
        return texts
    alike = takewhile(lambda letters: len(set(letters)) == 1, zip(*texts, strict=False))
    start = max(0, sum(1 for _ in alike) - _CONTEXT_CHARACTERS)
    shown = []
    for text in texts:
        part = text[start : start + _LONG_CHARACTERS]
        shown.append(f"{'...' * (start > 0)}{part}{'...' * (start + len(part) < len(text))}")
    return tuple(shown)


_ABSENT = object()
_LONG_CHARACTERS = 160
_CONTEXT_CHARACTERS = 40


def _summary(value: object) -> str:
    if isinstance(value, Mapping):
        return f"a dict with keys {sorted(map(str, value))}"
    return f"{type(value).__name__} {str(value)[:40]!r}"


def save_state(state: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a state to a file, atomically: a reader finds the old file or the new one, whole.

    Args:
        state: what `Loader.state_dict()` returned, alone or in a dict with other plain data and
            tensors (a model's `state_dict()`, a step count).
        path: the file; its folder must exist.

    Raises:
        TypeError: `path` is no path.
        FileNotFoundError: the folder does not exist.
        StateError: `state` holds something else than plain data and tensors. A file that was at
            `path` before is kept.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(
            f"`path` must be a path, but is a `{type(path).__name__}` instead. The state comes "
            "first: `save_state(state, path)`."
        )
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"`{path.parent}` is no folder: make it before saving into it.")
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        _check_readable(temporary)
        os.chmod(temporary, _mode_of(path))
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _check_readable(path: str) -> None:
    """Raise if a file cannot be read again: it must not replace one that can."""
    try:
        torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise StateError(
            "`state` must hold plain data and tensors only (numpy's are not: use `float(x)` and "
            f"`torch.from_numpy(x)`), but holds {_refused(error)}."
        ) from error


def _refused(error: pickle.UnpicklingError) -> str:
    """Return what torch refused to load, out of its long message."""
    found = re.search(r"Unsupported \w+: (?:GLOBAL )?(\S+)", str(error))
    return f"`{found[1]}`" if found else type(error).__name__


def _mode_of(path: Path) -> int:
    """Return the permissions that a file has, or would have if it were made."""
    if path.exists():
        return path.stat().st_mode & 0o777
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def load_state(path: str | os.PathLike[str]) -> Any:
    """Read a file that `save_state` wrote, with `torch.load(weights_only=True)`.

    Raises:
        FileNotFoundError: there is no such file.
        StateError: the file is truncated, or holds something else than plain data and tensors.
    """
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"`{path}` is a folder, not a state file.")
    try:
        with zipfile.ZipFile(path) as archive:  # torch itself does not look at the checksums
            if (damaged := archive.testzip()) is not None:
                raise ValueError(f"checksum of {damaged}")
        return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise
    except pickle.UnpicklingError as error:
        raise StateError(
            f"`{path}` is not a state file: it holds something else than plain data and tensors "
            f"(numpy's are not): {_refused(error)}."
        ) from error
    except Exception as error:
        raise StateError(
            f"`{path}` ({path.stat().st_size} bytes) is truncated or not a state file "
            f"({type(error).__name__}). Use an earlier checkpoint."
        ) from error
