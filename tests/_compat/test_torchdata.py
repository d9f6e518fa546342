"""Canaries: what we rely on inside of torchdata, to stop its threads and to begin its epochs."""

import subprocess
import sys
import threading
from typing import Any

import pytest
from canary import relies_on
from torchdata.nodes import (
    BaseNode,
    Batcher,
    IterableWrapper,
    ParallelMapper,
    PinMemory,
    Prefetcher,
    SamplerWrapper,
)

STOPPING = "_compat/torchdata.py (`join_threads`)"
EPOCHS = "_compat/torchdata.py (`set_epoch`)"
LENGTHS = "_compat/torchdata.py (`length_of`)"
READ_AHEAD = "nodes/read_ahead.py"


def started(node):
    """Return a node that has yielded its first item, with its threads at work."""
    node.reset(None)
    next(node)
    return node


def double(item):
    return 2 * item


def impl_of(mapper):
    """Return the node that holds the threads of a `ParallelMapper`."""
    from torchdata.nodes.map import _ParallelMapperImpl

    impl = mapper._it if mapper.prebatch is None else mapper._it.source
    assert isinstance(impl, _ParallelMapperImpl), type(impl)
    return impl


def test_a_prefetcher_reads_on_a_thread_that_an_event_stops():
    with relies_on("torchdata", "_SingleThreadedMapper as Prefetcher._it", STOPPING):
        from torchdata.nodes.map import _SingleThreadedMapper

        it = started(Prefetcher(IterableWrapper(range(1000)), 2))._it
        assert isinstance(it, _SingleThreadedMapper), type(it)
        assert isinstance(it._stop_event, threading.Event)
        assert it._thread.is_alive()
        it._stop_event.set()
        it._thread.join(10)
        assert not it._thread.is_alive()


def test_pin_memory_runs_by_the_same_iterator():
    # Without a GPU it cannot be built, so this reads what its `reset` would make.
    with relies_on("torchdata", "_SingleThreadedMapper in PinMemory.reset", STOPPING):
        assert "_SingleThreadedMapper" in PinMemory.reset.__code__.co_names
        assert "_it" in PinMemory.reset.__code__.co_names


def test_a_reset_deletes_the_iterator_and_needs_one_to_delete():
    with relies_on("torchdata", "Prefetcher._it, deleted by a reset that raises", STOPPING):
        node = started(Prefetcher(IterableWrapper(range(9)), 2))
        with pytest.raises(KeyError):
            node.reset({"not": "a state"})
        assert not hasattr(node, "_it")
        node._it = None
        assert next(started(node)) == 1


@pytest.mark.parametrize("in_order", [True, False])
def test_a_parallel_mapper_of_threads_stops_by_an_event(in_order):
    with relies_on("torchdata", "_ParallelMapperIter of threads", STOPPING):
        from torchdata.nodes.map import _ParallelMapperIter

        source = IterableWrapper(range(1000))
        it = impl_of(started(ParallelMapper(source, double, 2, in_order, "thread")))._it
        assert isinstance(it, _ParallelMapperIter), type(it)
        assert (it.method, it.in_order) == ("thread", in_order)
        it._stop.set()
        it._mp_stop.set()
        for thread in (it._read_thread, *([it._sort_thread] if in_order else []), *it._workers):
            thread.join(10)
            assert not thread.is_alive()


OF_PROCESSES = """
import operator, os, threading
from torchdata.nodes import IterableWrapper, ParallelMapper

if __name__ == "__main__":
    options = {"method": "process", "multiprocessing_context": "spawn"}
    mapper = ParallelMapper(IterableWrapper(range(1000)), operator.neg, 1, **options)
    mapper.reset(None)
    assert next(mapper) == 0
    it = mapper._it._it  # of the `_ParallelMapperImpl` within
    assert it.method == "process"
    it._stop.set()
    it._mp_stop.set()
    it._read_thread.join(10)
    it._sort_thread.join(10)
    for worker in it._workers:
        worker.terminate()
        worker.join(10)
        assert not worker.is_alive()
    for queue in (it._in_q, it._intermed_q):
        assert queue._thread is None or isinstance(queue._thread, threading.Thread)
        queue.cancel_join_thread()
        queue._reader.close()
        queue.close()
    print("closed", flush=True)
    os._exit(0)
"""


def test_a_parallel_mapper_of_processes_has_queues_that_can_be_closed(tmp_path):
    """In a program of its own: a queue that is closed under its threads may end the process."""
    program = tmp_path / "program.py"
    program.write_text(OF_PROCESSES)
    with relies_on("torchdata", "_ParallelMapperIter of processes, and its queues", STOPPING):
        ran = subprocess.run(
            [sys.executable, program], capture_output=True, text=True, timeout=120, check=False
        )
        assert ran.stdout == "closed\n", ran.stderr


def test_a_mapper_with_prebatch_hides_its_impl_below_an_unbatcher():
    with relies_on("torchdata", "ParallelMapper.prebatch and source.source", LENGTHS):
        mapper = ParallelMapper(IterableWrapper(range(10)), double, 2, method="thread", prebatch=4)
        assert mapper.prebatch == 4
        assert isinstance(mapper.source, Batcher)
        assert isinstance(mapper.source.source, IterableWrapper)
        assert impl_of(mapper).source is mapper.source


def test_nodes_hold_what_their_length_is_counted_from():
    with relies_on(
        "torchdata", "attributes of Batcher, IterableWrapper and SamplerWrapper", LENGTHS
    ):
        items = IterableWrapper(range(10))
        batches = Batcher(items, batch_size=4, drop_last=False)
        assert (batches.source, batches.batch_size, batches.drop_last) == (items, 4, False)
        assert items.iterable == range(10)
        sampler: Any = [1, 2]
        assert SamplerWrapper(sampler).sampler is sampler
        assert Prefetcher(items, 2).source is items


class Epochs:
    """A sampler that records the epochs it is told."""

    def __init__(self):
        self.told = []

    def set_epoch(self, epoch):
        self.told.append(epoch)

    def __iter__(self):
        return iter(range(3))


def test_a_sampler_wrapper_begins_the_epoch_that_is_set_from_outside():
    with relies_on("torchdata", "SamplerWrapper.epoch and _started", EPOCHS):
        sampler = Epochs()
        node = started(SamplerWrapper(sampler))
        assert node._started is True
        node.epoch, node._started = 7, False
        node.reset(None)
        assert sampler.told == [0, 7]


def test_the_state_of_a_prefetcher_has_that_of_its_source_after_the_last_item():
    with relies_on("torchdata", 'the "snapshot" of Prefetcher.state_dict()', READ_AHEAD):
        source = IterableWrapper(range(9))
        node = started(Prefetcher(source, 2))
        plain = started(IterableWrapper(range(9)))
        assert node.state_dict()["snapshot"] == plain.state_dict()
        assert node.source is source


def test_a_prefetcher_reads_from_a_source_that_was_reset_before():
    with relies_on("torchdata", "a Prefetcher that calls source.reset() once", READ_AHEAD):
        source = Counting()
        started(Prefetcher(source, 1))
        assert source.resets == [None]


class Counting(BaseNode):
    """Counts, and keeps what it was reset to."""

    def __init__(self):
        super().__init__()
        self.resets, self.count = [], 0

    def reset(self, initial_state=None):
        super().reset(initial_state)
        self.resets.append(initial_state)

    def next(self):
        self.count += 1
        return self.count

    def get_state(self):
        return {"count": self.count}
