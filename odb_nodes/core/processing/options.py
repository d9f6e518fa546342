"""How processing runs in parallel."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Literal, get_args

from odb_nodes._support.checks import check_callable, check_choice, check_seconds, keep_count

Method = Literal["process", "thread", "ray"]
ChunkSize = int | Literal["auto"]

_ONLY_FOR_PROCESSES = {"thread": ("start_method", "worker_init_fn"), "ray": ("start_method",)}
AUTO: Final = "auto"
_NOMINAL_SAMPLES = 32
"""Size of an `"auto"` chunk that states, and the default of `in_flight_samples`, assume."""
MOST_SAMPLES = 256  # the most samples of an `"auto"` chunk


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """How processing runs in parallel. Samples and groups do not depend on these options.

    If lengths are known before samples are read, a worker gets a whole group at a time. Then
    `chunk_size` matters only for samples that are processed again after a resume, and at least one
    group per worker is in flight, two if `in_flight_samples` is `None`.

    Args:
        num_workers: number of workers; 0 processes in the trainer's own thread.
        method: `"process"`; `"thread"`, for processing that releases the GIL; or `"ray"`, for
            actors of a Ray cluster (docs/ray.md; needs `odb-nodes[ray]`).
        start_method: how worker processes start: `"fork"`, `"spawn"`, `"forkserver"`, or `None`
            for the platform's default.
        chunk_size: number of samples sent and processed together; `"auto"`: from 1 to 256
            samples, which take a worker up to 20 ms and up to 1 MiB, so that all workers are busy.
        in_flight_samples: number of samples being processed or waiting to be taken; `None` for 4
            chunks per worker.
        in_flight_bytes: the most bytes of these samples, estimated from earlier samples; `None`
            for no limit. At least two chunks per worker are in flight. No effect on threads.
        timeout_s: seconds to wait for a chunk before an error is raised.
        worker_init_fn: called with the worker's number when a worker process starts. It must be
            `None` for threads, and `start_method` for threads and Ray.

    Raises:
        TypeError, ValueError: an argument is not valid.
    """

    num_workers: int = 0
    method: Method = "process"
    start_method: Literal["fork", "spawn", "forkserver"] | None = None
    chunk_size: ChunkSize = AUTO
    in_flight_samples: int | None = None
    in_flight_bytes: int | None = 256 << 20
    timeout_s: float = 600.0
    worker_init_fn: Callable[[int], None] | None = None

    def __post_init__(self) -> None:
        keep_count(self, "num_workers", 0)
        if self.chunk_size != AUTO:
            keep_count(self, "chunk_size")
        if self.in_flight_samples is not None:
            keep_count(self, "in_flight_samples")
        if self.in_flight_bytes is not None:
            keep_count(self, "in_flight_bytes")
        check_choice("method", self.method, get_args(Method))
        if self.start_method is not None:
            check_choice("start_method", self.start_method, multiprocessing.get_all_start_methods())
        check_seconds("timeout_s", self.timeout_s)
        check_callable("worker_init_fn", self.worker_init_fn)
        for name in _ONLY_FOR_PROCESSES.get(self.method, ()):
            if getattr(self, name) is not None:
                raise ValueError(
                    f'`{name}` must be None where `method` is "{self.method}", but is '
                    f"{getattr(self, name)!r:.80} instead: only worker processes have it."
                )

    @property
    def forks(self) -> bool:
        """Whether worker processes are forked."""
        chosen = self.start_method or multiprocessing.get_start_method(allow_none=True)
        return (chosen or multiprocessing.get_all_start_methods()[0]) == "fork"

    @property
    def nominal_chunk_samples(self) -> int:
        """Size of a chunk that states, and the default of `in_flight_samples`, assume."""
        return _NOMINAL_SAMPLES if self.chunk_size == AUTO else self.chunk_size

    @property
    def most_chunk_samples(self) -> int:
        """The most samples of a chunk."""
        return MOST_SAMPLES if self.chunk_size == AUTO else self.chunk_size

    @property
    def samples_ahead(self) -> int:
        """Samples in flight beyond the current chunk, before rounding up to whole chunks."""
        if self.num_workers == 0:
            return 0
        if self.in_flight_samples is None:
            return 4 * self.num_workers * self.nominal_chunk_samples
        return self.in_flight_samples


def share_of(workers: WorkerOptions, count: int) -> WorkerOptions:
    """Return the options of each of `count` nodes that share the workers: 1 worker at least."""

    def share(limit: int | None) -> int | None:
        return None if limit is None else max(1, limit // count)

    return replace(
        workers,
        num_workers=-(-workers.num_workers // count),
        in_flight_samples=share(workers.in_flight_samples),
        in_flight_bytes=share(workers.in_flight_bytes),
    )
