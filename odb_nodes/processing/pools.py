"""The interface of a pool of workers."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Protocol

from odb_nodes._core.processes import Owner
from odb_nodes.processing.chunk import ChunkProcessor, ChunkResult, ChunkTask
from odb_nodes.processing.options import WorkerOptions
from odb_nodes.processing.process_pool import ProcessPool
from odb_nodes.processing.ray_pool import RayPool
from odb_nodes.processing.thread_pool import ThreadPool


class WorkerPool(Protocol):
    """Processes chunks in parallel and returns the results in futures.

    Attributes:
        owner: the process that the workers belong to.
    """

    owner: Owner

    def submit(self, task: ChunkTask) -> Future[ChunkResult]:
        """Queue a chunk."""

    def what_hangs(self, future: Future[ChunkResult]) -> str:
        """Return what keeps a chunk from being done, and what to do."""

    def discard(self) -> None:
        """Skip queued chunks that no worker has begun: nobody waits for them any more."""

    def close(self) -> None:
        """Stop the workers; may be called again, and from any thread. Only the owner's does."""


def start_pool(processor: ChunkProcessor, options: WorkerOptions) -> WorkerPool:
    """Start the workers that `options` ask for."""
    if options.method == "thread":
        return ThreadPool(processor, options)
    if options.method == "ray":
        return RayPool(processor, options)
    return ProcessPool(processor, options)
