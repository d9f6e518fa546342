"""Everything for several tasks at once, through resumes from each step."""

import random

import numpy as np
import pytest

from odb_nodes import Observation, ODBDataLoader, TokenBudget, WeightSchedule, pop_step_info
from odb_nodes.testing import assert_resumes_exactly
from odb_nodes.vision import MultiImageCollate

SIZES = {"one": 30, "pair": 40, "text": 20}
IMAGES = {"one": 1, "pair": 2, "text": 0}
SCHEDULE = WeightSchedule(
    [
        (0, {"one": 1, "pair": 0, "text": 1}),
        (15, {"one": 1, "pair": 3, "text": 1}),
        (40, {"one": 1, "pair": 1, "text": 0.5}),
    ]
)
collate = MultiImageCollate(resize=(6, 6, 4), dummy_shape=(1, 6, 6, 4), task_names=(*SIZES,))


def volume():
    """A scan of any size, drawn from the random numbers of its sample."""
    return np.random.rand(1, *np.random.randint(3, 9, size=3)).astype(np.float32)


def sample_of(item):
    name, number = item
    sample = {"input_ids": [number] * random.randint(3, 30)}
    if IMAGES[name]:
        sample["pixel_values"] = [volume() for _ in range(IMAGES[name])]
    return sample


def observe(sample):
    return Observation(len(sample["input_ids"]), patches=collate.count_patches(sample, 2))


def make(exchange=None, **options):
    data = {name: [(name, number) for number in range(size)] for name, size in SIZES.items()}
    return ODBDataLoader(
        data,
        process_fn=sample_of,
        observe=observe,
        collate_fn=collate,
        token_budget=TokenBudget(128, max_patches=300),
        window=16,
        weights=SCHEDULE,
        tasks=[*SIZES],
        diversity=0.5,
        accumulate=2,
        process_group=exchange,
        **options,
    )


@pytest.mark.parametrize("options", [{}, {"state": "payload"}, {"num_workers": 2}])
def test_it_resumes_exactly(options, sampled):
    less = {"every": 5 if options else 3, "horizon": 12, "chain": 1}
    report = assert_resumes_exactly(lambda: make(**options), epochs=1, **sampled(**less))
    assert report.steps > 15


def test_every_sample_comes_once_and_each_row_knows_its_task():
    found = []
    for batch in make():
        info = pop_step_info(batch)
        found += info.row_tasks
        assert batch["task_names"] == [*info.row_tasks]
        assert [[*SIZES][number] for number in batch["task_ids"]] == batch["task_names"]
        assert sum(info.local_task_targets.values()) == info.local_targets
        images = [IMAGES[task] for task in info.row_tasks]
        assert batch["image_mask"].sum(1).tolist() == images
    assert {name: found.count(name) for name in SIZES} == SIZES
