"""Batches that worker processes make are those that the trainer's process would make."""

import os
import random
import sys
from operator import attrgetter

import numpy as np
import pytest
import torch
from stored_rows import BUDGET, SIZE, Rows, assert_equal, epoch, options, where
from torchdata.nodes import IterableWrapper

from odb_nodes import (
    Mixing,
    ODBDataLoader,
    PaddingCollate,
    ParallelProcessor,
    Skipped,
    TokenBudget,
    WorkerOptions,
)
from odb_nodes.nodes import worker_batches
from odb_nodes.processing.observation import observe_sample
from odb_nodes.sample import StoredData
from odb_nodes.testing import assert_resumes_exactly

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
        (
            {"workers": SPAWNED, "collate_fn": lambda samples: where(samples)},
            "`collate_fn` cannot be pickled",
        ),
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
        pooled = loader._graphs[0].bucketer._table.all()
        assert {isinstance(one.data, StoredData) for one in pooled} == {True}
