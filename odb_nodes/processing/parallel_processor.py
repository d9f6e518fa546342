"""Node: the user's processing, in worker processes, threads, actors, or in place."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import accumulate, chain, islice
from typing import Any, TypeVar

import numpy as np
from torchdata.nodes import BaseNode

from odb_nodes._core.checks import check_callable, check_integer
from odb_nodes._core.hashing import stable_name, stable_names
from odb_nodes._core.processes import resolve_rank
from odb_nodes._core.seeds import declares_draws
from odb_nodes.contract import EpochNode, EpochState, SourceState, copy_state, snapshot
from odb_nodes.contract.graph import length_of
from odb_nodes.contract.node import (
    ItemLocation,
    call_member,
    can_restore,
    check_node,
    checked_key,
    format_location,
    restore_items,
    take,
)
from odb_nodes.errors import SampleError, StateError
from odb_nodes.processing.again import ProcessedAgain
from odb_nodes.processing.chunk import ChunkProcessor, ChunkResult, ChunkTask, Fetcher
from odb_nodes.processing.chunk_runner import ChunkRunner
from odb_nodes.processing.options import WorkerOptions
from odb_nodes.sample import ItemKey, Sample, Skipped, SourceItem
from odb_nodes.sample_block import ItemKeys

T = TypeVar("T")


@dataclass(kw_only=True)
class ProcessorState(EpochState):
    """Where a `ParallelProcessor` stands."""

    source: SourceState  # the state of the source before the chunk in hand
    taken: int  # items of that chunk that are out
    position: int  # items of the epoch that are out
    # source -> how many of `taken` are of it, and the `repeat` of the last, where sources have
    # names
    taken_of: dict[str, tuple[int, int]] = field(default_factory=dict)


@dataclass
class ReadItems:
    """The items of a chunk, and how they were read."""

    items: list[Any] = field(default_factory=list)
    # filled in when all are read
    keys: ItemKeys = field(default_factory=lambda: ItemKeys.of([]))
    # where each was read, where the source knows that
    locations: list[ItemLocation | None] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)  # raw items from each on to the next one
    # numbers of items, and the states of the source before them
    states: list[tuple[int, Any]] = field(default_factory=list)
    positions: Sequence[int] = ()  # of the items in the epoch; filled in when all are read
    error: Exception | None = None  # what the source raised after them


class ChunkReader:
    """Reads the items of an epoch, or of the rest of one."""

    def __init__(self, source: BaseNode[Any], distance: int, name: str) -> None:
        self._source, self._distance, self._name = source, distance, name
        self._since_state = 0  # items read since the last state
        self._gaps: deque[int] = deque()  # raw items to leave out after each of the next ones
        self._position = 0  # raw items read in this epoch
        self.has_ended = False  # whether the source has no more items, or has failed

    def stand_at(self, position: int, taken: int) -> None:
        """Go past the items that are out, `taken` after the state that the source was reset to."""
        self._position = position
        self._skip(taken, taken)

    def select(self, wanted: Sequence[bool]) -> int:
        """Read of the next `len(wanted)` items only those that are wanted."""
        places = [place for place, is_wanted in enumerate(wanted) if is_wanted]
        first, *later = *places, len(wanted)
        self._skip(first, first)
        self._position += first
        self._gaps.extend(after - place - 1 for place, after in zip(places, later, strict=True))
        return first

    def read(self, count: int) -> ReadItems:
        """Return the next items, fewer at the end of the source; its error comes after them."""
        read, keys_read = ReadItems(), list[Sequence[ItemKey | None]]()
        try:
            while (left := count - len(read.items)) > 0:
                if self._since_state in (0, self._distance):
                    read.states.append((len(read.items), snapshot(self._source)))
                    self._since_state = 0
                left = min(left, self._distance - self._since_state)
                some, keys = take(self._source, 1 if self._gaps else left)
                self._since_state += len(some)
                if not isinstance(keys, ItemKeys):
                    keys = [checked_key(self._source, key) for key in keys]
                keys_read.append(keys)
                locations = [None] * len(some)
                if len(some) == 1:
                    locations = [call_member(self._source, "item_location")]
                read.locations += locations
                read.items += some
                read.steps += [1] * len(some)
                if self._gaps and (gap := self._gaps.popleft()):
                    read.steps[-1] += gap
                    self._skip(gap, sum(read.steps))
        except StopIteration:
            self.has_ended = True
        except Exception as error:
            self.has_ended, read.error = True, error
        read.keys = ItemKeys.joined(keys_read)
        positions = [*accumulate(read.steps, initial=self._position)]
        read.positions, self._position = positions[: len(read.items)], positions[-1]
        return read

    def _skip(self, count: int, behind: int) -> None:
        """Read items and leave them out: the last of them is `behind` items after a state's."""
        for left in range(count, 0, -1):
            try:
                next(self._source)
            except StopIteration:
                raise StateError(
                    f"the state of {self._name} stands {behind} items after its source's, "
                    f"which ended after {behind - left}. Resume over the data it was saved on."
                ) from None


class ParallelProcessor(EpochNode[T, ProcessorState]):
    """Applies `process_fn` to every item, in order, in parallel.

    Before each item, the global generators of Python, numpy and torch, and those that the function
    holds, are seeded from (seed, epoch, key), so a sample does not depend on the worker, the rank,
    or the number of attempts. If the function has `set_epoch`, it is told the epoch. (An item
    without a key, or of data that belongs to this rank, is also seeded by the rank.) A function
    with an attribute `draws_random_numbers = False` is not seeded, which saves 9 us a sample.

    With `num_workers=0` and with threads the generators are restored afterwards. Threads process
    one chunk at a time then, and a training loop that draws from the same CPU generators disturbs
    processing: use processes, or `seed=None` and generators of your own.

    The thread that calls `next` reads items in chunks, which are processed ahead of it. Workers
    live from the first reset until `close`, over epochs.

    State: the source's state before a chunk, and how many of its items were taken. A run may resume
    with other `workers`.

    Args:
        source: node that yields items, cheap to read (indices, paths, raw records).
        process_fn: item -> processed sample; picklable unless workers are forked or threads.
        seed: seed of the random numbers of processing; `None` does not seed.
        workers: how to run in parallel.
        rank: this rank. Default: from torch.distributed, or `RANK`.
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
        seed = None if declares_draws(process_fn) is False else self._seed
        processor = ChunkProcessor(
            process_fn, seed, self._rank, self._world_size, self._workers.timeout_s
        )
        self.runner = ChunkRunner(processor, self._workers, type(self).__name__)
        """Runs chunks, and has the workers make batches."""
        self._clear()

    def _clear(self) -> None:
        self.runner.resume()
        self._in_flight: deque[tuple[ChunkTask, Future[ChunkResult], ReadItems]] = deque()
        self._ahead = 0  # items in flight
        self._states: deque[tuple[int, Any]] = deque()  # of the chunk in hand, still to come
        self._runs: list[Sequence[Any]] = []  # the results of the chunk in hand
        self._run_at = 0  # items of the first of them that are out
        self._ready = self._out = 0  # items of the chunk in hand: good ones, and those that are out
        self._keys, self._steps = ItemKeys.of([]), list[int]()
        self._failure: Exception | None = None
        self._taken = 0  # items out since `_source_state`
        self._taken_of: dict[str, tuple[int, int]] = {}  # likewise, by source
        self._position = 0  # items out in this epoch
        distance = self._workers.nominal_chunk_samples
        self._reader = ChunkReader(self.source, distance, type(self).__name__)

    def __len__(self) -> int:
        """Return how many items an epoch has."""
        return length_of(self.source)

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the worker processes that run now."""
        return self.runner.pids

    @property
    def has_workers(self) -> bool:
        """Tell whether workers run, in processes or threads."""
        return self.runner.is_started

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        """Begin the next epoch, or go to where `initial_state` stands.

        Raises:
            StateError: the state is damaged, or was saved with another `process_fn`, seed, rank or
                world size.
            WorkerError: a worker could not be started, or the workers belong to the process that
                this one was forked from.
        """
        self.runner.check_process()
        super().reset(initial_state)
        # Here and not in `next`, which may run on a thread: a fork should see few of those.
        self.runner.start(self._epochs.epoch)

    def prepare_reset(self) -> None:
        """Leave what is in flight."""
        if self._in_flight or self.runner.has_backlog:
            self.runner.discard()
        self._clear()

    def begin_epoch(self) -> None:
        """Begin the epoch of the source."""
        self.source.reset(None)
        self._source_state = snapshot(self.source)

    def restore(self, state: ProcessorState) -> None:
        """Go to the source's chunk, and past the items of it that are out."""
        self._source_state, self._taken = state.source, state.taken
        self._taken_of.update(state.taken_of)
        self._position = state.position
        self.source.reset(copy_state(state.source))
        self._reader.stand_at(state.position, state.taken)

    def save(self) -> ProcessorState:
        """Return the source's state before the chunk in hand, and how many items of it are out."""
        return ProcessorState(
            source=self._source_state,
            taken=self._taken,
            position=self._position,
            taken_of=self._taken_of,
        )

    def next(self) -> T:
        """Return the next processed sample.

        Raises:
            SampleError: `process_fn` raised; names the item, its position and the worker. Raised
                again until the next reset, so the sample cannot pass unseen.
            WorkerError: a worker died, did not answer in time, or belongs to the process that this
                one was forked from. Likewise.
        """
        (result,), _ = self._take(1)
        return result

    def next_chunk(self, count: int) -> tuple[Sequence[T], ItemKeys]:
        """Return the next processed samples of a chunk, and the keys of their items."""
        return self._take(count)

    def _take(self, count: int) -> tuple[Sequence[T], ItemKeys]:
        while self._out == self._ready:
            if self._failure is not None:
                raise self._failure
            self._take_chunk()
        run, at, first = self._runs[0], self._run_at, self._out
        results = run[at : at + count]
        self._run_at, self._out = at + len(results), first + len(results)
        if self._run_at == len(run):  # Samples that are out shall not stay here.
            del self._runs[0]
            self._run_at = 0
        self._note_taken(first)
        return results, self._keys[first : self._out]

    def _note_taken(self, first: int) -> None:
        """Count the items of the chunk in hand that went out, from number `first` on."""
        self._position += sum(self._steps[first : self._out])
        while self._states and self._states[0][0] < self._out:
            first, self._source_state = self._states.popleft()
            self._taken, self._taken_of = 0, {}
        self._taken += sum(self._steps[first : self._out])
        keys = self._keys
        for code, (source, _) in enumerate(keys.origins):
            if not source:
                continue
            own = keys.codes[first : self._out] == code
            of_source = first + np.flatnonzero(own & (keys.numbers[first : self._out] >= 0))
            if len(of_source):
                taken, _ = self._taken_of.get(source, (0, 0))
                last = int(keys.repeats[of_source[-1]])
                self._taken_of[source] = taken + len(of_source), last

    def item_key(self) -> ItemKey | None:
        """Return that of the item that the last sample was made of."""
        return self._keys[self._out - 1] if self._out else None

    @property
    def can_restore(self) -> bool:
        """Whether the source can make its items again."""
        return can_restore(self.source)

    def restore_items(self, items: Sequence[ItemKey]) -> Iterator[T]:
        """Yield samples of this epoch again, processed in parallel; `next` goes on as before."""
        again, start = restore_items(self.source, items), 0
        waiting: deque[tuple[ChunkTask, Future[ChunkResult]]] = deque()
        try:
            while keys := items[start : start + self.runner.fit.items]:
                stop = start + len(keys)
                task = self._task(
                    [*islice(again, len(keys))], ItemKeys.of(keys), range(start, stop)
                )
                waiting.append((task, self.runner.submit(task, urgent=True)))
                start = stop
                while waiting and stop - waiting[0][0].positions[-1] > self.runner.fit.items_ahead:
                    yield from self._restored(*waiting.popleft())
            while waiting:
                yield from self._restored(*waiting.popleft())
        finally:
            if waiting:  # Nobody waits for them any more.
                self.runner.discard()

    def make_again(self, items: Sequence[ItemKey]) -> ProcessedAgain:
        """Return samples of this epoch that are made again when they are taken, or by idle workers.

        Their raw items are read at once.
        """
        order = sorted(range(len(items)), key=lambda row: items[row][:2])  # neighbours together
        again = restore_items(self.source, [items[row] for row in order])
        raw = dict(zip(order, again, strict=True))
        in_order = [raw[row] for row in range(len(items))]
        place = self._epochs.epoch, self._epochs.cycle
        return ProcessedAgain(self.runner, in_order, items, place)

    def select(self, wanted: Sequence[bool]) -> bool:
        """Process of the next `len(wanted)` items only those that are wanted. After a reset only.

        The others are read from the source, and left out. True: a node without this cannot do it.
        """
        first = self._reader.select(wanted)
        self._taken += first
        self._position += first
        return True

    def close(self) -> None:
        """Stop the workers. A later reset starts them again.

        A forked child forgets them: they go on for the process that started them.
        """
        self.runner.close()

    def interrupt(self) -> None:
        """Make a `next` that waits on another thread raise now. A reset takes it back."""
        self.runner.interrupt()

    def _take_chunk(self) -> None:
        """Make the results of the next chunk ready, and read further ahead."""
        self.runner.check()
        while not self._reader.has_ended and self._has_room():
            self._read_chunk()
        if not self._in_flight:
            # Nothing is out since this state: it stands at the end of the epoch.
            self._source_state = snapshot(self.source)
            self._taken, self._taken_of = 0, {}
            raise StopIteration
        task, future, read = self._in_flight[0]
        self._runs, failure = self.runner.results(task, future)
        self._in_flight.popleft()
        self._ahead -= len(task.items)
        self._states = deque(read.states)
        self._run_at, self._out, self._ready = 0, 0, sum(map(len, self._runs))
        self._keys, self._steps = task.keys, read.steps
        if failure is not None:
            bad = self._ready
            location = format_location(read.locations[bad])
            where = f"sample {task.positions[bad]} of epoch {task.epoch}{location}"
            self._failure = failure.explained(where)
        elif read.error is not None:
            self._failure = read.error

    def _has_room(self) -> bool:
        """Tell whether to read a chunk: beyond the one to be taken next, so many may wait."""
        if not self._in_flight:
            return True
        task, _, _ = self._in_flight[0]
        return self._ahead - len(task.items) < self.runner.fit.items_ahead

    def _read_chunk(self) -> None:
        read = self._reader.read(self.runner.fit.items)
        if read.items or read.error is not None:  # The items before an error are delivered first.
            task = self._task(read.items, read.keys, read.positions)
            self._in_flight.append((task, self.runner.submit(task), read))
            self._ahead += len(read.items)

    def _task(self, items: list[Any], keys: ItemKeys, positions: Sequence[int]) -> ChunkTask:
        return ChunkTask(items, keys, self._epochs.epoch, self._epochs.cycle, positions)

    def _restored(self, task: ChunkTask, future: Future[ChunkResult]) -> Iterator[T]:
        runs, failure = self.runner.results(task, future)
        yield from chain(*runs)
        if failure is not None:
            bad = task.keys[sum(map(len, runs))]
            raise failure.explained(f"which is made again for a restore ({bad})")

    def fingerprint(self) -> dict[str, Any]:
        """Return what decides the output: a state fits only if it is equal."""
        return {
            "process_fn": self._name,
            "seed": self._seed,
            "rank": self._rank,
            "world_size": self._world_size,
        }


class PerSource(Fetcher):
    """Processes the items of each source with a function of its own.

    Args:
        functions: name of the source -> function of an item; picklable unless workers are forked or
            threads.
    """

    def __init__(self, functions: Mapping[str, Callable[[Any], Any]]) -> None:
        self._functions = dict(functions)
        self.parts = [*self._functions.values()]

    @property
    def fingerprint_name(self) -> str:
        """The sources, each with the name of its function."""
        return f"{type(self).__name__}({stable_names(self._functions)})"

    @property
    def draws_random_numbers(self) -> bool | None:
        """`False` where all functions say so; `None` where it is not known."""
        quiet = all(declares_draws(one) is False for one in self._functions.values())
        return False if quiet else None

    def fetch(self, items: Sequence[SourceItem]) -> Sequence[SourceItem]:
        """Return items with what the functions of their sources have read for them."""
        found = [*items]
        for name, function in self._functions.items():
            if isinstance(function, Fetcher):
                own = [at for at, one in enumerate(items) if one.source == name]
                read = function.fetch([items[at].item for at in own])
                for at, one in zip(own, read, strict=True):
                    found[at] = SourceItem(name, one)
        return found

    def __call__(self, routed: SourceItem) -> Sample | Skipped | SourceItem:
        """Return what the function of the item's source makes of it, with its name."""
        try:
            function = self._functions[routed.source]
        except KeyError:
            raise SampleError(
                f"`PerSource` has no function for source {routed.source!r}, but for "
                f"{sorted(self._functions)}."
            ) from None
        result = function(routed.item)
        if isinstance(result, (Sample, Skipped)):
            return result.of_source(routed.source)
        return SourceItem(routed.source, result)
