"""Items of a restored state, which workers process again."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from odb_nodes.core.contract.again import ItemsAgain
from odb_nodes.core.processing.backlog import QueuedChunk, RestoredItems
from odb_nodes.core.processing.chunk import ChunkResult, ChunkTask
from odb_nodes.core.processing.chunk_runner import ChunkRunner
from odb_nodes.core.sample import ItemKey
from odb_nodes.core.sample_block import ItemKeys


class ProcessedAgain(ItemsAgain, RestoredItems):
    """Items that a node processes again: when `take` is called, or ahead, by the `Backlog`.

    Results are kept until they are taken.

    whole: the chunk of all items.
    order: the rows of the items, with neighbours in the data side by side.
    """

    def __init__(self, runner: ChunkRunner, whole: ChunkTask, order: Sequence[int]) -> None:
        self._runner, self._whole = runner, whole
        self._backlog = runner.backlog()  # `None` without workers
        self._lock = threading.RLock() if self._backlog is None else self._backlog.lock
        self._neighbours = dict(zip(order, range(len(order)), strict=True)).__getitem__
        self._was_sent = bytearray(len(order))
        self._sent: dict[int, tuple[Future[ChunkResult], ChunkTask, Sequence[int]]] = {}
        self._results: dict[int, tuple[Sequence[Any], int]] = {}
        if self._backlog is not None:
            self._backlog.add_later(self)

    def key_of(self, index: int) -> ItemKey | None:
        """Return the key of an item, if the source has keys."""
        return self._whole.keys[index]

    def name_of(self, index: int) -> str:
        """Return the name of an item in errors: its key, or else its number in the epoch."""
        return self._whole.name_of(index)

    def want(self, indices: Sequence[int]) -> None:
        """Queue these items: after all queued items, before the remaining ones."""
        if self._backlog is not None:
            self._runner.check_process()  # A forked child may have inherited a lock that is held.
            self._backlog.plan(self, sorted(indices, key=self._neighbours))

    def take(self, indices: Sequence[int]) -> list[tuple[Sequence[Any], int]]:
        """Return for each item a run of results that contains its result, and the position in it.

        Raises:
            SampleError: processing an item raised; names the item's key.
            WorkerError: a worker died, did not answer in time, or belongs to another process.
        """
        self._runner.check_process()
        with self._lock:  # Otherwise the backlog might send the same items meanwhile.
            unsent = [
                index for index in indices if index not in self._sent and index not in self._results
            ]
            for index in unsent:
                self._was_sent[index] = True
        self._send(unsent)
        return [self._result(index) for index in indices]

    def was_sent(self, row: int) -> bool:
        """Return whether a row was ever sent to the workers."""
        return bool(self._was_sent[row])

    @property
    def has_unsent(self) -> bool:
        """Whether a row was never sent to the workers."""
        return 0 in self._was_sent

    def next_chunk(self, count: int) -> QueuedChunk:
        """Return a chunk of the first rows that were never sent, and note that they are."""
        rows: list[int] = []
        row = self._was_sent.find(0)
        while row >= 0 and len(rows) < count:
            rows.append(row)
            row = self._was_sent.find(0, row + 1)
        return self.chunk_of(rows)

    def chunk_of(self, rows: Sequence[int]) -> QueuedChunk:
        """Return a chunk of these rows, and note that they are sent."""
        chunk = QueuedChunk(self._task_of(rows))
        self._note_sent(chunk, chunk.task, rows)
        return chunk

    def _task_of(self, rows: Sequence[int]) -> ChunkTask:
        whole = self._whole
        return replace(
            whole,
            items=[whole.items[row] for row in rows],
            keys=ItemKeys.of([whole.keys[row] for row in rows]),
            positions=[whole.positions[row] for row in rows],
        )

    def _send(self, rows: Sequence[int]) -> None:
        """Send rows that the caller waits for, divided among the workers."""
        share = -(-len(rows) // max(1, self._runner.options.num_workers))
        size = max(1, min(self._runner.sizer.items, share))
        rows = sorted(rows, key=self._neighbours)
        for start in range(0, len(rows), size):
            chunk_rows = rows[start : start + size]
            task = self._task_of(chunk_rows)
            self._note_sent(self._runner.submit(task, urgent=True), task, chunk_rows)

    def _note_sent(self, future: Future[ChunkResult], task: ChunkTask, rows: Sequence[int]) -> None:
        for row in rows:
            self._was_sent[row] = True
            self._sent[row] = future, task, rows

    def _result(self, row: int) -> tuple[Sequence[Any], int]:
        while row not in self._results:
            if row not in self._sent:  # An earlier item of its chunk has failed.
                self._send([row])
            future, task, rows = self._sent[row]
            runs, failure = self._runner.results(task, future)
            results = [(run, index) for run in runs for index in range(len(run))]
            with self._lock:
                for chunk_row in rows:
                    if self._sent.get(chunk_row, (None,))[0] is future:
                        del self._sent[chunk_row]
                self._results.update(zip(rows, results, strict=False))
            if failure is not None and rows[len(results)] == row:
                raise failure.explained(f"which is made again for a restore ({self.name_of(row)})")
        return self._results.pop(row)
