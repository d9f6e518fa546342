"""Finds the random generators that functions and datasets hold, wherever they keep them."""

from __future__ import annotations

import random
import sys
import types
from collections import deque
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch.utils.data import ConcatDataset

from odb_nodes._core.seeds import GENERATORS, is_global

_MOST_ITEMS = 32  # of a list or dict that is looked through: a longer one holds data
_MOST_VALUES = 10_000  # that are looked at
_SCALARS = (str, bytes, int, float, bool, type(None), torch.Tensor)
_LIBRARIES = {*sys.stdlib_module_names, "datasets", "numpy", "odb_nodes", "torch", "transformers"}
"""Packages whose functions are not searched for generators in global variables."""


def generators_in(holders: Sequence[Any], depth: int, *, reads_code: bool) -> Iterator[Any]:
    """Yield the generators that functions or objects hold, each once, in a fixed order.

    Args:
        holders: functions, objects with methods, datasets.
        depth: of objects within objects.
        reads_code: whether to search modules of torch, and the global variables that functions and
            methods name.
    """
    seen: set[int] = set()
    waiting = deque((holder, 0) for holder in holders)
    while waiting and len(seen) < _MOST_VALUES:
        value, level = waiting.popleft()
        if isinstance(value, _SCALARS) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, GENERATORS):
            if not (is_global(value) or isinstance(value, random.SystemRandom)):  # has no state
                yield value
        elif level < depth:
            waiting.extend((inner, level + 1) for inner in _held_by(value, reads_code))


def _held_by(value: Any, reads_code: bool) -> list[Any]:
    """Return what a value holds that may be, or hold, a generator."""
    held: list[Any] = []
    if isinstance(value, (dict, list, tuple)):
        items = value.values() if isinstance(value, dict) else value
        if len(value) <= _MOST_ITEMS or isinstance(next(iter(items)), GENERATORS):
            held = [*items]
    if type(value) in (dict, list, tuple):
        return held
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, (types.MethodType, types.BuiltinMethodType)):
        return [value.__self__, getattr(value, "__func__", None)]
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        named = _named_by(value.__code__, value) if reads_code else []
        return [*cells, *defaults, *vars(value).values(), *named]
    is_model = isinstance(value, torch.nn.Module) and not reads_code
    if isinstance(value, (type, types.ModuleType)) or is_model or hasattr(value, "get_vocab"):
        return []
    if type(value) is ConcatDataset:  # of any number
        return [*value.datasets]
    cls: type[object] = type(value)
    slots, of_class = _of_class(cls)
    held += [getattr(value, name, None) for name in slots]
    held += getattr(value, "__dict__", {}).values()
    return held + [one for one in of_class if reads_code or isinstance(one, GENERATORS)]


@lru_cache
def _of_class(cls: type) -> tuple[list[str], list[Any]]:
    """Return the slots of a class, and its generators and functions, with those of its bases."""
    slots: list[str] = []
    held: list[Any] = []
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] not in _LIBRARIES:
            names = base.__dict__.get("__slots__", ())
            slots += [names] if isinstance(names, str) else names
            kinds = (*GENERATORS, types.FunctionType)
            values = [getattr(one, "__func__", one) for one in vars(base).values()]
            held += [value for value in values if isinstance(value, kinds)]
    return slots, held


def _named_by(code: types.CodeType, function: types.FunctionType) -> list[Any]:
    """Return the functions, and the generators, in global variables that a function names."""
    if str(function.__module__).partition(".")[0] in _LIBRARIES:
        return []
    names, variables = code.co_names, function.__globals__
    named = [variables[name] for name in names if name in variables]
    for module in [one for one in named if isinstance(one, types.ModuleType)]:
        named += [vars(module)[name] for name in names if name in vars(module)]
    held = [one for one in named if isinstance(one, (*GENERATORS, types.FunctionType))]
    for inner in code.co_consts:
        held += _named_by(inner, function) if isinstance(inner, types.CodeType) else []
    return held


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False
