"""Starting and ending a pool: whatever fails, nothing is left and nobody waits."""

import errno
import gc
import multiprocessing
import os
import re
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import wait
from pathlib import Path

import numpy as np
import pytest
import torch
from worker_functions import Program, same

from odb_nodes import WorkerError, WorkerOptions
from odb_nodes.processing import process_pool, worker_process
from odb_nodes.processing.chunk import ChunkProcessor, ChunkTask
from odb_nodes.processing.process_pool import ProcessPool
from odb_nodes.processing.thread_pool import ThreadPool

LIMIT_S = 10.0


def start(process_fn=same, num_workers=2, start_method="fork", pool=ProcessPool, **options):
    options = WorkerOptions(num_workers=num_workers, start_method=start_method, **options)
    return pool(ChunkProcessor(process_fn, None), options)


def held():
    """How many files, threads and children this process has."""
    gc.collect()
    return (
        len(os.listdir("/proc/self/fd")),
        sorted(thread.name for thread in threading.enumerate()),
        multiprocessing.active_children(),
    )


def assert_holds(before):
    deadline = time.monotonic() + LIMIT_S
    while held() != before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert held() == before


# --- what cannot be started -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sender", "reader"])
def test_a_thread_that_cannot_be_started_leaves_nothing(name, monkeypatch):
    real = threading.Thread.start

    def refuse(thread):
        if thread.name == f"odb_nodes-{name}":
            raise RuntimeError("can't start new thread")
        real(thread)

    before = held()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(WorkerError, match=f"`odb_nodes-{name}` could not be started.*ulimit -u"):
        start()
    assert_holds(before)


def test_a_worker_thread_that_cannot_be_started_leaves_nothing(monkeypatch):
    real = threading.Thread.start

    def refuse(thread):
        if thread.name == "odb_nodes-worker-1":
            raise RuntimeError("can't start new thread")
        real(thread)

    before = held()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(WorkerError, match=r"`odb_nodes-worker-1` could not be .*ulimit -u"):
        start(pool=ThreadPool, method="thread", start_method=None)
    assert_holds(before)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.EAGAIN, r"processes and threads is reached \(`ulimit -u`.*use fewer workers"),
        (errno.EMFILE, r"open files of a process is reached \(`ulimit -n`, here \d+\): raise it"),
        (errno.ENFILE, r"open files of this machine is reached"),
        (errno.ENOMEM, r"no memory left for a worker"),
    ],
)
@pytest.mark.parametrize("place", ["fork", "socketpair"])
@pytest.mark.parametrize("on_main", [True, False])
def test_a_limit_of_the_system_is_named(on_main, place, number, words, monkeypatch):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr({"fork": os, "socketpair": socket}[place], place, refuse)
    errors = []

    def run():
        with pytest.raises(WorkerError, match=f"worker 0 could not be started.*{words}") as caught:
            start()
        errors.append(str(caught.value))

    if on_main:
        run()
    else:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join(LIMIT_S)
    assert "picklable" not in errors[0]
    python_leaks = 4 * (place == "fork")  # `multiprocessing.popen_fork` opens two pipes before
    assert len(os.listdir("/proc/self/fd")) <= before + python_leaks


def test_a_worker_that_starts_before_one_that_cannot_is_ended(monkeypatch):
    real, forks = os.fork, []

    def refuse_second():
        forks.append(1)
        if len(forks) == 2:
            raise BlockingIOError(errno.EAGAIN, "no more")
        return real()

    before = held()
    monkeypatch.setattr(os, "fork", refuse_second)
    with pytest.raises(WorkerError, match="worker 1 could not be started") as caught:
        start()
    assert caught.value  # that somebody keeps keeps no file open
    files, threads, children = held()
    assert (threads, children) == before[1:]
    assert files <= before[0] + 4  # see above


# --- what does not answer -------------------------------------------------------------------------


def test_a_result_that_the_trainer_has_no_memory_for_is_an_error_at_once(monkeypatch):
    real = process_pool.receive

    def refuse(connection):
        message = real(connection)
        if len(message) > 1:
            raise MemoryError
        return message

    monkeypatch.setattr(process_pool, "receive", refuse)
    pool = start()
    future = pool.submit(ChunkTask([1], [None], 0, 0, [0]))
    with pytest.raises(WorkerError, match=r"MemoryError.*out of memory: lower `in_flight_bytes`"):
        future.result(LIMIT_S)
    pool.close()


def test_a_chunk_that_cannot_be_sent_is_an_error_at_once(monkeypatch):
    def refuse(connection, parts):
        raise MemoryError("no room")

    pool = start(num_workers=1)
    monkeypatch.setattr(worker_process, "send", refuse)
    future = pool.submit(ChunkTask([1], [None], 0, 0, [0]))
    with pytest.raises(WorkerError, match="could not send it a chunk: MemoryError: no room"):
        future.result(LIMIT_S)
    pool.close()


def test_a_reader_thread_that_fails_leaves_nobody_waiting(monkeypatch):
    def fail(*_):
        raise ValueError("a closed file")

    pool = start(num_workers=2)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    monkeypatch.setattr(process_pool, "_dead_in_silence", fail)
    monkeypatch.setattr(process_pool, "_DEATH_POLL_S", 0.01)
    time.sleep(1.2)  # the poll that has begun
    futures = [pool.submit(ChunkTask([1], [None], 0, 0, [0])) for _ in range(4)]
    for future in futures:
        with pytest.raises(WorkerError, match="the thread that reads results has failed"):
            future.result(LIMIT_S)
    pool.close()


class SleepAs:
    """A `worker_init_fn`, or the unpickling of one, that takes long."""

    def __init__(self, seconds, at_unpickling=False):
        self.seconds = seconds
        self.at_unpickling = at_unpickling

    def __setstate__(self, state):
        self.__dict__.update(state)
        if self.at_unpickling:
            time.sleep(self.seconds)

    def __call__(self, _):
        time.sleep(self.seconds)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"worker_init_fn": SleepAs(60)}, r"`worker_init_fn` of worker 0 \(process \d+\) has not"),
        (
            {"worker_init_fn": SleepAs(60, at_unpickling=True), "start_method": "spawn"},
            r"worker 0 \(process \d+\) has not come up: importing",
        ),
        ({"process_fn": time.sleep}, "`process_fn` hangs"),
    ],
    ids=["worker_init_fn", "unpickling", "process_fn"],
)
def test_what_hangs_is_blamed(options, words):
    pool = start(num_workers=1, **options)
    future = pool.submit(ChunkTask([60], [None], 0, 0, [0]))
    time.sleep(1)
    assert not future.done()
    assert re.match(words, pool.what_hangs(future))
    pool.close()


# --- how workers end ------------------------------------------------------------------------------


def leave_a_child(item):
    if os.fork() == 0:
        time.sleep(15)
        os._exit(0)
    return np.zeros(3)


def test_close_does_not_wait_for_the_child_of_a_worker():
    pool = start(leave_a_child)
    for future in [pool.submit(ChunkTask([1], [None], 0, 0, [0])) for _ in range(2)]:
        future.result(LIMIT_S)
    begun = time.monotonic()
    pool.close()
    assert time.monotonic() - begun < 0.9


def close_files_and_sleep(item):
    os.closerange(3, 1000)
    time.sleep(60)


def test_a_worker_that_closes_its_files_and_lives_is_ended():
    pool = start(close_files_and_sleep, num_workers=1)
    with pytest.raises(WorkerError, match="died with exit code"):
        pool.submit(ChunkTask([1], [None], 0, 0, [0])).result(LIMIT_S)
    pool.close()


def test_workers_outlive_the_thread_that_asked_for_them():
    pools = []
    thread = threading.Thread(target=lambda: pools.append(start()))
    thread.start()
    thread.join(LIMIT_S)
    time.sleep(0.2)
    assert pools[0].submit(ChunkTask([5], [None], 0, 0, [0])).result(LIMIT_S).failure is None
    pids = pools[0].pids
    pools[0].close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_the_exit_code_may_be_taken_by_another_part_of_the_program(tmp_path):
    body = """
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        loader = w.dataloader(w.Texts(500, 0.001), prefetch=0)
        iterator = iter(loader)
        next(iterator)
        os.kill(loader.worker_pids[0], signal.SIGKILL)
        begun = time.monotonic()
        try:
            list(iterator)
        except WorkerError as error:
            print("another part of this program took its exit code" in str(error))
        loader.close()
        print(time.monotonic() - begun < 3)
    """
    with Program(tmp_path, body) as program:
        assert program.finish(60) == (0, "True\nTrue\n", "")


@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
def test_a_function_below_the_guard_is_named(start_method, tmp_path):
    path = tmp_path / "guarded.py"
    path.write_text(
        "from odb_nodes import ODBDataLoader, WorkerOptions\n"
        "if __name__ == '__main__':\n"
        "    def prepare(item):\n"
        "        return item\n"
        f"    workers = WorkerOptions(num_workers=1, start_method={start_method!r})\n"
        "    data = [{'input_ids': [1]}] * 5\n"
        "    loader = ODBDataLoader(data, token_budget=9, workers=workers, process_fn=prepare)\n"
        "    try:\n"
        "        list(loader)\n"
        "    except Exception as error:\n"
        "        print(error)\n"
    )
    run = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=60)
    assert "It could not unpickle its work: AttributeError: Can't get attribute" in run.stdout
    assert "'prepare'" in run.stdout
    assert 'not below `if __name__ == "__main__":`' in run.stdout


@pytest.fixture
def held_lock(request):
    """The lock of a global generator, which another thread holds for some seconds."""
    held, release = threading.Event(), threading.Event()

    def hold():
        with np.random.get_bit_generator().lock:
            held.set()
            release.wait(getattr(request, "param", 60))

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    yield
    release.set()
    thread.join()


@pytest.mark.parametrize("held_lock", [1], indirect=True)
def test_a_forked_worker_that_inherits_a_held_lock_is_replaced(held_lock):
    # As where a thread of the trainer draws random numbers while the workers start.
    options = WorkerOptions(num_workers=2, start_method="fork")
    start_s = time.monotonic()
    pool = ProcessPool(ChunkProcessor(same, 0, limit_s=20.0), options)
    futures = [pool.submit(ChunkTask([n], [None], 0, 0, [n])) for n in range(4)]
    assert all(future.result(20).failure is None for future in futures)
    assert time.monotonic() - start_s < 15
    pool.close()


def test_to_replace_silent_workers_takes_no_longer_than_the_limit(held_lock):
    options = WorkerOptions(num_workers=3, start_method="fork", timeout_s=1.0)
    start_s = time.monotonic()
    pool = ProcessPool(ChunkProcessor(same, 0), options)
    future = pool.submit(ChunkTask([1], [None], 0, 0, [0]))
    assert not wait([future], 0.1).done
    assert "has not come up. It may wait for ever for a lock" in pool.what_hangs(future)
    pool.close()
    assert time.monotonic() - start_s < 15


def test_workers_start_under_a_default_device_that_a_fork_cannot_use():
    torch.set_default_device("cuda")
    try:
        pool = ProcessPool(
            ChunkProcessor(same, 0), WorkerOptions(num_workers=1, start_method="fork")
        )
        assert pool.submit(ChunkTask([1], [None], 0, 0, [0])).result(LIMIT_S).failure is None
        pool.close()
    finally:
        torch.set_default_device(None)
