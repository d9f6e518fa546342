"""The queue of chunks while items of a restored state are processed again: its order, its end."""

from concurrent.futures import Future
from itertools import count

import pytest

from odb_nodes.core.processing.backlog import Backlog, QueuedChunk, RestoredItems
from odb_nodes.core.processing.chunk import ChunkResult, ChunkTask
from odb_nodes.core.processing.chunk_runner import ChunkRunner
from odb_nodes.core.processing.options import WorkerOptions
from odb_nodes.core.processing.worker_pool import WorkerPool
from odb_nodes.core.sample_block import ItemKeys
from odb_nodes.errors import WorkerError


def task(*items):
    return ChunkTask(items, ItemKeys.of([None] * len(items)), 0, 0, range(len(items)))


class Later(RestoredItems):
    """Items "name0", "name1", ... of a restored state."""

    def __init__(self, name, size):
        self.name, self.unsent, self.chunks = name, [*range(size)], []

    @property
    def has_unsent(self):
        return bool(self.unsent)

    def was_sent(self, row):
        return row not in self.unsent

    def next_chunk(self, count):
        return self.chunk_of(self.unsent[:count])

    def chunk_of(self, rows):
        self.unsent = [row for row in self.unsent if row not in rows]
        self.chunks.append(QueuedChunk(task(*(f"{self.name}{row}" for row in rows))))
        return self.chunks[-1]


class Workers:
    """Workers that keep all chunks until the test finishes them."""

    def __init__(self, num_workers=1, chunk_items=1):
        self.sent, self._done, self.refuses = [], count(), None
        self.backlog = Backlog(self._submit, num_workers, lambda: chunk_items)

    def _submit(self, task):
        if self.refuses is not None:
            raise self.refuses
        future = Future()
        self.sent.append((task.items, future))
        return future

    @property
    def items(self):
        return [item for items, _ in self.sent for item in items]

    def finish(self, seconds=1.0):
        """Finish the oldest chunk."""
        items, future = self.sent[next(self._done)]
        future.set_result(ChunkResult([items], None, seconds))

    def finish_all(self):
        while any(not future.done() for _, future in self.sent):
            self.finish()


def test_what_is_waited_for_comes_first_then_planned_items_then_new_ones_then_the_rest():
    workers, later = Workers(), Later("old", 6)
    backlog = workers.backlog
    backlog.add_later(later)
    assert workers.items == []  # until the first chunk is queued
    backlog.add(task("new0"))
    assert workers.items == ["new0", "old0"]  # two chunks, while their time is unknown
    backlog.add(task("new1"))
    backlog.plan(later, [4, 3])
    backlog.add(task("urgent"), urgent=True)
    workers.finish_all()
    expected = ["new0", "old0", "urgent", "old4", "old3", "new1", "old1", "old2", "old5"]
    assert workers.items == expected


def test_new_items_that_are_waited_for_come_before_planned_ones():
    workers, later = Workers(), Later("old", 9)
    workers.backlog.add_later(later)
    workers.backlog.plan(later, range(9))
    new = workers.backlog.add(task("new"))
    workers.backlog.hurry(new)
    workers.finish()
    workers.finish()
    assert workers.items == ["old0", "old1", "new"]
    workers.backlog.plan(later, [8])  # With another planned step, the trainer waits for it.
    workers.backlog.add(task("another"))
    workers.finish()
    assert workers.items[3:] == ["old2"]


def test_workers_have_little_ahead_while_items_are_to_be_made_again_and_all_afterwards():
    workers = Workers(num_workers=2, chunk_items=1)
    workers.backlog.add_later(Later("old", 40))
    new = [workers.backlog.add(task(number)) for number in range(100)]
    assert len(workers.sent) == 4
    workers.finish(seconds=0.01)  # 0.15 s of work a worker are 15 such items
    assert len(workers.sent) == 1 + 30
    while len(workers.sent) < 140:
        workers.finish(seconds=10.0)
        assert len(workers.sent) == 140 or not workers.backlog.is_done
    assert workers.backlog.is_done
    while not all(chunk.done() for chunk in new):
        workers.finish()


def test_no_more_than_a_chunk_waits_where_a_chunk_takes_long():
    workers = Workers(num_workers=2)
    workers.backlog.add_later(Later("old", 40))
    workers.backlog.add(task("new"))
    for done in range(4, 10):
        workers.finish(seconds=10.0)
        assert len(workers.sent) <= max(4, done - 1)


def test_chunks_of_planned_items_have_as_many_as_others():
    workers, first, second = Workers(chunk_items=3), Later("a", 5), Later("b", 5)
    for later in first, second:
        workers.backlog.add_later(later)
    workers.backlog.plan(first, [0, 1])
    workers.backlog.plan(second, [4, 0, 1, 2])
    assert not workers.sent
    workers.backlog.send()
    workers.finish_all()
    chunks = [[*items] for items, _ in workers.sent]
    assert chunks[:3] == [["a0", "a1"], ["b4", "b0", "b1"], ["b2"]]
    assert chunks[3:5] == [["a2", "a3", "a4"], ["b3"]]


@pytest.mark.parametrize("how", ["closed", "a worker died", "cannot be sent"])
def test_whoever_waits_for_a_chunk_hears_how_it_ended(how):
    workers, later = Workers(), Later("old", 9)
    backlog = workers.backlog
    backlog.add_later(later)
    queued = [backlog.add(task(number), urgent=number == 2) for number in range(5)]
    if how == "closed":
        backlog.fail(WorkerError(how))
        workers.finish_all()
    elif how == "a worker died":
        workers.sent[0][1].set_exception(WorkerError(how))
    else:
        workers.refuses = WorkerError(how)
        workers.finish()
        workers.finish()
    late = backlog.add(task("late"))
    for chunk in [*queued[2:], late]:
        with pytest.raises(WorkerError, match=how):
            chunk.result(timeout=5.0)


def test_workers_that_take_no_chunk_are_closed_where_a_result_is_waited_for(monkeypatch):
    class Refusing(WorkerPool):
        def submit(self, task):
            raise OSError("no room")

    runner = ChunkRunner(None, WorkerOptions(num_workers=1, method="thread"), "a node")
    runner._pool = Refusing()
    backlog = runner.backlog()
    backlog.add_later(Later("old", 9))
    monkeypatch.setattr(backlog, "_is_full", lambda: True)
    chunk = runner.submit(task("new"))
    monkeypatch.undo()  # Now there is room for the chunk.
    with pytest.raises(WorkerError, match="no room"):
        runner.results(chunk.task, chunk)
    assert not runner.is_started
