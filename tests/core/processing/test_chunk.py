"""An item's random numbers are its own, in whatever chunk it is."""

import random
from collections import UserDict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rows import KEYS, ROWS_OF_INTEGERS
from worker_functions import draw, drawn

from odb_nodes import (
    IterableSource,
    ParallelProcessor,
    SampleError,
    ShardedSampler,
    WorkerOptions,
)
from odb_nodes.core.processing.chunk import ChunkProcessor, ChunkTask
from odb_nodes.core.processing.chunk_runner import ChunkSizer
from odb_nodes.core.processing.observation import digest_of_sample, observe_sample, with_item_key
from odb_nodes.core.sample import ItemKey, Sample
from odb_nodes.core.sample_block import ItemKeys


def draws_of(keys, positions, seed):
    processor = ChunkProcessor(draw, seed, rank=1, world_size=2)
    chunk = processor.run(ChunkTask([*positions], ItemKeys.of(keys), 3, 1, [*positions]))
    assert chunk.failure is None
    return [drawn(sample) for run in chunk.results for sample in run]


@given(
    st.lists(KEYS, min_size=16, max_size=40) | st.lists(KEYS | st.none(), min_size=1, max_size=20),
    st.sampled_from([0, -1, 2**63]),
)
def test_an_item_draws_the_same_numbers_in_a_chunk_as_alone(chunk, seed):
    alone = [draws_of([key], [position], seed)[0] for position, key in enumerate(chunk)]
    assert draws_of(chunk, range(len(chunk)), seed) == alone


# --- generators that a function or a dataset holds, and the epoch -------------------------------


class Drawing:
    """Draws from a generator of its own, which it may make in its first call or for an epoch."""

    def __init__(self, make, *, lazily=False):
        self.make, self.generator = make, None if lazily else make()

    def __call__(self, item):
        if self.generator is None:
            self.generator = self.make()
        if isinstance(self.generator, torch.Generator):
            return float(torch.rand((), generator=self.generator))
        if isinstance(self.generator, np.random.BitGenerator):
            return float(np.random.Generator(self.generator).uniform(0, 1))
        return float(self.generator.uniform(0, 1))


class DrawingAnew(Drawing):
    def set_epoch(self, epoch):
        self.generator = self.make()


MAKE = {
    "torch": lambda: torch.Generator().manual_seed(5),
    "numpy": lambda: np.random.default_rng(5),
    "bits of numpy": lambda: np.random.MT19937(5),
    "numpy legacy": lambda: np.random.RandomState(5),
    "random": lambda: random.Random(5),
}


def numbers_of(processor, items, epoch=0):
    keys = ItemKeys.of([ItemKey("", item, 1, 0) for item in items])
    chunk = processor.run(ChunkTask([*items], keys, epoch, 0, [*items]))
    assert chunk.failure is None, chunk.failure
    return [number for run in chunk.results for number in run]


@pytest.mark.parametrize("kind", MAKE)
def test_a_held_generator_draws_for_each_item_by_seed_epoch_and_key(kind):
    def processor(cls=Drawing, seed=0, **options):
        return ChunkProcessor(cls(MAKE[kind], **options), seed)

    first = numbers_of(processor(), range(20))
    assert len({*first, *numbers_of(processor(), range(20), epoch=1)}) == 40
    assert not {*first} & {*numbers_of(processor(seed=1), range(20))}
    for fresh in processor(), processor(lazily=True), processor(DrawingAnew):
        assert numbers_of(fresh, range(3)) + numbers_of(fresh, range(3, 20)) == first
        later = numbers_of(fresh, range(20), epoch=1)
        assert later == numbers_of(processor(), range(20), epoch=1)
        assert numbers_of(fresh, [19, 4, 7]) == [first[19], first[4], first[7]]


@pytest.mark.parametrize("kind", MAKE)
def test_a_generator_that_others_use_as_well_goes_on_for_them(kind):
    function, alone = Drawing(MAKE[kind]), Drawing(MAKE[kind])
    numbers_of(ChunkProcessor(function, 0), range(3))
    assert function(0) == alone(0)


def test_what_declares_that_it_draws_nothing_or_has_no_seed_keeps_its_generator():
    class Quiet(Drawing):
        draws_random_numbers = False

    for function, seed in (Quiet(MAKE["numpy"]), 0), (Drawing(MAKE["numpy"]), None):
        node = ParallelProcessor(ShardedSampler(4, rank=0, world_size=1), function, seed=seed)
        alone = Drawing(MAKE["numpy"])
        assert [*node] == [alone(item) for item in range(4)]


def test_a_function_that_makes_a_generator_in_each_call_is_called_twice_for_the_first_item():
    calls = []

    class Maker:
        def __call__(self, item):
            calls.append(item)
            self.generator = np.random.default_rng(item)
            return self.generator.random()

    numbers_of(ChunkProcessor(Maker(), 0), range(5))
    assert calls == [0, *range(5)]


def test_a_generator_that_no_seed_resets_is_an_error_that_says_so():
    generator = np.random.RandomState(np.random.PCG64(1))
    processor = ChunkProcessor(lambda item: generator.random_sample(), 0)
    failure = processor.run(ChunkTask([3], ItemKeys.of([None]), 0, 0, [0])).failure
    assert "a `RandomState` that the dataset or a function holds cannot be seeded" in failure.error


class Epochal:
    epoch = None

    def __init__(self):
        self.epochs = []

    def set_epoch(self, epoch):
        self.epoch = epoch
        self.epochs.append(epoch)
        if epoch == 9:
            raise LookupError("no such lesson")

    def __call__(self, item):
        return self.epoch


@pytest.mark.parametrize("seed", [0, None])
def test_each_chunk_is_processed_in_its_epoch_also_if_loaders_share_what_they_tell(seed):
    function = Epochal()
    training, evaluation = (ChunkProcessor(function, seed) for _ in range(2))
    for processor, epoch in (training, 3), (training, 3), (evaluation, 0), (training, 3):
        assert numbers_of(processor, [1, 2], epoch) == [epoch, epoch]
    assert function.epochs == [3, 0, 3]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resume_tells_the_epoch_again_after_somebody_has_told_another(workers):
    function = Epochal()
    options = WorkerOptions(num_workers=workers, method="thread")
    node = ParallelProcessor(IterableSource(range(40), 0, 1), function, workers=options)
    node.reset()
    assert next(node) == 0
    state = node.state_dict()
    function.set_epoch(5)
    node.reset(state)
    assert [*node] == [0] * 39
    node.close()


def test_what_set_epoch_raises_is_an_error_that_names_it():
    failure = ChunkProcessor(Epochal(), 0).run(ChunkTask([3], ItemKeys.of([None]), 9, 0, [0]))
    expected = "`set_epoch(9)` of `Epochal` raised LookupError: no such lesson"
    assert failure.failure.error == expected


# --- chunks, and what is in flight, follow time and bytes of the items; nothing else follows them -


MIB = 1 << 20


def fitted(chunks, seconds_per_item=0.0, bytes_per_item=0, **options):
    """What fits after some chunks of such items."""
    defaults = {"num_workers": 2, "in_flight_samples": 4096}
    fit = ChunkSizer(WorkerOptions(**defaults | options))
    for _ in range(chunks):
        fit.note(fit.items, fit.items * seconds_per_item, fit.items * bytes_per_item)
    return fit


@pytest.mark.parametrize(
    "seconds, size_bytes, options, expected",
    [
        (0.0, 0, {}, 256),  # cheap and small: as many as there may be
        (1e-3, 10, {}, 20),  # 20 ms
        (1e-6, MIB // 8, {}, 8),  # 1 MiB
        (1.0, 10, {}, 1),
        (1e-6, 5 * MIB, {}, 1),
        (0.0, 0, {"in_flight_samples": 64, "num_workers": 4}, 8),  # two chunks for each worker
        (0.0, 0, {"in_flight_samples": 2}, 1),
        (0.0, 0, {"in_flight_samples": None}, 64),
        (9.0, 0, {"chunk_size": 7}, 7),
        (9.0, 0, {"num_workers": 0}, 32),
    ],
)
def test_a_chunk_takes_20_ms_or_1_mib(seconds, size_bytes, options, expected):
    assert fitted(12, seconds, size_bytes, **options).items == expected


def test_it_grows_step_by_step_and_shrinks_after_two_slow_chunks():
    assert [fitted(chunks).items for chunks in range(5)] == [4, 8, 16, 32, 64]
    fit = fitted(7)
    fit.note(256, 256 * 0.01, 0)
    assert fit.items == 256  # which may have waited for the processor
    fit.note(256, 256 * 0.01, 0)
    assert fit.items == 2
    fit.note(0, 1.0, 0)  # An empty chunk says nothing.
    assert fit.items == 2


@pytest.mark.parametrize(
    "chunks, size_bytes, options, expected",
    [
        (200, 10, {}, 1000),
        (200, 5 * MIB, {}, 51),  # 256 MiB
        (200, MIB, {"in_flight_bytes": 20 * MIB}, 20),
        (200, MIB, {"in_flight_bytes": 1}, 4),  # two chunks of one item for each worker
        (200, MIB, {"in_flight_bytes": None}, 1000),
        (200, MIB, {"in_flight_bytes": 20 * MIB, "chunk_size": 8}, 32),
        (200, 5 * MIB, {"in_flight_samples": 3}, 3),
        (200, 5 * MIB, {"num_workers": 0}, 0),
        # Little, before it is known what items have.
        *((chunks, 10, {}, 16 << chunks) for chunks in range(6)),
        (0, 10, {"in_flight_bytes": None}, 1000),
        (0, 10, {"chunk_size": 50}, 200),
    ],
)
def test_so_many_bytes_are_in_flight(chunks, size_bytes, options, expected):
    fit = fitted(chunks, 0.0, size_bytes, **{"in_flight_samples": 1000} | options)
    assert fit.items_ahead == expected


def test_what_an_item_has_follows_the_last_chunks():
    fit = fitted(100, 0.0, 1, num_workers=1)
    fit.note(10, 0.0, 10 * 8 * MIB)
    assert fit.items_ahead == pytest.approx(256 / (0.25 * 8), abs=1)


def _make_mebibyte(_item):
    return np.zeros(MIB, np.uint8)


@pytest.mark.slow
def test_large_samples_are_read_no_further_than_their_bytes_allow():
    source, distances = ShardedSampler(100, rank=0, world_size=1), []
    workers = WorkerOptions(num_workers=2, in_flight_samples=100, in_flight_bytes=10 * MIB)
    node = ParallelProcessor(source, _make_mebibyte, workers=workers)
    node.reset(None)
    try:
        for number, _ in enumerate(node):
            distances.append(source.state_dict()["position"] - number)
    finally:
        node.close()
    # Two chunks of up to 8 for each worker at first; then 10, one in hand, and one as it fills up.
    assert len(distances) == 100 and max(distances) <= 40
    assert max(distances[50:]) <= 14


@pytest.mark.slow
def test_states_do_not_depend_on_what_is_in_a_chunk():
    def states(sizes, **options):
        node = ParallelProcessor(
            ShardedSampler(300, rank=0, world_size=1), str, workers=WorkerOptions(**options)
        )
        saved = []
        node.reset(None)
        for number in range(300):
            node.runner.sizer.items = sizes[number % len(sizes)]
            saved.append(node.state_dict())
            next(node)
        node.close()
        return saved

    expected = states([32])
    assert [state["taken"] for state in expected[:34]] == [*range(33), 1]
    for options in {}, {"num_workers": 2, "method": "thread"}:
        for sizes in [1], [5, 40], [256, 3, 31]:
            assert states(sizes, **options) == expected


# --- what a sample costs and its digest: of the usual samples as of all others --------------------


LABELS = st.lists(st.sampled_from([-100, 0, 7, 2**31, -(2**63)]), max_size=12)
KINDS = {
    **ROWS_OF_INTEGERS,
    "int32": lambda row: np.array(row).clip(-(2**31), 2**31 - 1).astype(np.int32),
    "float": lambda row: np.array(row, np.float32),
    "with a gradient": lambda row: torch.tensor(row, dtype=torch.float32, requires_grad=True),
    "without a dtype of numpy": lambda row: torch.tensor(row, dtype=torch.bfloat16),
}
NOT_INTEGERS = {"float", "with a gradient", "without a dtype of numpy"}
MORE = st.sampled_from(
    [
        {},
        {"label": 1},
        {"label_ids": [1, 2]},
        {"start_positions": 3},
        {"pixel_values": np.zeros((4, 2))},
        {"image_grid_thw": [[1, 2, 3]]},
        {"text": "a"},
    ]
)


def outcome(data):
    """Return what a sample costs, and the types of that; or its error."""
    try:
        facts = observe_sample(data)[1:]
    except SampleError as error:
        return str(error).replace("UserDict", "dict")
    return facts, [*map(type, facts)]


@given(st.sampled_from(sorted(KINDS)), LABELS, LABELS, MORE)
def test_a_dict_costs_what_any_other_mapping_does(kind, ids, labels, more):
    data = {"input_ids": KINDS[kind](ids), **more}
    of_all = [data, *({**data, "labels": make(labels)} for make in KINDS.values())]
    for sample in of_all:
        assert outcome(sample) == outcome(UserDict(sample))


@given(LABELS.filter(len), st.sampled_from(sorted({*KINDS} - NOT_INTEGERS)))
def test_targets_are_the_labels_after_the_first_that_count(labels, kind):
    if kind == "int32":
        labels = [label for label in labels if abs(label) < 2**31] or [1]
    sample = observe_sample({"input_ids": KINDS[kind](labels), "labels": KINDS[kind](labels)})
    assert sample.tokens == len(labels)
    assert sample.targets == sum(label != -100 for label in labels[1:])
    assert sample.counted == "labels"
    assert {type(cost) for cost in sample[1:4]} == {int}  # which a checkpoint can hold


def test_a_chunk_that_is_made_again_is_called_by_its_keys_or_else_by_its_numbers():
    keys = ItemKeys.of([ItemKey("a", 5, 1), None])
    task = ChunkTask([0, 0], keys, 2, 0, [0, 33], is_reprocessed=True)
    assert str(task).endswith("made again (source 'a', key 5) (sample 33)")
    assert [task.name_of(row) for row in (0, 1)] == [str(keys[0]), "sample 33 of the epoch"]


def test_a_result_keeps_its_own_key_and_digest_and_learns_its_item():
    item = ItemKey("a", 2**63 - 1, 2, 3)
    data = {"input_ids": np.arange(3)}
    of_item = with_item_key(Sample(data, 3, 2, 1, "s", "labels", task="t"), item)
    assert of_item == (data, 3, 2, 1, "s", "labels", item.key, item, of_item.digest, "t", None, 0)
    assert of_item.digest == digest_of_sample(Sample(data, 3, 2, 1, task="t"))
    keyed = with_item_key(Sample(data, 3, 2, key=0, digest=0), item)
    assert (keyed.key, keyed.digest, keyed.item) == (0, 0, item)
