"""Random numbers from identity: the same sample draws the same numbers, whoever processes it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

__all__ = ["mix", "preserved_rngs", "seed_rngs"]

_MASK64 = 2**64 - 1


def mix(*values: int) -> int:
    """Return a 64-bit hash of integers: SplitMix64 (Steele et al., 2014), absorbing one by one."""
    state = 0
    for value in values:
        state = (state + (value & _MASK64) + 0x9E3779B97F4A7C15) & _MASK64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK64
        state ^= state >> 31
    return state


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
