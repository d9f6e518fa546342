"""Finds the random generators that functions and datasets hold, wherever they keep them."""

from __future__ import annotations

import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

import torch
from torch.utils.data import ConcatDataset

from odb_nodes._support.content import copied
from odb_nodes._support.seeds import GENERATORS, GLOBAL_GENERATORS, preserved, seed_generators

R = TypeVar("R")
Seed = Callable[[int], object]

_DEPTH = 10  # of objects within objects
_MOST_ITEMS = 32  # of a list or dict that is looked through: a longer one holds data
_MOST_VALUES = 10_000  # that are looked at
_SCALARS = (str, bytes, int, float, bool, type(None), torch.Tensor)
_CONTAINERS = (dict, list, tuple)
_LIBRARIES = {*sys.stdlib_module_names, "datasets", "numpy", "odb_nodes", "torch", "transformers"}
"""Packages whose functions are not searched for generators in global variables."""


class HeldGenerators:
    """The generators that functions and datasets hold, to be seeded for each of their calls."""

    def __init__(self, *holders: Any) -> None:
        self._holders = holders
        self.forget()

    def forget(self) -> None:
        """Have them looked for again: there may be others."""
        self._known: list[Any] | None = None
        self._is_complete = False  # whether those that the first call makes are known, too

    def preserved(self) -> AbstractContextManager[None]:
        """Look for them, if they are not known, and leave them as they were."""
        if self._known is None:
            self._known = [*generators_in(self._holders)]
        return preserved(self._known)

    def call(self, run: Callable[..., R], *arguments: Any, key: int, seed: Seed) -> R:
        """Return what `run` returns under a key, which `seed` seeds the global generators by.

        It is called again, with the arguments as they were, if its first call has made a generator.
        """
        unchanged = arguments if self._is_complete else copied(arguments)
        seed(key)
        seed_generators(self._known or (), key)
        result = run(*arguments)
        if self._is_complete:
            return result
        before = {*map(id, self._known or ())}
        self._known, self._is_complete = [*generators_in(self._holders)], True
        if before.issuperset(map(id, self._known)):
            return result
        return self.call(run, *unchanged, key=key, seed=seed)


def generators_in(holders: Sequence[Any]) -> Iterator[Any]:
    """Yield the generators that functions, objects or datasets hold, each once, in a fixed order.

    They are attributes, in closures, or in global variables that functions and methods name: alone,
    in lists and dicts, or in what can be called.
    """
    seen: set[int] = set()
    waiting = deque((holder, 0) for holder in holders)
    while waiting and len(seen) < _MOST_VALUES:
        value, level = waiting.popleft()
        if isinstance(value, _SCALARS) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, GENERATORS):
            is_global = any(value is generator for generator in GLOBAL_GENERATORS)
            if not (is_global or isinstance(value, random.SystemRandom)):  # which has no state
                yield value
        elif level < _DEPTH:
            waiting.extend((inner, level + 1) for inner in _held_by(value))


def _held_by(value: Any) -> list[Any]:
    """Return what a value holds that may be, or hold, a generator."""
    values: list[Any] = []
    if isinstance(value, _CONTAINERS):
        items = value.values() if isinstance(value, dict) else value
        if len(value) <= _MOST_ITEMS or isinstance(next(iter(items)), GENERATORS):
            values = [*items]
    if type(value) in _CONTAINERS:
        return values
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, (types.MethodType, types.BuiltinMethodType)):
        return [value.__self__, getattr(value, "__func__", None)]
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        return [*cells, *defaults, *vars(value).values(), *_named_by(value.__code__, value)]
    if isinstance(value, (type, types.ModuleType)) or hasattr(value, "get_vocab"):
        return []
    if type(value) is ConcatDataset:  # of any number
        return [*value.datasets]
    values += getattr(value, "__dict__", {}).values()
    for base in type(value).__mro__:
        if base.__module__.partition(".")[0] not in _LIBRARIES:
            slots = vars(base).get("__slots__", ())
            names = [slots] if isinstance(slots, str) else slots
            values += [getattr(value, name, None) for name in names]
            in_class = [
                getattr(attribute, "__func__", attribute) for attribute in vars(base).values()
            ]
            values += filter(_is_followed, in_class)
    return values


def _named_by(code: types.CodeType, function: types.FunctionType) -> list[Any]:
    """Return what is followed of the global variables that a function names."""
    if str(function.__module__).partition(".")[0] in _LIBRARIES:
        return []
    names, variables = code.co_names, function.__globals__
    named = [variables[name] for name in names if name in variables]
    for module in [variable for variable in named if isinstance(variable, types.ModuleType)]:
        named += [vars(module)[name] for name in names if name in vars(module)]
    followed = [*filter(_is_followed, named)]
    for inner in code.co_consts:
        followed += _named_by(inner, function) if isinstance(inner, types.CodeType) else []
    return followed


def _is_followed(value: Any) -> bool:
    """Tell whether a value of a class or a global variable is looked at: not so other objects."""
    return callable(value) or isinstance(value, (*GENERATORS, *_CONTAINERS))


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False
