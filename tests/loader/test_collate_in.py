"""Batches that worker processes make are those that the trainer's process would make."""

import gc
import os
import random
import signal
import sys
import time
import traceback
import warnings
from functools import partial
from operator import attrgetter
from pathlib import Path

import numpy as np
import pytest
import torch
from torchdata.nodes import IterableWrapper
from worker_functions import Program

from odb_nodes import (
    Ledger,
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
from odb_nodes.contract.graph import walk
from odb_nodes.nodes import worker_batches
from odb_nodes.processing import transport
from odb_nodes.processing.observation import observe_sample
from odb_nodes.sample import StoredData
from odb_nodes.testing import assert_resumes_exactly


class Rows:
    """Samples of different lengths: arrays and tensors, small and large, and plain data."""

    def __init__(self, size=160, side=0):
        self.size, self.side = size, side

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        length = 5 + index * 37 % 60
        sample = {"input_ids": np.arange(length) + index, "id": f"row {index}"}
        if self.side:
            sample["pixels"] = torch.full((self.side, self.side), index, dtype=torch.int32)
        return sample


def where(samples):
    """A padded batch, and the process that has made it."""
    ids = [torch.as_tensor(sample["input_ids"]) for sample in samples]
    batch = {
        "input_ids": torch.nn.utils.rnn.pad_sequence(ids, batch_first=True),
        "attention_mask": torch.tensor([len(row) for row in ids]),
        "ids": [sample.get("id") for sample in samples],
        "made by": os.getpid(),
    }
    if "pixels" in samples[0]:
        batch["pixels"] = torch.stack([sample["pixels"] for sample in samples])
    return batch


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


pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs memfd_create")


def skip_some(sample):
    return Skipped("odd") if len(sample["input_ids"]) % 5 == 0 else sample


def draw(samples):
    """A batch with random numbers from each of the global generators."""
    drawn = [random.random(), np.random.random(), float(torch.rand(()))]
    return {**where(samples), "drawn": torch.tensor(drawn, dtype=torch.float64)}


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


class SomeLarge(Rows):
    """Some samples are large, also among the small ones of a chunk; or the first ones are."""

    def __init__(self, are_large):
        super().__init__()
        self.are_large = are_large

    def __getitem__(self, index):
        side = 80 if self.are_large(index) else 2
        return {**super().__getitem__(index), "image": np.full((side, side), index)}


def images(samples):
    return {**draw(samples), "images": [float(one["image"].sum()) for one in samples]}


def row_of(index):
    return observe_sample(Rows()[index])


def where_within(samples):
    return where([sample.data for sample in samples])


class Processed(ParallelProcessor):
    """A dataset of samples that workers of its own process."""

    def __init__(self):
        super().__init__(IterableWrapper(range(SIZE)), row_of, workers=options()["workers"])


SPAWNED = WorkerOptions(num_workers=2, chunk_size=7, start_method="spawn")
LARGE = {"collate_fn": images, "chunk_size": 2, "shuffle": False, "collate_in": "auto"}
KINDS = {
    "default, excluded": {"exclude": [3, 4, 5]},
    "packed": {"token_budget": TokenBudget(BUDGET, layout="packed")},
    "draws, one-sample chunks": {"collate_fn": draw, "chunk_size": 1},
    "keeps a generator": {"collate_fn": Keeper()},
    "takes the step": {"collate_fn": OfStep(), "accumulate": 4, "round_size": 4},
    "payload, skipped": {"state": "payload", "process_fn": skip_some},
    "virtual ranks": {"virtual_ranks": 2, "process_fn": None},
    "mixture": {
        "dataset": {"short": Rows(90), "long": Rows(70)},
        "weights": Mixing(weights={"short": 2, "long": 1}, by="tokens"),
    },
    # Some come through the socket, some in files of several samples, some in one of their own.
    "files": {"dataset": Rows(60, 200), "collate_fn": where, "chunk_size": "auto"},
    "a file of each": {"dataset": Rows(60, 800), "collate_fn": where, "chunk_size": "auto"},
    "some large": {"dataset": SomeLarge(lambda index: index % 6 == 0), **LARGE},
    "first large": {"dataset": SomeLarge(lambda index: index < SIZE // 3), **LARGE},
    "workers of its own": {
        "dataset": Processed,
        "observe": attrgetter("tokens"),
        "collate_fn": where_within,
    },
    "spawned": {"workers": SPAWNED},
}


@pytest.mark.filterwarnings("ignore:.*skipped:UserWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_batches_steps_and_states_are_the_same(kind, monkeypatch):
    monkeypatch.setattr(worker_batches, "_LARGE_BYTES", 10_000)
    given = {"dataset": Rows(), "collate_in": "workers", **KINDS[kind]}
    make = given.pop("dataset")
    collate_in = given.pop("collate_in")
    runs = [
        epoch(make() if make is Processed else make, mode, **given) for mode in ("main", collate_in)
    ]
    assert_equal(*runs)


@pytest.mark.filterwarnings("ignore:.*skipped:UserWarning")
@pytest.mark.parametrize("kind", ["keeps a generator", "payload, skipped"])
def test_a_run_resumes_exactly(kind, sampled):
    loaders = []

    def make():
        given = {"collate_fn": PaddingCollate(), **KINDS[kind]}
        loaders.append(ODBDataLoader(Rows(), **options(**given)))
        return loaders[-1]

    assert_resumes_exactly(make, **sampled(every=7, horizon=10, chain=1))
    for loader in loaders:
        loader.close()


def makers(dataset=None, **given):
    with ODBDataLoader(dataset or Rows(), **options(**{"collate_fn": where, **given})) as loader:
        return {batch["made by"] for batch in loader}, {*loader.worker_pids}


def test_all_workers_make_batches_and_by_default_those_of_large_samples(monkeypatch):
    monkeypatch.setattr(worker_batches, "_LARGE_BYTES", 10_000)
    for given in ({}, {"collate_in": "auto", "dataset": Rows(80, 60), "chunk_size": 3}):
        made_by, workers = makers(**given)
        assert made_by == workers and len(workers) == 2
    for collate_in in ("auto", "main"):
        assert makers(collate_in=collate_in)[0] == {os.getpid()}


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"prefetch": 0}, "`prefetch` is 0"),
        ({"workers": None}, "there are no worker processes"),
        ({"workers": WorkerOptions(num_workers=2, method="thread")}, "there are no worker"),
        ({"workers": SPAWNED, "collate_fn": lambda group: where(group)}, "`collate_fn` cannot be"),
    ],
)
def test_the_trainer_makes_batches_where_no_worker_can_and_says_why(given, why):
    with pytest.warns(UserWarning, match=f"`collate_in=.workers.` has no effect, since {why}"):
        assert makers(**given)[0] == {os.getpid()}
    if given.get("workers") is not SPAWNED:
        assert makers(**given | {"collate_in": "auto"})[0] == {os.getpid()}


def test_samples_do_not_come_to_the_trainer():
    with ODBDataLoader(Rows(), **options()) as loader:
        next(iter(loader))
        store = loader._graphs[0].bucketer.store
        pooled = store.look(store.ordinals())
        assert {isinstance(one.data, StoredData) for one in pooled} == {True}


# --- what goes wrong where workers make the batches, and the memory that these are made of --------


def raise_for(samples, key=31):
    if any(sample["id"] == f"row {key}" for sample in samples):
        raise ValueError("bad row")
    return where(samples)


def test_an_error_is_the_one_that_the_trainer_would_raise():
    """With its type, its traceback and the name of the sample; mended, the run goes on."""
    kept = None
    with ODBDataLoader(Rows(), **options(collate_fn=raise_for)) as loader:
        with pytest.raises(SampleError, match="bad row") as caught:
            for batch in loader:
                kept = pop_step_info(batch)
        cause = caught.value.__cause__
        assert type(cause) is ValueError
        assert "raise_for" in [one.name for one in traceback.extract_tb(cause.__traceback__)]
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


def test_a_child_of_a_worker_may_end_within_a_batch():
    expected = epoch(Rows(), "main", collate_fn=where)
    assert_equal(expected, epoch(Rows(), "workers", collate_fn=faulty(fork)))


def killed_in_batch(step, size, once):
    """The steps of an epoch, and a loader whose worker is killed once, while it makes a batch."""
    workers = WorkerOptions(num_workers=2, chunk_size=7, in_flight_samples=7, **WORKERS)
    given = {"workers": workers, "prefetch": 1}
    expected = epoch(Rows(size), "main", collate_fn=where, **given)

    def fault(batch):
        if batch["ids"] == expected[step][0]["ids"] and not once.exists():
            once.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return batch

    loader = ODBDataLoader(Rows(size), **options(collate_fn=faulty(fault), **given))
    return [info for _, info, _ in expected], loader


@pytest.mark.filterwarnings("ignore:worker process .* was killed:UserWarning")
def test_a_worker_that_dies_within_a_batch_is_an_error_that_loses_nothing(tmp_path):
    """Batches of which the samples are there still come; a reset starts new workers."""
    # Most samples of the epoch are still to be processed, so the worker is missed for sure.
    expected, loader = killed_in_batch(4, 2 * SIZE, tmp_path / "once")
    found = []
    with loader:
        with pytest.raises(WorkerError, match="signal 9"):
            for batch in loader:
                found.append(pop_step_info(batch))
        assert 0 < len(found) < len(expected) - 1
        loader.load_state_dict(loader.state_dict())
        found += [pop_step_info(batch) for batch in loader]
    assert found == expected


def test_a_worker_that_dies_within_a_batch_after_the_last_sample_is_no_error(tmp_path):
    expected, loader = killed_in_batch(-1, SIZE, tmp_path / "once")
    with loader, pytest.warns(UserWarning, match=r"signal 9.* The trainer's process makes them"):
        assert [pop_step_info(batch) for batch in loader] == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("os._exit(9)", "died with exit code 9. It had batches to make"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "was killed by signal 11, Segmentation fault"),
    ],
)
def test_a_collate_function_that_ends_its_process_does_not_end_the_trainer(end, said, tmp_path):
    body = f"""
        faulthandler.disable()
        def collate(samples):
            if any(sample["id"] == 137 for sample in samples):
                {end}
            return w.keep_ids(samples)
        try:
            with w.dataloader(w.Texts(), collate_fn=collate, collate_in="workers") as loader:
                list(loader)
        except WorkerError as error:
            print(error)
    """
    with Program(tmp_path, body) as program:
        code, out, errors = program.finish(100)
        assert code == 0 and said in out and "`collate_fn`, or the processing" in out, errors
        assert program.running() == []


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


@pytest.mark.filterwarnings("ignore:worker process .* was killed:UserWarning")
def test_workers_that_died_with_nothing_to_do_are_started_anew():
    workers = WorkerOptions(num_workers=2, in_flight_samples=SIZE, **WORKERS)
    given = options(workers=workers, prefetch=1, collate_fn=where)
    with ODBDataLoader(Rows(), **given) as loader:
        (node,) = [one for one in walk(loader.root) if hasattr(one, "worker_pids")]
        batches, pids = iter(loader), node.worker_pids
        while not node._has_read_all:
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
        with pytest.warns(
            UserWarning, match=f"signal 9.* It had {owed}.* All workers are started anew"
        ):
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


# --- the trainer's process calls nothing for each sample, but for groups and chunks --------------


GROUPS, TOKENS = 24, 10


class Texts:
    def __init__(self, samples):
        self._samples = samples

    def __len__(self):
        return self._samples

    def __getitem__(self, index):
        ids = np.full(TOKENS, index)
        return {"input_ids": ids, "labels": ids}


def calls_of_an_epoch(of_each, budget, ledger):
    """Return the calls of Python functions in an epoch of groups of `of_each` samples."""
    calls = 0

    def count(_frame, event, _argument):
        nonlocal calls
        calls += event == "call"

    loader = ODBDataLoader(
        Texts(GROUPS * of_each),
        token_budget=budget,
        window=4 * of_each,
        workers=WorkerOptions(num_workers=1, chunk_size=4 * of_each),
        prefetch=0,
    )
    with loader, ledger:
        batches, groups = iter(loader), 0
        ledger.record(pop_step_info(next(batches)))
        sys.setprofile(count)
        try:
            for batch in batches:
                ledger.record(pop_step_info(batch))
                groups += 1
        finally:
            sys.setprofile(None)
    assert groups == GROUPS - 1
    return calls


@pytest.mark.slow  # worker processes
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_no_function_is_called_for_each_sample(layout, tmp_path):
    few, many = (
        calls_of_an_epoch(
            of_each, TokenBudget(of_each * TOKENS, layout=layout), Ledger(tmp_path / str(of_each))
        )
        for of_each in (8, 128)
    )
    assert (many - few) / (GROUPS * (128 - 8)) < 0.5
