"""Memory that batches of workers are made of: written again, and never under a reader."""

import gc
import os
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
from stored_rows import WORKERS, Rows, assert_equal, epoch, options, same, where

from odb_nodes import (
    ODBDataLoader,
    WorkerOptions,
    pop_step_info,
)
from odb_nodes.processing import shared_pages

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


@pytest.mark.parametrize("forking", [False, True])
def test_epochs_hold_no_more_and_more_files(forking):
    """Also where a fork, whose child may read them, retires those that are in use."""
    before = open_files()
    with ODBDataLoader(Rows(300, 100), **options(collate_fn=where)) as loader:
        counts = []
        for _ in range(6):
            for step, batch in enumerate(loader):
                if forking and step % 3 == 0:
                    child = os.fork()
                    if not child:
                        os._exit(0)
                    os.waitpid(child, 0)
                del batch
            counts.append([open_files(pid) for pid in ("self", *loader.worker_pids)])
    for several in zip(*counts, strict=True):
        assert max(several[3:]) <= 1.5 * max(several[:3]) + 4
    del loader
    assert open_files() == before


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


def allow_few_files(worker):
    import resource  # which not every system has

    resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))


@pytest.mark.parametrize("allow", [allow_no_files, allow_few_files])
def test_a_worker_may_have_few_files_or_none(allow):
    """None: large batches come through the socket. Few: it processes more samples ahead."""
    given = {"chunk_size": 1, "worker_init_fn": allow, **WORKERS}
    given = {"workers": WorkerOptions(num_workers=1, **given), "collate_fn": where, "window": 200}
    assert_equal(*(epoch(Rows(300, 150), mode, **given) for mode in ("main", "workers")))


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
