"""The global random generators: seeded for a sample, put back for everybody else, and saved."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

__all__ = ["load_rngs", "preserved_rngs", "save_rngs", "seed_rngs"]


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


def save_rngs() -> dict[str, Any]:
    """Return the states of the global generators, as plain data and tensors.

    They are those of Python, numpy and torch: on the CPU, and on the current GPU where it is used.
    """
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
    }


def load_rngs(states: dict[str, Any]) -> None:
    """Put the global generators back to where `save_rngs` was called."""
    kind, keys, *rest = states["numpy"]
    random.setstate(states["python"])
    np.random.set_state((kind, keys.numpy(), *rest))
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
