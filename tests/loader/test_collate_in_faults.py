"""What goes wrong where workers make the batches."""

import os
import re
import signal
import sys
import time
import warnings
from functools import partial

import pytest
from stored_rows import SIZE, WORKERS, Rows, assert_equal, epoch, options, where
from torchdata.nodes import IterableWrapper

from odb_nodes import (
    ODBDataLoader,
    SampleError,
    WorkerError,
    WorkerOptions,
    pop_step_info,
)
from odb_nodes.contract.graph import walk

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


class Item:
    """Cannot be sent to a worker, if it is the thirtieth."""

    def __init__(self, index, trainer):
        self.index, self.trainer = index, trainer
        if index == 30 and os.getpid() != trainer:
            raise ValueError("cannot arrive")

    def __reduce__(self):
        return Item, (self.index, self.trainer)


def slow_row(item):
    time.sleep(0.01)
    return Rows()[item.index]


def test_an_order_that_a_worker_cannot_read_is_no_error_of_the_item_in_hand(capfd):
    items = IterableWrapper([Item(index, os.getpid()) for index in range(SIZE)])
    workers = WorkerOptions(num_workers=1, chunk_size=5, in_flight_samples=20, **WORKERS)
    given = options(process_fn=slow_row, workers=workers)
    with ODBDataLoader(items, **given) as loader, pytest.raises(WorkerError, match="exit code 1"):
        next(iter(loader))
    assert "cannot arrive" in capfd.readouterr().err


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


def end_at(batch, number):
    """End the worker that makes a batch of that sample."""
    if f"row {number}" in batch["ids"]:
        os._exit(5)
    return batch


def test_a_worker_that_collating_ends_is_not_taken_to_have_processed():
    """Its error says that it had batches to make. The other one makes the rest."""
    expected = epoch(Rows(), "main", collate_fn=where)
    workers = WorkerOptions(num_workers=2, chunk_size=7, in_flight_samples=SIZE, **WORKERS)
    collate, found = faulty(partial(end_at, number=31)), []
    with ODBDataLoader(Rows(), **options(collate_fn=collate, workers=workers)) as loader:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            while len(found) < len(expected):
                try:
                    for batch in loader:
                        found.append(pop_step_info(batch))
                except WorkerError as error:
                    told.append(error)
        assert found == [info for _, info, _ in expected]
    said = [str(getattr(one, "message", one)) for one in told]
    assert any(re.search(r"exit code 5\. It had batches to make(, too)? \(\d", one) for one in said)
    assert not any("-9" in one for one in said)


def processor_of(loader):
    (node,) = [one for one in walk(loader._graphs[0].samples) if hasattr(one, "worker_pids")]
    return node


def test_workers_that_died_with_nothing_to_do_are_started_anew():
    workers = WorkerOptions(num_workers=2, in_flight_samples=SIZE, **WORKERS)
    given = options(workers=workers, prefetch=1, collate_fn=where)
    with ODBDataLoader(Rows(), **given) as loader:
        node = processor_of(loader)
        batches, pids = iter(loader), node.worker_pids
        while not node._reader.has_ended:
            next(batches)
        workers = node.runner._pool._workers
        while any(one.batches_due or not one._pending.empty() for one in workers):
            time.sleep(0.01)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        assert len([*batches]) > 0
        while not all(one.is_buried for one in workers):  # A kill takes its time.
            time.sleep(0.01)
        # A batch may be ordered before its worker is known to be dead.
        owed = "(nothing to do|batches to make)"
        with pytest.warns(UserWarning, match=f"-9.* It had {owed}.* All workers are started anew"):
            again = [pop_step_info(batch) for batch in loader]
        assert sum(info.local_samples for info in again) == SIZE
        assert not {*node.worker_pids} & {*pids}
