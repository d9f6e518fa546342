"""Node: the user's processing, in worker processes, threads, actors, or in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Generic, TypeVar

import numpy as np
from torchdata.nodes import BaseNode

from odb_nodes._support.checks import check_integer, check_type
from odb_nodes._support.hashing import stable_names
from odb_nodes._support.seeds import declares_draws
from odb_nodes.core.contract import EpochState, SourceState, copy_state
from odb_nodes.core.contract.again import restore_items
from odb_nodes.core.contract.graph import length_of
from odb_nodes.core.contract.node import (
    ItemLocation,
    call_member,
    can_restore,
    check_node,
    checked_key,
    format_location,
)
from odb_nodes.core.contract.numbered_items import NumberedItems
from odb_nodes.core.processing.again import ProcessedAgain
from odb_nodes.core.processing.chunk import ChunkResult, ChunkTask, Fetcher
from odb_nodes.core.processing.chunk_node import ChunkNode
from odb_nodes.core.processing.options import WorkerOptions
from odb_nodes.core.sample import ItemKey, Sample, Skipped, SourceItem
from odb_nodes.core.sample_block import ItemKeys
from odb_nodes.errors import SampleError

T = TypeVar("T")


@dataclass(kw_only=True)
class ProcessorState(EpochState):
    """The state of a `ParallelProcessor`."""

    source: SourceState  # from before the last item taken, and before all items to make again
    taken: int  # items taken since the state of the source
    position: int  # items of the epoch that were taken
    # source name -> items among `taken`, and the `repeat` of the last item. Only for named sources
    # that read by key, since only their items can be divided among other ranks.
    taken_of: dict[str, tuple[int, int]] = field(default_factory=dict)


@dataclass
class _ReadChunk:
    """A chunk in flight, and how its items were read."""

    task: ChunkTask
    future: Future[ChunkResult]
    locations: Sequence[ItemLocation | None]  # where each item comes from, if the source says so
    error: Exception | None  # raised by the source after these items


class _CurrentChunk(Generic[T]):
    """The results of the chunk that `next` takes from, and the error after them."""

    def __init__(
        self, runs: Sequence[Sequence[T]], keys: ItemKeys, failure: Exception | None
    ) -> None:
        self._runs = [*runs]
        self._run_taken = 0  # results taken from the first run
        self._keys = keys
        self._taken = 0
        self._count = sum(map(len, runs))
        self.failure = failure

    @property
    def is_used_up(self) -> bool:
        """Whether all results were taken."""
        return self._taken == self._count

    @property
    def last_key(self) -> ItemKey | None:
        """The key of the item of the last result taken."""
        return self._keys[self._taken - 1] if self._taken else None

    def take(self, count: int) -> tuple[Sequence[T], ItemKeys]:
        """Return the next results, at most `count`, and the keys of their items."""
        run = self._runs[0]
        results = run[self._run_taken : self._run_taken + count]
        self._run_taken += len(results)
        if self._run_taken == len(run):  # This frees the samples of the run.
            del self._runs[0]
            self._run_taken = 0
        first = self._taken
        self._taken += len(results)
        return results, self._keys[first : self._taken]


class ParallelProcessor(ChunkNode[T, ProcessorState]):
    """Applies `process_fn` to every item, in order, in parallel.

    Before each item, the global generators of Python, numpy and torch, and generators that the
    function holds, are seeded from (seed, epoch, key), so a sample does not depend on the worker,
    the rank, or the number of attempts. (For an item without a key, and for data of this rank
    alone, the seed also depends on the rank.) A method `set_epoch` of the function is called with
    the epoch. For a function with an attribute `draws_random_numbers = False`, nothing is seeded,
    which saves 9 us a sample.

    With `num_workers=0` and with threads the generators are restored afterwards. Threads then
    process one chunk at a time, and a training loop that draws from the same CPU generators
    disturbs processing: use processes, or `seed=None` and your own generators.

    The thread that calls `next` reads items in chunks, which workers process ahead of that thread.
    Workers live from the first reset until `close`, over epochs.

    State: a state of the source, and the number of items taken since. A run may resume with other
    `workers`.

    Args:
        source: node that yields items, cheap to read (indices, paths, raw records).
        process_fn: item -> processed sample; picklable unless workers are forked or threads.
        seed: seed of the random numbers of processing; `None` does not seed.
        workers: how to run in parallel.
        rank: this rank. Default: from torch.distributed, or `RANK`.
        world_size: number of ranks. Default: from torch.distributed, or `WORLD_SIZE`.
    """

    STATE = ProcessorState

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
        check_node("source", source)
        self._seed = None if seed is None else check_integer("seed", seed)
        super().__init__(process_fn, self._seed, workers, rank, world_size)
        self.source = source
        self._clear()

    def _clear(self) -> None:
        self._items: NumberedItems[Any] = NumberedItems(
            self.source, type(self).__name__, self.runner.options.nominal_chunk_samples
        )
        self._has_read_all = False  # whether the source is exhausted, or has failed
        self._chunk: _CurrentChunk[T] = _CurrentChunk([], ItemKeys.of([]), None)
        self._position = 0  # items of this epoch that were taken
        # Counts by source name since the state of the source. Empty if the source cannot read by
        # key: `keep_items` then decides which state is saved, and the counts would not fit it.
        self._taken_of: dict[str, tuple[int, int]] = {}

    def __len__(self) -> int:
        """Return the number of items of an epoch."""
        return length_of(self.source)

    def prepare_reset(self) -> None:
        """Discard the chunks in flight."""
        super().prepare_reset()
        self._clear()

    def begin_epoch(self) -> None:
        """Begin the epoch of the source."""
        self.source.reset(None)
        self._items.begin()

    def restore(self, state: ProcessorState) -> None:
        """Restore the source, and skip the items that were taken since its state."""
        self._position, self._taken_of = state.position, state.taken_of
        self.source.reset(copy_state(state.source))
        self._items.restore(state.source, state.position - state.taken, state.position)
        if can_restore(self.source):  # Otherwise `make_again` may have to read items first.
            self._items.catch_up()

    def save(self) -> ProcessorState:
        """Return a state of the source, and the number of items taken since."""
        first, source = self._state_of_source()
        return ProcessorState(
            source=source,
            taken=self._position - first,
            position=self._position,
            taken_of=self._taken_of,
        )

    def _state_of_source(self) -> tuple[int, Any]:
        """Return the number of the next item in a state of the source, and that state.

        The state is from before the last item taken: a state right after that item exists only if
        a chunk has ended there.
        """
        return self._items.state_at(max(0, self._position - 1))

    def next(self) -> T:
        """Return the next processed sample.

        Raises:
            SampleError: `process_fn` raised; names the item, its position and the worker. Raised
                again until the next reset, so that no sample is lost silently.
            WorkerError: a worker died, did not answer in time, or belongs to the process that this
                process was forked from. Raised again until the next reset.
        """
        (result,), _ = self._take(1)
        return result

    def next_chunk(self, count: int) -> tuple[Sequence[T], ItemKeys]:
        """Return the next processed samples of a chunk, and the keys of their items."""
        return self._take(count)

    def _take(self, count: int) -> tuple[Sequence[T], ItemKeys]:
        while self._chunk.is_used_up:
            if self._chunk.failure is not None:
                raise self._chunk.failure
            self._take_chunk()
        results, keys = self._chunk.take(count)
        self._note_taken(keys)
        return results, keys

    def _note_taken(self, keys: ItemKeys) -> None:
        first = self._position
        self._position += len(keys)
        self._items.forget(self._position - 1)
        if not can_restore(self.source):
            return
        state_position, _ = self._state_of_source()
        if state_position >= first:
            self._taken_of = {}
            keys = keys[state_position - first :]
        for code, (source, _) in enumerate(keys.origins):
            if not source:
                continue
            rows = np.flatnonzero((keys.codes == code) & (keys.numbers >= 0))
            if len(rows):
                count, _ = self._taken_of.get(source, (0, 0))
                self._taken_of[source] = count + len(rows), int(keys.repeats[rows[-1]])

    def item_key(self) -> ItemKey | None:
        """Return the key of the last sample's item."""
        return self._chunk.last_key

    @property
    def can_restore(self) -> bool:
        """Whether the source can make its items again by their keys."""
        return can_restore(self.source)

    def keep_items(self, first: int, distance: int) -> bool:
        """Keep states of the source, so that items from number `first` on can be read again.

        The states are about `distance` items apart. Returns `False`, and keeps none, if the source
        has keys: items are then read by key.
        """
        if can_restore(self.source):
            return False
        self._items.keep_from(first, distance)
        return True

    def make_again(self, items: Sequence[ItemKey]) -> ProcessedAgain:
        """Return samples of this epoch, which are processed again when taken, or by idle workers.

        Their raw items are read now: by key, or by number (see `keep_items`).
        """
        order = sorted(range(len(items)), key=lambda row: items[row][:2])  # neighbours together
        numbers: Sequence[int] = range(len(items))
        keys: Sequence[ItemKey | None] = items
        if can_restore(self.source):
            in_order = restore_items(self.source, [items[row] for row in order])
            rows_and_items = sorted(zip(order, in_order, strict=True), key=itemgetter(0))
            raw = [item for _, item in rows_and_items]
        else:
            numbers = [item.key for item in items]
            by_number = self._items.read_again(numbers)
            raw = [by_number[number][0] for number in numbers]
            keys = [checked_key(self.source, by_number[number][1]) for number in numbers]
        task = self._task(raw, ItemKeys.of(keys), numbers, is_reprocessed=True)
        return ProcessedAgain(self.runner, task, order)

    def _take_chunk(self) -> None:
        """Read ahead, and wait for the results of the next chunk."""
        self.runner.check()
        while not self._has_read_all and self._has_room():
            self._read_chunk()
        if not self._in_flight:
            if self._items.note_state():  # At the end of the epoch, no item was taken since.
                self._taken_of = {}
            raise StopIteration
        chunk: _ReadChunk = self._in_flight[0]
        task = chunk.task
        runs, failure = self.runner.results(task, chunk.future)
        self._in_flight.popleft()
        error = chunk.error
        if failure is not None:
            failed = sum(map(len, runs))
            location = format_location(chunk.locations[failed])
            error = failure.explained(
                f"sample {task.positions[failed]} of epoch {task.epoch}{location}"
            )
        self._chunk = _CurrentChunk(runs, task.keys, error)

    def _has_room(self) -> bool:
        if not self._in_flight:
            return True
        oldest: _ReadChunk = self._in_flight[0]
        items_ahead = self._items.position - (oldest.task.positions[-1] + 1)
        return items_ahead < self.runner.sizer.items_ahead

    def _read_chunk(self) -> None:
        """Read a chunk and send it to the workers. Keep an error of the source for later."""
        first, count = self._items.position, self.runner.sizer.items
        items: list[Any] = []
        keys: list[Sequence[ItemKey | None]] = []
        locations: list[ItemLocation | None] = []
        error: Exception | None = None
        try:
            while len(items) < count:
                chunk, chunk_keys = self._items.take(count - len(items))
                if not isinstance(chunk_keys, ItemKeys):
                    chunk_keys = [checked_key(self.source, key) for key in chunk_keys]
                keys.append(chunk_keys)
                is_single = len(chunk) == 1
                location = call_member(self.source, "item_location") if is_single else None
                locations += [location] * len(chunk)
                items += chunk
        except StopIteration:
            self._has_read_all = True
        except Exception as source_error:
            self._has_read_all = True
            error = source_error
        if items or error is not None:
            task = self._task(items, ItemKeys.joined(keys), range(first, first + len(items)))
            self._in_flight.append(_ReadChunk(task, self.runner.submit(task), locations, error))

    def _task(
        self,
        items: list[Any],
        keys: ItemKeys,
        positions: Sequence[int],
        is_reprocessed: bool = False,
    ) -> ChunkTask:
        return ChunkTask(
            items, keys, self._epochs.epoch, self._epochs.cycle, positions, is_reprocessed
        )

    def fingerprint(self) -> dict[str, Any]:
        """Return the configuration that decides the output."""
        return {
            "process_fn": self._name,
            "seed": self._seed,
            "rank": self._rank,
            "world_size": self._world_size,
        }


class PerSource(Fetcher):
    """Processes the items of each source with the source's function.

    Args:
        functions: name of the source -> function of an item; picklable unless workers are forked or
            threads.
    """

    def __init__(self, functions: Mapping[str, Callable[[Any], Any]]) -> None:
        check_type("functions", functions, Mapping, "Pass `{source: function of an item}`.")
        self._functions = dict(functions)
        self.parts = [*self._functions.values()]

    @property
    def fingerprint_name(self) -> str:
        """The sources, each with the name of its function."""
        return f"{type(self).__name__}({stable_names(self._functions)})"

    @property
    def draws_random_numbers(self) -> bool | None:
        """`False` if all functions declare `False`, else `None`: unknown."""
        draws = map(declares_draws, self._functions.values())
        return False if all(draw is False for draw in draws) else None

    def fetch(self, items: Sequence[SourceItem]) -> Sequence[SourceItem]:
        """Read items by the functions of their sources."""
        fetched = [*items]
        for name, function in self._functions.items():
            if isinstance(function, Fetcher):
                rows = [row for row, item in enumerate(items) if item.source == name]
                arguments = function.fetch([items[row].item for row in rows])
                for row, argument in zip(rows, arguments, strict=True):
                    fetched[row] = SourceItem(name, argument)
        return fetched

    def __call__(self, routed: SourceItem) -> Sample | Skipped | SourceItem:
        """Process an item by the function of its source; name the source in the result."""
        try:
            function = self._functions[routed.source]
        except KeyError:
            raise SampleError(
                f"`PerSource` has no function for source {routed.source!r}, only for "
                f"{sorted(self._functions)}."
            ) from None
        result = function(routed.item)
        if isinstance(result, (Sample, Skipped)):
            return result.of_source(routed.source)
        return SourceItem(routed.source, result)
