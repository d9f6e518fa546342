"""Declared types of a state's fields, checked when a state is loaded.

A node declares its state as a dataclass. The annotations say what a field may hold: plain types,
`X | None`, `list[X]`, tuples, `dict[K, V]`, `Any`, and `Annotated` with the limits below.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from itertools import islice
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

__all__ = [
    "Count",
    "InRange",
    "RowsOf",
    "SourceState",
    "SourceStates",
    "Sparse",
    "check_declaration",
    "check_fields",
    "source_fields",
    "sparse_defaults",
]

_MAX_INT64 = 2**63 - 1


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


@dataclass(frozen=True)
class Sparse:
    """Marks a field with a default, which a state leaves out where it holds that."""


class _IsState:
    """Marks a field that holds the state of another node."""


Count = Annotated[int, InRange(0, _MAX_INT64)]
"""A number of items."""

SourceState = Annotated[dict[str, Any], _IsState()]
"""What `state_dict()` of another node returned; that node checks it."""

SourceStates = dict[str, SourceState]
"""The states of several nodes, by name."""


@cache
def _hints_of(declared: Any) -> dict[str, Any]:
    """Return the annotation of each field of a dataclass, by name, once all can be checked."""
    hints = get_type_hints(declared, include_extras=True)
    hints = {field.name: hints[field.name] for field in fields(declared)}
    for name, hint in hints.items():
        if (unknown := _unknown_in(hint)) is not None:
            raise TypeError(
                f"`{name}` of `{declared.__name__}`: a state cannot declare a field of type "
                f"`{unknown}`."
            )
    return hints


@cache
def source_fields(declared: Any) -> frozenset[str]:
    """Return the names of the fields that hold the states of sources."""
    states = (SourceState, SourceStates)
    return frozenset(name for name, hint in _hints_of(declared).items() if hint in states)


@cache
def sparse_defaults(declared: Any) -> Mapping[str, Any]:
    """Return the default of each field that is `Sparse`, by name. Shared: not to be changed."""
    defaults = {}
    for one in fields(declared):
        if Sparse() in get_args(_hints_of(declared)[one.name])[1:]:
            makes = one.default_factory
            defaults[one.name] = one.default if makes is MISSING else makes()
    return defaults


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
        _hints_of(declared)
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
    hints = _hints_of(declared).items()
    return {name: rule for name, hint in hints for rule in islice(_broken(hint, values[name]), 1)}


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


def _unknown_in(hint: Any) -> Any:
    """Return what is in an annotation and cannot be checked; `None` where all of it can be."""
    kind, parts = get_origin(hint) or hint, get_args(hint)
    if kind not in (Any, Annotated, Union, UnionType, *_NAMES):
        return hint
    inner = parts[:1] if kind is Annotated else [part for part in parts if part is not ...]
    return next((found for part in inner if (found := _unknown_in(part)) is not None), None)


def _broken(hint: Any, value: Any) -> Iterator[str]:
    """Yield the rules that a value breaks: take only the first, which the others take for kept."""
    kind, parts = get_origin(hint) or hint, get_args(hint)
    if kind is Annotated:
        yield from _broken(parts[0], value)
        limits = [one for one in parts[1:] if isinstance(one, (InRange, RowsOf))]
        yield from filter(None, (limit(value) for limit in limits))
    elif kind in (Union, UnionType):
        broken = [next(_broken(part, value), None) for part in parts]
        if None not in broken:
            yield " or ".join(map(str, broken))
    elif kind is not Any:
        if not _is_a(kind, value):
            yield f"be {_NAMES[kind]}"
        if kind is tuple and parts and parts[-1] is not ...:
            if len(value) != len(parts):
                yield f"have {len(parts)} elements"
            for part, one in zip(parts, value, strict=True):
                yield from _broken(part, one)
        elif parts:
            columns = (value.keys(), value.values()) if kind is dict else (value,)
            for part, held in zip(parts, columns, strict=False):
                for one in held:
                    yield from (f"{rule}, each of its elements" for rule in _broken(part, one))


def _is_a(kind: type[Any], value: Any) -> bool:
    if kind is dict:  # a plain node's state may be another mapping
        return isinstance(value, Mapping)
    return type(value) is kind or (kind is float and type(value) is int)  # a bool is no integer
