"""Find what has a state that training changes: models, optimizers, schedulers, generators."""

from __future__ import annotations

import functools
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from odb_nodes._core.seeds import GENERATORS

__all__ = ["STATEFUL", "find_stateful"]

STATEFUL = (torch.nn.Module, Optimizer, LRScheduler, torch.amp.GradScaler, *GENERATORS)

MOST_OBJECTS = 100_000  # the nearest ones
MOST_ELEMENTS = 1000  # of a container: what has more is data
LEAVES = (str, bytes, int, float, complex, type, ModuleType, CodeType, np.ndarray, torch.Tensor)
LIBRARIES = {"torch", "torchdata", "numpy", "transformers", *sys.stdlib_module_names}
OF_MODULES = {"_parameters", "_buffers", "_modules"}  # which a module itself stands for


def find_stateful(roots: Iterable[Any]) -> list[Any]:
    """Return what has a state and can be reached from functions and other objects.

    From a function these are the variables that it closes over, its defaults, and the global names
    that it uses, unless it is a library's; from a method and other objects their attributes; from
    containers their first 1,000 elements. The search goes to the nearest 100,000 objects.
    """
    found = []
    waiting = deque(roots)
    seen: set[int] = set()
    alive = []  # or an address in `seen` might be taken anew
    while waiting and len(seen) < MOST_OBJECTS:
        one = waiting.popleft()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        alive.append(one)
        is_weight = isinstance(one, torch.Tensor) and one.requires_grad and one.is_leaf
        if is_weight or isinstance(one, STATEFUL):
            found.append(one)
        if not isinstance(one, LEAVES):
            waiting.extend(_parts(one))
    return found


def _parts(one: Any) -> Iterator[Any]:
    if isinstance(one, FunctionType):
        yield from _parts_of_function(one)
    elif isinstance(one, MethodType):
        yield from (one.__self__, one.__func__)
    elif isinstance(one, functools.partial):
        yield from (one.func, one.args, one.keywords)
    elif isinstance(one, dict):
        yield from list(islice(one.values(), MOST_ELEMENTS))
    elif isinstance(one, (list, tuple, set, frozenset, deque)):
        yield from list(islice(one, MOST_ELEMENTS))
    else:
        attributes = getattr(one, "__dict__", {})
        skipped = OF_MODULES if isinstance(one, torch.nn.Module) else ()
        yield from [value for name, value in attributes.items() if name not in skipped]


def _parts_of_function(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    yield from (function.__defaults__, function.__kwdefaults__, function.__dict__)
    if (function.__module__ or "").partition(".")[0] not in LIBRARIES:
        yield from (function.__globals__.get(name) for name in _names(function.__code__))


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names that a function, and the functions defined in it, look up."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
