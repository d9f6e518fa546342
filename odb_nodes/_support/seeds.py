"""The global random generators: seeded for a sample, restored after it, saved and loaded."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch

from odb_nodes._support.digest import content_digest
from odb_nodes._support.hashing import hash_ints
from odb_nodes.errors import WorkerError


class _Turns:
    """The lock that a thread of this library holds while it has seeded the generators."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.number = 0  # turns that have begun
        self.limit_s = 0.0  # longest duration of the current turn; 0 if no thread has it


_turns = _Turns()
_POLL_S = 0.1
_DRAWS = "draws_random_numbers"

_OF_NUMPY = (np.random.Generator, np.random.BitGenerator)

GENERATORS = (torch.Generator, *_OF_NUMPY, np.random.RandomState, random.Random)
"""The types of the generators that `seed_generators` takes."""

_METHODS: tuple[Any, ...] = (random.random, np.random.random_sample)
GLOBAL_GENERATORS = (*(method.__self__ for method in _METHODS), torch.default_generator)
"""The global generators of Python, numpy and torch (CPU)."""


def _begin_turns() -> None:
    global _turns
    _turns = _Turns()


if hasattr(os, "register_at_fork"):  # A child has none of the threads that might hold it.
    os.register_at_fork(after_in_child=_begin_turns)


def declares_draws(function: Any) -> bool | None:
    """Tell whether a function, or a dataset, draws random numbers; `None` if undeclared.

    The declaration is an attribute `draws_random_numbers`. `False` counts only if the object or its
    class itself has it: a subclass may draw, and `functools.wraps` copies it to a wrapper.
    """
    declared = getattr(function, _DRAWS, None)
    if not isinstance(declared, bool):
        return None
    wrapped = getattr(function, "__wrapped__", None)
    attributes = {*vars(type(function)), *getattr(function, "__dict__", ())}
    is_own = _DRAWS in attributes and _DRAWS not in getattr(wrapped, "__dict__", ())
    return declared if declared or is_own else None


def seed_rngs(seed: int) -> None:
    """Seed the global generators of Python, numpy and torch (CPU) of this process."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)


@contextmanager
def preserved(generators: Iterable[Any]) -> Iterator[None]:
    """Restore generators of the types `GENERATORS` on exit."""
    before = [(generator, state_of(generator)) for generator in generators]
    try:
        yield
    finally:
        for generator, state in before:
            put_back(generator, state)


def preserved_rngs() -> AbstractContextManager[None]:
    """Restore the global generators on exit."""
    return preserved(GLOBAL_GENERATORS)


@contextmanager
def exclusive_rngs(limit_s: float, *, preserves: bool = True) -> Iterator[None]:
    """Lock the global generators against other threads of this library; restore them on exit.

    If this block takes longer than `limit_s`, threads that wait for its end raise a `WorkerError`.
    """
    turns = _turns  # A fork meanwhile makes other turns for the child.
    number = turns.number
    start_s = time.monotonic()
    while not turns.lock.acquire(timeout=_POLL_S):
        # If another thread has begun a turn, wait for the end of that turn.
        if turns.number != number:
            number = turns.number
            start_s = time.monotonic()
        elif 0 < turns.limit_s < time.monotonic() - start_s:
            raise WorkerError(
                f"a thread that processes a sample has kept the random generators and the dataset "
                f"for more than `timeout_s`={turns.limit_s}: it hangs, or needs a longer limit. "
                "Use processes; or `seed=None`, if the dataset has no `set_epoch`."
            )
    limit_before_s = turns.limit_s  # set by an outer block of this thread
    turns.number += 1
    turns.limit_s = limit_s
    try:
        with preserved_rngs() if preserves else nullcontext():
            yield
    finally:
        turns.limit_s = limit_before_s
        turns.lock.release()


def digest_of_rngs() -> int:
    """Return a digest of the states of the global generators, which draws change."""
    return content_digest([*map(state_of, GLOBAL_GENERATORS)])


def seed_generators(generators: Sequence[Any], key: int) -> None:
    """Seed generators of the types `GENERATORS` by a key, each differently."""
    for number, generator in enumerate(generators):
        seed = hash_ints(key, number + 1)
        try:
            if isinstance(generator, torch.Generator):
                generator.manual_seed(seed)
            elif isinstance(generator, _OF_NUMPY):
                put_back(generator, type(_bits_of(generator))(seed).state)
            else:
                is_python = isinstance(generator, random.Random)
                generator.seed(seed if is_python else seed & 0xFFFFFFFF)
        except Exception as error:
            raise TypeError(
                f"a `{type(generator).__name__}` that the dataset or a function holds cannot be "
                f"seeded: {error} Hold a `numpy.random.default_rng`, `torch.Generator` or "
                "`random.Random`, or declare `draws_random_numbers = False` if nothing is drawn."
            ) from error


def state_of(generator: Any) -> Any:
    """Return the state of a generator of the types `GENERATORS`."""
    if isinstance(generator, _OF_NUMPY):
        return _bits_of(generator).state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def put_back(generator: Any, state: Any) -> None:
    """Set a generator to a state that `state_of` returned."""
    if isinstance(generator, _OF_NUMPY):
        _bits_of(generator).state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


def _bits_of(generator: Any) -> Any:
    return getattr(generator, "bit_generator", generator)


def save_rngs() -> dict[str, Any]:
    """Return the states of the generators of Python, numpy, torch, and of the GPU if it is used."""
    kind, keys, *position = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *position),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
    }


def load_rngs(states: dict[str, Any]) -> None:
    """Set the global generators to the states that `save_rngs` returned."""
    kind, keys, *position = states["numpy"]
    random.setstate(states["python"])
    np.random.set_state((kind, keys.numpy(), *position))
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
