import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from odb_nodes.processing.chunk import ChunkProcessor, ChunkTask
from odb_nodes.sample import ItemKey

KEYS = st.builds(
    ItemKey,
    st.sampled_from(["", "a", "b/c"]),
    st.integers(0, 2**63 - 1),
    st.sampled_from([1, 2]),
    st.sampled_from([0, 1, 2**40]),
)


def draw(_item):
    return (
        random.random(),
        random.gauss(0, 1),
        np.random.random(),
        np.random.standard_normal(),
        torch.rand(1).item(),
    )


def draws_of(keys, positions, seed=5):
    processor = ChunkProcessor(draw, seed, rank=1, world_size=2)
    chunk = processor.run(ChunkTask([*positions], [*keys], 3, 1, [*positions]))
    assert chunk.failure is None
    return chunk.results


@given(
    st.lists(KEYS, min_size=16, max_size=40) | st.lists(KEYS | st.none(), min_size=1, max_size=20),
    st.sampled_from([0, -1, 2**63]),
)
def test_an_item_draws_the_same_numbers_in_a_chunk_as_alone(chunk, seed):
    alone = [draws_of([key], [position], seed)[0] for position, key in enumerate(chunk)]
    assert draws_of(chunk, range(len(chunk)), seed) == alone


def test_golden_draws():
    drawn = draws_of([ItemKey("a", 2**62 + number, 2) for number in range(20)], range(20))
    assert drawn[19][:3] == (0.254922149277822, 0.12603536072773638, 0.34126348465975176)


@pytest.mark.parametrize("key", [ItemKey("\ud800", 1, 1), ItemKey("", "no number", 1)])
def test_a_key_without_a_seed_fails_its_item_alone(key):
    keys = [ItemKey("", number, 1) for number in range(40)]
    keys[30] = key
    chunk = ChunkProcessor(draw, 0).run(ChunkTask(range(40), keys, 0, 0, range(40)))
    assert len(chunk.results) == 30 and chunk.failure.item == "30"
