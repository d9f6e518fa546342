import random
import threading
import time
from itertools import islice

import numpy as np
import pytest
import torch
from torchdata.nodes import BaseNode
from worker_functions import Logged, NoteWorker, draw, drawn, processor, same

from odb_nodes import IterableSource, Loader, ShardedSampler, StateError, WorkerError, WorkerOptions
from odb_nodes.testing import assert_resumes_exactly

SIZE = 50
PARALLEL = [
    {"num_workers": workers, "method": method}
    for workers in (1, 2, 4)
    for method in ("thread", "process")
]


def epoch(node):
    """The samples of the next epoch, comparable."""
    node.reset(None)
    return [drawn(sample) for sample in node]


def epochs(count=2, **options):
    node = processor(**options)
    try:
        return [epoch(node) for _ in range(count)]
    finally:
        node.close()


def rng_states():
    return random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()


@pytest.fixture(scope="module")
def reference():
    return epochs(chunk_size=1)


@pytest.fixture
def made():
    """Builds processors that are closed in the end."""
    nodes = []

    def make(*args, **options):
        nodes.append(processor(*args, **options))
        return nodes[-1]

    yield make
    for node in nodes:
        node.close()


class CountingSource(BaseNode):
    """Yields 0, 1, 2, ... and knows how many."""

    def __init__(self, size):
        super().__init__()
        self.size = size
        self.read = 0

    def reset(self, initial_state=None):
        super().reset(initial_state)
        self.read = 0 if initial_state is None else initial_state["read"]

    def next(self):
        if self.read == self.size:
            raise StopIteration
        self.read += 1
        return self.read - 1

    def get_state(self):
        return {"read": self.read}


class Resumable:
    """An iterable with a state that is no position."""

    def __init__(self):
        self.value = 1
        self.loaded = False

    def __iter__(self):
        self.value = self.value if self.loaded else 1
        self.loaded = False
        while self.value < 4000:
            self.value = self.value * 3 // 2 + 1
            yield self.value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value, self.loaded = state["value"], True


# --- who processes does not matter ----------------------------------------------------------------


@pytest.mark.parametrize("chunk_size", [1, 7, 32, 500])
@pytest.mark.parametrize("workers", [{"num_workers": 0}, *PARALLEL], ids=str)
def test_a_sample_does_not_depend_on_who_processes_it(workers, chunk_size, reference, exhaustive):
    for in_flight in (None, 1, 9, 1000) if exhaustive else (None, 9):
        options = {**workers, "chunk_size": chunk_size, "in_flight_samples": in_flight}
        assert epochs(**options) == reference


@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
def test_a_sample_does_not_depend_on_how_processes_start(start_method, reference):
    assert epochs(num_workers=2, chunk_size=7, start_method=start_method) == reference


def test_order_is_kept_where_items_take_different_times(made):
    def process(item):
        time.sleep(random.random() * 0.02)
        return item

    expected = list(made(same))
    for method in ("thread", "process"):
        assert (
            list(made(process, num_workers=4, method=method, chunk_size=1, seed=None)) == expected
        )


def test_every_rank_without_samples_has_an_empty_epoch(made):
    for workers in ({}, {"num_workers": 1}):
        node = made(size=1, rank=1, world_size=2, **workers)
        assert epoch(node) == epoch(node) == []
        assert_resumes_exactly(lambda w=workers: two_shards(w), epochs=2)


def two_shards(workers):
    return Loader(processor(same, 5, rank=1, world_size=2, chunk_size=3, **workers))


# --- random numbers -------------------------------------------------------------------------------


def test_every_sample_epoch_seed_and_rank_draws_its_own_numbers():
    runs = {
        (seed, rank): epochs(2, seed=seed, rank=rank, world_size=2)
        for seed in (0, 1)
        for rank in (0, 1)
    }
    for field in (1, 2, 4):  # python, numpy, torch
        draws = [str(s[field]) for run in runs.values() for samples in run for s in samples]
        assert len(draws) == 2 * 2 * SIZE
        assert len(set(draws)) == len(draws)


def test_set_epoch_gives_the_numbers_of_that_epoch(reference, made):
    node = made(source=ShardedSampler(SIZE, shuffle=False, rank=0, world_size=1), chunk_size=7)
    first, second = epoch(node), epoch(node)
    node.set_epoch(0)
    node.source.set_epoch(0)
    assert epoch(node) == first != second


def test_large_and_negative_seeds(made):
    for seed in (-1, 2**63, 2**80, np.int64(3)):
        first, again = (epoch(made(seed=seed, size=3)) for _ in range(2))
        assert first == again


def test_inline_processing_leaves_the_trainers_generators_alone(made):
    node = made(chunk_size=7)
    before = rng_states()
    for _ in range(2):
        node.reset(None)
        for _ in node:
            assert rng_states() == before


def test_threads_leave_the_trainers_generators_alone(made):
    node = made(chunk_size=7, num_workers=2, method="thread")
    before = rng_states()
    for _ in range(2):
        epoch(node)
        assert rng_states() == before


@pytest.mark.parametrize("workers", [{}, {"num_workers": 2, "method": "thread"}], ids=str)
def test_generators_are_put_back_also_after_an_error(workers, made):
    def process(item):
        draw(item)
        raise ValueError("bad item")

    before = rng_states()
    node = made(process, **workers)
    with pytest.raises(ValueError, match="bad item"):
        next(node)
    node.close()
    assert rng_states() == before


def test_workers_leave_the_trainers_generators_alone(made):
    before = rng_states()
    epoch(made(chunk_size=7, num_workers=2))
    assert rng_states() == before


def test_without_a_seed_processing_uses_the_generators_as_they_are(made):
    node = made(lambda item: (random.random(), np.random.random(), torch.rand(1).item()), seed=None)
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    expected = [(random.random(), np.random.random(), torch.rand(1).item()) for _ in range(SIZE)]
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    assert list(node) == expected


def global_draw(_item):
    return random.random(), np.random.random(), float(torch.rand(()))


def test_processing_that_says_it_draws_nothing_is_not_seeded(made):
    """So what it draws all the same is drawn from the generators as they are."""

    def process(item):
        return global_draw(item)

    process.draws_random_numbers = False
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    expected = [global_draw(None) for _ in range(SIZE)]
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    assert list(made(process)) == expected


def test_without_a_seed_threads_process_side_by_side(made):
    both = threading.Barrier(2)

    def process(item):
        both.wait(20)
        return item

    node = made(process, num_workers=2, method="thread", chunk_size=1, seed=None)
    assert len(list(node)) == SIZE


# --- state ----------------------------------------------------------------------------------------


END = "end of epoch"


def states_and_rest(node):
    """The state at every step of two epochs, their ends included, and what followed each."""
    loader = Loader(node)
    states, events = [loader.state_dict()], []
    for _ in range(2):
        for sample in loader:
            events.append(drawn(sample))
            states.append(loader.state_dict())
        events.append(END)
        states.append(loader.state_dict())
    loader.close()
    return [(state, events[index:]) for index, state in enumerate(states)]


def rest(node, state, count):
    """What follows after a state, to the end of an epoch and for `count` events at least."""
    loader = Loader(node)
    loader.load_state_dict(state)
    events = []
    while len(events) < count:
        events += [*map(drawn, loader), END]
    loader.close()
    return events


SETTINGS = {
    "inline, chunk 32": {"chunk_size": 32},
    "inline, chunk 5": {"chunk_size": 5},
    "2 processes, chunk 7": {"num_workers": 2, "chunk_size": 7},
    "1 process, chunk 1": {"num_workers": 1, "chunk_size": 1},
    "4 threads, chunk 3": {"num_workers": 4, "method": "thread", "chunk_size": 3},
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("resumed_with", SETTINGS)
@pytest.mark.parametrize("saved_with", SETTINGS)
def test_a_run_may_resume_with_other_workers(saved_with, resumed_with, exhaustive):
    saved = states_and_rest(processor(**SETTINGS[saved_with]))
    step = 1 if "inline" in resumed_with or exhaustive else 9
    for state, expected in saved[::step]:
        node = processor(**SETTINGS[resumed_with])
        assert rest(node, state, len(expected)) == expected


@pytest.mark.parametrize("saved_with", SETTINGS)
def test_the_state_is_the_same_bit_for_bit_after_restoring_it(saved_with):
    node = processor(chunk_size=4)
    for state, _ in states_and_rest(processor(**SETTINGS[saved_with])):
        node.reset(state["root"])
        assert node.state_dict() == state["root"]


@pytest.mark.parametrize(
    "workers", [{}, {"num_workers": 2, "method": "thread"}, {"num_workers": 2}], ids=str
)
@pytest.mark.parametrize("iterable", [False, True], ids=["sampler", "stateful iterable"])
def test_resumes_exactly_at_every_step(workers, iterable, sampled):
    def graph():
        source = IterableSource(Resumable(), 0, 1) if iterable else None
        return processor(draw, 19, source=source, chunk_size=4, in_flight_samples=10, **workers)

    less = sampled(every=5, horizon=12, chain=1)
    assert assert_resumes_exactly(graph, epochs=3, **less).steps >= 3 * 17


def test_a_source_that_has_become_shorter_is_an_error():
    saved = processor(same, source=IterableSource(range(40), 0, 1), chunk_size=8)
    saved.reset(None)
    assert list(islice(saved, 13)) == list(range(13))
    for size in (3, 7, 8, 9, 12):
        node = processor(same, source=IterableSource(range(size), 0, 1), chunk_size=8)
        with pytest.raises(StateError, match="ended"):
            node.reset(saved.state_dict())


def test_a_state_is_not_touched_by_what_happens_later(made):
    node = made(chunk_size=4)
    node.reset(None)
    next(node)
    state = node.state_dict()
    copy = repr(state)
    epoch(node)
    made(chunk_size=4).reset(state)
    assert repr(state) == copy


# --- workers --------------------------------------------------------------------------------------


def test_processes_persist_over_epochs(made):
    node = made(num_workers=3, chunk_size=7)
    node.reset(None)
    pids = node.worker_pids  # from the reset on: later there may be threads beside it
    assert len(set(pids)) == 3
    assert len({len(list(node)), *[len(epoch(node)) for _ in range(3)]}) == 1
    assert node.worker_pids == pids


def test_processes_persist_where_an_epoch_is_left_early(made, reference):
    node = made(num_workers=2, chunk_size=7)
    pids = set()
    for number, taken in enumerate((0, 1, 7, 20, 49)):
        node.reset(None)
        assert len(list(islice(node, taken))) == taken
        node.reset(None)
        node.set_epoch(number % 2)
        node.source.set_epoch(number % 2)
        assert epoch(node) == reference[number % 2]
        pids.update(node.worker_pids)
    assert len(pids) == 2


@pytest.mark.parametrize("method", ["thread", "process"])
def test_what_was_queued_for_an_epoch_left_early_is_skipped(method, made, tmp_path):
    log = Logged(tmp_path / "log", seconds=0.02)
    node = made(log, 60, num_workers=2, method=method, chunk_size=1, in_flight_samples=59)
    node.reset(None)
    next(node)
    assert len(epoch_of(node)) == 60
    assert len(log.items()) < 60 + 30


def epoch_of(node):
    node.reset(None)
    return list(node)


@pytest.mark.parametrize("method", ["thread", "process"])
@pytest.mark.parametrize("chunk_size", [1, 4])
@pytest.mark.parametrize("in_flight", [1, 8, 100, None])
def test_no_more_samples_are_in_flight_than_asked_for(method, chunk_size, in_flight, made):
    source = CountingSource(300)
    node = made(
        same,
        source=source,
        num_workers=2,
        method=method,
        chunk_size=chunk_size,
        in_flight_samples=in_flight,
    )
    asked = 4 * 2 * chunk_size if in_flight is None else -(-in_flight // chunk_size) * chunk_size
    node.reset(None)
    most = max(source.read - taken for taken, _ in enumerate(node))
    assert most <= asked + chunk_size  # the chunk in hand
    assert most >= min(asked, 8)


def test_inline_processing_reads_one_chunk(made):
    source = CountingSource(300)
    node = made(same, source=source, chunk_size=10, in_flight_samples=100)
    node.reset(None)
    assert max(source.read - taken for taken, _ in enumerate(node)) <= 10


def test_worker_init_fn_is_called_once_in_each_worker_process(made, tmp_path):
    node = made(same, num_workers=3, chunk_size=1, worker_init_fn=NoteWorker(tmp_path))
    epoch_of(node)
    epoch_of(node)
    notes = {int(path.name): int(path.read_text()) for path in tmp_path.iterdir()}
    assert notes == dict(enumerate(node.worker_pids))


def test_closing_twice_and_starting_again(made, reference):
    for method in ("thread", "process"):
        node = made(num_workers=2, method=method, chunk_size=7)
        assert epoch(node) == reference[0]
        node.close()
        node.close()
        assert node.worker_pids == []
        assert epoch(node) == reference[1]


def test_reading_on_after_closing_is_an_error(made):
    for method in ("thread", "process"):
        node = made(num_workers=2, method=method, chunk_size=1, in_flight_samples=1)
        node.reset(None)
        next(node)
        node.close()
        with pytest.raises(WorkerError, match="closed|died"):
            list(node)


def test_length(made):
    assert len(made(size=7)) == 7
    assert len(made(size=7, rank=1, world_size=2)) == 3
    assert len(made(source=IterableSource([1, 2, 3], 0, 1), num_workers=2)) == 3
    with pytest.raises(TypeError):
        len(made(source=IterableSource(Resumable(), 0, 1)))


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("num_workers", -1, ValueError),
        ("num_workers", 1.5, TypeError),
        ("chunk_size", 0, ValueError),
        ("in_flight_samples", 0, ValueError),
        ("method", "coroutine", ValueError),
        ("start_method", "clone", ValueError),
        ("timeout_s", 0, ValueError),
        ("timeout_s", float("nan"), ValueError),
    ],
)
def test_options_that_make_no_sense_are_refused(name, value, error):
    with pytest.raises(error, match=f"`{name}`"):
        WorkerOptions(**{name: value})
