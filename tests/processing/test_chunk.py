import pickle
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from odb_nodes.processing.chunk import ChunkProcessor, ChunkTask
from odb_nodes.processing.observation import made_of
from odb_nodes.processing.transport import pack, unpack
from odb_nodes.sample import ItemKey, Sample

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


@given(st.lists(KEYS | st.none(), max_size=20))
def test_a_task_arrives_as_it_was_sent(keys):
    task = ChunkTask([*range(len(keys))], keys, 3, 1, range(len(keys)))
    again = pickle.loads(pickle.dumps(task, protocol=5))
    assert again == task and [*map(type, again.keys)] == [*map(type, keys)]


def a_sample(tokens):
    return Sample({"input_ids": np.arange(tokens)}, tokens, tokens - 1)


@given(st.lists(KEYS | st.none(), min_size=1, max_size=20), st.booleans())
def test_samples_arrive_with_the_very_keys_of_their_task(keys, fails):
    task = ChunkTask([*range(1, len(keys) + 1), *["x"] * fails], [*keys, *[None] * fails], 0, 0, [])
    result = ChunkProcessor(a_sample, None).run_packed(task)
    samples = unpack([bytearray(part) for part in result.results], task.keys)
    assert all(one.item is key for one, key in zip(samples, keys, strict=True))
    assert [one.tokens for one in samples] == [*range(1, len(keys) + 1)]
    assert (result.failure is not None) == fails


def test_a_sample_keeps_a_key_that_is_not_of_its_task():
    keys = [ItemKey("", number, 1) for number in range(3)]
    samples = [made_of(a_sample(5), key) for key in keys]
    for others in (keys[::-1], keys[:2], [ItemKey(*key) for key in keys]):
        parts = [bytearray(part) for part in pack(samples, others)]
        assert [one.item for one in unpack(parts, others)] == keys
