"""Configurations: what decides a node's output, compared when a state is loaded."""

from __future__ import annotations

import contextlib
import contextvars
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import takewhile
from typing import Any

from odb_nodes._core.user_warning import warn_user
from odb_nodes.errors import StateError

__all__ = [
    "allow_mismatch",
    "allow_smaller_budget",
    "check_config",
    "epoch_is_left",
    "equal",
    "leave_epoch",
    "mismatch_is_allowed",
    "sealed_configs",
    "several_changes",
    "smaller_budget_is_allowed",
]

_REMEDY = (
    "Build the graph as it was, or load with `strict=False` if the change is meant: the rest of "
    "the epoch then differs, and after a change of the order of samples it may repeat or miss some."
)
_ABSENT = object()
_BUDGET_LIMITS = ("budget.tokens", "budget.max_samples", "budget.max_patches")
_LONG_CHARACTERS = 160
_CONTEXT_CHARACTERS = 40

_LOAD_SMALLER = "To go on with a smaller budget, load with `change_budget=True`. "
_ONLY_SMALLER = "With `change_budget=True` the limits of a budget may only become smaller. "
_NO_SHAPES = (
    "With `shapes` a budget cannot become smaller within an epoch, also not by `change_budget`: "
    "groups that were formed before would have more rows than their shape has now. "
)

_OF_THE_JOB = "RankAligner"  # the node whose ranks are those of the job

_strict: contextvars.ContextVar[bool] = contextvars.ContextVar("odb_nodes_strict", default=True)
_smaller: contextvars.ContextVar[bool] = contextvars.ContextVar("odb_nodes_smaller", default=False)
_left: contextvars.ContextVar[bool] = contextvars.ContextVar("odb_nodes_left", default=False)


@contextlib.contextmanager
def allow_mismatch(allow: bool = True) -> Iterator[None]:
    """Within this context a changed configuration field warns instead of raising."""
    token = _strict.set(not allow)
    try:
        yield
    finally:
        _strict.reset(token)


@contextlib.contextmanager
def allow_smaller_budget(allow: bool = True) -> Iterator[None]:
    """Within this context the limits of a budget may be lower than they were."""
    token = _smaller.set(allow)
    try:
        yield
    finally:
        _smaller.reset(token)


@contextlib.contextmanager
def leave_epoch(leave: bool = True) -> Iterator[None]:
    """Within this context a state is restored whose epoch does not go on: the next one follows."""
    token = _left.set(leave)
    try:
        yield
    finally:
        _left.reset(token)


def epoch_is_left() -> bool:
    """Tell whether nothing follows in the epoch of the state that is being loaded."""
    return _left.get()


def smaller_budget_is_allowed() -> bool:
    """Tell whether the limits of a budget may be lower than those of the state being loaded."""
    return _smaller.get()


def mismatch_is_allowed() -> bool:
    """Tell whether the state that is being loaded need not fit, as the user has said."""
    return not _strict.get()


def check_config(
    node: str, saved: Mapping[str, Any], present: Mapping[str, Any], fixed: Collection[str] = ()
) -> None:
    """Compare the configuration of a node with that in its state.

    Args:
        node: the name of the node.
        saved: the configuration in the state.
        present: the configuration now.
        fixed: the fields that must be the same also within `allow_mismatch`.

    Raises:
        StateError: a field has changed; names all that have. Within `allow_mismatch` it is a
            warning, unless one of them is fixed.
    """
    changes = _changes(saved, present)
    if changes:
        message = f"the state does not fit {node}: {'; '.join(changes.values())}. "
        message += _budget_remedy(saved, present) + _ranks_remedy(node, saved, present)
        _reject(message, [name for name in changes if name in fixed])


def several_changes(nodes: Iterable[tuple[str, Mapping[str, Any]]], state: object) -> str | None:
    """Say which fields have changed, where the resets of nodes would name those of one node alone.

    A node that is the only one of its name is compared.

    Args:
        nodes: name and configuration of each node of a graph.
        state: the state of the graph, in which those of the nodes are sealed.

    Returns:
        The message of an error; None unless fields of several nodes have changed.
    """
    present, saved = _singles(nodes), _singles(sealed_configs(state))
    changes = {
        name: found
        for name in present
        if name in saved and (found := _changes(saved[name], present[name]))
    }
    if len(changes) < 2:
        return None
    parts = (f"{name}: {'; '.join(found.values())}" for name, found in changes.items())
    remedies = {_budget_remedy(saved[name], present[name]) for name in changes}
    remedies |= {_ranks_remedy(name, saved[name], present[name]) for name in changes}
    return f"the state does not fit {'. '.join(parts)}. {''.join(sorted(remedies))}{_REMEDY}"


def equal(saved: Any, present: Any) -> bool:
    """Compare as `==` does, but True is not 1: a state where it stands for it is damaged."""
    return type(saved) is type(present) and bool(saved == present)


def _reject(message: str, fixed: Collection[str]) -> None:
    if fixed:
        raise StateError(
            f"{message}By `strict=False`, `{'`, `'.join(fixed)}` can change only between epochs: "
            "build the node as it was, or load a state that was saved after the last step of an "
            "epoch."
        )
    message += _REMEDY
    if _strict.get():
        raise StateError(message)
    warn_user(message)


def _changes(saved: Mapping[str, Any], present: Mapping[str, Any]) -> dict[str, str]:
    """Return what is to be said of each field that has changed."""
    found = {}
    for name in sorted({*saved, *present}, key=str):
        pair = saved.get(name, _ABSENT), present.get(name, _ABSENT)
        if not (equal(*pair) or (_is_smaller(name, *pair) and _may_shrink(present))):
            before, now = _where_they_differ(
                repr(saved.get(name, "absent")), repr(present.get(name, "absent"))
            )
            found[name] = f"`{name}` was {before} when saved, but is {now} now"
    return found


def _is_smaller(name: str, before: Any, now: Any) -> bool:
    """Tell whether a field is a limit of a budget, and lower than it was."""
    return (
        name in _BUDGET_LIMITS
        and type(now) is int
        and (before is None or (type(before) is int and now < before))
    )


def _may_shrink(present: Mapping[str, Any]) -> bool:
    return _smaller.get() and not _has_padded_shapes(present)


def _has_padded_shapes(config: Mapping[str, Any]) -> bool:
    return config.get("budget.shapes") is not None and config.get("budget.layout") == "padded"


def _budget_remedy(saved: Mapping[str, Any], present: Mapping[str, Any]) -> str:
    """Return what to do about the limits of a budget that have changed; `""` where none has."""
    pairs = {name: (saved.get(name), present.get(name)) for name in _BUDGET_LIMITS}
    changed = {name: pair for name, pair in pairs.items() if not equal(*pair)}
    if not changed:
        return ""
    if not all(_is_smaller(name, *pair) for name, pair in changed.items()):
        return _ONLY_SMALLER if _smaller.get() else ""
    if _has_padded_shapes(present):
        return _NO_SHAPES
    return "" if _smaller.get() else _LOAD_SMALLER


def _ranks_remedy(node: str, saved: Mapping[str, Any], present: Mapping[str, Any]) -> str:
    """Return what to do where a job of another number of ranks has saved; `""` where none has."""
    before, now = saved.get("world_size"), present.get("world_size")
    if node != _OF_THE_JOB or equal(before, now):
        return ""
    return (
        f"To go on with another number of ranks, take the states of all {before}: by "
        f"`reshard(states, {now})`, `load_rank_state` or `Checkpoints.load`. "
    )


def sealed_configs(state: object) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield name and configuration of each state that is sealed within another."""
    if isinstance(state, Mapping):
        if isinstance(state.get("node"), str) and isinstance(state.get("config"), Mapping):
            yield state["node"], state["config"]
        for part in state.values():
            yield from sealed_configs(part)
    elif isinstance(state, (list, tuple)):
        for part in state:
            yield from sealed_configs(part)


def _singles(named: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, Mapping[str, Any]]:
    pairs = list(named)
    counts = Counter(name for name, _ in pairs)
    return {name: config for name, config in pairs if counts[name] == 1}


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
