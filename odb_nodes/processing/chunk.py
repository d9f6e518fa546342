"""Process one chunk of items, in a worker process, a thread, or the trainer itself."""

from __future__ import annotations

import math
import os
import pickle
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import groupby
from typing import Any

from odb_nodes._core.hashing import hash_ints, hash_rows
from odb_nodes._core.seeds import own_rngs, seed_rngs
from odb_nodes.errors import SampleError
from odb_nodes.processing.collate_request import BatchMaker
from odb_nodes.processing.columns import DataColumns
from odb_nodes.processing.observation import made_of
from odb_nodes.processing.options import WorkerOptions
from odb_nodes.processing.shared_pages import size_of
from odb_nodes.processing.transport import pack
from odb_nodes.sample import Sample, Skipped, name_of
from odb_nodes.sample_block import ItemKeys, SampleBlock

_KNOWN = (Sample, Skipped)

_ROWS = 16  # from which on `hash_rows` is faster


@dataclass(frozen=True)
class Failure:
    """Why a chunk ends early: the item after its good results raised."""

    item: str
    error: str
    details: str
    worker: str

    def explained(self, where: str, *, elsewhere: bool) -> SampleError:
        """Return the error to raise."""
        by = f" It was processed in {self.worker}." if elsewhere else ""
        return SampleError(
            f"item {self.item}, {where}, cannot be processed: {self.error}\nNo batch with it was "
            f"delivered. Mend it, then iterate again or resume.{by}\n{self.details}".rstrip()
        )


@dataclass(frozen=True)
class ChunkTask:
    """What a chunk is made of.

    Attributes:
        items: its items.
        keys: their keys.
        epoch: the number of the epoch.
        cycle: how often the epoch was begun again.
        positions: of the items in the epoch; 0, 1, ... where they are made again, by their keys.
    """

    items: Sequence[Any]
    keys: ItemKeys
    epoch: int
    cycle: int
    positions: Sequence[int]

    def __str__(self) -> str:
        first, last = (self.positions[0], self.positions[-1]) if self.positions else (0, -1)
        return f"samples {first}..{last} of epoch {self.epoch}"


@dataclass(frozen=True)
class ChunkResult:
    """What became of a chunk.

    Attributes:
        results: its good results in order, in runs of one kind (see `runs_of`), packed or not.
        failure: what ended it early.
        seconds: that it has taken.
        content: the data of its samples, packed, where workers are to collate them; `results` are
            without it then.
        unread: why the worker could not unpickle it.
    """

    results: Any
    failure: Failure | None
    seconds: float = 0.0
    content: Any = None
    unread: str = ""


@dataclass(frozen=True)
class ChunkProcessor:
    """Applies `process_fn` to the items of a chunk, each under random numbers of its own."""

    process_fn: Callable[[Any], Any]
    seed: int | None
    rank: int = 0
    world_size: int = 1
    limit_s: float = WorkerOptions.timeout_s
    maker: BatchMaker | None = None

    def run(
        self, task: ChunkTask, caught: tuple[type[BaseException], ...] = (Exception, SystemExit)
    ) -> ChunkResult:
        """Process a chunk in the trainer's process, and put its global generators back after."""
        start = time.perf_counter()
        if self.seed is None:
            results, failure = self._apply(task, caught)
        else:
            with own_rngs(self.limit_s):
                results, failure = self._apply(task, caught)
        return ChunkResult(runs_of(results), failure, time.perf_counter() - start)

    def run_pickled(self, task: Any) -> ChunkResult:
        """Process a chunk that was pickled, and pack the results for transport."""
        try:
            chunk: ChunkTask = pickle.loads(task)
        except Exception as error:
            return ChunkResult([], None, unread=f"{type(error).__name__}: {error}")
        return self.run_packed(chunk)

    def run_packed(self, task: ChunkTask) -> ChunkResult:
        """Process a chunk in a worker process, and pack the results for transport."""
        start = time.perf_counter()
        results, failure = self._apply(task, (BaseException,))
        try:
            parts, content = self._packed(results)
            return ChunkResult(parts, failure, time.perf_counter() - start, content)
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
                failure = _describe(task.items[good], cause)
            return ChunkResult(pack(runs_of(results[:good], joined=True)), failure)

    def _packed(self, results: list[Any]) -> tuple[list[memoryview], list[memoryview] | None]:
        """Return results as parts, and apart from them the data that workers keep, if any."""
        runs = runs_of(results, joined=True)
        least_bytes = math.inf if self.maker is None else self.maker.least_bytes
        if least_bytes:
            parts = pack(runs)
            if size_of(parts) < least_bytes * len(results):
                return parts, None
        blocks = [run for run in runs if isinstance(run, SampleBlock)]
        if not blocks or not all(isinstance(one, _KNOWN) for one in results):
            return pack(runs), None
        facts = [run.with_data(()) if isinstance(run, SampleBlock) else run for run in runs]
        return pack(facts), pack(DataColumns.of([one for block in blocks for one in block.data()]))

    def _apply(
        self, task: ChunkTask, caught: tuple[type[BaseException], ...]
    ) -> tuple[list[Any], Failure | None]:
        results: list[Any] = []
        process = self.process_fn
        seeds = None if self.seed is None else self._seeds_of(task)
        for item, key in zip(task.items, task.keys, strict=True):
            try:
                if seeds is not None:
                    seed_rngs(next(seeds))
                results.append(made_of(process(item), key))
            except caught as error:
                return results, _describe(item, error)
        return results, None

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

    Args:
        results: samples, and what else processing returns.
        joined: whether their data become columns, as which they travel.
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
