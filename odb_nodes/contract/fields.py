"""Declared types of a state's fields, checked when a state is loaded.

A node declares its state as a dataclass. The annotations say what a field may hold: plain types,
`X | None`, `list[X]`, tuples, `dict[K, V]`, `Any`, and `Annotated` with the limits below.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

__all__ = [
    "Count",
    "InRange",
    "RowsOf",
    "SourceState",
    "SourceStates",
    "check_declaration",
    "check_fields",
    "source_fields",
]

_MAX_INT64 = 2**63 - 1

Check = Callable[[Any], str | None]
"""Value -> the rule that it breaks; `None` where it breaks none."""


@dataclass(frozen=True)
class InRange:
    """An integer between two limits, both included."""

    least: int
    most: int

    def __call__(self, value: Any) -> str | None:
        """Return the rule that `value` breaks, if any."""
        if self.least <= value <= self.most:
            return None
        return f"be an integer in {self.least}..{self.most}"


@dataclass(frozen=True)
class RowsOf:
    """Bytes that hold rows of a fixed size, or `None` for no rows.

    Not `b""`, which `torch.load(weights_only=True)` refuses.
    """

    size_bytes: int

    def __call__(self, value: Any) -> str | None:
        """Return the rule that `value` breaks, if any."""
        if value is None or (value and len(value) % self.size_bytes == 0):
            return None
        return f"hold rows of {self.size_bytes} bytes"


class _IsState:
    """Marks a field that holds the state of another node."""


Count = Annotated[int, InRange(0, _MAX_INT64)]
"""A number of items."""

SourceState = Annotated[dict[str, Any], _IsState()]
"""What `state_dict()` of another node returned; that node checks it."""

SourceStates = dict[str, SourceState]
"""The states of several nodes, by name."""


@cache
def _checks_of(declared: Any) -> dict[str, Check]:
    """Return a check for each field of a dataclass, by name."""
    hints = get_type_hints(declared, include_extras=True)
    found = {}
    for field in fields(declared):
        try:
            found[field.name] = _check_of(hints[field.name])
        except TypeError as error:
            raise TypeError(f"`{field.name}` of `{declared.__name__}`: {error}") from None
    return found


@cache
def source_fields(declared: Any) -> frozenset[str]:
    """Return the names of the fields that hold the states of sources."""
    hints = get_type_hints(declared, include_extras=True)
    return frozenset(name for name, hint in hints.items() if hint in (SourceState, SourceStates))


def check_declaration(declared: Any) -> None:
    """Make sure that a dataclass declares fields that can be checked.

    Raises:
        TypeError: it is no dataclass, or the annotation of a field is not one of those above; names
            class and field.
    """
    if "__dataclass_fields__" not in vars(declared):
        raise TypeError(
            f"`{declared.__name__}` must be a dataclass: put `@dataclass(kw_only=True)` over it."
        )
    try:
        _checks_of(declared)
    except NameError as error:
        raise TypeError(f"an annotation of `{declared.__name__}` is not known: {error}.") from error


def check_fields(declared: Any, values: dict[str, Any]) -> dict[str, str]:
    """Return the rules that values break, by field.

    Args:
        declared: a dataclass with annotations as the module says.
        values: a value for each of its fields.

    Raises:
        TypeError: an annotation is none of those.
    """
    broken = {name: check(values[name]) for name, check in _checks_of(declared).items()}
    return {name: rule for name, rule in broken.items() if rule is not None}


def _check_of(hint: Any) -> Check:
    kind, parts = get_origin(hint), get_args(hint)
    if hint is Any:
        return _accept
    if kind is Annotated:
        limits = [one for one in hint.__metadata__ if isinstance(one, (InRange, RowsOf))]
        return _all_of([_check_of(parts[0]), *limits])
    if kind in (Union, UnionType):
        return _any_of(list(map(_check_of, parts)))
    if hint in _NAMES:
        return _check_type(hint)
    if kind is list or (kind is tuple and parts[1:] == (...,)):
        return _all_of([_check_type(kind), _each(_check_of(parts[0]))])
    if kind is tuple:
        return _all_of([_check_type(tuple), _in_turn(list(map(_check_of, parts)))])
    if kind is dict:
        key, value = map(_check_of, parts)
        return _all_of([_check_type(dict), _each(key), lambda held: _each(value)(held.values())])
    raise TypeError(f"a state cannot declare a field of type `{hint}`.")


_NAMES = {
    bool: "True or False",
    int: "an integer",
    float: "a number",
    str: "a string",
    bytes: "bytes",
    NoneType: "None",
    list: "a list",
    tuple: "a tuple",
    dict: "a dict",
}


def _check_type(kind: type[Any]) -> Check:
    """Return a check for exactly that type: a bool is no integer here."""
    kinds = (float, int) if kind is float else (kind,)
    rule = f"be {_NAMES[kind]}"
    if kind is dict:  # a plain node's state may be another mapping
        return lambda value: None if isinstance(value, Mapping) else rule
    return lambda value: None if type(value) in kinds else rule


def _accept(_value: Any) -> None:
    return None


def _all_of(checks: list[Check]) -> Check:
    return lambda value: next((rule for one in checks if (rule := one(value)) is not None), None)


def _any_of(checks: list[Check]) -> Check:
    def check(value: Any) -> str | None:
        broken = [one(value) for one in checks]
        return None if None in broken else " or ".join(map(str, broken))

    return check


def _in_turn(checks: list[Check]) -> Check:
    def check_all(values: Any) -> str | None:
        if len(values) != len(checks):
            return f"have {len(checks)} elements"
        pairs = zip(checks, values, strict=True)
        return next((rule for one, value in pairs if (rule := one(value)) is not None), None)

    return check_all


def _each(check: Check) -> Check:
    def check_all(values: Any) -> str | None:
        broken = next((rule for one in values if (rule := check(one)) is not None), None)
        return None if broken is None else f"{broken}, each of its elements"

    return check_all
