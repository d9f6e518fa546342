"""Node: the user's processing, in worker processes, threads, or in place."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any, TypeVar

from torchdata.nodes import BaseNode

from odb_nodes._core.checks import check_callable, check_integer
from odb_nodes._core.fingerprints import stable_name
from odb_nodes._core.ranks import resolve_rank
from odb_nodes._core.signals import deferred_interrupt
from odb_nodes.contract import Count, EpochNode, EpochState, SourceState, copy_state
from odb_nodes.contract.graph import length_of
from odb_nodes.contract.item_location import ItemLocation, format_location
from odb_nodes.contract.node import call_member, check_node
from odb_nodes.errors import StateError, WorkerError
from odb_nodes.processing.chunk import ChunkProcessor, ChunkResult, ChunkTask, Failure
from odb_nodes.processing.options import WorkerOptions
from odb_nodes.processing.pools import WorkerPool, start_pool
from odb_nodes.processing.process_pool import ProcessPool
from odb_nodes.processing.transport import unpack
from odb_nodes.sample import ItemKey

T = TypeVar("T")


@dataclass(frozen=True)
class _Chunk:
    """A chunk in flight: the source's state before it, and what will come of it."""

    source_state: Any
    task: ChunkTask
    locations: list[ItemLocation | None]  # of its items
    future: Future[ChunkResult] | None  # None: processed when its turn comes
    source_error: Exception | None


@dataclass(kw_only=True)
class ProcessorState(EpochState):
    """Where a `ParallelProcessor` stands.

    Attributes:
        source: the state of the source before the chunk in hand.
        taken: items of that chunk that are out.
        position: items of the epoch that are out.
    """

    source: SourceState
    taken: Count
    position: Count

    def validate(self) -> None:
        """Check that what is out of the chunk is out of the epoch."""
        if self.taken > self.position:
            raise ValueError(
                f"`taken` must be at most `position`, {self.position}, but is {self.taken}."
            )


class ParallelProcessor(EpochNode[T, ProcessorState]):
    """Applies `process_fn` to every item, in order, in parallel.

    Before each item, the global generators of Python, numpy and torch are seeded from (seed, epoch,
    key), so a sample does not depend on who processes it, on which rank, or how often. (An item
    without a key, and one of data that this rank has for itself, is seeded by the rank, too.) With
    `num_workers=0` and with threads they are put back afterwards; threads then process one chunk at
    a time, and a training loop that draws from the same CPU generators meanwhile would disturb
    both: use processes, or `seed=None` and generators of your own.

    Items are read from the source on the thread that calls `next`, in chunks, and processed ahead
    of it. Workers live from the first reset until `close`, over epochs.

    State: the source's state before a chunk, and how many of its items were taken. It does not
    depend on `workers`: a run may resume with other workers than it was saved with.

    Args:
        source: node that yields items, cheap to read (indices, paths, raw records).
        process_fn: item -> processed sample. Picklable, unless workers are forked or threads.
        seed: the seed of the random numbers of processing; `None` does not seed.
        workers: how to run in parallel.
        rank: this rank; by default that of torch.distributed, or of `RANK`.
        world_size: number of ranks, likewise.
    """

    STATE = ProcessorState
    keeps_failed_items = True

    def __init__(
        self,
        source: BaseNode[Any],
        process_fn: Callable[[Any], T],
        *,
        seed: int | None = 0,
        workers: WorkerOptions | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        super().__init__()
        check_node("source", source)
        check_callable("process_fn", process_fn)
        self.source = source
        self._seed = None if seed is None else check_integer("seed", seed)
        self._name = stable_name(process_fn)
        self._workers = workers or WorkerOptions()
        self._rank, self._world_size = resolve_rank(rank, world_size)
        self._processor = ChunkProcessor(
            process_fn, self._seed, self._rank, self._world_size, self._workers.timeout_s
        )
        self._pool: WorkerPool | None = None
        self._finalizer: Callable[[], Any] | None = None
        self._key: ItemKey | None = None  # of the last item that is out
        self._clear()

    def __len__(self) -> int:
        """Return how many items an epoch has.

        Raises:
            TypeError: the source does not know its length.
        """
        return length_of(self.source)

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the worker processes that run now."""
        return self._pool.pids if isinstance(self._pool, ProcessPool) else []

    @property
    def has_workers(self) -> bool:
        """Tell whether workers run, in processes or threads."""
        return self._pool is not None

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        """Begin the next epoch, or go to where `initial_state` stands.

        Raises:
            StateError: the state is damaged, or was saved with another `process_fn`, seed, rank or
                world size.
            WorkerError: a worker could not be started, or the workers belong to the process that
                this one was forked from.
        """
        self._check_process()
        super().reset(initial_state)
        if self._pool is None and self._workers.num_workers > 0:
            # Here and not in `next`, which may run on a thread: a fork should see few of those.
            with deferred_interrupt():
                self._pool = start_pool(self._processor, self._workers)
                self._finalizer = weakref.finalize(self, self._pool.close)

    def prepare_reset(self) -> None:
        """Leave what is in flight."""
        if self._pool is not None and self._in_flight:
            self._pool.discard()
        self._clear()

    def begin_epoch(self) -> None:
        """Begin the epoch of the source."""
        self.source.reset(None)
        self._source_state = copy_state(self.source.state_dict())

    def restore(self, state: ProcessorState) -> None:
        """Go to the source's chunk, and past the items of it that are out."""
        self._source_state, self._taken = state.source, state.taken
        self._position = self._submitted = state.position
        self.source.reset(copy_state(state.source))
        self._skip(state.taken)

    def save(self) -> ProcessorState:
        """Return the source's state before the chunk in hand, and how many items of it are out."""
        return ProcessorState(
            source=copy_state(self._source_state), taken=self._taken, position=self._position
        )

    def next(self) -> T:
        """Return the next processed sample.

        Raises:
            SampleError: `process_fn` raised; names the item, its position and the worker. Raised
                again until the next reset, so the sample cannot pass unseen.
            WorkerError: a worker died, did not answer in time, or belongs to the process that this
                one was forked from. Likewise.
        """
        while True:
            for result, key in self._ready:
                self._key = key
                self._taken += 1
                self._position += 1
                return result  # type: ignore[no-any-return]
            if self._failure is not None:
                raise self._failure
            self._take_chunk()

    def item_key(self) -> ItemKey | None:
        """Return that of the item that the last sample was made of."""
        return self._key

    def close(self) -> None:
        """Stop the workers. A later reset starts them again.

        A forked child forgets them: they go on for the process that started them.
        """
        finalizer, self._pool, self._finalizer = self._finalizer, None, None
        if finalizer is not None:
            with deferred_interrupt():  # Half closed, it would wait for workers that are gone.
                finalizer()

    def _clear(self) -> None:
        self._interruption: Future[ChunkResult] = Future()
        self._in_flight: deque[_Chunk] = deque()
        self._ready: Iterator[tuple[Any, ItemKey | None]] = iter(())
        self._failure: Exception | None = None
        self._source_ended = False
        self._taken = 0  # items out since `_source_state`
        self._position = 0  # items out in this epoch
        self._submitted = 0  # items read in this epoch

    def _skip(self, count: int) -> None:
        """Read items that were taken before; they are not processed again."""
        for read in range(count):
            try:
                next(self.source)
            except StopIteration:
                raise StateError(
                    f"the state of {type(self).__name__} stands {count} items after its source's, "
                    f"which ended after {read}. Resume over the data it was saved on."
                ) from None

    def interrupt(self) -> None:
        """Make a `next` that waits on another thread raise now. A reset takes it back."""
        if not self._interruption.done():
            self._interruption.set_result(ChunkResult(None, None))

    def _take_chunk(self) -> None:
        """Make the results of the next chunk ready, and read further ahead.

        Raises:
            StopIteration: the source has ended and nothing is in flight.
        """
        self._check_process()
        self._check_interrupted()
        while not self._source_ended and len(self._in_flight) <= self._workers.chunks_ahead:
            self._read_chunk()
        if not self._in_flight:
            # Nothing is out since this state: it stands at the end of the epoch.
            self._source_state, self._taken = copy_state(self.source.state_dict()), 0
            raise StopIteration
        chunk = self._in_flight[0]
        results, failure = self._results_of(chunk)
        self._in_flight.popleft()
        self._source_state, self._taken = chunk.source_state, 0
        self._ready = zip(results, chunk.task.keys, strict=False)
        if failure is not None:
            position = self._position + len(results)
            location = format_location(chunk.locations[len(results)])
            where = f"sample {position} of epoch {self._epochs.epoch}{location}"
            self._failure = failure.explained(where, elsewhere=chunk.future is not None)
        elif chunk.source_error is not None:
            self._failure = chunk.source_error

    def _read_chunk(self) -> None:
        source_state = copy_state(self.source.state_dict())
        items: list[Any] = []
        keys: list[ItemKey | None] = []
        locations: list[ItemLocation | None] = []
        error: Exception | None = None
        try:
            while len(items) < self._workers.chunk_size:
                items.append(next(self.source))
                keys.append(call_member(self.source, "item_key"))
                locations.append(call_member(self.source, "item_location"))
        except StopIteration:
            self._source_ended = True
        except Exception as caught:
            # The items before it are delivered first: the error comes in its place.
            self._source_ended, error = True, caught
        if items or error is not None:
            task = ChunkTask(items, keys, self._epochs.shuffle_key, self._submitted)
            self._submitted += len(items)
            future = self._submit(task)
            self._in_flight.append(_Chunk(source_state, task, locations, future, error))

    def _submit(self, task: ChunkTask) -> Future[ChunkResult] | None:
        if self._pool is not None:
            try:
                return self._pool.submit(task)
            except Exception as error:  # of pickling
                raise self._fail(
                    f"samples {task.position}..{task.position + len(task.items) - 1} of epoch "
                    f"{self._epochs.epoch} cannot be sent to a worker: {type(error).__name__}: "
                    f'{error}. Let the source yield plain data, or use `method="thread"`.'
                ) from error
        if self._workers.num_workers == 0:
            return None
        raise WorkerError("the workers were closed: reset the node to start them again.")

    def _results_of(self, chunk: _Chunk) -> tuple[list[Any], Failure | None]:
        if chunk.future is None:
            result = self._processor.run(chunk.task)
            return result.results, result.failure
        first, size = chunk.task.position, len(chunk.task.items)
        where = f"samples {first}..{first + size - 1} of epoch {self._epochs.epoch}"
        waiting = (chunk.future, self._interruption)
        wait(waiting, self._workers.timeout_s, return_when=FIRST_COMPLETED)
        self._check_interrupted()
        if not chunk.future.done():
            cause = self._pool.what_hangs(chunk.future) if self._pool else "the pool was closed."
            raise self._fail(
                f"no result within {self._workers.timeout_s} s (`timeout_s`) for {where}: {cause}"
            )
        try:
            result = chunk.future.result()
            packed = isinstance(self._pool, ProcessPool)
            return unpack(result.results) if packed else result.results, result.failure
        except WorkerError as error:
            raise self._fail(f"while processing {where}: {error}") from error
        except Exception as error:
            raise self._fail(
                f"the results of {where} cannot be unpickled here: {type(error).__name__}: {error}"
            ) from error

    def _fail(self, message: str) -> WorkerError:
        """Remember an error, and stop the workers: the next reset starts new ones."""
        self._failure = WorkerError(message)
        self.close()
        return self._failure

    def _check_process(self) -> None:
        if self._pool is not None:
            self._pool.owner.check(f"`{type(self).__name__}`")

    def _check_interrupted(self) -> None:
        if self._interruption.done():
            raise WorkerError("processing was interrupted, since the graph is reset or closed.")

    def fingerprint(self) -> dict[str, Any]:
        """Return what decides the output: a state fits only where it is equal."""
        return {
            "process_fn": self._name,
            "seed": self._seed,
            "rank": self._rank,
            "world_size": self._world_size,
        }
