"""The contract of all workers: the trainer's own thread, threads, processes, and actors of Ray.

Each fault is real. It becomes a clear error within a limit, and no sample is lost.
"""

import errno
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import pytest
import ray_clusters
import torch
import worker_functions as w
from torchdata.nodes import BaseNode
from worker_functions import DEATHS, ERRORS, RESULTS, Faulty, Init, Texts, drawn, same

from odb_nodes import (
    IterableSource,
    ODBDataLoader,
    SampleError,
    ShardedSampler,
    StateError,
    WorkerError,
    WorkerOptions,
)
from odb_nodes.core.processing import process_pool
from odb_nodes.core.sample import ItemKey

SIZE, AT, CHUNK = 60, 30, 4  # the item with the fault is the third of its chunk
LIMIT_S = 100.0  # on a machine that is busy otherwise
KINDS = {
    "inline": {"num_workers": 0},
    "threads": {"method": "thread"},
    "fork": {"start_method": "fork"},
    "forkserver": {"start_method": "forkserver"},
    "spawn": {"start_method": "spawn"},
    "ray": {"method": "ray"},
}
PROCESSES = ("fork", "forkserver", "spawn")


def of(*names):
    """Cases of these kinds of workers."""
    return pytest.mark.parametrize("kind", [case(name) for name in names])


def case(kind, *more):
    slow = () if kind in ("inline", "threads") else pytest.mark.slow
    return pytest.param(kind, *more, marks=slow)


def options(kind, **changed):
    defaults = {"num_workers": 2, "chunk_size": CHUNK, "timeout_s": 2 * LIMIT_S}
    return {**defaults, **KINDS[kind], **changed}


@pytest.fixture(scope="module")
def cluster():
    pytest.importorskip("ray")
    with ray_clusters.cluster() as ray:
        yield ray


@pytest.fixture
def make(request):
    """Builds processors, which are closed in the end."""
    opened = []

    def make(kind, process_fn=same, source=None, **changed):
        if kind == "ray":
            request.getfixturevalue("cluster")
        changed = options(kind, **changed)
        of_node = {name: changed.pop(name) for name in ("seed", "rank") if name in changed}
        source = IterableSource(range(SIZE), 0, 1) if source is None else source
        opened.append(w.processor(process_fn, source=source, **of_node, **changed))
        return opened[-1]

    make.opened = opened
    yield make
    for closable in opened:
        closable.close()


@contextmanager
def within(seconds=LIMIT_S):
    """Fail instead of hanging."""

    def fail(*_):
        pytest.fail(f"not done after {seconds} s: a hang.")

    previous = signal.signal(signal.SIGALRM, fail)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def wait_for(condition):
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "the condition was never true."
        time.sleep(0.01)


def epoch(node):
    node.reset(None)
    return [*node]


def read_until_error(node, kind=(SampleError, WorkerError)):
    """Return the samples that a node delivers, and the error after them, which it must repeat."""
    delivered = []
    with within():
        with pytest.raises(kind) as caught:
            while True:
                delivered.append(next(node))
        with pytest.raises(kind) as repeated:
            next(node)
    assert str(repeated.value) == str(caught.value)
    return delivered, str(caught.value)


def assert_continues(node, delivered, make, *kinds):
    """The node, and nodes with its state, deliver the samples that follow `delivered`."""
    state = node.state_dict()
    with within(2 * LIMIT_S):
        for reader in (node, *(make(kind, node.runner._processor.process_fn) for kind in kinds)):
            reader.reset(state)
            assert [*delivered, *reader] == [*range(SIZE)]


# --- results, random numbers, states --------------------------------------------------------------


def run(node, epochs=2):
    """The state before each sample of some epochs, and the samples."""
    steps = []
    for _ in range(epochs):
        node.reset(None)
        state = node.state_dict()
        for sample in node:
            steps.append((state, drawn(sample)))
            state = node.state_dict()
    return steps


def indices(**shard):
    return ShardedSampler(SIZE, seed=1, **{"rank": 0, "world_size": 1, **shard})


@pytest.fixture(scope="module")
def expected():
    """Two epochs of the trainer's own thread, by the size of chunks."""
    chunks = (1, 7, 500)
    make = w.DrawSlowly(0.0)
    return {size: run(w.processor(make, source=indices(), chunk_size=size)) for size in chunks}


@pytest.mark.parametrize(
    ("kind", "chunk_size"),
    [
        *(case(kind, size) for kind in ("inline", "threads", "fork") for size in (1, 7, 500)),
        *(case(kind, 7) for kind in ("forkserver", "spawn", "ray")),
    ],
)
def test_samples_and_states_are_those_of_the_trainers_own_thread(kind, chunk_size, expected, make):
    sizes = {"chunk_size": chunk_size, "in_flight_samples": 20}
    node, wanted = make(kind, w.DrawSlowly(), indices(), **sizes), expected[chunk_size]
    assert run(node) == wanted
    assert [sample for _, sample in wanted] == [sample for _, sample in expected[1]]
    if chunk_size == 7:  # from any state, with any workers
        for other in node, make("inline", w.DrawSlowly(), indices(), chunk_size=5):
            for step in (0, 9, 20, SIZE - 1, SIZE + 30):
                state, remaining = wanted[step][0], wanted[step : -(-(step + 1) // SIZE) * SIZE]
                other.reset(state)
                if other is node:  # Others keep states of the source at other items.
                    assert other.state_dict() == state
                assert [drawn(sample) for sample in other] == [sample for _, sample in remaining]


def test_a_sample_draws_by_seed_epoch_and_item_whoever_has_it():
    def draws(seed=0, rank=0, world_size=1, is_whole=False):
        source = indices() if is_whole else indices(rank=rank, world_size=world_size)
        node = w.processor(source=source, seed=seed, rank=rank, world_size=world_size)
        return {
            (number // len(source), draw[0]): draw for number, (_, draw) in enumerate(run(node))
        }

    alone = draws()
    assert draws(rank=0, world_size=2) | draws(rank=1, world_size=2) == alone
    runs = [alone, draws(seed=1), draws(seed=2**63), draws(seed=-3)]
    runs += [draws(rank=rank, world_size=2, is_whole=True) for rank in (0, 1)]  # data of its own
    for field in (1, 2, 4):  # python, numpy, torch
        drawn_by = [str(draw[field]) for run in runs for draw in run.values()]
        assert len({*drawn_by}) == len(drawn_by) == 2 * SIZE * len(runs)


def test_golden_draws():
    """Saved runs depend on these: a change here is a change of `STATE_VERSION`."""
    node = w.processor(source=indices(), seed=5, rank=0, world_size=1)
    assert [drawn(next(node))[:2] for _ in range(2)] == [
        (20, 0.932377452452851),
        (6, 0.12297689470751139),
    ]


def test_a_key_without_a_seed_fails_its_item_alone(make):
    class Keyed(CountingSource):
        def item_key(self):
            return ItemKey("\ud800" if self.read == AT + 1 else "", self.read, 1)

    delivered, message = read_until_error(make("inline", source=Keyed(40), chunk_size=40))
    assert delivered == [*range(AT)] and f"item {AT}, " in message


def generators():
    return random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()


class DrawAndFail(Faulty):
    def __call__(self, item):
        w.draw(item)
        return super().__call__(item)


@of("inline", "threads", "fork")
def test_the_trainers_generators_are_left_alone_also_after_an_error(kind, make, tmp_path):
    node, before = make(kind, DrawAndFail(tmp_path, "ValueError")), generators()
    with pytest.raises(SampleError):
        for _ in node:
            assert kind == "threads" or generators() == before
    node.close()
    assert generators() == before


def three_draws(_item=None):
    return random.random(), np.random.random(), float(torch.rand(()))


class Undrawn:
    draws_random_numbers = False  # it says

    def __call__(self, item):
        return three_draws(item)


@pytest.mark.parametrize(("process_fn", "seed"), [(three_draws, None), (Undrawn(), 0)])
def test_without_a_seed_processing_uses_the_generators_as_they_are(process_fn, seed, make):
    def seeded():
        random.seed(5), np.random.seed(5), torch.manual_seed(5)

    seeded()
    wanted = [three_draws() for _ in range(SIZE)]
    seeded()
    assert epoch(make("inline", process_fn, seed=seed)) == wanted


def test_without_a_seed_threads_process_side_by_side(make):
    barrier = threading.Barrier(2)

    def process(item):
        barrier.wait(LIMIT_S)
        return item

    assert len(epoch(make("threads", process, chunk_size=1, seed=None))) == SIZE


def held_draws(loader):
    """Of the samples of an epoch, in order: index, epoch and numbers drawn."""
    rows = []
    for batch in loader:
        indices = batch["input_ids"][:, 0].tolist()
        rows += zip(indices, batch["epoch"].tolist(), batch["drawn"], strict=True)
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_dataset_draws_from_its_generators_and_follows_the_epoch_with_any_workers(
    kind, make, request
):
    def loader(workers):
        arguments = {"window": 8, "workers": WorkerOptions(**workers)}
        built = ODBDataLoader(w.Holding(), token_budget=16, **arguments)
        make.opened.append(built)
        return built

    if kind == "ray":
        request.getfixturevalue("cluster")
    alone, by_workers = loader({}), loader(options(kind))
    expected = [held_draws(alone) for _ in range(3)]
    assert [held_draws(by_workers) for _ in range(3)] == expected
    assert by_workers.dataset.epochs == [0, 1, 2]  # in the trainer's process, too
    assert [{epoch for _, epoch, _ in rows} for rows in expected] == [{0}, {1}, {2}]
    numbers = [number for rows in expected for *_, drawn in rows for number in eval(drawn)]
    assert len({*numbers}) == len(numbers)
    batches = iter(loader_in_epoch(by_workers, 1))
    first = held_draws([next(batches) for _ in range(3)])
    resumed = loader(options(kind))
    resumed.load_state_dict(by_workers.state_dict())
    assert first + held_draws(resumed) == expected[1]


def loader_in_epoch(loader, epoch):
    loader.set_epoch(epoch)
    return loader


def test_a_source_that_has_become_shorter_is_an_error(make):
    node = make("inline", source=IterableSource(range(40), 0, 1), chunk_size=8)
    assert [next(node) for _ in range(13)] == [*range(13)]
    for size in (3, 8, 12):
        shorter = make("inline", source=IterableSource(range(size), 0, 1), chunk_size=8)
        for call in (lambda node: node.make_again([]), next):  # the first, in a bucketer's restore
            with pytest.raises(StateError, match="ended"):
                shorter.reset(node.state_dict())
                call(shorter)


def test_a_state_does_not_depend_on_how_far_the_source_is_read_ahead(make):
    def states(kind, **changed):
        node = make(kind, chunk_size=8, **changed)
        node.reset(None)
        return [node.state_dict() for _ in node]

    assert states("threads") == states("inline", num_workers=0)


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        *(case(kind, "ValueError") for kind in ("threads", "ray")),
        *(case("inline", fault) for fault in ERRORS),
        # Errors that the transport could take for its own, or cannot send.
        *(case("fork", fault) for fault in ("SystemExit", "EOFError", "Unpicklable", "Speechless")),
        case("threads", "KeyboardInterrupt"),
        case("fork", "KeyboardInterrupt"),
    ],
)
def test_an_error_names_sample_and_function_and_loses_nothing(kind, fault, make, tmp_path):
    process_fn = Faulty(tmp_path, fault)
    node = make(kind, process_fn)
    delivered, message = read_until_error(node, SampleError)
    assert delivered == [*range(AT)]  # all before it
    assert f"item {AT}, sample {AT} of epoch 0, cannot be processed: {fault}" in message
    if fault in ERRORS and fault != "Speechless":
        assert str(ERRORS[fault]()) in message
        assert "Traceback" in message
        assert "in __call__" in message  # the line of the user's code
    pids = {"inline": [""], "threads": [os.getpid()]}.get(kind, node.worker_pids)
    assert kind == "ray" or any(f"process {pid}" in message for pid in pids) == (kind != "inline")
    assert kind != "ray" or f"machine {os.uname().nodename!r}" in message
    process_fn.mend()
    assert_continues(node, delivered, make, "inline")


def test_the_error_counts_epochs_and_places_of_a_shuffled_run(make, tmp_path):
    process_fn = Faulty(tmp_path, "ValueError")
    process_fn.mend()
    node = make("inline", process_fn, indices())
    first = epoch(node)
    process_fn.mended.unlink()
    node.reset(None)
    delivered, message = read_until_error(node)
    assert delivered != first[: len(delivered)]
    assert f"item {AT}, sample {len(delivered)} of epoch 1" in message
    assert message.endswith("ValueError: bad image")


class Where:
    """Raises in one of the functions that a user gives."""

    draws_random_numbers = False

    def __init__(self, place):
        self.place = place

    def at(self, place, value):
        if place == self.place:
            raise w.Unpicklable(7, threading.Lock())
        return value

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return self.at("dataset", {"input_ids": [index]})

    def __call__(self, item):
        return self.at("process_fn", item)

    def observe(self, sample):
        return self.at("observe", 1)

    def collate(self, samples):
        return self.at("collate_fn", {"rows": samples})


@pytest.mark.parametrize("place", ["dataset", "process_fn", "observe", "collate_fn"])
@pytest.mark.parametrize(
    "workers", [{}, {"num_workers": 1, "method": "thread"}], ids=["inline", "thread"]
)
def test_a_debugger_reaches_what_the_user_raised_in_the_trainers_process(place, workers):
    user = Where(place)
    functions = {"process_fn": user, "observe": user.observe, "collate_fn": user.collate}
    with ODBDataLoader(
        user, token_budget=8, workers=WorkerOptions(**workers), **functions
    ) as loader:
        for _ in range(2):  # also where it is raised again
            with pytest.raises(SampleError, match="code 7") as caught:
                next(iter(loader))
            cause = caught.value.__cause__
            assert type(cause) is w.Unpicklable
            frames = [frame.f_locals for frame, _ in traceback.walk_tb(cause.__traceback__)]
            assert frames[-1]["self"] is user and frames[-1]["place"] == place


class Hidden:
    def __repr__(self):
        raise RuntimeError("no picture")


def plus_one(item):
    return item + 1


def test_an_item_that_cannot_be_shown(make):
    node = make("inline", plus_one, IterableSource([1, 2, Hidden(), 4], 0, 1))
    delivered, message = read_until_error(node, SampleError)
    assert delivered == [2, 3]
    assert "sample 2 of epoch 0" in message


class Items:
    """An iterable of numbers; at one of them it raises, or yields something else."""

    def __init__(self, other):
        self.other = other

    def __iter__(self):
        for item in range(SIZE):
            if item == AT and isinstance(self.other, BaseException):
                raise self.other
            yield item if item != AT or self.other is None else self.other


# --- what cannot be sent --------------------------------------------------------------------------


@pytest.mark.parametrize("fault", RESULTS)
@pytest.mark.slow
def test_a_result_that_cannot_leave_a_worker(fault, make, tmp_path):
    process_fn = Faulty(tmp_path, fault)
    node = make("fork", process_fn)
    delivered, message = read_until_error(node)
    assert delivered == [*range(28 if fault.startswith("what") else AT)]
    expected = "not a number" if fault.startswith("what") else "cannot be sent between processes"
    assert expected in message and "of epoch 0" in message
    process_fn.mend()
    assert_continues(node, delivered, make)


@pytest.mark.parametrize(
    ("kind", "item", "message"),
    [
        case("fork", lambda: None, "pickle"),
        case("fork", threading.Lock(), "pickle"),
        case("fork", w.Bomb(), f"(key {AT}) cannot be unpickled by a worker: ValueError"),
        case("ray", w.Bomb(), f"(key {AT}) cannot be unpickled by a worker: ValueError"),
        case("ray", threading.Lock(), 'method="thread"'),
    ],
)
def test_an_item_that_cannot_be_sent_to_a_worker(kind, item, message, make):
    items = Items(item)
    node = make(kind, source=IterableSource(items, 0, 1))
    delivered, seen = read_until_error(node, WorkerError)
    assert message in seen
    assert delivered == [*range(len(delivered))]
    items.other = None
    assert_continues(node, delivered, make)


LOCK = threading.Lock()


@pytest.mark.parametrize(
    ("kind", "process_fn", "message"),
    [
        case("spawn", lambda item: item, r"must be picklable.*method=\"thread\""),
        case("forkserver", lambda item: item, r"must be picklable.*method=\"thread\""),
        case("spawn", w.Bomb(), "has ended. It could not unpickle"),
        case("ray", lambda _: LOCK, "cannot be sent to Ray's actors"),
    ],
)
def test_a_function_that_cannot_be_sent_to_workers(kind, process_fn, message, make):
    before = multiprocessing.active_children()
    node = make(kind, process_fn)
    for _ in range(1 if isinstance(process_fn, w.Bomb) else 2):
        with within(), pytest.raises(WorkerError, match=message):
            epoch(node)
        assert node.worker_pids == []
    assert multiprocessing.active_children() == before


SPAWNING = """
def prepare(item):
    return {"input_ids": [item]}
workers = WorkerOptions(num_workers=1, start_method="spawn")
list(ODBDataLoader(range(5), token_budget=9, workers=workers, process_fn=prepare))
"""
PROGRAMS = {
    "no guard": (
        """
workers = WorkerOptions(num_workers=1, start_method="spawn")
list(ODBDataLoader([{"input_ids": [1]}] * 5, token_budget=9, workers=workers))
""",
        ["exit code 1. Nothing", "by `if __name__ =="],
    ),
    "below the guard": (
        """
if __name__ == "__main__":
    def prepare(item):
        return item
    workers = WorkerOptions(num_workers=1, start_method="forkserver")
    data = [{"input_ids": [1]}] * 5
    list(ODBDataLoader(data, token_budget=9, workers=workers, process_fn=prepare))
""",
        ["not unpickle its work: AttributeError", "'prepare'", "not below `if"],
    ),
    "standard input": (SPAWNING, ["came from standard input here: run it from a file"]),
    "python -c": (SPAWNING, ["'prepare'", "what a notebook, a prompt, `python -c`"]),
    "daemon": (
        """
import multiprocessing
def run():
    list(ODBDataLoader(range(5), token_budget=9, workers=WorkerOptions(num_workers=1)))
if __name__ == "__main__":
    process = multiprocessing.get_context("fork").Process(target=run, daemon=True)
    process.start()
    process.join()
""",
        ["not allowed to have children. This process is daemonic", "start it with `daemon=False`"],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_told_why_its_workers_do_not_start(name, tmp_path):
    path, (body, expected) = tmp_path / "program.py", PROGRAMS[name]
    code = f"from odb_nodes import *\n{body}"
    path.write_text(code)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    how = {"standard input": ["-"], "python -c": ["-c", code]}.get(name, [str(path)])
    result = subprocess.run(
        [sys.executable, *how],
        input=code,
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )
    last = result.stderr[result.stderr.rindex("WorkerError: ") :]
    assert all(part in last for part in expected), last
    assert ("picklable" in last, "guard" in last) == (False, name == "no guard")


# --- items that are made again --------------------------------------------------------------------


def made_again(node, rows=range(SIZE)):
    """Items of the epoch that a node stands in, by rows that are their indices."""
    return node.make_again([ItemKey("", row, 1) for row in rows])


def taken_from(items_again, rows):
    return [run[index] for run, index in items_again.take(rows)]


@of(*KINDS)
def test_items_are_made_again_in_any_order_while_the_epoch_goes_on(kind, make):
    whole = epoch(make("inline", w.draw, indices()))
    by_item = {sample["item"]: drawn(sample) for sample in whole}
    node = make(kind, w.draw, indices())
    node.reset(None)
    samples = [drawn(next(node)) for _ in range(3)]
    items_again, rows = made_again(node), random.Random(0).sample(range(SIZE), SIZE)
    items_again.want(rows[:10])
    for start in range(0, SIZE, 12):
        chunk = rows[start : start + 12]
        assert [*map(drawn, taken_from(items_again, chunk))] == [by_item[row] for row in chunk]
        samples.append(drawn(next(node)))
    assert drawn(taken_from(items_again, [rows[0]])[0]) == by_item[rows[0]]  # once more
    with within():
        assert [*samples, *map(drawn, node)] == [drawn(sample) for sample in whole]


@of("inline", "threads", "fork", "ray")
def test_an_item_that_cannot_be_made_again_is_named_and_the_others_of_its_chunk_are_made(
    kind, make, tmp_path
):
    node = make(kind, process_fn := Faulty(tmp_path, "ValueError"), indices(shuffle=False))
    node.reset(None)
    items_again = made_again(node)
    with within():
        assert taken_from(items_again, [29, 31, 28]) == [29, 31, 28]
        for _ in range(2):
            with pytest.raises(SampleError, match=rf"item {AT}, which is made again .*key={AT},"):
                items_again.take([27, AT, 32])
        process_fn.mend()
        assert taken_from(items_again, [AT, 32]) == [AT, 32]
        assert next(node) == 0


@pytest.mark.parametrize(
    ("kind", "end"),
    [case("threads", "interrupt"), case("fork", "interrupt"), case("fork", "close")],
)
def test_a_wait_for_an_item_that_is_made_again_ends(kind, end, make, tmp_path):
    node = make(kind, process_fn := Faulty(tmp_path, "hangs"), indices(shuffle=False))
    node.reset(None)
    items_again = made_again(node)
    threading.Timer(0.5, getattr(node, end)).start()
    with within(), pytest.raises(WorkerError):
        items_again.take([AT])
    process_fn.mend()
    with within():
        assert epoch(node) == [*range(SIZE)]
        assert taken_from(made_again(node), [AT]) == [AT]


@pytest.mark.slow
def test_an_item_that_hangs_is_an_error_after_the_limit_also_for_those_behind_it(make, tmp_path):
    process_fn = Faulty(tmp_path, "hangs")
    node = make("fork", process_fn, indices(shuffle=False), num_workers=1, timeout_s=2.0)
    node.reset(None)
    items_again = made_again(node)
    with within(), pytest.raises(WorkerError, match="`timeout_s`"):
        items_again.take([AT])
    node.reset(None)
    items_again = made_again(node)
    items_again.want([AT])
    with within(), pytest.raises(WorkerError, match="`timeout_s`"):
        items_again.take(range(SIZE))


@pytest.mark.slow
@pytest.mark.parametrize("death", ["SIGKILL", "exit"])
def test_a_worker_that_dies_while_it_makes_items_again_is_an_error(death, make, tmp_path):
    death = death if death in DEATHS else next(name for name in DEATHS if name != "SIGKILL")
    node = make("fork", process_fn := Faulty(tmp_path, death), indices(shuffle=False))
    node.reset(None)
    items_again = made_again(node)
    with within(), pytest.raises(WorkerError) as caught:
        for row in range(SIZE):
            items_again.take([row])
    assert DEATHS[death][1] in str(caught.value)
    process_fn.mend()
    with within():
        assert epoch(node) == [*range(SIZE)]


@pytest.mark.slow
def test_a_forked_child_cannot_take_an_item_that_is_made_again(make):
    node = make("fork", same, indices())
    node.reset(None)
    items_again = made_again(node)
    items_again.take([3])
    child = os.fork()
    if not child:
        try:
            items_again.take([4])
        except WorkerError:
            node.close()
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert taken_from(items_again, [4]) == [4]


# --- workers that die -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "death"),
    [*(case("fork", death) for death in DEATHS), case("spawn", "SIGKILL")],
)
def test_a_worker_that_dies_is_an_error_and_is_replaced_by_a_reset(kind, death, make, tmp_path):
    process_fn = Faulty(tmp_path, death)
    node = make(kind, process_fn)
    delivered, message = read_until_error(node, WorkerError)
    assert delivered == [*range(28)]  # the chunks before its own
    assert DEATHS[death][1] in message
    assert "samples 28..31 of epoch 0" in message
    process_fn.mend()
    assert_continues(node, delivered, make, "inline")


@pytest.mark.slow
@pytest.mark.parametrize("when", ["idle", "processing", "stopped"])
def test_workers_that_are_killed_or_stopped_from_outside(when, make, tmp_path):
    process_fn, count = w.Logged(tmp_path / "log"), 0 if when == "processing" else 5
    process_fn.seconds = 0 if count else 2 * LIMIT_S
    timeout_s = 2.0 if when == "stopped" else 2 * LIMIT_S
    node = make("fork", process_fn, chunk_size=1, in_flight_samples=8, timeout_s=timeout_s)
    node.reset(None)

    def end():
        begun = count + 8 if count else 2
        wait_for(lambda: Path(process_fn.path).exists() and len(process_fn.items()) >= begun)
        for pid in node.worker_pids[: 1 if when == "stopped" else 2]:
            os.kill(pid, signal.SIGSTOP if when == "stopped" else signal.SIGKILL)

    ending = threading.Thread(target=end)
    delivered = [next(node) for _ in range(count)]
    ending.start()
    if count:
        ending.join()
    more, message = read_until_error(node, WorkerError)
    ending.join()
    assert ("`timeout_s`" if when == "stopped" else "was killed by signal 9, often") in message
    assert "__main__" not in message
    process_fn.seconds = 0
    assert_continues(node, delivered + more, make)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("delay_s", "elements"),  # through the socket, and by pages
    [(0.0, 1_000_000), (0.02, 200_000)],
)
def test_workers_killed_at_any_time_while_writing_large_results(delay_s, elements, make):
    def large(item):
        return item, np.full(elements, item, np.int32)

    node = make("fork", large, chunk_size=1)
    node.reset(None)
    delivered = [next(node)[0]]
    timers = [threading.Timer(delay_s, os.kill, (pid, signal.SIGKILL)) for pid in node.worker_pids]
    for timer in timers:
        timer.start()
    with within(), pytest.raises((WorkerError, UserWarning), match="signal 9"):
        for item, data in node:
            assert (data == item).all()
            delivered.append(item)
        timers[0].join()  # All was processed before: the next epoch will see it.
        epoch(node)
    assert delivered == [*range(len(delivered))]


@pytest.mark.slow
def test_a_worker_that_died_idle_is_warned_of_once_and_replaced(make):
    node = make("fork")
    assert len(epoch(node)) == SIZE
    os.kill(node.worker_pids[0], signal.SIGKILL)
    wait_for(lambda: node.runner._pool.exit_reason)
    with pytest.raises(UserWarning, match="signal 9.*nothing to do.* All workers are started"):
        node.reset(None)  # which has started new ones before it raises the warning
    assert epoch(node) == [*range(SIZE)]


@pytest.mark.slow
def test_the_exit_code_may_be_taken_by_another_part_of_the_program(tmp_path):
    body = """
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        loader = w.dataloader(w.Texts(500, 0.001), prefetch=0)
        iterator = iter(loader)
        next(iterator)
        os.kill(loader.worker_pids[0], signal.SIGKILL)
        try:
            list(iterator)
        except WorkerError as error:
            print("another part of this program took its exit code" in str(error))
        loader.close()
    """
    with w.Program(tmp_path, body) as program:
        assert program.finish(200) == (0, "True\n", "")


# --- what hangs -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "fault"),
    [case("threads", "hangs"), case("fork", "hangs"), case("fork", "holds the GIL")],
)
def test_processing_that_hangs_is_an_error_after_the_limit(kind, fault, make, tmp_path):
    process_fn = Faulty(tmp_path, fault)
    node = make(kind, process_fn, timeout_s=2.0)
    delivered, message = read_until_error(node, WorkerError)
    assert "no result within 2.0 s (`timeout_s`) for samples" in message
    assert "`process_fn` hangs" in message or kind == "threads"
    assert delivered == [*range(len(delivered))]
    # A thread that hangs may hold what another waits for.
    assert len(delivered) == 28 or (kind == "threads" and len(delivered) < 28)
    process_fn.mend()
    assert_continues(node, delivered, make, kind)


@pytest.mark.parametrize(
    ("kind", "seed", "expected"),
    [
        case("fork", 0, nullcontext()),
        case("inline", None, nullcontext()),
        # The thread holds the global generators, which a seeded node in this process needs.
        case("inline", 0, pytest.raises(WorkerError, match="hangs")),
    ],
)
def test_a_thread_that_hangs_does_not_hang_another_node(kind, seed, expected, make, tmp_path):
    process_fn = Faulty(tmp_path, "hangs")
    read_until_error(make("threads", process_fn, timeout_s=0.5), WorkerError)
    healthy = make(kind, seed=seed, timeout_s=0.5 if kind == "inline" else LIMIT_S)
    try:
        with expected, within():
            assert epoch(healthy) == [*range(SIZE)]
    finally:
        process_fn.mend()


@pytest.mark.parametrize(
    ("kind", "init", "message"),
    [
        case("fork", Init(ValueError("no such GPU")), "(?s)`worker_init_fn` raised.*no such GPU"),
        case("fork", Init(SystemExit("no such GPU")), "(?s)`worker_init_fn` raised.*no such GPU"),
        case("ray", Init(ValueError("no such GPU")), "(?s)`worker_init_fn` raised.*no such GPU"),
        case("fork", Init(seconds=60), "0..3 of epoch 0: `worker_init_fn` of worker 0"),
        case("spawn", Init(None, 60, at_unpickling=True), "has not come up: importing"),
    ],
)
def test_a_worker_that_does_not_begin_is_an_error(kind, init, message, make):
    timeout_s = 3.0 if init.seconds else LIMIT_S
    node = make(kind, worker_init_fn=init, timeout_s=timeout_s)
    with within(), pytest.raises(WorkerError, match=message):
        epoch(node)


@pytest.fixture
def held_lock():
    """The lock of a global generator, which another thread holds, for these seconds."""
    is_held, release, seconds = threading.Event(), threading.Event(), [60]

    def hold():
        with np.random.get_bit_generator().lock:
            is_held.set()
            release.wait(seconds[0])

    thread = threading.Thread(target=hold)
    yield lambda limit_s: (seconds.__setitem__(0, limit_s), thread.start(), is_held.wait())
    release.set()
    thread.join()


@pytest.mark.slow
def test_a_forked_worker_that_inherits_a_held_lock_is_replaced_within_the_limit(held_lock, make):
    """As where a thread of the trainer draws random numbers while the workers start."""
    held_lock(1)
    node = make("fork", chunk_size=1)
    with within():
        assert epoch(node) == [*range(SIZE)]


@pytest.mark.slow
def test_where_the_lock_is_held_for_ever_that_is_an_error(held_lock, make):
    held_lock(60)
    node = make("fork", timeout_s=1.0)
    with within(), pytest.raises(WorkerError, match="It may wait for ever for a lock"):
        epoch(node)


# --- workers that do not come up ------------------------------------------------------------------

BEGIN = """
    data = [{"input_ids": [k % 97] * 40} for k in range(5000)]  # more than a pipe holds
    workers = WorkerOptions(num_workers=2, start_method=sys.argv[1], timeout_s=float(sys.argv[2]))
    with ODBDataLoader(data, token_budget=64, window=12, workers=workers) as loader:
        print("begins", flush=True)
        try:
            list(loader)
        except (KeyboardInterrupt, WorkerError) as error:
            print(type(error).__name__, error)
"""
WORKER = """
import os, signal, time
if __name__ == "__mp_main__":  # in each worker, before it reads what it works with
    {}
"""


def ended(program, limit_s=LIMIT_S):
    """What a program said that came to its end, and left no process behind."""
    code, out, errors = program.finish(limit_s)
    assert code == 0, errors
    wait_for(lambda: not program.running())
    return out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "fault", "said"),
    [
        ("spawn", "os._exit(9)", "died with exit code 9. Nothing is lost"),
        ("forkserver", "os.kill(os.getpid(), 9)", "was killed by signal 9, often the out-of-mem"),
        ("spawn", "time.sleep(600)", "has not come up: importing"),
        ("forkserver", "time.sleep(600)", "has not come up: importing"),
    ],
)
def test_a_worker_that_never_reads_its_work_is_an_error(kind, fault, said, tmp_path):
    limit_s = 3 if "sleep" in fault else LIMIT_S
    with w.Program(tmp_path, BEGIN, kind, limit_s, header=WORKER.format(fault)) as program:
        assert said in ended(program)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "server"), [("spawn", "new"), ("forkserver", "new"), ("forkserver", "old")]
)
def test_ctrl_c_while_workers_start_is_that_alone(kind, server, tmp_path):
    """Even if the program has started the fork server before, whose children get the signal."""
    before = f"""
    import multiprocessing
    process = multiprocessing.get_context("{kind}").Process(target=int)
    process.start()
    process.join()
"""
    # The program starts workers only once those that ran before are counted.
    ready = tmp_path / "ready"
    header = WORKER.format(f"time.sleep(2 * os.path.exists({str(ready)!r}))")
    waiting = f"""
    print("waits", flush=True)
    while not os.path.exists({str(ready)!r}):
        time.sleep(0.01)
"""
    body = (before if server == "old" else "") + waiting + BEGIN
    with w.Program(tmp_path, body, kind, LIMIT_S, header=header) as program:
        assert program.line() == "waits"
        count = len(program.running())
        ready.touch()
        assert program.line() == "begins"
        wait_for(lambda: len(program.running()) >= count + 2)
        os.killpg(program.session, signal.SIGINT)
        assert ended(program).startswith("KeyboardInterrupt")


@pytest.mark.slow
def test_a_server_that_forks_nothing_is_an_error(tmp_path):
    (tmp_path / "hanging.py").write_text("import time\ntime.sleep(600)")
    body = """
    import multiprocessing
    multiprocessing.set_forkserver_preload(["hanging"])
"""
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, [str(tmp_path), *sys.path]))}
    with w.Program(tmp_path, body + BEGIN, "forkserver", 3, environment=environment) as program:
        assert "worker 0 could not be started: EOFError" in ended(program)


class Shared:
    """A dataset that holds what only a start of a process can pickle."""

    def __init__(self, kind):
        self.reads = multiprocessing.get_context(kind).Value("q", 0)

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        with self.reads.get_lock():
            self.reads.value += 1
        return {"input_ids": [index]}


@pytest.mark.slow
@pytest.mark.parametrize("kind", PROCESSES)
def test_locks_and_shared_values_come_to_the_workers(kind):
    dataset = Shared(kind)
    workers = WorkerOptions(num_workers=2, start_method=kind)
    with ODBDataLoader(dataset, token_budget=16, window=8, workers=workers) as loader, within():
        assert len([*loader]) > 0
    assert dataset.reads.value == SIZE


# --- starting and closing -------------------------------------------------------------------------


def held(kind):
    """What this process has: files, threads of ours, children, and pages of memory."""
    return (
        len(os.listdir("/proc/self/fd")),
        sorted(
            thread.name for thread in threading.enumerate() if thread.name.startswith("odb_nodes")
        ),
        multiprocessing.active_children(),
        ray_clusters.actor_pids() if kind == "ray" else [],
        Path("/proc/self/maps").read_text().count("memfd:odb_nodes"),
    )


@pytest.mark.parametrize(
    ("kind", "busy"),
    [
        *(case(kind, busy) for kind in ("threads", "fork") for busy in (False, True)),
        *(case(kind, True) for kind in ("forkserver", "spawn", "ray")),
    ],
)
def test_close_ends_everything_and_a_reset_starts_again(kind, busy, make):
    node = make(kind, w.DrawSlowly(0.05 if busy else 0.0), chunk_size=1, in_flight_samples=20)
    for _ in range(2):  # The first leaves what Python keeps: its server of forks, and pipes.
        wait_for(lambda: held(kind)[3] == [])  # A lost actor takes its time.
        before = held(kind)
        node.reset(None)
        for _ in range(3):
            next(node)
        pids = node.worker_pids
        assert len(pids) == (2 if kind in PROCESSES else 0)
        begun_s = time.monotonic()
        node.close()
        node.close()
        assert time.monotonic() - begun_s < 10
        assert node.worker_pids == []
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
        with within(), pytest.raises(WorkerError, match="closed|died"):
            for _ in range(SIZE):
                next(node)
    wait_for(
        lambda: held(kind)[1:] == before[1:] and held(kind)[0] <= before[0] + 5 * (kind == "ray")
    )


@pytest.mark.slow
def test_close_does_not_wait_for_the_child_of_a_worker(make, tmp_path, monkeypatch):
    monkeypatch.setattr(process_pool, "_DEATH_POLL_S", 60.0)  # which would see it, in the end
    node = make("fork", Faulty(tmp_path, "forks"))
    assert len(epoch(node)) == SIZE
    begun_s = time.monotonic()
    node.close()
    assert time.monotonic() - begun_s < 4


@of("threads", "fork")
def test_another_thread_may_interrupt_what_waits(kind, make, tmp_path):
    process_fn = Faulty(tmp_path, "hangs")
    node = make(kind, process_fn)
    threading.Timer(0.5, node.interrupt).start()
    delivered = []
    with within(), pytest.raises(WorkerError, match="processing was interrupted"):
        while True:
            delivered.append(next(node))
    process_fn.mend()
    assert_continues(node, delivered, make)


@pytest.mark.slow
def test_workers_outlive_the_thread_that_asked_for_them_and_live_over_epochs(make, tmp_path):
    node = make("fork", num_workers=3, worker_init_fn=w.NoteWorker(tmp_path))
    thread = threading.Thread(target=node.reset)
    thread.start()
    thread.join(LIMIT_S)
    pids = node.worker_pids
    for count in (SIZE, 0, 1, 20, SIZE):  # left early, too
        assert [next(node) for _ in range(count)] == [*range(count)]
        node.reset(None)
    assert epoch(node) == [*range(SIZE)]
    assert node.worker_pids == pids
    assert {int(path.name): int(path.read_text()) for path in tmp_path.iterdir()} == {
        **dict(enumerate(pids))
    }


@pytest.mark.slow
def test_workers_start_under_a_default_device_that_a_fork_cannot_use(make):
    torch.set_default_device("cuda")
    try:
        assert epoch(make("fork")) == [*range(SIZE)]
    finally:
        torch.set_default_device(None)


def refusing(real, refused, error):
    """A function that raises at its call number `refused`, or for a thread of that name."""
    calls = []

    def call(*args, **named):
        calls.append(args)
        if refused in (len(calls), getattr(args[0], "name", None) if args else None):
            raise error
        return real(*args, **named)

    return call


NO_THREAD = RuntimeError("can't start new thread")


def refused(number):
    return OSError(number, os.strerror(number))


def here(call):
    call()


def on_a_thread(call):
    with ThreadPoolExecutor(1) as pool:
        pool.submit(call).result(LIMIT_S)


START, FORK, PAIR = (threading.Thread, "start"), (os, "fork"), (socket, "socketpair")


@pytest.mark.parametrize(
    ("kind", "run", "place", "call", "error", "message"),
    [
        case(
            "threads", here, START, "odb_nodes-worker-1", NO_THREAD, r"-\w+` could not .*ulimit -u"
        ),
        case("fork", here, START, "odb_nodes-sender", NO_THREAD, r"-\w+` could not .*ulimit -u"),
        case(
            "fork",
            on_a_thread,
            START,
            "odb_nodes-reader",
            NO_THREAD,
            r"-\w+` could not .*ulimit -u",
        ),
        case("fork", here, FORK, 1, refused(errno.EAGAIN), "worker 0 could not.*`ulimit -u.*fewer"),
        case("fork", here, FORK, 2, refused(errno.EAGAIN), "worker 1 could not.*`ulimit -u.*fewer"),
        case("fork", on_a_thread, FORK, 1, refused(errno.ENOMEM), "no memory left for a worker"),
        case("fork", here, PAIR, 1, refused(errno.EMFILE), r"`ulimit -n`, here \d+"),
        case("fork", on_a_thread, PAIR, 2, refused(errno.ENFILE), "files of this machine"),
    ],
)
def test_a_limit_of_the_system_is_named_and_nothing_left(
    kind, run, place, call, error, message, make, monkeypatch
):
    node, before = make(kind, seed=None), held(kind)
    monkeypatch.setattr(*place, refusing(getattr(*place), call, error))
    with pytest.raises(WorkerError, match=message) as caught:
        run(node.reset)
    monkeypatch.undo()
    assert "picklable" not in str(caught.value)
    wait_for(lambda: held(kind)[1:] == before[1:])
    # `multiprocessing.popen_fork` opens two pipes before it is refused, and leaves them.
    assert held(kind)[0] <= before[0] + 4 * (place[1] == "fork")


def no_memory(*_):
    raise MemoryError("no room")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "name", "message"),
    [
        (process_pool.WorkerProcess, "_take", "out of memory: lower `in_flight_bytes`"),
        (process_pool, "write", "could not send it a chunk: MemoryError"),
        (process_pool.WorkerProcess, "read", "the thread that reads results has failed"),
    ],
)
def test_a_thread_of_the_trainer_that_fails_leaves_nobody_waiting(
    module, name, message, make, monkeypatch
):
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    node = make("fork")
    node.reset(None)
    monkeypatch.setattr(module, name, no_memory)
    with within(), pytest.raises(WorkerError, match=message):
        next(node)


@pytest.mark.slow
def test_ctrl_c_while_a_chunk_is_written_ends_the_worker_which_would_misread_the_next(
    make, monkeypatch
):
    node = make("fork")
    assert next(node) == 0

    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(process_pool, "encode", interrupt)
    with within(), pytest.raises(KeyboardInterrupt):
        list(node)
    monkeypatch.undo()
    wait_for(lambda: node.runner._pool.exit_reason)
    with pytest.raises(UserWarning, match="was interrupted while sending"):
        node.reset(None)
    assert epoch(node) == [*range(SIZE)]


# --- how far ahead --------------------------------------------------------------------------------


class CountingSource(BaseNode):
    """Yields 0, 1, 2, ... and knows how many."""

    def __init__(self, size):
        super().__init__()
        self.size, self.read = size, 0

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


@pytest.mark.parametrize(("chunk_size", "in_flight"), [(1, 1), (1, 100), (4, 8), (4, None)])
@of("inline", "threads", "fork", "ray")
def test_no_more_samples_are_in_flight_than_asked_for(kind, chunk_size, in_flight, make):
    source = CountingSource(80)
    node = make(kind, source=source, chunk_size=chunk_size, in_flight_samples=in_flight)
    limit = 4 * 2 * chunk_size if in_flight is None else -(-in_flight // chunk_size) * chunk_size
    limit = 0 if kind == "inline" else limit
    node.reset(None)
    most = max(source.read - count for count, _ in enumerate(node))
    assert min(limit, 8) <= most <= limit + chunk_size  # the chunk in hand


@of("threads", "fork")
def test_what_was_queued_for_an_epoch_left_early_is_skipped(kind, make, tmp_path):
    log = w.Logged(tmp_path / "log", seconds=0.02)
    node = make(kind, log, chunk_size=1, in_flight_samples=59, in_flight_bytes=None)
    node.reset(None)
    next(node)
    assert epoch(node) == [*range(SIZE)]
    assert len(log.items()) < SIZE + 30


# --- through the whole graph, with a thread that reads ahead --------------------------------------


def collate(samples):
    return {"ids": [sample["id"] for sample in samples]}


def loader_of(dataset, kind, make, **changed):
    arguments = {"token_budget": 64, "window": 12, "shuffle": False, "collate_fn": collate}
    workers = WorkerOptions(**options(kind))
    make.opened.append(ODBDataLoader(dataset, workers=workers, **{**arguments, **changed}))
    return make.opened[-1]


def read_batches(loader, seen):
    for batch in loader:
        seen.append(batch["ids"])
    return seen


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), SystemExit(3), w.Unpicklable(1, 2)], ids=repr
)
@pytest.mark.parametrize("where", ["dataset", "collate_fn", "source"])
@of("inline", "threads", "fork")
def test_what_is_raised_anywhere_does_not_strand_the_reader(where, error, kind, make):
    broken = [True]

    def fail(index):
        if broken and index == AT:
            raise error

    def collate_or_fail(samples):
        for sample in samples if where == "collate_fn" else ():
            fail(sample["id"])
        return collate(samples)

    class Stream:
        def __iter__(self):
            for index in range(SIZE):
                if where == "source":
                    fail(index)
                yield Texts(SIZE)[index]

    def make_loader():
        dataset = Texts(SIZE, fault=fail) if where == "dataset" else Stream()
        return loader_of(dataset, kind, make, collate_fn=collate_or_fail)

    expected = read_batches(loader_of(Texts(SIZE), "inline", make), [])
    loader, seen = make_loader(), []
    with within(), pytest.raises((Exception, KeyboardInterrupt, SystemExit)):
        read_batches(loader, seen)
    with within():
        loader.close()
    assert seen == expected[: len(seen)] != expected
    broken.clear()
    if where != "collate_fn":
        fresh = make_loader()
        fresh.load_state_dict(loader.state_dict())
        with within():
            assert read_batches(fresh, seen) == expected
