"""A forked child has a copy of the loader, and owns nothing of what the loader has started."""

import gc
import os
import signal
import time
import traceback

import psutil
import pytest
from worker_functions import Program, Texts, dataloader, processor, same

from odb_nodes import ODBDataLoader, WorkerError

LIMIT_S = 20


def in_child(action):
    """Run an action in a forked child; return what it returned, or raised, as text."""
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        signal.alarm(LIMIT_S)  # ends the child: a hang
        try:
            try:
                said = str(action())
            except Exception:
                said = traceback.format_exc()
            os.write(writer, said.encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as answers:
        said = answers.read().decode()
    assert os.waitpid(pid, 0)[1] == 0, "the child hung"
    return said


def ids(batches):
    return [int(row[0]) for batch in batches for row in batch["input_ids"]]


def forget(loader, iterator):
    del loader, iterator
    gc.collect()


@pytest.mark.parametrize(("method", "prefetch"), [("fork", 4), ("fork", 0), ("thread", 4)])
def test_a_forked_child_is_told_to_make_a_loader_of_its_own_and_disturbs_nothing(method, prefetch):
    with dataloader(Texts(), method, prefetch=prefetch) as loader:
        iterator = iter(loader)
        first = next(iterator)
        for action in (lambda: next(iterator), lambda: iter(loader), loader.state_dict):
            said = in_child(action)
            assert f"WorkerError: this loader was started in process {os.getpid()}; " in said
            assert "Make a loader of its own in the child process." in said
        assert in_child(loader.close) == in_child(lambda: forget(loader, iterator)) == "None"
        assert sorted(ids([first, *iterator])) == list(range(200))


def test_a_node_that_a_child_closes_goes_on_in_its_parent():
    node = processor(same, num_workers=2, chunk_size=4)
    node.reset(None)
    first = next(node)

    def again():
        with pytest.raises(WorkerError, match="Make a loader of its own"):
            node.reset(None)
        node.close()
        node.reset(None)  # with workers of its own
        try:
            return len(list(node))
        finally:
            node.close()

    assert in_child(again) == "50"
    assert len([first, *node]) == 50
    node.close()


def test_a_loader_without_threads_or_that_was_not_begun_goes_on_in_a_child():
    loader = ODBDataLoader(Texts(), token_budget=64, window=12, prefetch=0)
    iterator = iter(loader)
    next(iterator)
    there = in_child(lambda: ids(iterator))
    assert there == str(ids(iterator))
    with dataloader(Texts()) as loader:
        assert in_child(lambda: (len(ids(loader)), loader.close())[0]) == "200"
        assert len(ids(loader)) == 200


@pytest.mark.parametrize("method", ["fork", "thread"])
def test_a_child_that_ends_by_sys_exit_disturbs_nobody(method, tmp_path):
    body = """
        loader = w.dataloader(w.Texts(), sys.argv[1])
        iterator = iter(loader)
        next(iterator)
        if (pid := os.fork()) == 0:
            sys.exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        print(sum(1 for _ in iterator) > 10)
    """
    with Program(tmp_path, body, method) as program:
        assert program.finish(60) == (0, "True\n", "")


def fork_once(index):
    """Leave a child behind that goes on as if it were the worker."""
    if index == 7:
        os.fork()
    return {"input_ids": [index + 1]}


def test_a_child_that_processing_has_forked_ends_and_takes_nothing():
    data = list(range(100))
    options = {"process_fn": fork_once, "shuffle": False, "window": 8, "num_workers": 1}
    with ODBDataLoader(data, token_budget=10, **options) as loader:
        ids = [int(i) for batch in loader for i in batch["input_ids"].flatten()]
        (worker,) = loader.worker_pids
        (child,) = psutil.Process(worker).children()
        deadline = time.monotonic() + LIMIT_S
        while child.status() != psutil.STATUS_ZOMBIE:  # which the worker does not reap
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert sorted(ids) == [index + 1 for index in data]
