"""Actors of a local Ray cluster do what worker processes do, whatever becomes of them."""

import gc
import os
import signal
import threading
import time
from copy import deepcopy

import mixed_sources
import numpy as np
import pytest
from ray_clusters import MARKS, actor_pids, cluster, wait_for
from worker_functions import (
    Logged,
    NoteWorker,
    Texts,
    dataloader,
    draw,
    drawn,
    hold_the_gil,
    processor,
    same,
)

from odb_nodes import (
    IterableSource,
    Mixing,
    ParallelProcessor,
    SampleError,
    WorkerError,
    WorkerOptions,
    pop_step_info,
)
from odb_nodes.contract.graph import walk

pytestmark = MARKS

SIZE = 160
RAY = {"method": "ray", "num_workers": 2, "chunk_size": 4, "timeout_s": 60}
ONE = {**RAY, "num_workers": 1}


@pytest.fixture(scope="module")
def ray():
    with cluster() as ray:
        yield ray


@pytest.fixture(autouse=True)
def none_left(ray):
    """No test leaves an actor behind."""
    yield
    wait_for(actor_pids, 0)


def steps(loader, stop=None):
    """Batches as bytes, with their `StepInfo`, and the state after each."""
    found = []
    for batch in loader:
        info = pop_step_info(batch)
        values = {key: (value.dtype, value.tolist()) for key, value in batch.items()}
        found.append((info, values, deepcopy(loader.state_dict())))
        if len(found) == stop:
            break
    return found


def seeded(method, **options):
    return dataloader(Texts(SIZE), method, process_fn=augment, **options)


def augment(sample):
    """A sample whose length and content come from the global generators."""
    noise = np.random.randint(9, size=np.random.randint(1, 6))
    return {**sample, "input_ids": np.concatenate([sample["input_ids"], noise])}


@pytest.fixture(scope="module")
def expected():
    """Two epochs of worker processes."""
    with seeded("fork") as loader:
        return [steps(loader), steps(loader)]


def test_batches_infos_and_states_are_those_of_processes_and_the_trainer_collates(expected):
    with seeded("ray", collate_in="workers") as loader:
        (node,) = [
            one for one in walk(loader._graphs[0].samples) if isinstance(one, ParallelProcessor)
        ]
        assert node.runner.cannot_make_batches(np.stack) == "there are no worker processes"
        assert [steps(loader), steps(loader)] == expected


@pytest.mark.parametrize("saved, resumed", [("fork", "ray"), ("ray", "fork")])
def test_a_run_resumes_with_other_workers(expected, saved, resumed):
    stop = len(expected[0]) // 2
    found = []
    for methods in ((saved, resumed), ("fork", "fork")):
        with seeded(methods[0]) as loader:
            before = steps(loader, stop)
            state = loader.state_dict()
        with seeded(methods[1]) as loader:
            loader.load_state_dict(state)
            found.append((before, state, steps(loader)))
    assert found[0] == found[1]
    assert [one[:2] for one in found[0][2]] == [one[:2] for one in expected[0][stop:]]


def test_sources_mixed_by_tokens_have_actors_of_their_own(tmp_path):
    chats = mixed_sources.write_chats(tmp_path / "chats.jsonl")
    mixing = Mixing(weights=mixed_sources.WEIGHTS, by="tokens")
    found = []
    for method in ("process", "ray"):
        workers = WorkerOptions(num_workers=3, method=method, chunk_size=4)
        options = {"weights": mixing, "workers": workers}
        with mixed_sources.make(lambda: mixed_sources.mixture(chats), **options) as loader:
            found.append(steps(loader))
            assert method == "process" or len(actor_pids()) == 3
    assert found[0] == found[1]


def test_a_lost_actor_is_replaced_and_its_chunks_are_processed_again(ray):
    options = {"seed": 3, "in_flight_samples": 40, "size": SIZE}
    slowly = Slowly(0.01)
    in_place = processor(slowly, **options)
    in_place.reset()
    wanted = [drawn(sample) for sample in in_place]
    node = processor(slowly, **options, **RAY)
    node.reset()
    found, pids = [], set()
    for sample in node:
        found.append(drawn(sample))
        if len(found) in (10, 60, 110):
            pids |= {*actor_pids()}
            first = node.runner._pool.actors[0]
        if len(found) == 10:
            os.kill(actor_pids()[0], signal.SIGKILL)
        elif len(found) in (60, 110):
            ray.kill(first, no_restart=len(found) == 60)
    assert found == wanted
    assert len(pids | {*actor_pids()}) >= 4
    node.close()


class Slowly:
    """Draws, and takes some time."""

    def __init__(self, seconds):
        self.seconds = seconds

    def __call__(self, item):
        time.sleep(self.seconds)
        return draw(item)


def test_batches_are_the_same_after_actors_are_killed(expected):
    found = []
    with dataloader(Texts(SIZE, 0.005), "ray", process_fn=augment) as loader:
        for batch in loader:
            info = pop_step_info(batch)
            found.append((info, batch["input_ids"].tolist()))
            if len(found) in (5, 25):
                os.kill(actor_pids()[-1], signal.SIGKILL)
    assert found == [(info, values["input_ids"][1]) for info, values, _ in expected[0]]


def die(item):
    if item == 9:
        os.kill(os.getpid(), signal.SIGKILL)
    return item


def test_an_item_that_kills_every_actor_is_an_error():
    node = processor(die, **ONE)
    node.reset()
    with pytest.raises(WorkerError, match=r"no result for samples \d+.*4 actors were lost"):
        list(node)


def fail_at_9(item):
    if item == 9:
        raise ValueError("nine")
    return item


def test_an_item_that_raises_is_named_with_its_machine():
    node = processor(fail_at_9, source=range_source(), **ONE)
    node.reset()
    found = []
    with pytest.raises(SampleError, match="ValueError: nine") as caught:
        while True:
            found.append(next(node))
    assert found == list(range(9))
    assert f"machine {os.uname().nodename!r}" in str(caught.value)
    node.close()


def range_source(items=range(30)):
    return IterableSource(list(items))


def test_processing_that_hangs_is_an_error_after_the_limit(tmp_path):
    """Also where it does not let another thread of its process run."""
    init_fn = NoteWorker(tmp_path)
    node = processor(hold_the_gil, **{**ONE, "timeout_s": 3}, worker_init_fn=init_fn)
    node.reset()
    wait_for(lambda: [*tmp_path.iterdir()], 1, seconds=60)
    time.sleep(0.5)  # until the trainer knows that it has begun
    start = time.monotonic()
    with pytest.raises(WorkerError, match=r"no result within 3 s.*`process_fn` hangs"):
        next(node)
    assert time.monotonic() - start < 10


def test_actors_without_a_cpu_are_named(ray):
    @ray.remote(num_cpus=3)
    class All:
        def ready(self):
            return True

    holder = All.remote()
    assert ray.get(holder.ready.remote(), timeout=30)
    node = processor(same, **{**RAY, "timeout_s": 3})
    node.reset()
    with pytest.raises(WorkerError, match="none of 2 Ray actors has begun"):
        next(node)
    ray.kill(holder)


def test_more_actors_than_cpus_work_with_those_that_have_one():
    node = processor(same, **{**RAY, "num_workers": 4})
    node.reset()
    assert len([*node]) == 50
    wait_for(actor_pids, 3, seconds=60)
    node.close()


def refuse(index):
    raise OSError(f"no file for {index}")


def test_an_init_function_that_raises_is_an_error_at_once():
    node = processor(same, **ONE, worker_init_fn=refuse)
    node.reset()
    with pytest.raises(WorkerError, match=r"(?s)Its `worker_init_fn` raised.*no file for"):
        next(node)


def test_functions_may_be_lambdas_and_what_cannot_be_sent_is_an_error():
    node = processor(lambda item: item + 1, source=range_source(), **ONE)
    node.reset()
    assert [*node] == list(range(1, 31))
    node.close()
    lock = threading.Lock()
    node = processor(lambda _: lock, **ONE)
    with pytest.raises(WorkerError, match="cannot be sent to Ray's actors: TypeError: cannot pick"):
        node.reset()
    node = processor(same, source=range_source([1, 2, lock]), **ONE)
    node.reset()
    with pytest.raises(WorkerError, match=r"cannot be sent to a worker.*method=\"thread\""):
        next(node)
    node = processor(lambda _: threading.Lock(), **ONE)
    node.reset()
    with pytest.raises(SampleError, match="the result cannot be sent between processes"):
        next(node)
    node.close()


def test_results_can_be_written_to():
    node = processor(large, size=8, **ONE)
    node.reset()
    for sample in node:
        assert sample.flags.writeable and sample.flags.owndata is False
        sample += 1
    node.close()


def large(item):
    return np.full(300_000, item)


def test_the_init_function_is_called_in_each_actor_and_the_look_ahead_is_bounded(tmp_path):
    logged = Logged(tmp_path / "log")
    init_fn = NoteWorker(tmp_path)
    node = processor(logged, SIZE, **RAY, in_flight_samples=12, worker_init_fn=init_fn)
    node.reset()
    next(node)
    wait_for(lambda: [*tmp_path.glob("[01]")], 2, seconds=60)
    time.sleep(0.5)
    assert 4 <= len(logged.items()) <= 16
    node.close()


def test_a_reset_leaves_what_is_in_flight():
    node = processor(Slowly(0.01), SIZE, **ONE, seed=1)
    node.reset()
    first = [drawn(next(node)) for _ in range(10)]
    state = node.state_dict()
    rest = [drawn(next(node)) for _ in range(10)]
    node.reset(state)
    assert [drawn(next(node)) for _ in range(10)] == rest != first
    node.close()


def test_close_and_a_loader_that_is_forgotten_leave_no_actor(ray, new_threads):
    loader = dataloader(Texts(), "ray")
    next(iter(loader))
    assert actor_pids()
    loader.close()
    wait_for(actor_pids, 0)
    loader = dataloader(Texts(), "ray")
    iterator = iter(loader)
    next(iterator)
    del loader, iterator
    gc.collect()
    wait_for(actor_pids, 0)
    assert not [name for name in new_threads() if "odb_nodes-ray" in name]
    assert ray.is_initialized()  # it was not started by a loader
