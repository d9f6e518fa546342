"""Finds the random generators that functions and datasets hold."""

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

_MOST_LEVELS = 10  # levels of objects within objects that are searched
_MOST_ITEMS = 32  # items of a searched list or dict: a longer one holds data
_MOST_VALUES = 10_000  # values that are searched in all
_SCALARS = (str, bytes, int, float, bool, type(None), torch.Tensor)
_CONTAINERS = (dict, list, tuple)
_LIBRARIES = {*sys.stdlib_module_names, "datasets", "numpy", "odb_nodes", "torch", "transformers"}
"""Packages whose functions are not searched for generators in global variables."""


class HeldGenerators:
    """The generators that functions and datasets hold, which are seeded for each call."""

    def __init__(self, *holders: Any) -> None:
        self._holders = holders
        self.forget()

    def forget(self) -> None:
        """Search again at the next use: there may be new generators."""
        self._generators: list[Any] | None = None  # `None` before the search
        self._is_complete = False  # whether the first call, which may make generators, is done

    def preserved(self) -> AbstractContextManager[None]:
        """Restore the generators on exit."""
        if self._generators is None:
            self._generators = [*generators_in(self._holders)]
        return preserved(self._generators)

    def call(self, run: Callable[..., R], *arguments: Any, key: int, seed: Seed) -> R:
        """Call `run` with all generators seeded by `key`; `seed` seeds the global generators.

        If the first call has made a generator, call `run` again with a copy of the arguments.
        """
        unchanged = arguments if self._is_complete else copied(arguments)
        seed(key)
        seed_generators(self._generators or (), key)
        result = run(*arguments)
        if self._is_complete:
            return result
        before = {*map(id, self._generators or ())}
        self._generators = [*generators_in(self._holders)]
        self._is_complete = True
        if before.issuperset(map(id, self._generators)):
            return result
        return self.call(run, *unchanged, key=key, seed=seed)


def generators_in(holders: Sequence[Any]) -> Iterator[Any]:
    """Yield the generators that functions, objects or datasets hold, each once, in a fixed order.

    It searches attributes, closures, and global variables that functions and methods name, and the
    lists, dicts and callables in them.
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
            if not (is_global or isinstance(value, random.SystemRandom)):  # it has no state
                yield value
        elif level < _MOST_LEVELS:
            waiting.extend((inner, level + 1) for inner in _values_in(value))


def _values_in(value: Any) -> list[Any]:
    """Return the values within a value that may be, or hold, a generator."""
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
        return [*cells, *defaults, *vars(value).values(), *_globals_of(value.__code__, value)]
    if isinstance(value, (type, types.ModuleType)) or hasattr(value, "get_vocab"):
        return []
    if type(value) is ConcatDataset:  # with any number of datasets
        return [*value.datasets]
    values += getattr(value, "__dict__", {}).values()
    for base in type(value).__mro__:
        library = str(base.__module__).partition(".")[0]  # no string for Cython in Python 3.10
        if library not in _LIBRARIES:
            slots = vars(base).get("__slots__", ())
            names = [slots] if isinstance(slots, str) else slots
            values += [getattr(value, _mangled(name, base), None) for name in names]
            in_class = [
                getattr(attribute, "__func__", attribute) for attribute in vars(base).values()
            ]
            values += filter(_is_searched, in_class)
    return values


def _mangled(name: str, owner: type) -> str:
    """Return the attribute of a slot: Python puts the class before a private name."""
    is_private = name.startswith("__") and not name.endswith("__")
    return f"_{owner.__name__.lstrip('_')}{name}" if is_private else name


def _globals_of(code: types.CodeType, function: types.FunctionType) -> list[Any]:
    """Return the global variables that a function names and that are searched."""
    if str(function.__module__).partition(".")[0] in _LIBRARIES:
        return []
    names, variables = code.co_names, function.__globals__
    named = [variables[name] for name in names if name in variables]
    for module in [variable for variable in named if isinstance(variable, types.ModuleType)]:
        named += [vars(module)[name] for name in names if name in vars(module)]
    searched = [*filter(_is_searched, named)]
    for inner in code.co_consts:
        searched += _globals_of(inner, function) if isinstance(inner, types.CodeType) else []
    return searched


def _is_searched(value: Any) -> bool:
    """Tell whether a global variable, or an attribute of a class, is searched."""
    return callable(value) or isinstance(value, (*GENERATORS, *_CONTAINERS))


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False
