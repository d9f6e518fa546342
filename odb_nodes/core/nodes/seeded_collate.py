"""Runs a collate function that may draw random numbers, with seeded generators."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from odb_nodes._support.held_generators import HeldGenerators, Seed
from odb_nodes._support.seeds import declares_draws, digest_of_rngs, exclusive_rngs, seed_rngs
from odb_nodes.core.collate.protocol import Collate, collate_group, copy_for_collate
from odb_nodes.core.step_info import Batch, StepInfo
from odb_nodes.errors import WorkerError

_LIMIT_S = 600.0  # limit of a thread's wait for another thread that collates

MakeBatch = Callable[[], Batch]


@dataclass(frozen=True)
class DeferredBatch:
    """A group that the training thread collates, not the read-ahead thread."""

    collate: MakeBatch  # returns the batch; may be called again if it raises
    info: StepInfo


class SeededCollate:
    """Seeds the generators of a collate function for each call.

    The global generators of Python, numpy and torch (CPU) are seeded before a call and restored
    afterwards; meanwhile, no other code may draw from these. Generators that the function holds, in
    an attribute or its closure, are seeded and restored, too, since other code may use them.
    """

    def __init__(self, collate: Any) -> None:
        self.held = HeldGenerators(collate)
        declared = declares_draws(collate)
        self.draws_nothing = declared is False  # whether the function is known never to draw
        self.draws = declared
        """Whether the function draws from the global generators; `None` if not yet known."""
        # The training thread may collate parts of a batch while a thread collates the next batch.
        self._lock = threading.Lock()

    def call(self, make_batch: MakeBatch, key: int, *, find_out: bool = False) -> Batch:
        """Return the result of `make_batch`, which calls the function, under the seed `key`.

        `make_batch` is called twice if the function makes a generator in its first call, so it must
        pass copies of the samples. find_out: whether to find out if the function draws.
        """
        with exclusive_rngs(_LIMIT_S):
            seed_rngs(key)
            before = digest_of_rngs() if find_out else None
            batch = self.call_ahead(make_batch, key, seed_rngs)
            if find_out:
                self.draws = bool(self.draws) or digest_of_rngs() != before
        return batch

    def call_ahead(self, make_batch: MakeBatch, key: int, seed: Seed = lambda _: None) -> Batch:
        """Return the result of `make_batch`; seed the held generators, and by `seed` the others."""
        with self._locked(), self.held.preserved():
            return self.held.call(make_batch, key=key, seed=seed)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Let one thread of this library use the held generators."""
        if not self._lock.acquire(timeout=_LIMIT_S):
            raise WorkerError(
                f"`collate_fn` has not returned within {_LIMIT_S:g} s on another thread: it hangs."
            )
        try:
            yield
        finally:
            self._lock.release()


class WorkerCollate:
    """Makes batches in a worker, with generators seeded by a key."""

    def __init__(self, collate: Collate) -> None:
        self._collate = collate
        self._draws_nothing = declares_draws(collate) is False
        self._seeded: SeededCollate | None = None  # created in the worker: a lock is not picklable

    def __call__(self, samples: Sequence[Any], key: int, info: StepInfo | None = None) -> Batch:
        """Return the batch of samples. Collating does not change them."""

        def run() -> Batch:
            copies = [*map(copy_for_collate, samples)]
            return collate_group(self._collate, copies, info)  # type: ignore[arg-type]

        if self._draws_nothing:
            return run()
        if self._seeded is None:
            self._seeded = SeededCollate(self._collate)
        return self._seeded.call(run, key)
