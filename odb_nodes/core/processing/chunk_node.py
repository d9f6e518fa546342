"""The base class of nodes whose items workers process in chunks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from odb_nodes._support.checks import check_callable, check_type
from odb_nodes._support.hashing import stable_name
from odb_nodes._support.processes import resolve_rank
from odb_nodes._support.seeds import declares_draws
from odb_nodes.core.contract import EpochNode
from odb_nodes.core.contract.node import S
from odb_nodes.core.processing.chunk import ChunkProcessor, MakesGroups
from odb_nodes.core.processing.chunk_runner import ChunkRunner
from odb_nodes.core.processing.options import WorkerOptions

T = TypeVar("T")


class ChunkNode(EpochNode[T, S], Generic[T, S]):
    """A node whose items workers process. Workers live from its first reset until `close`."""

    keeps_failed_items = True

    def __init__(
        self,
        process_fn: Callable[[Any], Any],
        seed: int | None,
        workers: WorkerOptions | None,
        rank: int | None,
        world_size: int | None,
        make_group: MakesGroups | None = None,
    ) -> None:
        super().__init__()
        check_callable("process_fn", process_fn)
        remedy = "Pass `WorkerOptions(num_workers=2)`."
        check_type("workers", workers, WorkerOptions | None, remedy)
        self._name = stable_name(process_fn)
        self._rank, self._world_size = resolve_rank(rank, world_size)
        options = workers or WorkerOptions()
        seed = None if declares_draws(process_fn) is False else seed
        processor = ChunkProcessor(
            process_fn,
            seed,
            self._rank,
            self._world_size,
            options.timeout_s,
            make_group=make_group,
        )
        self.runner = ChunkRunner(processor, options, type(self).__name__)
        """Runs chunks."""
        self._in_flight = deque[Any]()  # chunks, the oldest first

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the worker processes that run now."""
        return self.runner.pids

    @property
    def has_workers(self) -> bool:
        """Whether workers run, in processes or threads."""
        return self.runner.is_started

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        """Begin the next epoch, or restore `initial_state`.

        Raises:
            StateError: the state is damaged, or was saved with another configuration.
            WorkerError: a worker could not be started, or the workers belong to the process that
                this one was forked from.
        """
        self.runner.check_process()
        super().reset(initial_state)
        # Not in `next`, which may run on a thread: a fork should see few threads.
        self.runner.start(self._epochs.epoch)

    def prepare_reset(self) -> None:
        """Discard the chunks in flight."""
        if self._in_flight or self.runner.has_backlog:
            self.runner.discard()
        self._in_flight.clear()
        self.runner.resume()

    def close(self) -> None:
        """Stop the workers. A later reset starts them again.

        A forked child forgets the workers, which continue for the process that started them.
        """
        self.runner.close()

    def interrupt(self) -> None:
        """Make a `next` that waits on another thread raise now. The next reset cancels this."""
        self.runner.interrupt()
