"""Graphs that several tests resume."""

import random

import numpy as np
import torch
from torchdata.nodes import (
    Mapper,
    MultiNodeWeightedSampler,
    ParallelMapper,
    Prefetcher,
    SamplerWrapper,
    StopCriteria,
)

from odb_nodes import (
    GroupCollator,
    LengthObserver,
    Loader,
    ODBDataLoader,
    ParallelProcessor,
    ShardedSampler,
    TokenBudget,
    WindowBucketer,
    WorkerOptions,
)

SIZE = 120
LENGTHS = np.random.default_rng(0).integers(3, 60, SIZE)


def process(index):
    """A sample whose length comes from its index."""
    return {"input_ids": np.full(int(LENGTHS[index]), index), "id": int(index)}


def augment(index):
    """A sample whose length and content come from all three global generators."""
    length = int(LENGTHS[index]) + random.randrange(9) + int(np.random.randint(9))
    return {"input_ids": torch.randint(0, 99, (length,)), "id": int(index)}


def sampler(size=SIZE, seed=3):
    return ShardedSampler(size, seed=seed, rank=0, world_size=1)


def mixed(criterion):
    sources = {"a": sampler(40, 1), "b": sampler(80, 2)}
    return MultiNodeWeightedSampler(sources, {"a": 0.3, "b": 0.7}, criterion, 0, 1)


def processed(**options):
    workers = WorkerOptions(chunk_size=7, **options)
    return ParallelProcessor(sampler(), augment, workers=workers, rank=0, world_size=1)


BELOW = {
    "Mapper": lambda: Mapper(sampler(), process),
    "ParallelMapper-thread": lambda: ParallelMapper(sampler(), process, 2),
    "ParallelMapper-thread-prebatch": lambda: ParallelMapper(sampler(), process, 2, prebatch=5),
    "ParallelMapper-process": lambda: ParallelMapper(sampler(), process, 1, method="process"),
    "Prefetcher": lambda: Prefetcher(Mapper(sampler(), process), 8),
    "Prefetcher-rare-snapshots": lambda: Prefetcher(Mapper(sampler(), process), 8, 5),
    "SamplerWrapper": lambda: Mapper(SamplerWrapper(range(SIZE)), process),
    "ParallelProcessor-inline": lambda: processed(),
    "ParallelProcessor-thread": lambda: processed(num_workers=2, method="thread"),
    "ParallelProcessor-process": lambda: processed(num_workers=2),
    "Mixed-cycle": lambda: Mapper(mixed(StopCriteria.CYCLE_UNTIL_ALL_DATASETS_EXHAUSTED), process),
    "Mixed-first": lambda: Mapper(mixed(StopCriteria.FIRST_DATASET_EXHAUSTED), process),
    "Mixed-all": lambda: Mapper(mixed(StopCriteria.ALL_DATASETS_EXHAUSTED), process),
}
ABOVE = {
    "bare": lambda node: node,
    "Prefetcher": lambda node: Prefetcher(node, 3),
    "Mapper": lambda node: Prefetcher(Mapper(node, dict), 2, 3),
}


def make(below, state="replay", above="Prefetcher", window=24):
    """Build a graph by the names of its parts."""
    observed = LengthObserver(BELOW[below]())
    bucketer = WindowBucketer(observed, TokenBudget(256), window, state)
    return Loader(ABOVE[above](GroupCollator(bucketer)))


class Dataset:
    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return augment(index)


def make_dataloader(**options):
    return ODBDataLoader(Dataset(), **{"token_budget": 256, "window": 24, "seed": 5, **options})
