"""Checks of arguments, whose errors name the argument, the rule and the value."""

from __future__ import annotations

import importlib
import math
import operator
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from numbers import Real
from types import ModuleType, NoneType, UnionType
from typing import Any, TypeVar, get_args

MAX_COUNT = 2**31 - 1  # largest count: state stores counts as 32-bit integers
MAX_KEY = 2**63 - 1  # largest key of a sample

C = TypeVar("C", bound=type)


def check_integer(name: str, value: object, remedy: str = "") -> int:
    """Return `value` as an int; reject a bool."""
    if type(value) is int:
        return value
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        seen = f"{value!r:.80} (`{type(value).__name__}`)"
        raise TypeError(_message(name, "an integer", seen, remedy)) from None


def check_count(name: str, value: object, minimum: int = 1, maximum: int = MAX_COUNT) -> int:
    """Return `value` as an int in `minimum`..`maximum`."""
    count = check_integer(name, value)
    if not minimum <= count <= maximum:
        raise ValueError(f"`{name}` must be in {minimum}..{maximum}, but is {count} instead.")
    return count


def keep_count(options: Any, name: str, minimum: int = 1, maximum: int = MAX_COUNT) -> None:
    """Check a field of a frozen dataclass, and store it as an int: numpy integers overflow."""
    object.__setattr__(options, name, check_count(name, getattr(options, name), minimum, maximum))


def check_number(name: str, value: Any, interval: str) -> float:
    """Return `value` as a float in an interval such as "(0, 1]": above 0, and at most 1."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(_message(name, f"a number in {interval}", describe(value)))
    low, high = map(float, interval[1:-1].split(","))
    try:
        number = float(value)
    except OverflowError:
        number = math.nan  # in no interval
    is_above = number >= low if interval[0] == "[" else number > low
    is_below = number <= high if interval[-1] == "]" else number < high
    if not (is_above and is_below):
        raise ValueError(_message(name, f"in {interval}", describe(value)))
    return number


def check_seconds(name: str, value: Any) -> None:
    """Raise an error unless a lock can wait for `value` seconds."""
    check_number(name, value, f"(0, {threading.TIMEOUT_MAX:.0f}]")


def check_bool(name: str, value: object) -> bool:
    """Return `value`, which must be a bool."""
    if not isinstance(value, bool):
        raise TypeError(_message(name, "True or False", f"{value!r:.80}"))
    return value


def check_choice(name: str, value: object, choices: Sequence[str], remedy: str = "") -> None:
    """Raise a `ValueError` unless `value` is one of `choices`."""
    if value not in choices:
        allowed = ", ".join(f'"{choice}"' for choice in choices)
        raise ValueError(_message(name, f"one of ({allowed})", f"{value!r:.80}", remedy))


def check_type(name: str, value: object, expected: type | UnionType, remedy: str = "") -> None:
    """Raise a `TypeError` unless `value` is an instance of `expected`, a class or several."""
    if not isinstance(value, expected):
        allowed = " or ".join(map(_class_name, get_args(expected) or (expected,)))
        raise TypeError(_message(name, allowed, describe(value), remedy))


def check_names(name: str, value: object, example: str = '["chat", "code"]') -> tuple[str, ...]:
    """Return a list of different names as a tuple."""
    remedy = f"Pass a list such as {example}."
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError(_message(name, "a list of names", describe(value), remedy))
    if not all(isinstance(entry, str) and entry for entry in value) or len({*value}) < len(value):
        raise ValueError(_message(name, "names that differ", describe(value), remedy))
    return (*value,)


def check_named(name: str, value: Mapping[Any, object]) -> None:
    """Raise a `TypeError` unless all keys of a mapping are strings."""
    for key in value:
        if not isinstance(key, str):
            raise TypeError(f"`{name}` must have names as keys, but has {describe(key)} instead.")


def check_iterable(name: str, value: object, remedy: str) -> None:
    """Raise a `TypeError` unless `value` can be iterated more than once."""
    if isinstance(value, Iterator) or not isinstance(value, Iterable):
        rule = "an iterable that can be iterated once per epoch"
        raise TypeError(_message(name, rule, _class_name(type(value)), remedy))


def check_callable(name: str, value: Any) -> None:
    """Raise a `TypeError` unless `value` is a function or None."""
    if value is not None and not callable(value):
        raise TypeError(_message(name, "a function or None", f"{value!r:.80}"))
    if isinstance(value, type) and any("__call__" in vars(base) for base in value.__mro__):
        remedy = f"Its instances can be called: pass `{value.__name__}(...)`."
        raise TypeError(_message(name, "a function or None", describe(value), remedy))


def refuse(refused: Mapping[str, Any]) -> None:
    """Raise a `ValueError` with the first message that applies."""
    for message, applies in refused.items():
        if applies:
            raise ValueError(message)


def describe(value: object) -> str:
    """Return a value for an error text: plain values as they are, other objects by their class."""
    if isinstance(value, type):
        return f"the class `{value.__name__}`"
    if isinstance(value, (str, int, float, dict, list, tuple, NoneType)):
        return f"{value!r:.80}"
    function = getattr(value, "__name__", "")
    return f"the {type(value).__name__} `{function}`" if function else _class_name(type(value))


def _message(name: str, rule: str, seen: str, remedy: str = "") -> str:
    return f"`{name}` must be {rule}, but is {seen} instead.{remedy and f' {remedy}'}"


def _class_name(kind: type) -> str:
    if kind is NoneType:
        return "None"
    return f"{'an' if kind.__name__[0] in 'AEIOUaeiou' else 'a'} `{kind.__name__}`"


def import_extra(module: str, extra: str) -> ModuleType:
    """Import a module that an extra of this library installs."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"`{module}` cannot be imported ({error}). Install it with: "
            f"pip install 'odb-nodes[{extra}]'"
        ) from error


def explains_arguments(owner: str, instead: Mapping[str, str]) -> Callable[[C], C]:
    """Return a class decorator: arguments of `owner` that the class lacks are named in the error.

    instead: name of the argument -> what to pass in its place.
    """

    def decorate(decorated: C) -> C:
        init: Callable[..., None] = vars(decorated)["__init__"]

        @wraps(init)
        def checked(self: Any, *args: Any, **options: Any) -> None:
            if unknown := [name for name in options if name in instead]:
                raise TypeError(
                    f"`{unknown[0]}` is an argument of {owner} that `{type(self).__name__}` does "
                    f"not have: {instead[unknown[0]]}."
                )
            init(self, *args, **options)

        setattr(decorated, "__init__", checked)  # noqa: B010
        return decorated

    return decorate
