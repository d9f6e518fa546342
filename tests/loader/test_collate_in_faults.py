"""What goes wrong where workers make the batches, and the memory that these are made of."""

import gc
import os
import signal
import sys
import time
import warnings
from functools import partial
from pathlib import Path

import pytest
from stored_rows import SIZE, WORKERS, Rows, assert_equal, epoch, options, where

from odb_nodes import (
    ODBDataLoader,
    SampleError,
    WorkerError,
    WorkerOptions,
    pop_step_info,
)
from odb_nodes.contract.graph import walk
from odb_nodes.processing import transport

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs memfd_create")


def raise_for(samples, key=31):
    if any(sample["id"] == f"row {key}" for sample in samples):
        raise ValueError("bad row")
    return where(samples)


def test_an_error_is_the_one_that_the_trainer_would_raise():
    """With its type, its traceback and the name of the sample; mended, the run goes on."""
    kept = None
    with ODBDataLoader(Rows(), **options(collate_fn=raise_for)) as loader:
        with pytest.raises(ValueError, match="bad row") as caught:
            for batch in loader:
                kept = pop_step_info(batch)
        assert "raise_for" in [one.name for one in caught.traceback]
        state = loader.state_dict()
    expected = epoch(Rows(), "main", collate_fn=where)
    with ODBDataLoader(Rows(), **options(collate_fn=where)) as loader:
        loader.load_state_dict(state)
        rest = [pop_step_info(batch) for batch in loader]
    assert rest == [info for _, info, _ in expected][kept.step + 1 :]


def name_row(samples):
    raise SampleError("is odd", index=2)


@pytest.mark.parametrize(
    ("collate", "error", "message"),
    [
        (name_row, SampleError, r"^a sample.*key \d+.*`id` 'row \d+': is odd"),
        (len, TypeError, "must return a dict"),
    ],
)
def test_an_error_names_the_sample_or_the_function(collate, error, message):
    with ODBDataLoader(Rows(), **options(collate_fn=collate)) as loader:
        with pytest.raises(error, match=message):
            next(iter(loader))


def in_workers_only(samples, trainer, fault):
    """A batch, and a fault in any other process than the trainer's."""
    batch = where(samples)
    return batch if os.getpid() == trainer else fault(batch)


def faulty(fault):
    return partial(in_workers_only, trainer=os.getpid(), fault=fault)


def unsendable(batch):
    return {**batch, "function": lambda: 0}


def refuse(batch):
    raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")


@pytest.mark.parametrize(
    ("fault", "said"), [(unsendable, "pickle"), (refuse, "RuntimeError: Cannot re-initialize CUDA")]
)
def test_what_only_a_worker_cannot_do_the_trainer_does(fault, said):
    expected = epoch(Rows(), "main", collate_fn=where)
    with pytest.warns(UserWarning, match=f"(?s)a worker could not make a batch.*{said}") as told:
        found = epoch(Rows(), "workers", collate_fn=faulty(fault))
    assert_equal(expected, found)
    assert sum("a worker could not" in str(one.message) for one in told) == 1


def fork(batch):
    """Leave a child that ends by `sys.exit`, as if it were the worker."""
    if not (child := os.fork()):
        sys.exit(0)
    os.waitpid(child, 0)
    return batch


@pytest.mark.filterwarnings("ignore:worker process .* died with:UserWarning")
def test_a_worker_that_dies_within_a_batch_is_an_error_that_loses_nothing(tmp_path):
    """Batches of which the samples are there still come; a reset starts new workers."""
    expected = epoch(Rows(), "main", collate_fn=where)
    assert_equal(expected, epoch(Rows(), "workers", collate_fn=faulty(fork)))
    once = tmp_path / "once"

    def fault(batch):
        if batch["ids"] == expected[4][0]["ids"] and not once.exists():
            once.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return batch

    collate = faulty(fault)
    found = []
    with ODBDataLoader(Rows(), **options(collate_fn=collate)) as loader:
        with pytest.raises(WorkerError, match="-9"):
            for batch in loader:
                found.append(pop_step_info(batch))
        loader.load_state_dict(loader.state_dict())
        found += [pop_step_info(batch) for batch in loader]
    assert found == [info for _, info, _ in expected]


@pytest.mark.slow
def test_a_collate_function_that_hangs_is_an_error_after_the_limit():
    def hang(batch):
        time.sleep(600)

    workers = WorkerOptions(num_workers=2, timeout_s=2, start_method="fork")
    collate = faulty(hang)
    with (
        ODBDataLoader(Rows(), **options(collate_fn=collate, workers=workers)) as loader,
        pytest.raises(WorkerError, match=r"within 2 s .*`collate_fn`"),
    ):
        next(iter(loader))


@pytest.mark.filterwarnings("ignore:worker process .* died with:UserWarning")
def test_workers_that_died_with_nothing_to_do_are_started_anew():
    workers = WorkerOptions(num_workers=2, in_flight_samples=SIZE, **WORKERS)
    given = options(workers=workers, prefetch=1, collate_fn=where)
    with ODBDataLoader(Rows(), **given) as loader:
        (node,) = [one for one in walk(loader.root) if hasattr(one, "worker_pids")]
        batches, pids = iter(loader), node.worker_pids
        while not node._reader.has_ended:
            next(batches)
        workers = node.runner._pool._workers
        while any(one.batches_due or not one._pending.empty() for one in workers):
            time.sleep(0.01)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        assert len([*batches]) > 0
        while not all(one.is_marked_dead for one in workers):  # A kill takes its time.
            time.sleep(0.01)
        # A batch may be ordered before its worker is known to be dead.
        owed = "(nothing to do|batches to make)"
        with pytest.warns(UserWarning, match=f"-9.* It had {owed}.* All workers are started anew"):
            again = [pop_step_info(batch) for batch in loader]
        assert sum(info.local_samples for info in again) == SIZE
        assert not {*node.worker_pids} & {*pids}


# Memory that batches of workers are made of: written again, and never under a reader.


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


def allow_no_files(worker):
    transport.CAN_SHARE = False


def allow_few_files(worker):
    import resource  # which not every system has

    resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))


@pytest.mark.parametrize("allow", [allow_no_files, allow_few_files])
def test_a_worker_may_have_few_files_or_none(allow):
    """None: large batches come through the socket. Few: it processes more samples ahead."""
    given = {"chunk_size": 1, "worker_init_fn": allow, **WORKERS}
    given = {"workers": WorkerOptions(num_workers=1, **given), "collate_fn": where, "window": 200}
    assert_equal(*(epoch(Rows(300, 150), mode, **given) for mode in ("main", "workers")))
