"""Chunks, and what is in flight, follow time and bytes of the items; nothing else follows them."""

import numpy as np
import pytest

from odb_nodes import ParallelProcessor, ShardedSampler, WorkerOptions
from odb_nodes.processing.chunk_fit import ChunkFit

MIB = 1 << 20


def fitted(seconds_per_item, bytes_per_item, chunks=12, **options):
    """The size of chunks after some."""
    given = {"num_workers": 2, "in_flight_samples": 4096}
    fit = ChunkFit(WorkerOptions(**given | options))
    for _ in range(chunks):
        fit.note(fit.items, fit.items * seconds_per_item, fit.items * bytes_per_item)
    return fit.items


@pytest.mark.parametrize(
    "seconds, size_bytes, expected",
    [
        (1e-6, 10, 256),  # cheap and small: as many as there may be
        (1e-3, 10, 20),  # 20 ms
        (1e-6, MIB // 8, 8),  # 1 MiB
        (1.0, 10, 1),
        (1e-6, 5 * MIB, 1),
        (0.0, 0, 256),
    ],
)
def test_a_chunk_takes_20_ms_or_1_mib(seconds, size_bytes, expected):
    assert fitted(seconds, size_bytes) == expected


def test_it_grows_step_by_step_and_shrinks_at_once():
    fit = ChunkFit(WorkerOptions(num_workers=2, in_flight_samples=4096))
    sizes = [fit.items]
    for _ in range(4):
        fit.note(fit.items, 0.0, 0)
        sizes.append(fit.items)
    assert sizes == [4, 8, 16, 32, 64]
    fit.note(256, 256 * 0.01, 0)
    assert fit.items == 2


@pytest.mark.parametrize("in_flight, workers, expected", [(64, 4, 8), (2, 4, 1), (None, 2, 64)])
def test_each_worker_has_two_chunks(in_flight, workers, expected):
    assert fitted(0.0, 0, num_workers=workers, in_flight_samples=in_flight) == expected


@pytest.mark.parametrize("options", [{"chunk_size": 7}, {"num_workers": 0}])
def test_a_given_size_and_the_trainers_own_thread_stay(options):
    assert fitted(0.0, 0, **options) == options.get("chunk_size", 32)
    assert fitted(9.0, 0, **options) == options.get("chunk_size", 32)


def test_an_empty_chunk_says_nothing():
    fit = ChunkFit(WorkerOptions(num_workers=1))
    fit.note(0, 1.0, 0)
    assert fit.items == 4


def ahead_after(size_bytes, chunks, **options):
    """What may be in flight after some chunks of items of that size."""
    fit = ChunkFit(WorkerOptions(**{"num_workers": 2, "in_flight_samples": 1000} | options))
    for _ in range(chunks):
        fit.note(fit.items, 0.0, fit.items * size_bytes)
    return fit.items_ahead


@pytest.mark.parametrize(
    "size_bytes, options, expected",
    [
        (10, {}, 1000),
        (5 * MIB, {}, 51),  # 256 MiB
        (MIB, {"in_flight_bytes": 20 * MIB}, 20),
        (MIB, {"in_flight_bytes": 1}, 4),  # two chunks of one item for each worker
        (MIB, {"in_flight_bytes": None}, 1000),
        (MIB, {"in_flight_bytes": 20 * MIB, "chunk_size": 8}, 32),
        (5 * MIB, {"in_flight_samples": 3}, 3),
        (5 * MIB, {"num_workers": 0}, 0),
    ],
)
def test_so_many_bytes_are_in_flight(size_bytes, options, expected):
    assert ahead_after(size_bytes, 200, **options) == expected


def test_little_is_in_flight_before_it_is_known_what_items_have():
    assert [ahead_after(10, chunks) for chunks in range(6)] == [16, 32, 64, 128, 256, 512]
    assert ahead_after(10, 0, in_flight_bytes=None) == 1000
    assert ahead_after(10, 0, chunk_size=50) == 200


def test_what_an_item_has_follows_the_last_chunks():
    fit = ChunkFit(WorkerOptions(num_workers=1, in_flight_samples=1000))
    for _ in range(100):
        fit.note(10, 0.0, 10)
    assert fit.items_ahead == 1000
    fit.note(10, 0.0, 10 * 8 * MIB)
    assert fit.items_ahead == pytest.approx(256 / (0.25 * 8), abs=1)


def test_large_samples_are_read_no_further_than_their_bytes_allow():
    source, distances = ShardedSampler(200, rank=0, world_size=1), []
    workers = WorkerOptions(num_workers=2, in_flight_samples=100, in_flight_bytes=10 * MIB)
    node = ParallelProcessor(source, _make_mebibyte, workers=workers)
    node.reset(None)
    try:
        for number, _ in enumerate(node):
            distances.append(source.state_dict()["position"] - number)
    finally:
        node.close()
    # Two chunks of up to 8 for each worker at first; then 10, one in hand, and one as it fills up.
    assert len(distances) == 200 and max(distances) <= 40
    assert max(distances[50:]) <= 14


def _make_mebibyte(_item):
    return np.zeros(MIB, np.uint8)


def test_states_do_not_depend_on_what_is_in_a_chunk():
    def states(sizes, **options):
        node = ParallelProcessor(
            ShardedSampler(300, rank=0, world_size=1), str, workers=WorkerOptions(**options)
        )
        runner, found = node.runner, []
        node.reset(None)
        try:
            for number in range(300):
                runner._fit.items = sizes[number % len(sizes)]
                found.append(node.state_dict())
                next(node)
        finally:
            node.close()
        return found

    expected = states([32])
    assert [one["taken"] for one in expected[:34]] == [*range(33), 1]
    for options in {}, {"num_workers": 2, "method": "thread"}:
        for sizes in [1], [5, 40], [100], [256, 3, 31]:
            assert states(sizes, **options) == expected
