"""Memory that batches of workers are made of: written again, and never under a reader."""

import gc
import os
import signal
import sys
import threading
import time
import warnings
from pathlib import Path

import psutil
import pytest
from stored_rows import WORKERS, Rows, assert_equal, epoch, options, same, where

from odb_nodes import (
    ODBDataLoader,
    WorkerOptions,
    pop_step_info,
)
from odb_nodes.processing import shared_pages
from odb_nodes.sample import StoredData

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs memfd_create")


def keep_and_change(samples, kept=[]):  # noqa: B006
    """Hold on to each sample, look at it again later, and change what one is given."""
    for ids, first in kept:
        assert int(ids[0]) == first
    batch = where(samples)
    for sample in samples:
        kept.append((sample["input_ids"], int(sample["input_ids"][0])))
        sample["input_ids"][1:] = -7
    return batch


def test_a_collate_function_may_keep_and_change_samples():
    expected = epoch(Rows(400), "main", collate_fn=where, window=96)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = epoch(Rows(400), "workers", collate_fn=keep_and_change, window=96)
    assert_equal(expected, found)


def test_a_batch_stays_what_it_is_as_long_as_it_is_held():
    """Also where its memory would be written again, and in a child that this process forks."""
    with ODBDataLoader(Rows(200, 200), **options(collate_fn=where)) as loader:
        held = [(batch, [*batch["ids"]]) for batch in loader for _ in (pop_step_info(batch),)]
        pixels = [batch.pop("pixels")[:, 0, 0] for batch, _ in held]
        iterator = iter(loader)
        first = next(iterator)
        expected = [int(name.split()[1]) for name in first["ids"]]
        begun, ended = os.pipe()
        child = os.fork()
        if not child:
            os.close(ended)
            os.read(begun, 1)  # until the epoch is over
            os._exit(int(first["pixels"][:, 0, 0].tolist() != expected))
        os.close(begun)
        del first
        for _ in iterator:
            pass
        os.close(ended)
        assert os.waitpid(child, 0)[1] == 0
    for (batch, names), rows in zip(held, pixels, strict=True):
        assert [f"row {int(row)}" for row in rows] == names == batch["ids"]


def open_files(process="self"):
    """How many anonymous files of this library a process holds or maps."""
    gc.collect()
    folder = Path(f"/proc/{process}/fd")
    held = [os.readlink(path) for path in folder.iterdir() if path.is_symlink()]
    mapped = Path(f"/proc/{process}/maps").read_text().count("memfd:odb_nodes")
    return sum("memfd:odb_nodes" in name for name in held) + mapped


def test_epochs_hold_no_more_and_more_files():
    before = open_files()
    with ODBDataLoader(Rows(300, 100), **options(collate_fn=where)) as loader:
        counts = []
        for _ in range(8):
            for batch in loader:
                del batch
            counts.append([open_files(pid) for pid in ("self", *loader.worker_pids)])
    for several in zip(*counts, strict=True):
        assert max(several[4:]) <= 1.5 * max(several[:4]) + 4
    del loader
    assert open_files() == before


def test_files_that_are_retired_by_a_fork_are_let_go_of():
    with ODBDataLoader(Rows(300, 100), **options(collate_fn=where)) as loader:
        counts = []
        for _ in range(6):
            for step, batch in enumerate(loader):
                if step % 3 == 0:
                    child = os.fork()
                    if not child:
                        os._exit(0)
                    os.waitpid(child, 0)
                del batch
            counts.append([open_files(pid) for pid in ("self", *loader.worker_pids)])
    for several in zip(*counts, strict=True):
        assert max(several[3:]) <= 1.5 * max(several[:3]) + 4


def test_few_descriptors_are_enough(monkeypatch):
    """Where half of them are taken, samples are copied, and go through sockets again."""
    monkeypatch.setattr(shared_pages, "open_files_limit", lambda: 0)
    files = len(os.listdir("/proc/self/fd"))
    with ODBDataLoader(Rows(150, 200), **options(collate_fn=where)) as loader:
        found, most = [], 0
        for batch in loader:
            found.append({key: value for key, value in batch.items() if key != "made by"})
            pop_step_info(found[-1])
            assert batch["made by"] in loader.worker_pids
            most = max(most, len(os.listdir("/proc/self/fd")))
    assert most - files < 12
    monkeypatch.undo()
    for batch, (expected, *_) in zip(
        found, epoch(Rows(150, 200), "main", collate_fn=where), strict=True
    ):
        assert all(same(batch[key], expected[key]) for key in expected)


def allow_no_files(worker):
    shared_pages.CAN_SHARE = False


def test_large_batches_come_through_the_socket_where_a_worker_can_make_no_files():
    workers = WorkerOptions(num_workers=2, worker_init_fn=allow_no_files, **WORKERS)
    given = {"collate_fn": where, "workers": workers}
    assert_equal(*(epoch(Rows(60, 400), mode, **given) for mode in ("main", "workers")))


def allow_few_files(worker):
    import resource  # which not every system has

    resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))


def test_a_worker_leaves_descriptors_for_the_files_that_it_is_sent():
    """It processes far more samples ahead than it may have files."""
    workers = WorkerOptions(num_workers=1, chunk_size=1, worker_init_fn=allow_few_files, **WORKERS)
    given = {"collate_fn": where, "workers": workers, "window": 200}
    assert_equal(*(epoch(Rows(300, 150), mode, **given) for mode in ("main", "workers")))


def test_samples_do_not_come_to_the_trainer():
    with ODBDataLoader(Rows(), **options()) as loader:
        next(iter(loader))
        pooled = loader._graphs[0].bucketer._pool.items().values()
        assert {isinstance(one.data, StoredData) for one in pooled} == {True}


def test_a_batch_is_made_while_a_chunk_is_processed():
    """It does not wait for the end of a chunk that takes long."""

    def slowly(sample):
        time.sleep(0.02)
        return sample

    given = options(process_fn=slowly, collate_fn=where, chunk_size=64, window=64)
    with ODBDataLoader(Rows(640), **given) as loader:
        iterator = iter(loader)
        next(iterator)
        order = loader._graphs[0].collator._workers.order
        group = [*loader._graphs[0].bucketer._pool.items().values()][:3]
        before = threading.active_count()
        start = time.monotonic()
        batch = order(group, 1, None)(pytest.fail)
        assert len(batch["ids"]) == 3
        assert time.monotonic() - start < 0.64  # of 64 samples, each 20 ms
        assert threading.active_count() == before


def test_killed_with_files_in_hand_nothing_is_left():
    begun, ended = os.pipe()
    trainer = os.fork()
    if not trainer:
        os.close(begun)
        loader = ODBDataLoader(Rows(4000, 400), **options(collate_fn=where))
        iterator = iter(loader)
        next(iterator)
        os.write(ended, " ".join(map(str, loader.worker_pids)).encode())
        for _ in iterator:
            pass
        os._exit(0)
    os.close(ended)
    workers = [*map(int, os.read(begun, 100).split())]
    os.close(begun)
    assert len(workers) == 2
    os.kill(trainer, signal.SIGKILL)
    os.waitpid(trainer, 0)
    deadline = time.monotonic() + 5
    while any(map(is_running, workers)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(is_running, workers))


def is_running(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
