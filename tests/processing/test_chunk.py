"""An item's random numbers are its own, in whatever chunk it is."""

from hypothesis import given
from hypothesis import strategies as st
from worker_functions import draw, drawn

from odb_nodes.processing.chunk import ChunkProcessor, ChunkTask
from odb_nodes.sample import ItemKey
from odb_nodes.sample_block import ItemKeys

KEYS = st.builds(
    ItemKey,
    st.sampled_from(["", "a", "b/c"]),
    st.integers(0, 2**63 - 1),
    st.sampled_from([1, 2]),
    st.sampled_from([0, 1, 2**40]),
)


def draws_of(keys, positions, seed):
    processor = ChunkProcessor(draw, seed, rank=1, world_size=2)
    chunk = processor.run(ChunkTask([*positions], ItemKeys.of(keys), 3, 1, [*positions]))
    assert chunk.failure is None
    return [drawn(one) for run in chunk.results for one in run]


@given(
    st.lists(KEYS, min_size=16, max_size=40) | st.lists(KEYS | st.none(), min_size=1, max_size=20),
    st.sampled_from([0, -1, 2**63]),
)
def test_an_item_draws_the_same_numbers_in_a_chunk_as_alone(chunk, seed):
    alone = [draws_of([key], [position], seed)[0] for position, key in enumerate(chunk)]
    assert draws_of(chunk, range(len(chunk)), seed) == alone
