"""Canaries: what we rely on in torchdata, to stop its threads and to begin its epochs."""

import operator
import subprocess
import sys
from itertools import islice

import pytest
from canary import relies_on
from torchdata.nodes import (
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


def started_and_stopped(node):
    compat.join_threads(started(node), 10)
    return node


def impl_of(mapper):
    """Return the node that holds the threads of a `ParallelMapper`."""
    return mapper._it if mapper.prebatch is None else mapper._it.source


@canary("Prefetcher._it, which holds a thread and is deleted by a reset that raises")
def test_a_prefetcher_reads_on_a_thread_that_is_stopped(new_threads):
    node = started(Prefetcher(IterableWrapper(range(1000)), 2))
    assert compat.has_threads(node) and new_threads()
    compat.join_threads(node, 10)
    assert not new_threads()
    with pytest.raises(KeyError):
        node.reset({"not": "a state"})
    compat.join_threads(node, 10)
    assert next(started(node)) == 1
    compat.join_threads(node, 10)


@pytest.mark.parametrize("hidden", ["the threads", "their holder"])
def test_threads_that_are_kept_elsewhere_are_an_error(hidden, monkeypatch):
    """As in a later version: a reset that does not wait for them would lose items."""

    class Renamed(Prefetcher):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            if hidden == "their holder":
                del self._it

    monkeypatch.setattr(compat, "Prefetcher", Renamed)
    node = Renamed(IterableWrapper(range(9)), 2)
    if hidden == "the threads":
        threads = vars(started(node)._it)
        kept = {name: value for name, value in threads.items() if hasattr(value, "is_alive")}
        threads.update(dict.fromkeys(kept, None))
    with pytest.raises(RuntimeError, match="`Renamed` cannot be found in torchdata [0-9.]+"):
        compat.join_threads(node, 10)
    if hidden == "the threads":
        threads.update(kept)
        compat.join_threads(node, 10)


@canary("PinMemory.reset, which gives `_it` what a Prefetcher has there")
def test_pin_memory_runs_by_the_same_iterator():
    # Without a GPU it cannot be built, so this reads what its `reset` would make.
    made = type(started_and_stopped(Prefetcher(IterableWrapper(range(9)), 2))._it)
    assert {made.__name__, "_it"} <= {*PinMemory.reset.__code__.co_names}


@pytest.mark.parametrize("prebatch", [None, 4])
@pytest.mark.parametrize("in_order", [True, False])
@canary("what ParallelMapper._it holds, or ParallelMapper.prebatch and source.source")
def test_a_parallel_mapper_of_threads_is_stopped(in_order, prebatch, new_threads):
    source = IterableWrapper(range(1000))
    mapper = ParallelMapper(source, operator.neg, 2, in_order, "thread", prebatch=prebatch)
    impl = impl_of(started(mapper))
    assert compat.has_threads(impl)
    assert len(new_threads()) >= 3 + in_order  # of a source, of two workers, and for the order
    compat.join_threads(impl, 10)
    assert not new_threads()
    assert compat.length_of(mapper) == 1000


OF_PROCESSES = """
import multiprocessing, operator, os, threading
from odb_nodes._compat.torchdata import join_threads
from torchdata.nodes import IterableWrapper, ParallelMapper

if __name__ == "__main__":
    options = {"method": "process", "multiprocessing_context": "spawn"}
    mapper = ParallelMapper(IterableWrapper(range(1000)), operator.neg, 1, **options)
    mapper.reset(None)
    assert next(mapper) == 0
    (worker,), before = multiprocessing.active_children(), threading.active_count()
    join_threads(mapper._it, 10)
    assert threading.active_count() <= before - 3  # the reader, the sorter and a queue's feeder
    assert not worker.is_alive() and threading.active_count() == 1
    print("closed", flush=True)
    os._exit(0)
"""


@canary("what ParallelMapper._it holds of processes and queues")
def test_a_parallel_mapper_of_processes_has_queues_that_can_be_closed(tmp_path):
    """In a program of its own: a queue that is closed under its threads may end the process."""
    (tmp_path / "program.py").write_text(OF_PROCESSES)
    command = [sys.executable, tmp_path / "program.py"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ran.stdout == "closed\n", ran.stderr


@pytest.mark.parametrize("items", [0, 1, 4])
@canary("SamplerWrapper.sampler, epoch and epoch_updater", "_compat/torchdata.py (`set_epoch`)")
def test_a_sampler_wrapper_begins_the_epoch_that_is_set_from_outside(items):
    sampler = Epochs()
    node = SamplerWrapper(sampler)
    for epoch in (5, 7):
        compat.set_epoch(node, epoch)
        node.reset(None)
        list(islice(node, items))
    node.reset(None)
    assert sampler.epochs == [5, 7, 8 if items else 7]


def test_nothing_of_the_stateful_dataloader_is_imported():
    """It uses many private names of torch, and has been broken by new versions of torch before."""
    program = "import sys; from odb_nodes import ODBDataLoader; print(*sys.modules)"
    command = [sys.executable, "-c", program]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert "torchdata.nodes" in ran.stdout, ran.stderr
    assert "stateful_dataloader" not in ran.stdout


def test_the_random_sampler_of_the_stateful_dataloader_is_known_once_it_is_imported():
    from torchdata.stateful_dataloader.sampler import RandomSampler

    assert compat.is_random(RandomSampler(range(3)))
    assert not compat.is_random(range(3))
