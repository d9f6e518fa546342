"""Seed the global random generators for a sample, and put them back for everybody else."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

__all__ = ["preserved_rngs", "seed_rngs"]


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
