"""Reading ahead ends where the data end, and nowhere else."""

import threading

import pytest
from torchdata.nodes import IterableWrapper, Mapper

from odb_nodes import Loader, WorkerError
from odb_nodes.core.contract.graph import close_nodes
from odb_nodes.core.nodes.read_ahead import ReadAhead


@pytest.mark.parametrize("size", [6, 100], ids=["read to its end", "not read yet"])
def test_a_thread_that_was_stopped_has_not_come_to_the_end_of_the_data(size):
    read = threading.Semaphore(0)
    source = Mapper(IterableWrapper(range(size)), lambda item: read.release() or item)
    node = ReadAhead(source, depth=4)
    node.reset(None)
    assert [next(node), next(node)] == [0, 1]
    for _ in range(6):
        assert read.acquire(timeout=30)
    close_nodes(node, 30)
    for _ in range(2):
        with pytest.raises(WorkerError, match="before the end of the epoch"):
            next(node)
    node.reset(None)
    assert list(node) == [*range(size)]
    close_nodes(node, 30)
    with pytest.raises(StopIteration):
        next(node)


def test_to_close_another_loader_over_the_same_nodes_ends_no_epoch():
    root = ReadAhead(IterableWrapper(range(9)), depth=2)
    with Loader(root) as loader:
        items = iter(loader)
        taken = [next(items), next(items)]
        Loader(root).close()
        assert taken + list(items) == [*range(9)]


def test_a_reset_without_a_loader_waits_for_the_thread_to_leave_the_source():
    inside, gate = threading.Event(), threading.Event()

    def second_waits(item):
        if item == 1:
            inside.set()
            assert gate.wait(30)
        return item

    node = ReadAhead(Mapper(IterableWrapper(range(5)), second_waits), depth=2)
    assert next(node) == 0
    assert inside.wait(30)
    threading.Timer(0.7, gate.set).start()
    node.reset(None)
    assert gate.is_set()
    assert list(node) == [*range(5)]


@pytest.mark.parametrize("error", [ZeroDivisionError("at 2"), SystemExit(3)], ids=repr)
def test_an_error_comes_unchanged_at_its_item_and_the_thread_has_ended(error, new_threads):
    def third_fails(item):
        if item == 2:
            raise error
        return item

    node = ReadAhead(Mapper(IterableWrapper(range(5)), third_fails), depth=4)
    assert [next(node), next(node)] == [0, 1]
    state = node.state_dict()
    with pytest.raises(type(error)) as caught:
        next(node)
    assert caught.value is error and node.state_dict() == state
    with pytest.raises(WorkerError, match="its source raised"):
        next(node)
    node.join_threads(30)
    assert not new_threads()
