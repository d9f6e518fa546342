"""Batches that worker processes make are those that the trainer's process would make."""

import os
import random
import sys
import warnings
from operator import attrgetter

import numpy as np
import pytest
import torch
from stored_rows import BUDGET, SIZE, WORKERS, Rows, assert_equal, epoch, options, where
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
from odb_nodes.testing import assert_resumes_exactly

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs memfd_create")


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


@pytest.mark.slow
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
def test_a_run_resumes_exactly(kind, sampled):
    loaders = []

    def make():
        given = {"collate_fn": PaddingCollate(), **KINDS[kind]}
        if kind == "payload":
            given["collate_fn"] = PaddingCollate()  # which does not tell who has made a batch
        loaders.append(ODBDataLoader(Rows(), **options(**given)))
        return loaders[-1]

    assert_resumes_exactly(make, **sampled(every=7, horizon=10, chain=1))
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


NO_WORKERS = "there are no worker processes"


@pytest.mark.parametrize(
    "given, why",
    [
        ({"prefetch": 0}, "`prefetch` is 0"),
        ({"workers": None}, NO_WORKERS),
        ({"workers": WorkerOptions(num_workers=2, method="thread")}, NO_WORKERS),
    ],
)
def test_the_trainer_makes_batches_where_no_worker_can_and_says_why(given, why):
    with pytest.warns(UserWarning, match=f"`collate_in=.workers.` has no effect, since {why}"):
        assert makers(**given)[0] == {os.getpid()}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "`collate_in")
        assert makers(**given | {"collate_in": "auto"})[0] == {os.getpid()}


def test_the_trainer_makes_batches_where_it_shall():
    assert makers(collate_in="main")[0] == {os.getpid()}


@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
def test_workers_that_are_not_forked_make_them_too(start_method, monkeypatch):
    monkeypatch.setitem(WORKERS, "start_method", start_method)
    assert_equal(*(epoch(Rows(), mode) for mode in ("main", "workers")))


def test_a_function_that_no_other_process_can_have_stays_with_the_trainer(monkeypatch):
    monkeypatch.setitem(WORKERS, "start_method", "spawn")
    with pytest.warns(UserWarning, match="no effect, since `collate_fn` cannot be pickled"):
        loader = ODBDataLoader(Rows(), **options(collate_fn=lambda samples: where(samples)))
    with loader:
        assert {batch["made by"] for batch in loader} == {os.getpid()}
