"""A chunk of items, and how it is processed."""

from __future__ import annotations

import os
import pickle
import threading
import time
import traceback
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from itertools import groupby
from typing import Any, Protocol

from odb_nodes._support.hashing import hash_ints, hash_rows
from odb_nodes._support.held_generators import HeldGenerators
from odb_nodes._support.seeds import exclusive_rngs, seed_rngs
from odb_nodes.core.planning import TokenBudget
from odb_nodes.core.processing.columns import DataColumns
from odb_nodes.core.processing.first_samples import (
    OVERWRITTEN,
    FirstSamples,
    first_overwritten,
    result_digest,
)
from odb_nodes.core.processing.observation import with_item_key
from odb_nodes.core.processing.options import WorkerOptions
from odb_nodes.core.processing.transport import pack, unpack
from odb_nodes.core.sample import Sample, name_of
from odb_nodes.core.sample_block import ItemKeys, SampleBlock
from odb_nodes.errors import SampleError

_SHOWN = 8  # samples of a chunk that an error names
_HASHED_ROWS = 16  # from so many rows on, `hash_rows` is faster than a hash for each row


@dataclass(frozen=True)
class Failure:
    """The error of an item, which ended its chunk early."""

    item: str
    error: str
    details: str
    worker: str
    cause: BaseException | None = None  # the exception, if it was raised in this process

    def explained(self, where: str) -> SampleError:
        """Return the error to raise; `where` names the sample."""
        worker = f" It was processed in {self.worker}." if self.worker else ""
        error = SampleError(
            f"item {self.item}, {where}, cannot be processed: {self.error}\nNo batch with it was "
            f"delivered. Fix it, then iterate again or resume.{worker}\n{self.details}".rstrip()
        )
        error.__cause__ = self.cause
        return error


@dataclass(frozen=True)
class ChunkTask:
    """The items of a chunk, with the numbers that seeds and errors need."""

    items: Sequence[Any]
    keys: ItemKeys
    epoch: int
    cycle: int  # how many times the epoch was begun again
    # numbers of the items in the epoch, or indices of items made again by key
    positions: Sequence[int]
    is_reprocessed: bool = False  # whether the items were processed in this epoch before
    group_arguments: tuple[int, TokenBudget] | None = None  # for a group: see `MakesGroups`

    def __str__(self) -> str:
        if self.is_reprocessed or self.group_arguments is not None:
            names = "".join(map(self._short_name, range(min(_SHOWN, len(self.keys)))))
            more = " ..." * (len(self.keys) > _SHOWN)
            kind = "that are made again" if self.is_reprocessed else "in a group"
            return f"samples of epoch {self.epoch} {kind}{names}{more}"
        first, last = (self.positions[0], self.positions[-1]) if self.positions else (0, -1)
        return f"samples {first}..{last} of epoch {self.epoch}"

    def name_of(self, row: int) -> str:
        """Return the name of an item in errors: its key, or else its number in the epoch."""
        return str(self.keys[row] or f"sample {self.positions[row]} of the epoch")

    def _short_name(self, row: int) -> str:
        key = self.keys[row]
        return name_of(key) if key is not None else f" (sample {self.positions[row]})"


@dataclass(frozen=True)
class ChunkResult:
    """The results of a chunk."""

    # the results before an error, in order, in runs (see `runs_of`); message parts if `is_packed`
    results: Any
    failure: Failure | None  # the error that ended the chunk early
    seconds: float = 0.0  # processing time
    is_packed: bool = False  # whether the results come from another process
    unread: str = ""  # why the worker could not unpickle the chunk

    @property
    def size_bytes(self) -> int:
        """Bytes of the results, if they come from another process."""
        if not self.is_packed:
            return 0
        return sum(map(len, self.results))

    def runs(self) -> list[Sequence[Any]]:
        """Return the results before an error, in runs."""
        return unpack(self.results) if self.is_packed else self.results  # type: ignore[no-any-return]


class Fetcher:
    """A `process_fn` that can read many items at once."""

    parts: Sequence[Any] = ()
    """The functions and datasets that this function consists of."""

    def fetch(self, items: Sequence[Any]) -> Sequence[Any]:
        """Read items; return for each item the argument of `__call__`."""
        raise NotImplementedError


class MakesGroups(Protocol):
    """Makes a group from the results of its items, in a worker.

    collates: whether `collate_fn` is called.
    """

    collates: bool

    def __call__(self, results: Sequence[Any], key: int, budget: TokenBudget) -> Any:
        """Return the group; `key` seeds collating, and `budget` limits the group."""


_last_epochs: dict[int, tuple[Any, int]] = {}  # id of an object -> a reference, and its epoch


def _parts_of(function: Any) -> list[Any]:
    """Return the user's functions and datasets that a function consists of."""
    parts = function.parts if isinstance(function, Fetcher) else ()
    return [leaf for part in parts for leaf in _parts_of(part)] or [function]


def _call_set_epoch(holder: Any, epoch: int) -> bool:
    """Call `set_epoch` of a function or dataset; `False` if its last call had the same epoch.

    Loaders in one process may share the object, so its last epoch is kept in this module.
    """
    reference, last_epoch = _last_epochs.get(id(holder), (lambda: None, -1))
    if last_epoch == epoch and reference() is holder:
        return False
    try:
        holder.set_epoch(epoch)
    except Exception as error:
        raise SampleError(
            f"`set_epoch({epoch})` of `{type(holder).__name__}` raised {type(error).__name__}: "
            f"{error}"
        ) from error
    with suppress(TypeError):  # An object without weak references is called each time.
        _last_epochs[id(holder)] = weakref.ref(holder), epoch
    return True


@dataclass(frozen=True)
class ChunkProcessor:
    """Applies `process_fn` to the items of a chunk, and seeds the generators before each item.

    It seeds the global generators, and the generators that the dataset and the functions hold.
    """

    process_fn: Callable[[Any], Any]
    seed: int | None
    rank: int = 0
    world_size: int = 1
    limit_s: float = WorkerOptions.timeout_s
    make_group: MakesGroups | None = None
    before_collate: Callable[[], None] | None = None
    first: FirstSamples = field(default_factory=FirstSamples, compare=False)

    @cached_property
    def _held(self) -> HeldGenerators:
        return HeldGenerators(*_parts_of(self.process_fn) if self.seed is not None else ())

    @cached_property
    def _with_epochs(self) -> list[Any]:
        """The functions and datasets with `set_epoch`."""
        return [part for part in _parts_of(self.process_fn) if hasattr(part, "set_epoch")]

    def functions_of(self, task: ChunkTask) -> str:
        """Return the user's functions that process a chunk, for an error."""
        make_group = None if task.group_arguments is None else self.make_group
        collates = make_group is not None and make_group.collates
        return "`process_fn` or `collate_fn`" if collates else "`process_fn`"

    @property
    def takes_turns(self) -> bool:
        """Whether threads must process one chunk at a time: they share generators or epochs."""
        return self.seed is not None or bool(self._with_epochs)

    def forget_epoch(self) -> None:
        """Call `set_epoch` for the next chunk: other code may have called it with another epoch."""
        for holder in self._with_epochs:
            _last_epochs.pop(id(holder), None)

    def set_epoch(self, epoch: int) -> None:
        """Call `set_epoch` of the functions and datasets of this process that have it."""
        was_called = [_call_set_epoch(holder, epoch) for holder in self._with_epochs]
        if any(was_called):  # `set_epoch` may have made other generators.
            self._held.forget()

    def run(
        self, task: ChunkTask, caught: tuple[type[BaseException], ...] = (Exception, SystemExit)
    ) -> ChunkResult:
        """Process a chunk in the trainer's process, and restore its global generators."""
        start = time.perf_counter()
        alone = exclusive_rngs(self.limit_s, preserves=self.seed is not None)
        with alone if self.takes_turns else nullcontext():
            results, failure = self._apply(task, caught)
            runs = self._group_of(task, results, failure) or runs_of(results)
        return ChunkResult(runs, failure, time.perf_counter() - start)

    def run_pickled(self, task: bytes) -> ChunkResult:
        """Process a pickled chunk in a worker process, and pack the results."""
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
            sendable = 0
            try:
                for result in results:
                    pack(runs_of([result], joined=True))
                    sendable += 1
            except Exception as error:
                cause = TypeError(
                    "the result cannot be sent between processes. Return arrays, tensors and plain "
                    f'data, or use `method="thread"`: {type(error).__name__}: {error}'
                )
                failure = _describe(chunk.items[sendable], cause)
            packed = self._packed(results[:sendable], failure)
        return replace(packed, seconds=time.perf_counter() - start)

    def _group_of(
        self, task: ChunkTask, results: Sequence[Any], failure: Failure | None
    ) -> list[Sequence[Any]] | None:
        """Return the group of a chunk; `None` if the chunk is no group, or an item failed."""
        if task.group_arguments is None or failure is not None or self.make_group is None:
            return None
        if self.before_collate is not None and self.make_group.collates:
            self.before_collate()
        return [[self.make_group(results, *task.group_arguments)]]

    def _packed(self, results: list[Any], failure: Failure | None) -> ChunkResult:
        if failure is not None:  # Not every exception can be pickled: its text is sent.
            failure = replace(failure, cause=None)
        return ChunkResult(pack(runs_of(results, joined=True)), failure, is_packed=True)

    def _apply(
        self, task: ChunkTask, caught: tuple[type[BaseException], ...]
    ) -> tuple[list[Any], Failure | None]:
        if not task.items:
            return [], None
        try:
            self.set_epoch(task.epoch)
            preserved = self._held.preserved()
        except caught as error:
            return [], _describe(task.items[0], error)
        with preserved:
            return self._apply_each(task, caught)

    def _apply_each(
        self, task: ChunkTask, caught: tuple[type[BaseException], ...]
    ) -> tuple[list[Any], Failure | None]:
        results: list[Any] = []
        digests: list[int] = []  # digests of the samples that are checked
        checked = self.first.take(len(task.items))
        failure = None
        process = self.process_fn
        seeds = None if self.seed is None else self._seeds_of(task)
        try:
            arguments = process.fetch(task.items) if isinstance(process, Fetcher) else task.items
        except caught:  # Each item is read alone, to name the item that raises.
            arguments = task.items
        for item, argument, key in zip(task.items, arguments, task.keys, strict=True):
            try:
                if seeds is None:
                    result = process(argument)
                else:
                    result = self._held.call(process, argument, key=next(seeds), seed=seed_rngs)
                results.append(with_item_key(result, key))
            except caught as error:
                failure = _describe(item, error)
                break
            if len(results) <= checked:
                digests.append(result_digest(results[-1]))
        bad = first_overwritten(results, digests)
        if bad is not None:
            return results[:bad], _describe(task.items[bad], SampleError(OVERWRITTEN))
        return results, failure

    def _seeds_of(self, task: ChunkTask) -> Iterator[int]:
        """Return the seed of each item: by its key, if it has a key, so that ranks agree."""
        keys = task.keys
        if len(keys) >= _HASHED_ROWS and keys.are_known:
            try:
                source_seeds = [self._source_seed(task.epoch, *origin) for origin in keys.origins]
                row_seeds = [source_seeds[code] for code in keys.codes.tolist()]
                return iter(hash_rows(row_seeds, keys.numbers.tolist(), keys.repeats.tolist()))
            except Exception:  # A key is not valid: the error is raised again at its item.
                pass
        return self._seeds_of_rows(task)

    def _seeds_of_rows(self, task: ChunkTask) -> Iterator[int]:
        assert self.seed is not None
        source_seed = cache(partial(self._source_seed, task.epoch))
        for key, position in zip(task.keys, task.positions, strict=True):
            if key is None:
                yield hash_ints(self.seed, task.epoch, task.cycle, self.rank, position)
            else:
                yield hash_ints(source_seed(key.source, key.world_size), key.key, key.repeat)

    def _source_seed(self, epoch: int, source: str, world_size: int) -> int:
        """Return the common part of the seeds of a source's items."""
        assert self.seed is not None
        owner = 0 if world_size == self.world_size else 1 + self.rank
        return hash_ints(self.seed, epoch, owner, zlib.crc32(source.encode()))


def runs_of(results: Sequence[Any], *, joined: bool = False) -> list[Sequence[Any]]:
    """Return results in runs: samples as a `SampleBlock`, other results as lists.

    joined: whether the data become columns, to be sent between processes.
    """
    runs: list[Sequence[Any]] = []
    for are_samples, group in groupby(results, lambda result: type(result) is Sample):
        run: Sequence[Any] = [*group]
        if are_samples:
            data = DataColumns.of([sample.data for sample in run]) if joined else None
            run = SampleBlock.of(run, None if data is None or data.are_apart else data)
        elif joined:
            run = DataColumns.of(run)
        runs.append(run)
    return runs


def describe_unread(task: ChunkTask, dumps: Callable[[Any], bytes]) -> str:
    """Name the item of a chunk whose pickle cannot be loaded."""
    for item, key in zip(task.items, task.keys, strict=True):
        try:
            pickle.loads(dumps(item))
        except Exception:
            return f"item {_show(item)}{'' if key is None else name_of(key)}"
    return "it"


def _describe(item: Any, error: BaseException) -> Failure:
    expected = isinstance(error, SampleError)  # The message suffices without a traceback.
    return Failure(
        item=_show(item),
        error=_show(error, str) if expected else f"{type(error).__name__}: {_show(error, str)}",
        details="" if expected else _show(error, _format_traceback),
        worker=f"process {os.getpid()}, thread {threading.current_thread().name!r}",
        cause=error,
    )


def _format_traceback(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def _show(value: Any, to_text: Callable[[Any], str] = repr) -> str:
    """Return a text for a value of the user, even if `to_text` raises; shorten a `repr`."""
    try:
        text = to_text(value)
    except Exception as error:
        return f"<{type(value).__name__} that cannot be shown: {type(error).__name__}>"
    return text if to_text is not repr or len(text) <= 80 else text[:77] + "..."
