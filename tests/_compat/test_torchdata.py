"""Canaries: what we rely on inside of torchdata, to stop its threads and to begin its epochs."""

import operator
import subprocess
import sys
import threading

import pytest
from canary import relies_on
from torchdata.nodes import (
    BaseNode,
    IterableWrapper,
    ParallelMapper,
    PinMemory,
    Prefetcher,
    SamplerWrapper,
)
from toys import Epochs

from odb_nodes._compat import torchdata as compat


def canary(behaviour, used_in="_compat/torchdata.py (`join_threads`)"):
    return relies_on("torchdata", behaviour, used_in)


def started(node):
    """Return a node that has yielded its first item, with its threads at work."""
    node.reset(None)
    next(node)
    return node


def impl_of(mapper):
    """Return the node that holds the threads of a `ParallelMapper`."""
    return mapper._it if mapper.prebatch is None else mapper._it.source


@canary("_SingleThreadedMapper as Prefetcher._it, deleted by a reset that raises")
def test_a_prefetcher_reads_on_a_thread_that_is_stopped(new_threads):
    node = started(Prefetcher(IterableWrapper(range(1000)), 2))
    assert compat.has_threads(node) and isinstance(compat.thread_of(node), threading.Thread)
    compat.join_threads(node, 10)
    assert not new_threads()
    with pytest.raises(KeyError):
        node.reset({"not": "a state"})
    assert not hasattr(node, "_it")
    compat.join_threads(node, 10)
    assert next(started(node)) == 1
    compat.join_threads(node, 10)


@canary("_SingleThreadedMapper in PinMemory.reset")
def test_pin_memory_runs_by_the_same_iterator():
    # Without a GPU it cannot be built, so this reads what its `reset` would make.
    assert {"_SingleThreadedMapper", "_it"} <= {*PinMemory.reset.__code__.co_names}


@pytest.mark.parametrize("prebatch", [None, 4])
@pytest.mark.parametrize("in_order", [True, False])
@canary("_ParallelMapperIter of threads, or ParallelMapper.prebatch and source.source")
def test_a_parallel_mapper_of_threads_is_stopped(in_order, prebatch, new_threads):
    source = IterableWrapper(range(1000))
    mapper = ParallelMapper(source, operator.neg, 2, in_order, "thread", prebatch=prebatch)
    impl = impl_of(started(mapper))
    assert compat.has_threads(impl)
    assert len(new_threads()) >= 3 + in_order
    compat.join_threads(impl, 10)
    assert not new_threads()
    assert compat.length_of(mapper) == 1000


OF_PROCESSES = """
import multiprocessing, operator, os
from odb_nodes._compat.torchdata import join_threads
from torchdata.nodes import IterableWrapper, ParallelMapper

if __name__ == "__main__":
    options = {"method": "process", "multiprocessing_context": "spawn"}
    mapper = ParallelMapper(IterableWrapper(range(1000)), operator.neg, 1, **options)
    mapper.reset(None)
    assert next(mapper) == 0
    it = mapper._it._it  # of the `_ParallelMapperImpl` within
    workers, threads = it._workers, [it._read_thread, it._sort_thread]
    assert it.method == "process" and all(worker.is_alive() for worker in workers)
    join_threads(mapper._it, 10)
    assert not any(part.is_alive() for part in [*workers, *threads])
    print("closed", flush=True)
    os._exit(0)
"""


@canary("_ParallelMapperIter of processes, and its queues")
def test_a_parallel_mapper_of_processes_has_queues_that_can_be_closed(tmp_path):
    """In a program of its own: a queue that is closed under its threads may end the process."""
    (tmp_path / "program.py").write_text(OF_PROCESSES)
    command = [sys.executable, tmp_path / "program.py"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ran.stdout == "closed\n", ran.stderr


@canary("SamplerWrapper.epoch and _started", "_compat/torchdata.py (`set_epoch`)")
def test_a_sampler_wrapper_begins_the_epoch_that_is_set_from_outside():
    sampler = Epochs()
    node = started(SamplerWrapper(sampler))
    assert node._started is True
    compat.set_epoch(node, 7)
    node.reset(None)
    assert sampler.told == [0, 7]


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


@canary('the "snapshot" of Prefetcher.state_dict(), or its one reset', "core/nodes/read_ahead.py")
def test_a_prefetcher_resets_its_source_once_and_has_its_state_after_the_last_item():
    source = Counting()
    node = started(Prefetcher(source, 2))
    assert compat.snapshot_of(node) == {"count": 1}
    assert node.source is source and source.resets == [None]
    compat.join_threads(node, 10)
