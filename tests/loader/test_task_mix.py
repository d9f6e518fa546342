"""A loader whose batches mix tasks more evenly: what it resumes, what it refuses."""

import random
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import numpy as np
import pytest

from odb_nodes import (
    IterableSource,
    LengthObserver,
    Observation,
    ODBDataLoader,
    SampleError,
    TokenBudget,
    WindowBucketer,
    pop_step_info,
)
from odb_nodes.alignment.exchange.in_process import InProcessHub
from odb_nodes.testing import assert_resumes_exactly

rng = random.Random(0)
SIZES = {"chat": 40, "code": 40, "math": 20}
DATASETS = {
    name: [{"input_ids": [n] * rng.randint(4, 30)} for n in range(size)]
    for name, size in SIZES.items()
}


class Stream:
    """Items that can only be iterated, so that a resume pulls the pool again."""

    def __init__(self, items):
        self.items = items

    def __iter__(self):
        return iter(self.items)


def as_streams():
    return {name: Stream(items) for name, items in DATASETS.items()}


def make(datasets=DATASETS, exchange=None, **options):
    given = {"token_budget": 128, "window": 16, "round_size": 4, "diversity": 0.5, **options}
    return ODBDataLoader(datasets, process_group=exchange, **given)


@pytest.mark.parametrize("state", ["replay", "payload"])
@pytest.mark.parametrize("kind", ["by key", "iterated"])
def test_it_resumes_exactly(kind, state, sampled):
    datasets = DATASETS if kind == "by key" else as_streams()
    report = assert_resumes_exactly(
        lambda: make(datasets, state=state), **sampled(every=5, horizon=12, chain=1)
    )
    assert report.steps > 15


@pytest.mark.parametrize("kind", ["by key", "iterated"])
def test_two_ranks_resume_exactly(kind, exhaustive):
    datasets = DATASETS if kind == "by key" else as_streams()
    hubs = [InProcessHub(2, 20.0) for _ in range(400)]  # one for each graph that the ranks make

    def run(rank):
        made = count()
        return assert_resumes_exactly(
            lambda: make(datasets, hubs[next(made)].exchange(rank), timeout_s=20.0),
            epochs=1,
            every=1 if exhaustive else 2,
            chain=1,
        )

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(run, range(2))
    assert (first.steps, first.resumes) == (second.steps, second.resumes)
    assert first.resumes >= 8


def keys_of(loader):
    infos = [pop_step_info(batch) for batch in loader]
    return [list(zip(info.row_sources, info.keys, strict=True)) for info in infos]


def test_without_it_the_batches_are_those_of_a_loader_that_knows_of_none():
    plain = keys_of(ODBDataLoader(DATASETS, token_budget=128, window=16))
    assert keys_of(make(diversity=0.0, round_size=32)) == plain
    assert keys_of(make(round_size=32)) != plain


def observed_task(item):
    return Observation(item[0], task=item[1])


def test_a_task_that_is_observed_counts_like_a_source():
    items = np.random.default_rng(0).integers(4, 30, 200).tolist()
    items = [(tokens, "ab"[n % 3 == 0]) for n, tokens in enumerate(items)]

    def groups(names, **options):
        source = IterableSource([(tokens, names[task]) for tokens, task in items])
        bucketer = WindowBucketer(LengthObserver(source, observed_task), 128, 16, **options)
        return [[sample.data[0] for sample in group] for group in bucketer]

    mixed = groups({"a": "a", "b": "b"}, diversity=0.5)
    assert groups({"a": "z", "b": "y"}, diversity=0.5) == mixed
    assert groups({"a": "a", "b": "b"}) != mixed


def test_samples_without_a_task_are_refused():
    loader = make([{"input_ids": [1, 2]}] * 8)
    with pytest.raises(SampleError, match=r"`diversity` must be 0 .* sample \(key \d\) has none"):
        next(iter(loader))


@pytest.mark.parametrize("layout_of", [ODBDataLoader, WindowBucketer])
def test_packed_batches_are_refused(layout_of):
    budget = TokenBudget(128, layout="packed")
    with pytest.raises(ValueError, match="`diversity` must be 0 where groups are packed"):
        if layout_of is ODBDataLoader:
            make(token_budget=budget)
        else:
            WindowBucketer(LengthObserver(IterableSource([])), budget, diversity=0.5)
