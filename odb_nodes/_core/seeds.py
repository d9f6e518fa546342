"""Seed the global random generators for a sample, and put them back for everybody else."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

__all__ = [
    "GENERATORS",
    "global_rngs",
    "is_global",
    "preserved_rngs",
    "seed_generator",
    "seed_rngs",
    "states_of_rngs",
]

global_rngs = threading.RLock()
"""Held by the thread of this library that has seeded the global generators, until they are back."""

GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
"""The types of the generators that `seed_generator` takes."""


def seed_rngs(seed: int) -> None:
    """Seed the global generators of Python, numpy and torch (CPU) of this process."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)


@contextmanager
def preserved_rngs() -> Iterator[None]:
    """Leave the global generators of Python, numpy and torch (CPU) as they were."""
    python, numpy, generator = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(generator)


def states_of_rngs() -> tuple[Any, ...]:
    """Return the states of the global generators, which change if anybody draws from them."""
    legacy: Any = np.random.get_state()
    name, keys, *rest = legacy
    python, generator = random.getstate(), torch.get_rng_state()
    return python, name, keys.tobytes(), *rest, generator.numpy().tobytes()


def is_global(generator: Any) -> bool:
    """Tell whether a generator is one of the global ones, which `seed_rngs` seeds."""
    shared = (torch.default_generator, np.random.mtrand._rand, random._inst)
    return any(generator is one for one in shared)


def seed_generator(generator: Any, seed: int) -> None:
    """Seed a generator of one of the types `GENERATORS`."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        bits.state = type(bits)(seed).state
    elif isinstance(generator, np.random.RandomState):
        generator.seed(seed & 0xFFFFFFFF)
    else:
        generator.seed(seed)
