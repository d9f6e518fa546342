"""What a chunk of items is, how it is processed, and what a pool of workers does for it."""

from __future__ import annotations

import math
import os
import pickle
import threading
import time
import traceback
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from itertools import groupby
from typing import Any, Protocol

from odb_nodes._core.hashing import hash_ints, hash_rows
from odb_nodes._core.held_generators import HeldGenerators
from odb_nodes._core.processes import Owner
from odb_nodes._core.seeds import own_rngs, seed_rngs
from odb_nodes.errors import SampleError
from odb_nodes.planning import TokenBudget
from odb_nodes.processing.columns import DataColumns, StoredChunk
from odb_nodes.processing.first_samples import (
    OVERWRITTEN,
    FirstSamples,
    digest_of,
    first_overwritten,
)
from odb_nodes.processing.observation import made_of
from odb_nodes.processing.options import WorkerOptions
from odb_nodes.processing.transport import pack, size_of, split_parts, unpack
from odb_nodes.sample import Sample, Skipped, name_of
from odb_nodes.sample_block import ItemKeys, SampleBlock
from odb_nodes.step_info import StepInfo

_KNOWN = (Sample, Skipped)

_SHOWN = 8  # samples of a chunk, in an error
_ROWS = 16  # from which on `hash_rows` is faster


@dataclass(frozen=True)
class Failure:
    """Why a chunk ends early: the item after its good results raised."""

    item: str
    error: str
    details: str
    worker: str
    cause: BaseException | None = None  # what was raised, if in this process

    def explained(self, where: str) -> SampleError:
        """Return the error to raise."""
        by = f" It was processed in {self.worker}." if self.worker else ""
        error = SampleError(
            f"item {self.item}, {where}, cannot be processed: {self.error}\nNo batch with it was "
            f"delivered. Mend it, then iterate again or resume.{by}\n{self.details}".rstrip()
        )
        error.__cause__ = self.cause
        return error


@dataclass(frozen=True)
class ChunkTask:
    """What a chunk is made of."""

    items: Sequence[Any]
    keys: ItemKeys
    epoch: int
    cycle: int  # how often the epoch was begun again
    positions: Sequence[int]  # in the epoch; of items that are made again by their keys: rows
    is_again: bool = False  # whether the items were processed in this epoch before
    # where the items are those of a group: what its random numbers are drawn from, and its budget
    group: tuple[int, TokenBudget] | None = None

    def __str__(self) -> str:
        if self.is_again or self.group is not None:
            names = "".join(map(self._short_name, range(min(_SHOWN, len(self.keys)))))
            more = " ..." * (len(self.keys) > _SHOWN)
            what = "that are made again" if self.is_again else "in a group"
            return f"samples of epoch {self.epoch} {what}{names}{more}"
        first, last = (self.positions[0], self.positions[-1]) if self.positions else (0, -1)
        return f"samples {first}..{last} of epoch {self.epoch}"

    def name_of(self, row: int) -> str:
        """Return what an error calls an item: its key, or else its number in the epoch."""
        return str(self.keys[row] or f"sample {self.positions[row]} of the epoch")

    def _short_name(self, row: int) -> str:
        key = self.keys[row]
        return name_of(key) if key is not None else f" (sample {self.positions[row]})"


@dataclass(frozen=True)
class ChunkResult:
    """What became of a chunk."""

    # its good results in order, in runs of one kind (see `runs_of`); as parts, where it is packed,
    # or in `content`
    results: Any
    failure: Failure | None  # what ended it early
    seconds: float = 0.0  # that it has taken
    is_packed: bool = False  # whether it has come from another process
    # packed results, joined; the data of samples alone, where workers keep them
    content: Any = None
    is_stored: bool = False  # whether workers keep the data of its samples
    unread: str = ""  # why the worker could not unpickle it

    @property
    def size_bytes(self) -> int:
        """What has come from another process."""
        if not self.is_packed:
            return 0
        return sum(map(len, self.results)) + (0 if self.content is None else len(self.content))

    def runs(self) -> list[Sequence[Any]]:
        """Return the good results in runs."""
        if not self.is_packed:
            return self.results  # type: ignore[no-any-return]
        if self.content is None:
            return unpack(self.results)  # type: ignore[no-any-return]
        if not self.is_stored:
            return unpack(split_parts(self.content))  # type: ignore[no-any-return]
        runs: list[Sequence[Any]] = unpack(self.results)
        chunk, first = StoredChunk(self.content), 0
        for at, run in enumerate(runs):
            if isinstance(run, SampleBlock):
                runs[at] = run.with_data(chunk, first)
                first += len(run)
        return runs


class Fetcher:
    """A `process_fn` that can read what it processes many at once."""

    parts: Sequence[Any] = ()
    """The functions and datasets that it is made of."""

    def fetch(self, items: Sequence[Any]) -> Sequence[Any]:
        """Return items, with what was read for them, as a call takes them."""
        raise NotImplementedError


class MakesGroups(Protocol):
    """Makes what is sent of a group, of the results of its items.

    collates: whether it calls `collate_fn`.
    """

    collates: bool

    def __call__(self, results: Sequence[Any], key: int, budget: TokenBudget) -> Any:
        """Return it; `key`: of random numbers; `budget`: of the group."""


BatchMaker = Callable[[list[Any], int, StepInfo | None], Any]
"""Samples, the key of the random numbers, the step -> batch, in a worker process."""


class Pool:
    """Processes chunks, and returns what became of them in futures. Workers live until `close`."""

    pids: Sequence[int] = ()  # process ids of the workers, where they are processes of this machine
    exit_reason = ""  # how the first of the workers has ended that are gone; "" where all live

    def __init__(self) -> None:
        self.owner = Owner()

    def submit(self, task: ChunkTask) -> Future[ChunkResult]:
        """Queue a chunk."""
        raise NotImplementedError

    def make_batch(
        self,
        data: Sequence[Any],  # noqa: ARG002
        key: int,  # noqa: ARG002
        info: StepInfo | None,  # noqa: ARG002
    ) -> Future[Any] | None:
        """Have a worker make a batch; `None` where none can."""
        return None

    def dumps(self, value: Any) -> bytes:
        """Pickle a value as `submit` does."""
        return pickle.dumps(value)

    def what_hangs(self, future: Future[ChunkResult], functions: str) -> str:  # noqa: ARG002
        """Return what keeps a chunk from being done, one of these functions, and what to do."""
        return f"{functions} hangs, or needs a longer limit."

    def discard(self) -> None:
        """Skip queued chunks that no worker has begun: nobody waits for them any more."""

    def close(self) -> None:
        """Stop the workers; may be called again, and from any thread. Only the owner's does."""


_told_epochs: dict[int, tuple[Any, int]] = {}  # id of an object -> a reference, and its epoch


def _parts_of(function: Any) -> list[Any]:
    """Return the functions and datasets of the user that a function is made of."""
    parts = function.parts if isinstance(function, Fetcher) else ()
    return [one for part in parts for one in _parts_of(part)] or [function]


def _tell_epoch(holder: Any, epoch: int) -> bool:
    """Call `set_epoch` of a function or dataset; `False` if it was told that epoch last.

    Loaders in one process may share it, so what it was told is kept for the object, not by them.
    """
    known, told = _told_epochs.get(id(holder), (lambda: None, -1))
    if told == epoch and known() is holder:
        return False
    try:
        holder.set_epoch(epoch)
    except Exception as error:
        raise SampleError(
            f"`set_epoch({epoch})` of `{type(holder).__name__}` raised {type(error).__name__}: "
            f"{error}"
        ) from error
    with suppress(TypeError):  # of what takes no weak references: it is told again
        _told_epochs[id(holder)] = weakref.ref(holder), epoch
    return True


@dataclass(frozen=True)
class ChunkProcessor:
    """Applies `process_fn` to the items of a chunk, each under random numbers of its own.

    These come from the global generators, and those that the dataset and the functions hold.
    """

    process_fn: Callable[[Any], Any]
    seed: int | None
    rank: int = 0
    world_size: int = 1
    limit_s: float = WorkerOptions.timeout_s
    maker: BatchMaker | None = None
    before_item: Callable[[], None] | None = None
    make_group: MakesGroups | None = None
    before_collate: Callable[[], None] | None = None
    least_bytes: float = math.inf
    """Of a sample, on the average of a chunk: where it has fewer, its data go to the trainer."""
    first: FirstSamples = field(default_factory=FirstSamples, compare=False)

    @cached_property
    def _held(self) -> HeldGenerators:
        return HeldGenerators(*_parts_of(self.process_fn) if self.seed is not None else ())

    @cached_property
    def _hearers(self) -> list[Any]:
        """The functions and datasets that are told the epoch."""
        return [part for part in _parts_of(self.process_fn) if hasattr(part, "set_epoch")]

    def functions_of(self, task: ChunkTask) -> str:
        """Return the functions of the user that a chunk calls."""
        make_group = None if task.group is None else self.make_group
        collates = make_group is not None and make_group.collates
        return "`process_fn` or `collate_fn`" if collates else "`process_fn`"

    @property
    def takes_turns(self) -> bool:
        """Whether threads must process one chunk at a time, since they share what it depends on."""
        return self.seed is not None or bool(self._hearers)

    def forget_epoch(self) -> None:
        """Have it told again: somebody else may have told another one meanwhile."""
        for hearer in self._hearers:
            _told_epochs.pop(id(hearer), None)

    def tell_epoch(self, epoch: int) -> None:
        """Call `set_epoch` of the functions and datasets of this process that have it."""
        told = [_tell_epoch(hearer, epoch) for hearer in self._hearers]
        if any(told):  # It may have made other generators.
            self._held.forget()

    def run(
        self, task: ChunkTask, caught: tuple[type[BaseException], ...] = (Exception, SystemExit)
    ) -> ChunkResult:
        """Process a chunk in the trainer's process, and put its global generators back after."""
        start = time.perf_counter()
        alone = own_rngs(self.limit_s, preserves=self.seed is not None)
        with alone if self.takes_turns else nullcontext():
            results, failure = self._apply(task, caught)
            runs = self._group_of(task, results, failure) or runs_of(results)
        return ChunkResult(runs, failure, time.perf_counter() - start)

    def run_pickled(self, task: bytes) -> ChunkResult:
        """Process a chunk that was pickled, in a worker process, and pack the results."""
        try:
            chunk: ChunkTask = pickle.loads(task)
        except Exception as error:
            unread = f"{type(error).__name__}: {error}"
            return ChunkResult([], None, is_packed=True, unread=unread)
        start = time.perf_counter()
        results, failure = self._apply(chunk, (BaseException,))
        try:
            if (group := self._group_of(chunk, results, failure)) is not None:
                packed = ChunkResult(pack(group), failure, is_packed=True)
            else:
                packed = self._packed(results, failure)
        except Exception:
            good = 0
            try:
                for result in results:
                    pack(runs_of([result], joined=True))
                    good += 1
            except Exception as error:
                cause = TypeError(
                    "the result cannot be sent between processes. Return arrays, tensors and plain "
                    f'data, or use `method="thread"`: {type(error).__name__}: {error}'
                )
                failure = _describe(chunk.items[good], cause)
            packed = self._packed(results[:good], failure)
        return replace(packed, seconds=time.perf_counter() - start)

    def _group_of(
        self, task: ChunkTask, results: Sequence[Any], failure: Failure | None
    ) -> list[Sequence[Any]] | None:
        """Return what becomes of a group; `None` where the chunk is none, or not all is good."""
        if task.group is None or failure is not None or self.make_group is None:
            return None
        if self.before_collate is not None and self.make_group.collates:
            self.before_collate()
        return [[self.make_group(results, *task.group)]]

    def _packed(self, results: list[Any], failure: Failure | None) -> ChunkResult:
        if failure is not None:  # Not every exception can be sent: its text says it all.
            failure = replace(failure, cause=None)
        runs = runs_of(results, joined=True)
        blocks = [run for run in runs if isinstance(run, SampleBlock)]
        is_stored = bool(blocks) and all(isinstance(one, _KNOWN) for one in results)
        if not is_stored or self.least_bytes:
            parts = pack(runs)
            if not is_stored or size_of(parts) < self.least_bytes * len(results):
                # What is large has memory of its own, so that it can be freed alone.
                if any(map(_is_apart, runs)):
                    return ChunkResult(parts, failure, is_packed=True)
                return ChunkResult([], failure, is_packed=True, content=parts)
        facts = [run.with_data(()) if isinstance(run, SampleBlock) else run for run in runs]
        content = pack(DataColumns.of([one for block in blocks for one in block.data()]))
        return ChunkResult(pack(facts), failure, is_packed=True, content=content, is_stored=True)

    def _apply(
        self, task: ChunkTask, caught: tuple[type[BaseException], ...]
    ) -> tuple[list[Any], Failure | None]:
        if not task.items:
            return [], None
        try:
            self.tell_epoch(task.epoch)
            preserved = self._held.preserved()
        except caught as error:
            return [], _describe(task.items[0], error)
        with preserved:
            return self._apply_each(task, caught)

    def _apply_each(
        self, task: ChunkTask, caught: tuple[type[BaseException], ...]
    ) -> tuple[list[Any], Failure | None]:
        results: list[Any] = []
        digests: list[int] = []  # of those that are looked at
        looked_at = self.first.take(len(task.items))
        failure = None
        process = self.process_fn
        seeds = None if self.seed is None else self._seeds_of(task)
        try:
            read = process.fetch(task.items) if isinstance(process, Fetcher) else task.items
        except caught:  # each is read alone, so that the one that raises is known
            read = task.items
        for item, one, key in zip(task.items, read, task.keys, strict=True):
            if self.before_item is not None:
                self.before_item()
            try:
                if seeds is None:
                    result = process(one)
                else:
                    result = self._held.call(process, one, key=next(seeds), seed=seed_rngs)
                results.append(made_of(result, key))
            except caught as error:
                failure = _describe(item, error)
                break
            if len(results) <= looked_at:
                digests.append(digest_of(results[-1]))
        if (bad := first_overwritten(results, digests)) is not None:
            return results[:bad], _describe(task.items[bad], SampleError(OVERWRITTEN))
        return results, failure

    def _seeds_of(self, task: ChunkTask) -> Iterator[int]:
        """Return the seed of each item: of its own, on whatever rank, where it has a key."""
        keys = task.keys
        if len(keys) >= _ROWS and keys.are_known:
            try:
                begins = [self._begin(task.epoch, *origin) for origin in keys.origins]
                of_each = [begins[code] for code in keys.codes.tolist()]
                return iter(hash_rows(of_each, keys.numbers.tolist(), keys.repeats.tolist()))
            except Exception:  # of a key that is not valid: raised again, at its item
                pass
        return self._seeds_one_by_one(task)

    def _seeds_one_by_one(self, task: ChunkTask) -> Iterator[int]:
        assert self.seed is not None
        begin = cache(partial(self._begin, task.epoch))
        for key, position in zip(task.keys, task.positions, strict=True):
            if key is None:
                yield hash_ints(self.seed, task.epoch, task.cycle, self.rank, position)
            else:
                yield hash_ints(begin(key.source, key.world_size), key.key, key.repeat)

    def _begin(self, epoch: int, source: str, world_size: int) -> int:
        """Return what the seeds of the items of a source have in common."""
        assert self.seed is not None
        owner = 0 if world_size == self.world_size else 1 + self.rank
        return hash_ints(self.seed, epoch, owner, zlib.crc32(source.encode()))


def runs_of(results: Sequence[Any], *, joined: bool = False) -> list[Sequence[Any]]:
    """Return results in runs: samples as a `SampleBlock`, and what is in between.

    `joined`: their data become columns, as which they travel.
    """
    runs: list[Sequence[Any]] = []
    for are_samples, group in groupby(results, lambda one: type(one) is Sample):
        run: Sequence[Any] = [*group]
        if are_samples:
            data = DataColumns.of([one.data for one in run]) if joined else None
            run = SampleBlock.of(run, None if data is None or data.are_apart else data)
        elif joined:
            run = DataColumns.of(run)
        runs.append(run)
    return runs


def _is_apart(run: Any) -> bool:
    """Whether the data of a run are no columns."""
    if isinstance(run, SampleBlock):
        return any(isinstance(data, list) for data in run.sources.values())
    return bool(run.are_apart)


def describe_unread(task: ChunkTask, dumps: Callable[[Any], bytes]) -> str:
    """Name the item of a chunk that cannot be unpickled from what `dumps` makes of it."""
    for item, key in zip(task.items, task.keys, strict=True):
        try:
            pickle.loads(dumps(item))
        except Exception:
            return f"item {_show(item)}{'' if key is None else name_of(key)}"
    return "it"


def _describe(item: Any, error: BaseException) -> Failure:
    expected = isinstance(error, SampleError)  # whose message says enough
    return Failure(
        item=_show(item),
        error=_show(error, str) if expected else f"{type(error).__name__}: {_show(error, str)}",
        details="" if expected else _show(error, _format_traceback),
        worker=f"process {os.getpid()}, thread {threading.current_thread().name!r}",
        cause=error,
    )


def _format_traceback(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def _show(value: Any, how: Callable[[Any], str] = repr) -> str:
    """Return a text for a value of the user, whose own text may be long, or raise."""
    try:
        text = how(value)
    except Exception as error:
        return f"<{type(value).__name__} that cannot be shown: {type(error).__name__}>"
    return text if how is not repr or len(text) <= 80 else text[:77] + "..."
