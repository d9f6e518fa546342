"""Batches that worker processes make are those that the trainer's process would make."""

import gc
import os
import random
import signal
import sys
import threading
import time
import warnings
from functools import partial
from operator import attrgetter
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from stored_rows import Rows, where
from torchdata.nodes import IterableWrapper

from odb_nodes import (
    Mixing,
    ODBDataLoader,
    PaddingCollate,
    ParallelProcessor,
    SampleError,
    Skipped,
    TokenBudget,
    WorkerError,
    WorkerOptions,
    pop_step_info,
)
from odb_nodes.nodes import worker_batches
from odb_nodes.processing import shared_pages
from odb_nodes.processing.observation import observe_sample
from odb_nodes.sample import StoredData
from odb_nodes.testing import assert_resumes_exactly

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs memfd_create")

SIZE, BUDGET = 160, 512


def options(**given):
    workers = WorkerOptions(num_workers=2, chunk_size=given.pop("chunk_size", 7), **WORKERS)
    defaults = {"token_budget": BUDGET, "window": 24, "collate_in": "workers"}
    return {**defaults, "workers": workers, **given}


WORKERS = {"start_method": "fork"}


def same(one, other):
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.equal(other)
    return one == other


def epoch(dataset, collate_in, **given):
    """Batches without who has made them, step infos, and states of an epoch."""
    found = []
    with ODBDataLoader(dataset, **options(collate_in=collate_in, **given)) as loader:
        for batch in loader:
            info = pop_step_info(batch)
            batch = {key: value for key, value in batch.items() if key != "made by"}
            found.append((batch, info, loader.state_dict()))
    return found


def assert_equal(one, other):
    assert len(one) == len(other) > 3
    for (batch, info, state), (batch2, info2, state2) in zip(one, other, strict=True):
        assert batch.keys() == batch2.keys()
        assert all(same(batch[key], batch2[key]) for key in batch)
        assert (info, state) == (info2, state2)


def skip_some(sample):
    return Skipped("odd") if len(sample["input_ids"]) % 5 == 0 else sample


def draw(samples):
    """A batch with random numbers from each of the global generators."""
    drawn = [random.random(), np.random.random(), float(torch.rand(()))]
    return {**PaddingCollate()(samples), "drawn": torch.tensor(drawn, dtype=torch.float64)}


class Keeper:
    """A collate function that draws from a generator of its own."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(3)

    def __call__(self, samples):
        drawn = torch.rand(4, generator=self.generator)
        return {**PaddingCollate()(samples), "drawn": drawn}


class OfStep:
    """A collate function that takes the step."""

    def collate_step(self, samples, info):
        return {**PaddingCollate()(samples), "keys": info.keys, "tasks": info.row_tasks}

    def __call__(self, samples):
        raise AssertionError


KINDS = {
    "default": {},
    "own": {"collate_fn": where},
    "packed": {"token_budget": TokenBudget(BUDGET, layout="packed")},
    "draws": {"collate_fn": draw},
    "keeps a generator": {"collate_fn": Keeper()},
    "takes the step": {"collate_fn": OfStep()},
    "payload": {"state": "payload", "collate_fn": where},
    "skipped": {"process_fn": skip_some},
    "one-sample chunks": {"chunk_size": 1, "collate_fn": where},
    "accumulate": {"accumulate": 4, "round_size": 4},
    "virtual ranks": {"virtual_ranks": 2, "process_fn": None},
    "excluded": {"exclude": [3, 4, 5]},
}


@pytest.mark.parametrize("kind", KINDS)
def test_batches_steps_and_states_are_the_same(kind):
    runs = [epoch(Rows(), collate_in, **KINDS[kind]) for collate_in in ("main", "workers")]
    assert_equal(*runs)


@pytest.mark.parametrize("side", [20, 200, 800])
def test_large_samples_are_the_same(side):
    """Some come through the socket, some in files of several samples, some in one of their own."""
    given = {"collate_fn": where, "chunk_size": "auto"}
    assert_equal(*(epoch(Rows(60, side), mode, **given) for mode in ("main", "workers")))


@pytest.mark.parametrize("by", ["samples", "tokens"])
def test_mixtures_are_the_same(by):
    data = {"short": Rows(90), "long": Rows(70)}
    given = {"weights": Mixing(weights={"short": 2, "long": 1}, by=by), "collate_fn": where}
    assert_equal(*(epoch(data, mode, **given) for mode in ("main", "workers")))


@pytest.mark.parametrize("kind", ["default", "draws", "keeps a generator", "payload", "skipped"])
def test_a_run_resumes_exactly(kind):
    loaders = []

    def make():
        given = {"collate_fn": PaddingCollate(), **KINDS[kind]}
        if kind == "payload":
            given["collate_fn"] = PaddingCollate()  # which does not tell who has made a batch
        loaders.append(ODBDataLoader(Rows(), **options(**given)))
        return loaders[-1]

    assert_resumes_exactly(make)
    for loader in loaders:
        loader.close()


def makers(dataset=None, **given):
    with ODBDataLoader(dataset or Rows(), **options(collate_fn=where, **given)) as loader:
        return {batch["made by"] for batch in loader}, {*loader.worker_pids}


def test_by_default_workers_make_those_of_large_samples(monkeypatch):
    monkeypatch.setattr(worker_batches, "_LARGE_BYTES", 10_000)
    given = {"collate_in": "auto", "chunk_size": 3}
    assert makers(**given)[0] == {os.getpid()}
    made_by, workers = makers(Rows(80, 60), **given)
    assert made_by == workers


class SomeLarge(Rows):
    """Some samples are large, and chunks of others are on the whole not."""

    def __getitem__(self, index):
        side = 80 if index % 6 == 0 else 2
        return {**super().__getitem__(index), "image": np.full((side, side), index)}


def beside(samples):
    return {**where(samples), "images": [float(one["image"].sum()) for one in samples]}


def test_large_and_small_samples_in_one_batch(monkeypatch):
    monkeypatch.setattr(worker_batches, "_LARGE_BYTES", 10_000)
    given = {"collate_fn": beside, "chunk_size": 2, "shuffle": False}
    runs = [epoch(SomeLarge(), mode, **given) for mode in ("main", "auto", "workers")]
    assert_equal(*runs[:2])
    assert_equal(*runs[1:])


class FirstLarge(Rows):
    """The first third of the samples is large."""

    def __getitem__(self, index):
        side = 80 if index < SIZE // 3 else 2
        return {**super().__getitem__(index), "image": np.full((side, side), index)}


def draw_beside(samples):
    return {**beside(samples), "drawn": [random.random(), float(torch.rand(()))]}


def test_a_function_that_draws_is_seeded_also_where_workers_make_only_the_first_batches(
    monkeypatch,
):
    monkeypatch.setattr(worker_batches, "_LARGE_BYTES", 10_000)
    given = {"collate_fn": draw_beside, "chunk_size": 2, "shuffle": False}
    assert_equal(*(epoch(FirstLarge(), mode, **given) for mode in ("main", "auto")))


def row_of(index):
    return observe_sample(Rows()[index])


def where_within(samples):
    return where([sample.data for sample in samples])


def test_a_dataset_of_samples_that_workers_of_its_own_process_is_left_alone():
    def processed():
        return ParallelProcessor(IterableWrapper(range(SIZE)), row_of, workers=options()["workers"])

    given = {"observe": attrgetter("tokens"), "collate_fn": where_within}
    assert_equal(*(epoch(processed(), mode, **given) for mode in ("main", "workers")))


def test_all_workers_make_batches_and_the_trainer_makes_none():
    made_by, workers = makers()
    assert made_by == workers
    assert len(workers) == 2


@pytest.mark.parametrize(
    "given",
    [
        {"collate_in": "main"},
        {"prefetch": 0},
        {"workers": None},
        {"workers": WorkerOptions(num_workers=2, method="thread")},
    ],
)
def test_the_trainer_makes_batches_where_no_worker_can(given):
    assert makers(**given)[0] == {os.getpid()}


@pytest.mark.workers
@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
def test_workers_that_are_not_forked_make_them_too(start_method, monkeypatch):
    monkeypatch.setitem(WORKERS, "start_method", start_method)
    assert_equal(*(epoch(Rows(), mode) for mode in ("main", "workers")))


@pytest.mark.workers
def test_a_function_that_no_other_process_can_have_stays_with_the_trainer(monkeypatch):
    monkeypatch.setitem(WORKERS, "start_method", "spawn")
    with ODBDataLoader(Rows(), **options(collate_fn=lambda samples: where(samples))) as loader:
        assert {batch["made by"] for batch in loader} == {os.getpid()}


# --- what goes wrong ------------------------------------------------------------------------------


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


def test_an_error_names_the_sample():
    def name_row(samples):
        raise SampleError("is odd", index=2)

    with (
        ODBDataLoader(Rows(), **options(collate_fn=name_row)) as loader,
        pytest.raises(SampleError, match=r"^a sample.*key \d+.*`id` 'row \d+': is odd"),
    ):
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
    if not (child := os.fork()):
        sys.exit(0)
    os.waitpid(child, 0)
    return batch


def test_a_child_that_a_collate_function_forks_does_not_answer_for_it():
    runs = [("main", where), ("workers", faulty(fork))]
    assert_equal(*(epoch(Rows(), mode, collate_fn=collate) for mode, collate in runs))


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


@pytest.mark.parametrize("collate_in", ["main", "workers"])
def test_an_order_that_a_worker_cannot_read_is_no_error_of_the_item_in_hand(collate_in, capfd):
    items = IterableWrapper([Item(index, os.getpid()) for index in range(SIZE)])
    workers = WorkerOptions(num_workers=1, chunk_size=5, in_flight_samples=20, **WORKERS)
    given = options(collate_in=collate_in, process_fn=slow_row, workers=workers)
    with ODBDataLoader(items, **given) as loader, pytest.raises(WorkerError, match="exit code 1"):
        next(iter(loader))
    assert "cannot arrive" in capfd.readouterr().err


def die(batch):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_dies_within_a_batch_is_an_error_that_loses_nothing(tmp_path):
    """Batches of which the samples are there still come; a reset starts new workers."""
    expected = epoch(Rows(), "main", collate_fn=where)
    once = tmp_path / "once"

    def fault(batch):
        if batch["ids"] == expected[4][0]["ids"] and not once.exists():
            once.touch()
            die(batch)
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


def test_what_is_no_batch_is_refused():
    with (
        ODBDataLoader(Rows(), **options(collate_fn=len)) as loader,
        pytest.raises(TypeError, match="must return a dict"),
    ):
        next(iter(loader))


# --- memory ---------------------------------------------------------------------------------------


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
