"""Runs a collate function that may draw random numbers, under numbers of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from odb_nodes._core.held_generators import HeldGenerators, Seed
from odb_nodes._core.seeds import declares_draws, digest_of_rngs, own_rngs, seed_rngs
from odb_nodes.collate.protocol import Collate, collate_group, owned
from odb_nodes.errors import WorkerError
from odb_nodes.step_info import StepInfo

_LIMIT_S = 600.0  # that a thread which processes samples waits for a batch

Run = Callable[[], MutableMapping[str, Any]]


@dataclass(frozen=True)
class DeferredBatch:
    """A group that a read-ahead thread leaves to the trainer's thread to collate."""

    collate: Run  # returns the batch; may be called again if it raises
    info: StepInfo


class SeededCollate:
    """Gives the calls of a collate function random numbers of their own.

    The global generators of Python, numpy and torch (CPU) are seeded before a call, and put back
    after it; so nothing else may draw from them meanwhile. So are generators that the function
    keeps, as an attribute or in what it encloses: they may be somebody else's as well.
    """

    def __init__(self, collate: Any) -> None:
        self.held = HeldGenerators(collate)
        declared = declares_draws(collate)
        self.draws_nothing = declared is False  # whether the function is known never to draw
        self.draws = declared
        """Whether the function draws from the global generators; `None` until that is known."""
        # A batch may be collated ahead while parts of one that is out are, on the trainer's thread.
        self._one_at_a_time = threading.Lock()

    def call(self, run: Run, key: int, *, find_out: bool = False) -> MutableMapping[str, Any]:
        """Return what `run`, which calls the function, returns under the seed `key`.

        It is called twice where the function makes a generator in its first call, so the samples
        are its own to change. `find_out`: whether to find out if the function draws.
        """
        with own_rngs(_LIMIT_S):
            seed_rngs(key)
            before = digest_of_rngs() if find_out else None
            batch = self.call_ahead(run, key, seed_rngs)
            if find_out:
                self.draws = bool(self.draws) or digest_of_rngs() != before
        return batch

    def call_ahead(
        self, run: Run, key: int, seed: Seed = lambda _: None
    ) -> MutableMapping[str, Any]:
        """Return what `run` returns, with the function's generators seeded, others by `seed`."""
        with self._turn(), self.held.preserved():
            return self.held.call(run, key=key, seed=seed)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Have the function's own generators alone among the threads of this library."""
        if not self._one_at_a_time.acquire(timeout=_LIMIT_S):
            raise WorkerError(
                f"`collate_fn` has not returned within {_LIMIT_S:g} s on another thread: it hangs."
            )
        try:
            yield
        finally:
            self._one_at_a_time.release()


class WorkerCollate:
    """Makes batches in a worker, under random numbers that a key decides."""

    def __init__(self, collate: Collate) -> None:
        self._collate = collate
        self._draws_nothing = declares_draws(collate) is False
        self._seeded: SeededCollate | None = None  # has a lock, which no process sends

    def __call__(
        self, samples: Sequence[Any], key: int, info: StepInfo | None = None
    ) -> MutableMapping[str, Any]:
        """Return the batch of samples, which stay as they are."""

        def run() -> MutableMapping[str, Any]:
            own = [*map(owned, samples)]
            return collate_group(self._collate, own, info)  # type: ignore[arg-type]

        if self._draws_nothing:
            return run()
        if self._seeded is None:
            self._seeded = SeededCollate(self._collate)
        return self._seeded.call(run, key)
