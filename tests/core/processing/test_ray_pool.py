"""What only actors of Ray do: they are replaced, wait for CPUs, and leave no Ray behind.

All else that they share with worker processes is in `test_worker_contract.py`.
"""

import gc
import json
import os
import signal
import time
from copy import deepcopy
from functools import partial

import numpy as np
import pytest
from ray_clusters import MARKS, actor_pids, children, cluster, is_running, wait_for
from worker_functions import (
    DrawSlowly,
    NoteWorker,
    Program,
    Texts,
    dataloader,
    drawn,
    hold_the_gil,
    processor,
    same,
)

from odb_nodes import IterableSource, WorkerError, pop_step_info

pytestmark = MARKS

SIZE = 120
RAY = {"method": "ray", "num_workers": 2, "chunk_size": 4, "timeout_s": 300}
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


# --- the same as processes, through a loader ------------------------------------------------------


def steps(loader, kill_at=None):
    """Batches as bytes, with their `StepInfo`, and the state after each."""
    rows = []
    for batch in loader:
        info = pop_step_info(batch)
        values = {key: (value.dtype, value.tolist()) for key, value in batch.items()}
        rows.append((info, values, deepcopy(loader.state_dict())))
        if len(rows) == kill_at:
            os.kill(actor_pids()[-1], signal.SIGKILL)
    return rows


def augment(sample):
    """A sample whose length and content come from the global generators."""
    noise = np.random.randint(9, size=np.random.randint(1, 6))
    return {**sample, "input_ids": np.concatenate([sample["input_ids"], noise])}


def seeded(method, **options):
    return dataloader(Texts(SIZE, 0.003), method, process_fn=augment, **options)


@pytest.mark.filterwarnings("ignore:.collate_in=.* has no effect:UserWarning")
def test_batches_infos_and_states_are_those_of_processes_also_after_actors_are_killed():
    """And the trainer collates, since no process shares memory with it."""
    with seeded("fork") as loader:
        expected = steps(loader)
    with seeded("ray", collate_in="workers") as loader:
        assert steps(loader) == expected
        loader.load_state_dict(expected[5][2])
        resumed = steps(loader, kill_at=5)
    assert [step[:2] for step in resumed] == [step[:2] for step in expected[6:]]


def test_functions_may_be_lambdas_and_results_can_be_written_to():
    node = processor(lambda item: np.full(300_000, item), source=IterableSource(range(8)), **ONE)
    node.reset()
    for item, sample in enumerate(node):
        assert sample.flags.writeable and not sample.flags.owndata
        sample += 1
        assert (sample == item + 1).all()
    node.close()


# --- actors that are lost, hang, or find no CPU ---------------------------------------------------


def test_a_lost_actor_is_replaced_and_its_chunks_are_processed_again(ray):
    options = {"seed": 3, "in_flight_samples": 40, "size": SIZE}
    slowly = DrawSlowly(0.003)
    wanted = [drawn(sample) for sample in processor(slowly, **options)]
    node = processor(slowly, **options, **RAY)
    node.reset()
    samples, pids = [], set()
    for sample in node:
        samples.append(drawn(sample))
        if len(samples) in (10, 40, 80):
            pids |= {*actor_pids()}
            first = node.runner._pool.actors[0]
        if len(samples) == 10:
            os.kill(actor_pids()[0], signal.SIGKILL)
        elif len(samples) in (40, 80):
            ray.kill(first, no_restart=len(samples) == 40)
    assert samples == wanted
    assert len(pids | {*actor_pids()}) >= 4
    node.close()


def die(item):
    if item == 9:
        os.kill(os.getpid(), signal.SIGKILL)
    return item


def test_an_item_that_kills_every_actor_is_an_error():
    node = processor(die, **ONE)
    node.reset()
    with pytest.raises(WorkerError, match=r"no result for samples \d+.*4 actors were lost"):
        list(node)


def test_processing_that_hangs_is_an_error_after_the_limit(tmp_path):
    """Also where it does not let another thread of its process run."""
    init_fn = NoteWorker(tmp_path)
    node = processor(hold_the_gil, **{**ONE, "timeout_s": 3}, worker_init_fn=init_fn)
    node.reset()
    wait_for(lambda: [*tmp_path.iterdir()], 1, seconds=60)
    time.sleep(0.5)  # until the trainer knows that it has begun
    with pytest.raises(WorkerError, match=r"no result within 3 s.*`process_fn` hangs"):
        next(node)


def test_actors_without_a_cpu_are_named_and_those_that_have_one_work(ray):
    @ray.remote(num_cpus=3)
    class All:
        def ready(self):
            return True

    holder = All.remote()
    assert ray.get(holder.ready.remote(), timeout=60)
    node = processor(same, **{**RAY, "timeout_s": 3})
    node.reset()
    with pytest.raises(WorkerError, match="none of 2 Ray actors has begun"):
        next(node)
    ray.kill(holder)
    node = processor(same, **{**RAY, "num_workers": 4})
    node.reset()
    assert len([*node]) == 50
    wait_for(actor_pids, 3, seconds=60)
    node.close()


def test_a_loader_that_is_forgotten_leaves_no_actor(ray, new_threads):
    loader = dataloader(Texts(), "ray")
    iterator = iter(loader)
    next(iterator)
    assert actor_pids()
    del loader, iterator
    gc.collect()
    wait_for(actor_pids, 0)
    assert not [name for name in new_threads() if "odb_nodes-ray" in name]
    assert ray.is_initialized()  # it was not started by a loader


# --- programs: they leave neither actors nor a Ray that they have started -------------------------

# Its two pools share the Ray that the first has started, on a thread that ends. SIGTERM stays the
# trainer's.
TWO_POOLS = """
    import ray
    def save(*_):
        print("saved", flush=True)
    signal.signal(signal.SIGTERM, save)
    made = [w.processor(w.same, method="ray", num_workers=1) for _ in range(2)]
    for node in made:
        thread = threading.Thread(target=node.reset)
        thread.start()
        thread.join()
    first, second = made
    print(next(first) == next(second), ray.is_initialized(), flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    first.close()
    print(len([*second]), ray.is_initialized(), flush=True)
    second.close()
    print(ray.is_initialized(), flush=True)
    sys.stdin.read()
"""
TRAIN = """
    with w.dataloader(w.Texts(10_000, seconds=0.02), "ray") as loader:
        try:
            for step, _ in enumerate(loader):
                if step == 3:
                    print("trains", flush=True)
        finally:
            print("stops", flush=True)
    print("not reached", flush=True)
"""
SHUT_DOWN = """
    import ray
    node = w.processor(w.same, method="ray", num_workers=1)
    node.reset()
    next(node)
    ray.shutdown()
    try:
        list(node)
    except WorkerError as error:
        print(error)
    node.close()
    print(ray.is_initialized(), flush=True)
"""
LOST_NODE = """
    import json
    import ray
    from ray.cluster_utils import Cluster
    def with_node(sample):
        return {**sample, "node": ray.get_runtime_context().get_node_id()}
    cluster = Cluster(True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    lost = cluster.add_node(num_cpus=1)
    ray.init(cluster.address, log_to_driver=False)
    cluster.wait_for_nodes()
    ids, before, after, lost_at = [], set(), set(), None
    data = w.Texts(6000, seconds=0.01)
    with w.dataloader(data, "ray", process_fn=with_node, timeout_s=100) as loader:
        for step, batch in enumerate(loader):
            ids.append(batch["id"].tolist())
            (before if lost_at is None else after).update(batch["node"])
            if lost_at is None and len(before) == 2:
                lost_at = step
                cluster.remove_node(lost, allow_graceful=False)
                cluster.add_node(num_cpus=1)
            if lost.node_id in before and len(after - before) == 1:
                break
    print(json.dumps(ids))
    ray.shutdown()
    cluster.shutdown()
"""


@pytest.mark.timeout(400)
def test_a_machine_that_is_lost_is_replaced_and_batches_are_the_same(tmp_path):
    with Program(tmp_path, LOST_NODE) as program:
        code, out, errors = program.finish(300)
    assert code == 0, errors
    ids = json.loads(next(line for line in out.splitlines() if line.startswith("[[")))
    with dataloader(Texts(6000)) as loader:  # Ray may print other lines.
        assert ids == [batch["id"].tolist() for batch, _ in zip(loader, ids, strict=False)]
    assert 1 < len(ids) < 1000  # The new machine made samples, too.


def test_ray_is_shut_down_with_the_last_pool_that_uses_what_a_pool_has_started(tmp_path):
    with Program(tmp_path, TWO_POOLS) as program:
        assert [program.line() for _ in range(4)] == ["True True", "saved", "49 True", "False"]
        wait_for(lambda: children(program.process.pid), 0)


def test_ray_that_is_shut_down_in_mid_run_is_an_error_and_no_other_is_started(tmp_path):
    with Program(tmp_path, SHUT_DOWN) as program:
        code, out, errors = program.finish(100)
    assert code == 0
    assert "Ray was shut down while its actors were in use" in out
    assert out.endswith("False\n")
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("starts_ray", "how"), [(True, signal.SIGKILL), (False, signal.SIGKILL), (False, signal.SIGINT)]
)
def test_a_trainer_that_ends_leaves_no_actor(tmp_path, ray, starts_ray, how):
    address = {} if starts_ray else {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    with Program(tmp_path, TRAIN, environment=address) as program:
        assert program.line() == "trains"
        of_trainer = partial(children, program.process.pid, "ChunkActor")
        actors = wait_for(of_trainer if starts_ray else actor_pids, 2)
        assert starts_ray or not children(program.process.pid)
        os.kill(program.process.pid, how) if starts_ray else os.killpg(program.process.pid, how)
        wait_for(lambda: [pid for pid in actors if is_running(pid)], 0)
        if not starts_ray:
            code, out, err = program.finish(200)
            assert (code, out) == ((-9, "") if how == signal.SIGKILL else (-2, "stops\n")), err


def test_a_ray_that_is_not_there_is_an_error_after_the_limit(tmp_path):
    body = """
    node = w.processor(w.same, method="ray", num_workers=1, timeout_s=3)
    node.reset()
    next(node)
    """
    with Program(tmp_path, body, environment={"RAY_ADDRESS": "127.0.0.1:1"}) as program:
        assert "Ray does not answer" in program.finish(200)[2]
