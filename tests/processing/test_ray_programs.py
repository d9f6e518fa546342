"""Programs that process on Ray leave neither actors nor a Ray that they have started."""

import os
import signal

import pytest
from ray_clusters import MARKS, actor_pids, children, cluster, is_running, wait_for
from worker_functions import Program

pytestmark = MARKS

# Its two pools share the Ray that the first has started. SIGTERM stays the trainer's.
TWO_POOLS = """
    import ray
    def save(*_):
        print("saved", flush=True)
    signal.signal(signal.SIGTERM, save)
    made = [w.processor(w.same, method="ray", num_workers=1) for _ in range(2)]
    for node in made:
        node.reset()
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


@pytest.fixture(scope="module")
def address():
    with cluster() as ray:
        yield ray.get_runtime_context().gcs_address


def test_ray_is_shut_down_with_the_last_pool_that_uses_what_a_pool_has_started(tmp_path):
    with Program(tmp_path, TWO_POOLS) as program:
        assert [program.line() for _ in range(4)] == ["True True", "saved", "49 True", "False"]
        wait_for(lambda: children(program.process.pid), 0)


def test_ray_that_is_shut_down_in_mid_run_is_an_error_and_no_other_is_started(tmp_path):
    body = """
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
    with Program(tmp_path, body) as program:
        code, out, errors = program.finish(100)
    assert code == 0
    assert "Ray was shut down while its actors were in use" in out
    assert out.endswith("False\n")
    assert "Traceback" not in errors


def test_a_killed_trainer_leaves_no_actor_of_the_ray_that_it_has_started(tmp_path):
    with Program(tmp_path, TRAIN) as program:
        assert program.line() == "trains"
        actors = children(program.process.pid, "ChunkActor")
        assert len(actors) == 2
        os.kill(program.process.pid, signal.SIGKILL)
        wait_for(lambda: [pid for pid in actors if is_running(pid)], 0)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_trainer_that_ends_leaves_no_actor_in_a_cluster(tmp_path, address, how):
    with Program(tmp_path, TRAIN, environment={"RAY_ADDRESS": address}) as program:
        assert program.line() == "trains"
        assert len(actor_pids()) == 2
        assert not children(program.process.pid)
        os.killpg(program.process.pid, how)
        code, out, err = program.finish(30)
        assert (code, out) == ((-9, "") if how == signal.SIGKILL else (-2, "stops\n")), err
        wait_for(actor_pids, 0)


def test_ray_outlives_the_thread_that_its_first_pool_starts_on(tmp_path):
    body = """
    node = w.processor(w.same, method="ray", num_workers=1)
    thread = threading.Thread(target=node.reset)
    thread.start()
    thread.join()
    print(len([*node]))
    node.close()
    """
    with Program(tmp_path, body) as program:
        assert program.line() == "50"


def test_a_cluster_that_does_not_answer_is_an_error_after_the_limit(tmp_path):
    body = """
    node = w.processor(w.same, method="ray", num_workers=1, timeout_s=3)
    node.reset()
    start = time.monotonic()
    try:
        next(node)
    except WorkerError as error:
        print(error, flush=True)
    print(time.monotonic() - start < 30, flush=True)
    """
    with Program(tmp_path, body, environment={"RAY_ADDRESS": "127.0.0.1:1"}) as program:
        assert "Ray does not answer" in program.line()
        assert program.line() == "True"


def test_without_ray_the_error_names_what_to_install(tmp_path):
    body = """
    sys.modules["ray"] = None
    w.processor(num_workers=1, method="ray").reset()
    """
    with Program(tmp_path, body) as program:
        _, _, err = program.finish(30)
    assert "ImportError: `ray` cannot be imported" in err
    assert "pip install 'odb-nodes[ray]'" in err
