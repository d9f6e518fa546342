"""Each fault is a real one, and must become a clear error within 10 s, with nothing lost."""

import faulthandler
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import pytest
from worker_functions import Logged, Texts, forked, processor, same

import odb_nodes
from odb_nodes import IterableSource, ODBDataLoader, SampleError, WorkerError, WorkerOptions
from odb_nodes.processing import process_pool, transport, worker_loop
from odb_nodes.processing.chunk import ChunkProcessor, ChunkTask
from odb_nodes.processing.transport import send

SIZE = 60
AT = 30  # the item with the fault, third of its chunk
CHUNK = 4
LIMIT_S = 10.0
TEST_PID = os.getpid()


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


class Fault:
    """Does something bad at one item, for as long as it is not mended; another item passes."""

    def __init__(self, folder, action, at=AT):
        self.mended = Path(folder, "mended")
        self.action = action
        self.at = at

    def __call__(self, item):
        if item == self.at and not self.mended.exists():
            return self.action()
        return item

    def mend(self):
        self.mended.touch()


@pytest.fixture
def fault(tmp_path):
    return lambda action, at=AT: Fault(tmp_path, action, at)


@pytest.fixture
def hang():
    """An action that hangs: in a thread until `let_go`, in a process until it is killed."""
    release = threading.Event()

    def action():
        release.wait(60)

    action.let_go = release.set
    yield action
    release.set()
    for thread in threading.enumerate():  # It may hold a lock that the next test needs.
        if thread.name.startswith("odb_nodes"):
            thread.join(LIMIT_S)


# --- the faults -----------------------------------------------------------------------------------


class Unpicklable(Exception):
    """An exception that no other process will ever see."""

    def __init__(self, code, lock):
        super().__init__(f"code {code}")
        self.lock = lock


class Speechless(Exception):
    def __str__(self):
        raise RuntimeError("no words")


class Bomb:
    """Leaves well, and does not arrive."""

    def __reduce__(self):
        return int, ("not a number",)


def throw(error):
    def action():
        raise error

    return action


def exit_at_once():
    os._exit(3)


def signal_itself(number):
    def action():
        faulthandler.disable()  # pytest's would print a crash report that nobody needs
        os.kill(os.getpid(), number)

    return action


def die_while_writing():
    """As the kernel kills for memory: in the middle of sending a result of several megabytes."""

    class Half:
        def __init__(self, connection):
            self.connection = connection

        def sendmsg(self, parts):
            large = [part for part in parts if len(part) >= 1_000_000]
            if not large:
                return self.connection.sendmsg(parts)
            self.connection.sendall(b"".join(parts)[:500_000])
            os.kill(os.getpid(), signal.SIGKILL)

    worker_loop.send = lambda connection, parts: send(Half(connection), parts)
    return np.zeros(200_000)  # larger ones do not go through the socket


def die_with_pages():
    """Between writing the pages of a large result and sending them."""

    def send_pages(pages, connection):
        os.kill(os.getpid(), signal.SIGKILL)

    transport.PageFile.send = send_pages
    return np.zeros(8_000_000)


def die_with_a_child_alive():
    """The child holds on to everything that was open, the socket to the trainer included."""
    if os.fork() == 0:
        for _ in range(200):
            time.sleep(0.1)
            if os.getppid() == 1 and not Path(f"/proc/{TEST_PID}").exists():
                break
        os._exit(0)
    os._exit(3)


def close_all_files():
    os.closerange(3, 1000)


DEATHS = {
    "os._exit": (exit_at_once, "exit code 3"),
    "SIGKILL": (signal_itself(signal.SIGKILL), "exit code -9"),
    "SIGSEGV": (signal_itself(signal.SIGSEGV), "exit code -11"),
    "killed while writing": (die_while_writing, "exit code -9"),
    "killed with pages in hand": (die_with_pages, "exit code -9"),
    "closes its files": (close_all_files, "exit code"),
    "dies with a child alive": (die_with_a_child_alive, "exit code 3"),
}
ERRORS = {
    "ValueError": (throw(ValueError("bad image")), "ValueError: bad image"),
    "SystemExit": (throw(SystemExit(4)), "SystemExit: 4"),
    "StopIteration": (throw(StopIteration()), "StopIteration"),
    "TimeoutError": (throw(TimeoutError("slow disk")), "TimeoutError: slow disk"),
    "OSError": (throw(OSError("stale file handle")), "stale file handle"),
    "EOFError": (throw(EOFError("truncated")), "EOFError: truncated"),
    "unpicklable exception": (throw(Unpicklable(7, threading.Lock())), "Unpicklable: code 7"),
    "exception without words": (throw(Speechless()), "Speechless"),
}
RESULTS = {  # that only other processes cannot have
    "KeyboardInterrupt": (throw(KeyboardInterrupt()), "KeyboardInterrupt"),
    "a lambda": (lambda: lambda: None, "cannot be sent between processes.*pickle"),
    "a lock": (threading.Lock, "cannot be sent between processes.*pickle"),
    "a result that does not unpickle": (Bomb, "not a number"),
}


_opened = []


@pytest.fixture(autouse=True)
def close_all():
    """Whatever a test built is closed, so that one that fails does not disturb the next."""
    yield
    while _opened:
        _opened.pop().close()


def two(**options):
    return {"num_workers": 2, "chunk_size": CHUNK, "timeout_s": 60.0, **options}


def unshuffled(process_fn, **options):
    options = {"source": IterableSource(range(SIZE), 0, 1), **options}
    _opened.append(processor(process_fn, **options))
    return _opened[-1]


def read_until_error(node, kind):
    """What a node delivers, and the error after it, which it must repeat."""
    delivered = []
    with within():
        with pytest.raises(kind) as caught:
            while True:
                delivered.append(next(node))
        for _ in range(3):
            with pytest.raises(kind) as again:
                next(node)
            assert str(again.value) == str(caught.value)
    return delivered, str(caught.value)


def assert_goes_on(delivered, state, process_fn):
    """Resumed from `state`, by whomever, the rest follows on what was delivered."""
    for options in ({}, two(), two(num_workers=1, chunk_size=7)):
        node = unshuffled(process_fn, **options)
        node.reset(state)
        assert delivered + list(node) == list(range(SIZE))
        node.close()


@pytest.mark.parametrize("name", DEATHS)
def test_a_worker_that_dies(name, fault):
    action, expected = DEATHS[name]
    process_fn = fault(action)
    node = unshuffled(process_fn, **two())
    delivered, message = read_until_error(node, WorkerError)
    assert delivered == list(range(28))  # the chunks before its own
    assert expected in message
    assert "samples 28..31 of epoch 0" in message
    state = node.state_dict()
    process_fn.mend()
    with within(20):  # a reset replaces the workers
        node.reset(state)
        assert delivered + list(node) == list(range(SIZE))
        node.reset(None)
        assert list(node) == list(range(SIZE))
        node.close()
    assert_goes_on(delivered, state, process_fn)


WORKERS = {
    "inline": {"chunk_size": CHUNK},
    "2 threads": two(method="thread"),
    "2 processes": two(),
    "1 process, chunk 32": two(num_workers=1, chunk_size=32),
}


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("name", ERRORS)
def test_an_item_that_raises(name, workers, fault):
    action, expected = ERRORS[name]
    process_fn = fault(action)
    node = unshuffled(process_fn, **WORKERS[workers])
    delivered, message = read_until_error(node, SampleError)
    assert delivered == list(range(AT))  # all before it
    assert expected in message
    assert f"item {AT}, sample {AT} of epoch 0" in message
    state = node.state_dict()
    node.close()
    process_fn.mend()
    assert_goes_on(delivered, state, process_fn)


@pytest.mark.parametrize("name", RESULTS)
def test_what_cannot_leave_a_worker_process(name, fault):
    action, expected = RESULTS[name]
    process_fn = fault(action)
    node = unshuffled(process_fn, **two())
    delivered, message = read_until_error(node, (SampleError, WorkerError))
    assert delivered == list(range(len(delivered)))
    assert pytest.approx(len(delivered), abs=2) == AT
    assert all(part in message for part in expected.split(".*"))
    assert "of epoch 0" in message
    state = node.state_dict()
    node.close()
    process_fn.mend()
    assert_goes_on(delivered, state, process_fn)


@pytest.mark.parametrize("workers", ["inline", "2 threads"])
def test_ctrl_c_while_processing_in_the_trainers_process(workers, fault):
    process_fn = fault(throw(KeyboardInterrupt()))
    node = unshuffled(process_fn, **WORKERS[workers])
    delivered = []
    with within(), pytest.raises((KeyboardInterrupt, SampleError)):
        while True:
            delivered.append(next(node))
    state = node.state_dict()
    node.close()
    process_fn.mend()
    assert_goes_on(delivered, state, process_fn)


@pytest.mark.parametrize("workers", WORKERS)
def test_the_error_tells_item_position_epoch_worker_and_traceback(workers, fault):
    process_fn = fault(throw(ValueError("bad image")))
    process_fn.mend()
    node = processor(process_fn, SIZE, **WORKERS[workers])  # shuffled
    node.reset(None)
    first = list(node)
    process_fn.mended.unlink()
    node.reset(None)
    delivered, message = read_until_error(node, SampleError)
    pids = node.worker_pids or [os.getpid()]
    node.close()
    assert AT not in delivered
    assert delivered != first[: len(delivered)]
    assert f"item {AT}, sample {len(delivered)} of epoch 1" in message
    assert workers == "inline" or any(f"process {pid}" in message for pid in pids)
    assert "Traceback" in message
    assert "in action" in message  # the line of the user's code


def test_in_place_the_error_ends_with_the_traceback(fault):
    node = unshuffled(fault(throw(ValueError("bad image"))))
    _, message = read_until_error(node, SampleError)
    assert "process " not in message.partition("Traceback")[0]
    assert message.endswith("ValueError: bad image")


def test_an_interrupt_on_a_worker_thread_names_its_item(fault):
    process_fn = fault(throw(KeyboardInterrupt("stop")))
    node = unshuffled(process_fn, **two(method="thread"))
    delivered, message = read_until_error(node, SampleError)
    assert delivered == list(range(AT))
    assert f"item {AT}, sample {AT} of epoch 0, cannot be processed: KeyboardInterrupt" in message
    state = node.state_dict()
    node.close()
    process_fn.mend()
    assert_goes_on(delivered, state, process_fn)


def sleep_for_a_minute(_):
    time.sleep(60)


def test_a_worker_init_fn_that_hangs_is_blamed():
    options = two(worker_init_fn=sleep_for_a_minute, timeout_s=1.0)
    node = unshuffled(same, **options)
    _, message = read_until_error(node, WorkerError)
    assert "for samples 0..3 of epoch 0: `worker_init_fn` of worker 0 (process " in message


class Hidden:
    def __repr__(self):
        raise RuntimeError("no picture")


def test_an_item_that_cannot_be_shown():
    for workers in WORKERS.values():
        source = IterableSource([1, 2, Hidden(), 4], 0, 1)
        node = unshuffled(lambda item: item + 1, source=source, **workers)
        delivered, message = read_until_error(node, SampleError)
        node.close()
        assert delivered == [2, 3]
        assert "sample 2 of epoch 0" in message


class Items:
    """An iterable of numbers, one of them replaced by something else."""

    def __init__(self, other):
        self.other = other

    def __iter__(self):
        for item in range(SIZE):
            yield self.other if item == AT and self.other is not None else item


@pytest.mark.parametrize(
    ("item", "message"),
    [(lambda: None, "pickle"), (threading.Lock(), "pickle"), (Bomb(), "exit code 1")],
    ids=["a lambda", "a lock", "what does not unpickle"],
)
def test_an_item_that_cannot_be_sent_to_a_worker(item, message):
    items = Items(item)
    node = unshuffled(same, source=IterableSource(items, 0, 1), **two())
    delivered, seen = read_until_error(node, Exception)
    assert delivered == list(range(len(delivered)))
    assert message in seen
    state = node.state_dict()
    items.other = None
    node = unshuffled(same, source=IterableSource(items, 0, 1), **two())
    node.reset(state)
    assert delivered + list(node) == list(range(SIZE))


class Raising:
    """An iterable that raises in the middle, until it is mended."""

    def __init__(self, error):
        self.error = error

    def __iter__(self):
        for item in range(SIZE):
            if item == AT and self.error is not None:
                raise self.error
            yield item


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize(
    "error", [OSError("shard 7 is gone"), SystemExit("shard 7 is gone")], ids=repr
)
def test_a_source_that_raises_in_the_middle(workers, error):
    items = Raising(error)
    node = unshuffled(same, source=IterableSource(items, 0, 1), **WORKERS[workers])
    delivered = []
    with within(), pytest.raises((OSError, SystemExit), match="shard 7 is gone"):
        while True:
            delivered.append(next(node))
    if isinstance(error, Exception):
        assert delivered == list(range(AT))
        with pytest.raises(OSError, match="shard 7 is gone"):
            next(node)
    state = node.state_dict()
    node.close()
    items.error = None
    for options in WORKERS.values():
        node = unshuffled(same, source=IterableSource(items, 0, 1), **options)
        node.reset(state)
        assert delivered + list(node) == list(range(SIZE))
        node.close()


# --- from outside ---------------------------------------------------------------------------------


def wait_for(condition, timeout_s=LIMIT_S):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that."
        time.sleep(0.01)


@pytest.mark.parametrize("victims", [1, 2])
def test_workers_killed_while_idle(victims):
    node = unshuffled(same, **two(chunk_size=1, in_flight_samples=8))
    delivered = [next(node) for _ in range(5)]
    time.sleep(0.5)  # All that is in flight has been processed.
    for pid in node.worker_pids[:victims]:
        os.kill(pid, signal.SIGKILL)
    more, message = read_until_error(node, WorkerError)
    delivered += more
    assert delivered == list(range(len(delivered)))
    assert "exit code -9 (negative: killed" in message
    assert "__main__" not in message
    state = node.state_dict()
    node.close()
    assert_goes_on(delivered, state, same)


def test_a_worker_killed_while_processing(fault, tmp_path):
    log = Logged(tmp_path / "log")

    def work():
        log(AT)
        time.sleep(60)

    process_fn = fault(work)
    node = unshuffled(process_fn, **two())

    def kill():
        wait_for(log_is_written)
        os.kill(int(Path(log.path).read_text().split()[1]), signal.SIGKILL)

    def log_is_written():
        return Path(log.path).exists() and Path(log.path).read_text().endswith("\n")

    killer = threading.Thread(target=kill)
    node.reset(None)
    killer.start()
    delivered, message = read_until_error(node, WorkerError)
    killer.join()
    assert delivered == list(range(28))
    assert "exit code -9" in message
    state = node.state_dict()
    node.close()
    process_fn.mend()
    assert_goes_on(delivered, state, process_fn)


@pytest.mark.parametrize("delay_s", [0.0, 0.01, 0.03, 0.1])
def test_workers_killed_at_any_time_while_writing_large_results(delay_s):
    def large(item):
        return item, np.full(1_000_000, item)

    node = unshuffled(large, **two(chunk_size=1))
    node.reset(None)
    assert next(node)[0] == 0
    timers = [threading.Timer(delay_s, os.kill, (pid, signal.SIGKILL)) for pid in node.worker_pids]
    for timer in timers:
        timer.start()
    delivered = [0]
    with within(), pytest.raises(WorkerError, match="-9"):
        for item, data in node:
            assert (data == item).all()
            delivered.append(item)
        timers[0].join()  # All was processed before: the next epoch will see it.
        node.reset(None)
        list(node)
    node.close()
    assert delivered == list(range(len(delivered)))


def test_a_worker_that_is_stopped():
    node = unshuffled(same, **two(chunk_size=1, timeout_s=1.0))
    next(node)
    os.kill(node.worker_pids[0], signal.SIGSTOP)
    _, message = read_until_error(node, WorkerError)
    assert "`timeout_s`" in message
    with within():
        node.close()


# --- hangs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["thread", "process"])
def test_processing_that_hangs(method, fault, hang):
    process_fn = fault(hang)
    node = unshuffled(process_fn, **two(method=method, timeout_s=2.0))
    delivered, message = read_until_error(node, WorkerError)
    if method == "thread":  # The one that hangs may hold what another waits for.
        assert delivered == list(range(len(delivered)))
        assert len(delivered) <= 28
        assert "no result within 2.0 s (`timeout_s`) for samples" in message
    else:
        assert delivered == list(range(28))
        assert "no result within 2.0 s (`timeout_s`) for samples 28..31 of epoch 0" in message
    state = node.state_dict()
    with within():
        node.close()
    process_fn.mend()
    hang.let_go()
    assert_goes_on(delivered, state, process_fn)


@pytest.mark.parametrize("method", ["thread", "process"])
def test_a_reset_replaces_hanging_workers(method, fault, hang):
    process_fn = fault(hang)
    node = unshuffled(process_fn, **two(method=method, timeout_s=1.0))
    delivered, _ = read_until_error(node, WorkerError)
    process_fn.mend()
    if method == "thread":  # which nobody can stop
        hang.let_go()
    with within(20):
        node.reset(node.state_dict())
        assert delivered + list(node) == list(range(SIZE))
        node.close()


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (two(), nullcontext()),
        ({"seed": None}, nullcontext()),
        # The hanging thread holds the global generators, which a seeded node in this process needs.
        ({}, pytest.raises(WorkerError, match="hangs")),
    ],
    ids=["processes", "unseeded", "seeded"],
)
def test_a_thread_that_hangs_does_not_hang_another_node(other, expected, fault, hang):
    node = unshuffled(fault(hang), **two(method="thread", timeout_s=0.5))
    read_until_error(node, WorkerError)
    healthy = unshuffled(same, **other)
    try:
        with expected, within():
            assert list(healthy) == list(range(SIZE))
    finally:
        hang.let_go()
        node.close()
        healthy.close()


# --- at the start ---------------------------------------------------------------------------------


class InitFails:
    def __init__(self, error, only=None):
        self.error = error
        self.only = only

    def __call__(self, index):
        if self.only in (None, index):
            raise self.error


@pytest.mark.parametrize("only", [None, 1])
@pytest.mark.parametrize("error", [ValueError("no such GPU"), SystemExit("no such GPU")], ids=repr)
def test_a_worker_init_fn_that_raises(error, only):
    node = unshuffled(same, **two(worker_init_fn=InitFails(error, only)))
    _, message = read_until_error(node, WorkerError)
    with within():
        node.close()
    assert "worker_init_fn" in message
    assert "no such GPU" in message


def test_a_process_fn_that_cannot_be_pickled():
    before = multiprocessing.active_children()
    for start_method in ("spawn", "forkserver"):
        node = unshuffled(lambda item: item, **two(start_method=start_method))
        for _ in range(2):
            with (
                within(20),
                pytest.raises(WorkerError, match=r"must be picklable.*method=\"thread\""),
            ):
                node.reset(None)
            assert node.worker_pids == []
        node.close()
    assert multiprocessing.active_children() == before


def test_every_chunk_sent_to_a_dead_worker_fails_with_its_exit_code():
    options = WorkerOptions(num_workers=1, start_method="fork")
    task = ChunkTask([1], [None], 0, 0, [0])
    for _ in range(20):  # The reader sees the death while more is sent.
        pool = process_pool.ProcessPool(ChunkProcessor(same, None), options)
        pool.submit(task).result(LIMIT_S)
        os.kill(pool.pids[0], signal.SIGKILL)
        end, futures = time.monotonic() + 0.03, []
        while time.monotonic() < end:
            futures.append(pool.submit(task))
        assert all("exit code -9" in str(future.exception(LIMIT_S)) for future in futures)
        pool.close()


class CallableBomb(Bomb):
    def __call__(self, item):
        return item


def test_a_process_fn_that_cannot_be_unpickled():
    node = unshuffled(CallableBomb(), **two(start_method="spawn"))
    with within(60), pytest.raises(WorkerError, match="has ended. It could not unpickle"):
        next(node)
    node.close()


UNGUARDED = {
    "by a loader": """
data = [{"input_ids": [1]}] * 5
list(ODBDataLoader(data, token_budget=9, workers=workers))
""",
    "before it has work": """
node = ParallelProcessor(ShardedSampler(5, rank=0, world_size=1), str, workers=workers)
node.reset()
while not node.runner._pool._workers[0].is_buried:
    time.sleep(0.01)
list(node)
""",
}


@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
@pytest.mark.parametrize("body", UNGUARDED.values(), ids=UNGUARDED)
def test_a_program_without_a_guard_is_told_of_it(body, start_method, tmp_path):
    path = tmp_path / "program.py"
    path.write_text(
        "import time\n"
        "from odb_nodes import ODBDataLoader, ParallelProcessor, ShardedSampler, WorkerOptions\n"
        f"workers = WorkerOptions(num_workers=1, start_method={start_method!r})\n{body}"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(odb_nodes.__file__).parents[1])}
    program = [sys.executable, str(path)]
    result = subprocess.run(program, capture_output=True, text=True, env=environment, timeout=120)
    last = result.stderr[result.stderr.rindex("WorkerError: ") :]
    assert "exit code 1. Nothing" in last
    assert "by `if __name__ ==" in last


# --- the same through the whole graph, with a thread that reads ahead -----------------------------


class Watched(Texts):
    """Texts, one of which has a fault: what it returns in its place goes into the sample."""

    def __getitem__(self, index):
        return {**super().__getitem__(index), "extra": self.fault and self.fault(index)}


def collate(samples):
    return {"ids": [sample["id"] for sample in samples]}


def dataloader(dataset, workers, collate_fn=collate, **options):
    loader = ODBDataLoader(
        dataset,
        **{
            "token_budget": 64,
            "window": 12,
            "shuffle": False,
            "collate_fn": collate_fn,
            "workers": WorkerOptions(**forked(workers)),
            **options,
        },
    )
    _opened.append(loader)
    return loader


def ids(batches):
    return [batch["ids"] for batch in batches]


@pytest.fixture(scope="module")
def batches():
    """The batches of two epochs without any fault."""
    loader = dataloader(Watched(SIZE), {})
    return [ids(loader), ids(loader)]


def read_batches_until_error(loader, kind):
    seen = []
    with within(), pytest.raises(kind) as caught:
        for batch in loader:
            seen.append(batch["ids"])
    return seen, str(caught.value)


def assert_loader_goes_on(loader, seen, state, make, batches):
    """The loader itself, and a fresh one from its state: the rest of the epoch, then the next."""
    with within(20):
        assert [seen + ids(loader), ids(loader)] == batches
        loader.close()
        for workers in ({}, two()):
            with make(workers) as fresh:
                fresh.load_state_dict(state)
                assert [seen + ids(fresh), ids(fresh)] == batches


@pytest.mark.sampled(3)
@pytest.mark.parametrize("prefetch", [0, 4])
@pytest.mark.parametrize("name", [*DEATHS, *ERRORS, *RESULTS])
def test_through_the_dataloader(name, prefetch, fault, batches):
    action, expected = {**DEATHS, **ERRORS, **RESULTS}[name]
    process_fault = fault(action)

    def make(workers):
        return dataloader(Watched(SIZE, fault=process_fault), workers, prefetch=prefetch)

    loader = make(two())
    seen, message = read_batches_until_error(loader, (SampleError, WorkerError))
    assert seen == batches[0][: len(seen)]
    if name in ERRORS:
        assert f"item {AT}, sample {AT} of epoch 0" in message
        assert seen == read_batches_until_error(make({}), SampleError)[0]  # as inline
    assert all(part in message for part in expected.split(".*"))
    assert loader.worker_pids == []
    state = loader.state_dict()
    for _ in range(2):  # Not mended yet.
        again, _ = read_batches_until_error(loader, (SampleError, WorkerError))
        seen += again
        assert seen == batches[0][: len(seen)]
        state = loader.state_dict()
    process_fault.mend()
    assert_loader_goes_on(loader, seen, state, make, batches)


IN_PROCESS = {"inline": {}, "2 threads": two(method="thread"), "2 processes": two()}


@pytest.mark.parametrize("workers", IN_PROCESS)
@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), Unpicklable(1, 2)], ids=repr)
@pytest.mark.parametrize("where", ["dataset", "collate_fn", "source"])
def test_what_is_raised_anywhere_does_not_strand_the_reader(where, error, workers, batches):
    broken = [True]

    def fail(index):
        if broken and index == AT:
            raise error

    def collate_or_fail(samples):
        if where == "collate_fn" and broken and any(s["id"] == AT for s in samples):
            raise error
        return collate(samples)

    class Stream:
        def __iter__(self):
            for index in range(SIZE):
                if where == "source":
                    fail(index)
                yield Watched(SIZE)[index]

    def make(options):
        dataset = Watched(SIZE, fault=fail) if where == "dataset" else Stream()
        return dataloader(dataset, options, collate_or_fail)

    loader = make(IN_PROCESS[workers])
    seen, _ = read_batches_until_error(loader, (Exception, KeyboardInterrupt, SystemExit))
    with within():
        loader.close()
    assert seen == batches[0][: len(seen)]
    state = loader.state_dict() if where != "collate_fn" else None
    broken.clear()
    if state is not None:
        with within(), make(IN_PROCESS[workers]) as fresh:
            fresh.load_state_dict(state)
            assert seen + ids(fresh) == batches[0]


@pytest.mark.parametrize("prefetch", [0, 4])
@pytest.mark.parametrize("when", ["idle", "busy", "between epochs"])
def test_workers_of_the_dataloader_killed_from_outside(when, prefetch, batches):
    def make(workers):
        seconds = 0.01 if when == "busy" else 0.0
        return dataloader(Watched(SIZE, seconds), workers, prefetch=prefetch)

    loader = make(two(chunk_size=1, in_flight_samples=8))
    seen = []
    for batch in loader:
        seen.append(batch["ids"])
        if len(seen) == 3 and when != "between epochs":
            break
    reader = iter(loader) if when == "between epochs" else None
    if reader is None:  # Leaving an epoch and coming back is not what this is about.
        state = loader.state_dict()
        loader.load_state_dict(state)
        reader = iter(loader)
        seen.append(next(reader)["ids"])
    if when == "idle":
        time.sleep(0.5)
    os.kill(loader.worker_pids[1], signal.SIGKILL)
    expected = batches[0] if when != "between epochs" else batches[1]
    seen = seen if when != "between epochs" else []
    with within(), pytest.raises(WorkerError, match="exit code -9"):
        for batch in reader:
            seen.append(batch["ids"])
    assert seen == expected[: len(seen)]
    with within(20):
        assert seen + ids(loader) == expected
        loader.close()


@pytest.mark.parametrize("prefetch", [0, 4])
@pytest.mark.parametrize("method", ["thread", "process"])
def test_a_dataset_that_hangs(method, prefetch, fault, hang, batches):
    process_fault = fault(hang)

    def make(workers):
        return dataloader(Watched(SIZE, fault=process_fault), workers, prefetch=prefetch)

    loader = make(two(method=method, timeout_s=0.5))
    seen, message = read_batches_until_error(loader, WorkerError)  # its closing included
    assert "`timeout_s`" in message
    process_fault.mend()
    hang.let_go()
    assert_loader_goes_on(loader, seen, loader.state_dict(), make, batches)


def test_a_dataset_that_cannot_be_pickled():
    dataset = Watched(SIZE, fault=lambda index: None)
    loader = dataloader(dataset, two(start_method="spawn"))
    for _ in range(2):
        with within(20), pytest.raises(WorkerError, match="must be picklable"):
            iter(loader)
    loader.close()


@pytest.mark.parametrize("prefetch", [0, 4])
def test_a_worker_init_fn_that_raises_through_the_dataloader(prefetch):
    workers = two(worker_init_fn=InitFails(ValueError("no such GPU")))
    loader = dataloader(Watched(SIZE), workers, prefetch=prefetch)
    for _ in range(2):
        seen, message = read_batches_until_error(loader, WorkerError)
        assert seen == []
        assert "no such GPU" in message
    loader.close()
